"""Models as users have them: pruned, trained compiled, checkpointed, resumed, finalized, deployed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")
runtime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from torch import nn

from sparsetopk.torch.nn import TopKMag
from sparsetopk.torch.prune import LamSchedule, finalize, prune


class Projection(nn.Module):
    """As the Conv1D of GPT-2."""

    def __init__(self, dim, out):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(dim, out) / dim**0.5),
            nn.Parameter(torch.zeros(out)),
        )

    def forward(self, x):
        return x @ self.weight + self.bias


class Block(nn.Module):
    def __init__(self, dim, heads, causal, sparse):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first, self.second = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = Projection(dim, 3 * dim), Projection(dim, dim)
        self.up, self.down = Projection(dim, 4 * dim), Projection(4 * dim, dim)
        self.sparse = TopKMag(dim, 0.1, hard_eval=True) if sparse else nn.Identity()

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.first(x)).chunk(3, dim=-1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(self.sparse(nn.functional.gelu(self.up(self.second(x)))))


class Gpt(nn.Module):
    """As GPT-2, in any size: its own projections, tied embeddings, and sparse activations if wanted."""

    def __init__(self, words=500, dim=96, layers=2, heads=4, length=16, sparse=True):
        super().__init__()
        self.words, self.places = nn.Embedding(words, dim), nn.Embedding(length, dim)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.02)
        blocks = (Block(dim, heads, causal=True, sparse=sparse) for _ in range(layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def gpt2_small():
    model = Gpt(50257, 768, layers=12, heads=12, length=1024, sparse=False)
    assert sum(w.numel() for w in model.parameters()) == 124_439_808  # as many as GPT-2 small has
    return model


class Residual(nn.Module):
    """The basic block of a residual network."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        conv = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)
        self.body = nn.Sequential(
            conv(inputs, outputs, stride=stride),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            conv(outputs, outputs),
            nn.BatchNorm2d(outputs),
        )
        self.skip = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        return nn.functional.relu(self.body(x) + self.skip(x))


def resnet():
    """ResNet18 with a stem for small pictures."""
    widths = [64, 128, 256, 512]
    blocks = [
        Residual(width // 2 if i and not j else width, width, 2 if i and not j else 1)
        for i, width in enumerate(widths)
        for j in range(2)
    ]
    stem = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    return nn.Sequential(stem, *blocks, head).to(memory_format=torch.channels_last)


class Vit(nn.Module):
    """A vision transformer: patches, torch's own encoder layers, a class by the mean."""

    def __init__(self, dim=192, layers=2):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 4, stride=4)
        self.places = nn.Parameter(torch.randn(16, dim) / 8)
        layer = partial(nn.TransformerEncoderLayer, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.Sequential(*(layer(dim, 3, 4 * dim) for _ in range(layers)))
        self.head = nn.Linear(dim, 10)

    def forward(self, x):
        tokens = self.patches(x).flatten(2).mT + self.places
        return self.head(self.layers(tokens).mean(dim=1))


def pictures():
    return torch.randn(4, 3, 16, 16)


class Model(NamedTuple):
    make: Callable
    inputs: Callable
    options: dict  # of prune
    backend: str = (
        "aot_eager"  # Inductor takes a quarter of a minute of a quiet machine to compile a layer
    )
    steps: int = 20
    resumed: int = 10  # of these


MODELS = {
    "gpt": Model(Gpt, lambda: torch.randint(500, (4, 16)), {}),
    "gpt2-small": Model(gpt2_small, lambda: torch.randint(50257, (1, 8)), {}, steps=8, resumed=2),
    "resnet": Model(resnet, pictures, {"scope": "global"}),
    "vit": Model(partial(Vit, layers=1), pictures, {}, backend="inductor"),
}


def start(make, options, steps):
    torch.manual_seed(0)
    model = make()
    pruner = prune(model, 0.3, lam=0.1, schedule=LamSchedule(steps), **options)
    return model, pruner, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(compiled, pruner, optimizer, data, targets, steps):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        logits = compiled(data)
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), targets)
        loss.backward()
        optimizer.step()
        pruner.step()
        losses.append(float(loss.detach()))
    return losses


# With one k for all weights a compiled model breaks at every pruned layer, and torch looks at the .grad
# of what goes from one graph to the next, with the warning hidden, which "error" brings back.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", MODELS)
def test_from_pruning_to_onnx_runtime(name, tmp_path):
    make, inputs, options, backend, steps, resumed = MODELS[name]
    torch._dynamo.reset()
    model, pruner, optimizer = start(make, options, steps)
    data = inputs()
    with torch.no_grad():
        targets = torch.randint(10, (copy.deepcopy(model)(data).flatten(0, -2).shape[0],))
    compiled = torch.compile(model, backend=backend)
    losses = train(compiled, pruner, optimizer, data, targets, steps - resumed)
    saved = tmp_path / "checkpoint.pt"
    torch.save([model.state_dict(), optimizer.state_dict(), pruner.state_dict()], saved)
    losses += train(compiled, pruner, optimizer, data, targets, resumed)
    assert losses[-1] < losses[0]

    again, pruner, optimizer = start(make, options, steps)
    for part, state in zip((again, optimizer, pruner), torch.load(saved), strict=True):
        part.load_state_dict(state)
    found = train(again, pruner, optimizer, data, targets, resumed)
    assert found == pytest.approx(losses[steps - resumed :], rel=1e-3)
    del again, optimizer

    model.eval()
    relaxed = model(data).detach()
    finalize(model, hard=True)
    y = model(data).detach()
    torch.testing.assert_close(y, relaxed, rtol=1e-4, atol=1e-5)  # lam has come to 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about itself
        torch.onnx.export(model, (data,), tmp_path / "m.onnx", dynamo=True, verbose=False)
    session = runtime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: data.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), y, rtol=1e-5, atol=1e-5)
