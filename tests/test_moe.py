"""Routers and the mixture of experts: against the dense formula, and as part of what people train."""

import copy
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import sparsetopk.torch as st
from processes import start
from sparsetopk.torch import moe
from sparsetopk.torch.nn import ExpertChoice, ExpertMLP, MixtureOfExperts, TokenChoice

F64 = torch.float64
G, T, E, D = 3, 12, 4, 6  # groups, tokens, experts, dim
LAMS = [0.0, 0.3]


def gaussian(*shape, seed=0, dtype=F64):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(dtype)


def mlp(dim=D, hidden=10):
    return torch.nn.Sequential(
        torch.nn.Linear(dim, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, dim)
    )


def layer(router, batched=True, seed=0, dim=D):
    torch.manual_seed(seed)
    if batched:
        return MixtureOfExperts(router, ExpertMLP(E, dim, 10)).double()
    return MixtureOfExperts(router, [mlp(dim) for _ in range(E)], dim).double()


def dense_mask(logits, router, mask=None):
    """topk_mask over tokens or over experts, [..., tokens, experts]."""
    gates = logits.softmax(dim=-1)
    scores = gates if router.options["select_on"] == "gates" else logits
    dim = -2 if isinstance(router, ExpertChoice) else -1
    if mask is not None and dim == -2:
        scores = scores.masked_fill(~mask[..., None], -torch.inf)
    y = st.topk_mask(scores, router.k, router.lam, dim=dim)
    return y if mask is None else y * mask[..., None]


def dense(layer, x, mask=None):
    """sum_e w_e f_e(x) with every expert on every token."""
    logits = layer.gate(x)
    w = dense_mask(logits, layer.router, mask) * logits.softmax(dim=-1)
    if layer.router.options["normalize"]:
        total = w.sum(dim=-1, keepdim=True)
        w = w / torch.where(total > 0, total, 1.0)
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(layer.experts, ExpertMLP):
        every = layer.experts(rows.expand(E, *rows.shape))
    else:
        every = torch.stack([expert(rows) for expert in layer.experts])
    return torch.einsum("...te,e...td->...td", w, every.reshape(E, *x.shape))


ROUTERS = {
    "expert choice": lambda **o: ExpertChoice(3, capacity=T, **o),
    "token choice": lambda **o: TokenChoice(2, capacity=T, **o),
}


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("lam", LAMS)
@pytest.mark.parametrize("select_on", ["logits", "gates"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_equals_the_dense_formula_with_its_gradients(name, lam, select_on, normalize, batched):
    """Nothing can be dropped: there is a slot for every token."""
    router = ROUTERS[name](lam=lam, select_on=select_on, normalize=normalize)
    moe_layer, x = layer(router, batched), gaussian(G, T, D).requires_grad_()
    y, expected = moe_layer(x), dense(moe_layer, x)
    torch.testing.assert_close(y, expected)
    assert moe_layer.routing.dropped.abs().max() == 0
    at, g = [x, *moe_layer.parameters()], gaussian(G, T, D, seed=1)
    torch.testing.assert_close(torch.autograd.grad(y, at, g), torch.autograd.grad(expected, at, g))


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("shape", [(T,), (2, T), (2, 3, T)])
def test_any_leading_dimensions(name, shape):
    moe_layer, x = layer(ROUTERS[name](lam=0.3)), gaussian(*shape, D)
    torch.testing.assert_close(moe_layer(x), dense(moe_layer, x))
    if len(shape) > 1:  # groups do not know of each other
        torch.testing.assert_close(moe_layer(x)[1], moe_layer(x[1]))


def test_the_relaxed_router_has_a_gradient_of_the_selection():
    """The hard one moves the gate through the weights of what it took, and not through what it left."""
    x = gaussian(T, D)
    found = {}
    for lam in LAMS:
        logits = layer(ExpertChoice(3, lam)).gate(x).detach().requires_grad_()
        routing = st.expert_choice(logits, 3, lam)
        found[lam] = torch.autograd.grad(routing.selected.pow(2).sum(), logits, allow_unused=True)
    assert found[0.0][0] is None or found[0.0][0].abs().max() == 0
    assert found[0.3][0].abs().max() > 0.1


@pytest.mark.parametrize("lam", LAMS)
def test_expert_choice_takes_k_tokens(lam):
    routing = ExpertChoice(3, lam)(gaussian(G, T, E))
    torch.testing.assert_close(routing.selected.sum(dim=-1), torch.full((G, E), 3.0, dtype=F64))
    assert routing.balance == 0
    if lam == 0:
        assert routing.tokens.shape == (G, E, 3)
        expected = gaussian(G, T, E).topk(3, dim=-2).indices.mT.sort(dim=-1).values
        assert torch.equal(routing.tokens, expected)


def test_capacity_factor():
    for factor, tokens, k in ((1.0, 12, 3), (2.0, 12, 6), (1.0, 10, 3), (8.0, 12, 12)):
        routing = ExpertChoice(lam=0.0, capacity_factor=factor)(gaussian(tokens, E))
        assert routing.tokens.shape == (E, k)
        routing = TokenChoice(1, 0.0, capacity_factor=factor)(gaussian(tokens, E))
        assert routing.tokens.shape == (E, k)
    assert "capacity_factor=2" in repr(ExpertChoice(capacity_factor=2.0))


@pytest.mark.parametrize("normalize", [False, True])
def test_token_choice_drops_the_smallest_weights(normalize):
    logits = gaussian(T, E)
    logits[:, 0] += 5  # all want the first expert
    everything = st.token_choice(logits, 1, 0.0)
    routing = st.token_choice(logits, 1, 0.0, capacity=4, normalize=normalize)
    assert routing.tokens.shape == (E, 4)
    kept = everything.weights[0].topk(4)
    assert set(routing.tokens[0].tolist()) == set(everything.tokens[0][kept.indices].tolist())
    wanted = (logits.argmax(dim=-1) == 0).sum()
    assert routing.dropped[0] == wanted - 4
    assert routing.statistics()["dropped"] == pytest.approx((wanted - 4).item() / T)
    if normalize:
        assert (routing.weights[routing.selected > 0] == 1).all()


def test_balance():
    even = torch.eye(E, dtype=F64).repeat(3, 1)
    assert st.token_choice(even, 1, 0.0).balance == pytest.approx(1.0)
    crowded = torch.zeros(T, E, dtype=F64)
    crowded[:, 0] = 20.0
    assert st.token_choice(crowded, 1, 0.0).balance == pytest.approx(E)
    logits = (0.1 * gaussian(64, E)).requires_grad_()
    with torch.no_grad():
        logits[:, 0] += 0.2
    for _ in range(60):  # the load-balance loss alone evens the load out
        routing = st.token_choice(logits, 1, 0.0)
        (gradient,) = torch.autograd.grad(routing.balance, logits)
        with torch.no_grad():
            logits -= 20 * gradient
    load = st.token_choice(logits, 1, 0.0).statistics()["load"]
    assert load.max() < 24


def test_statistics():
    logits = torch.tensor([[3.0, 0.0], [2.0, 0.0], [1.95, 0.0], [0.0, 1.0]], dtype=F64)
    statistics = st.expert_choice(logits, 2, 0.1).statistics()
    # the first takes tokens 0 whole, 1 and 2 in part; the second 3, and a third of each other one
    torch.testing.assert_close(statistics["load"], torch.tensor([3.0, 4.0], dtype=F64))
    torch.testing.assert_close(statistics["fractional"].item(), 5 / 7)
    assert statistics["dropped"] == 0
    few = st.expert_choice(logits, 2, 0.1, capacity=2).statistics()
    torch.testing.assert_close(few["load"], torch.tensor([2.0, 2.0], dtype=F64))
    torch.testing.assert_close(few["dropped"].item(), (0.25 + 2 / 3) / 4)


# padding


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("lam", LAMS)
@pytest.mark.parametrize("garbage", [7.0, torch.inf, torch.nan])
def test_padding_is_never_routed_and_changes_nothing(name, lam, garbage):
    moe_layer, x = layer(ROUTERS[name](lam=lam)), gaussian(G, T, D)
    mask = torch.ones(G, T, dtype=torch.bool)
    mask[0, 8:] = mask[2, ::3] = False
    x[~mask] = garbage
    x.requires_grad_()
    y = moe_layer(x, mask)
    assert (y[~mask] == 0).all()
    routing = moe_layer.routing
    taken = mask.gather(-1, routing.tokens.flatten(1)).reshape(routing.tokens.shape)
    assert (routing.selected[~taken] == 0).all()
    assert (routing.weights[~taken] == 0).all()
    for group in range(G):
        alone = x[group][mask[group]]
        router = copy.deepcopy(moe_layer.router)
        router.capacity = len(alone)
        shorter = copy.deepcopy(moe_layer)
        shorter.router = router
        torch.testing.assert_close(y[group][mask[group]], shorter(alone))
    gradients = torch.autograd.grad(y.pow(2).sum(), [x, *moe_layer.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][~mask] == 0).all()


@pytest.mark.parametrize("name", ROUTERS)
def test_padding_does_not_count_in_the_balance_and_k_may_exceed_the_tokens(name):
    logits, mask = gaussian(T, E), torch.arange(T) < 2
    routing = ROUTERS[name](lam=0.2)(logits, mask)
    short = ROUTERS[name](lam=0.2)
    if name == "token choice":
        short.capacity = 2
        torch.testing.assert_close(routing.balance, short(logits[:2]).balance)
    else:  # two candidates for k = 3: both are taken whole
        assert (routing.selected.sum(dim=-1) == 2).all()


class Seen(torch.nn.Module):
    """Notes what it is called on."""

    def forward(self, x):
        self.x = x
        return x


@pytest.mark.parametrize("lam", LAMS)
def test_experts_see_the_tokens_they_took_and_nothing_else(lam):
    moe_layer = MixtureOfExperts(ExpertChoice(2, lam), [Seen() for _ in range(E)], D).double()
    x = gaussian(T, D)
    moe_layer(x)
    for e, expert in enumerate(moe_layer.experts):
        took = moe_layer.routing.weights[e] != 0
        assert len(expert.x) < T
        assert took.sum() >= 2
        torch.testing.assert_close(expert.x[took], x[moe_layer.routing.tokens[e][took]])
        assert (expert.x[~took] == 0).all()


# cost


def flops(f):
    with FlopCounterMode(display=False) as counter:
        f()
    return counter.get_total_flops()


@pytest.mark.parametrize("batched", [False, True])
def test_flops_grow_with_k_and_not_with_the_number_of_tokens(batched):
    torch.manual_seed(0)

    def count(k, tokens, lam=0.0, capacity=None):
        moe_layer = layer(ExpertChoice(k, lam, capacity=capacity), batched)
        x = gaussian(tokens, D)
        return flops(lambda: moe_layer(x)) - flops(lambda: moe_layer.gate(x))

    one = 2 * 2 * D * 10  # of a token in an expert
    assert count(4, 64) == 4 * E * one
    assert count(8, 64) == 2 * count(4, 64)
    assert count(4, 640) == count(4, 64)
    assert count(4, 64, 0.3, capacity=4) == count(4, 64)
    assert count(4, 64, 0.3) == 12 * E * one  # the default capacity of a relaxed selection


# transforms and the rest of torch


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("batched", [False, True])
def test_compile(name, batched):
    moe_layer = layer(ROUTERS[name](lam=0.3, normalize=True), batched)
    moe_layer.router.capacity = 6
    x = gaussian(G, T, D).requires_grad_()
    mask = torch.ones(G, T, dtype=torch.bool)
    mask[0, 8:] = False
    compiled = torch.compile(moe_layer, fullgraph=True, backend="aot_eager")
    y, expected = compiled(x, mask), moe_layer(x, mask)
    torch.testing.assert_close(y, expected)
    at, g = [x, *moe_layer.parameters()], gaussian(G, T, D, seed=1)
    torch.testing.assert_close(torch.autograd.grad(y, at, g), torch.autograd.grad(expected, at, g))


@pytest.mark.slow
def test_compile_by_inductor():
    moe_layer, x = layer(TokenChoice(2, 0.3)).float(), gaussian(G, T, D, dtype=torch.float32)
    torch.testing.assert_close(torch.compile(moe_layer, fullgraph=True)(x), moe_layer(x))
    assert moe_layer.routing.balance > 0


@pytest.mark.parametrize("name", ROUTERS)
def test_autocast(name):
    moe_layer, x = layer(ROUTERS[name](lam=0.3)).float(), gaussian(G, T, D, dtype=torch.float32)
    exact = moe_layer(x)
    weights = moe_layer.routing.weights
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = moe_layer(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(moe_layer.routing.weights, weights)  # the router keeps its precision
    torch.testing.assert_close(y.float(), exact, rtol=0.02, atol=0.02)
    y.float().pow(2).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in moe_layer.parameters())
    half = moe_layer.bfloat16()(x.bfloat16())
    torch.testing.assert_close(half.float(), exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    moe_layer = layer(ExpertChoice(3, 0.3, noise=0.5))
    x = gaussian(G, T, D).requires_grad_()
    g = gaussian(G, T, D, seed=1)
    found = []
    for call in (moe_layer, lambda x: checkpoint(moe_layer, x, use_reentrant=reentrant)):
        torch.manual_seed(0)
        moe_layer.zero_grad()
        x.grad = None
        call(x).backward(g)
        found.append([v.grad.clone() for v in (x, *moe_layer.parameters())])
    torch.testing.assert_close(*found)


def test_noise_is_for_training():
    router, logits = TokenChoice(1, 0.0, noise=3.0), gaussian(200, E)
    assert not torch.equal(router(logits).weights, router(logits).weights)
    router.eval()
    assert torch.equal(router(logits).weights, router(logits).weights)


def test_hard_eval_and_copies():
    moe_layer = layer(ExpertChoice(3, 0.3, hard_eval=True))
    x = gaussian(G, T, D)
    moe_layer(x)
    assert moe_layer.routing.statistics()["fractional"] > 0
    # with a routing at hand, which has a graph
    same = pickle.loads(pickle.dumps(copy.deepcopy(moe_layer)))
    torch.testing.assert_close(same(x), moe_layer(x))
    same.load_state_dict(layer(ExpertChoice(3), seed=1).state_dict())
    assert sorted(same.state_dict())[-1] == "gate.weight"
    moe_layer.eval()(x)
    assert moe_layer.routing.statistics()["fractional"] == 0


def train_one_model(group):
    model = torch.nn.parallel.DistributedDataParallel(layer(TokenChoice(1, 0.1)))
    y = model(gaussian(2, T, D, seed=7)[group.rank()])
    (y.pow(2).mean() + model.module.routing.balance).backward()
    return [p.grad.numpy() for p in model.parameters()]


@pytest.mark.slow
def test_two_processes_train_one_model(tmp_path):
    """Gradients are the mean over both, also of experts that one of them did not use."""
    found = start(train_one_model, 2, tmp_path)
    model, x = layer(TokenChoice(1, 0.1)), gaussian(2, T, D, seed=7)
    losses = []
    for one in x:
        y = model(one)
        losses.append(y.pow(2).mean() + model.routing.balance)
    expected = torch.autograd.grad(sum(losses) / 2, list(model.parameters()))
    for rank in range(2):
        for gradient, wanted in zip(found[rank], expected, strict=True):
            np.testing.assert_allclose(gradient, wanted.numpy(), atol=1e-12)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_mixture_trains(name):
    """Two kinds of tokens want opposite maps: one linear map cannot do it, two routed ones can."""
    torch.manual_seed(0)
    x = torch.randn(8, 32, 4)
    kind = x[..., :1] > 0
    target = torch.where(kind, 2 * x, -2 * x)
    router = ROUTERS[name](lam=0.3, normalize=True)
    router.k, router.capacity = (16, 32) if name == "expert choice" else (1, 32)
    model = MixtureOfExperts(router, [torch.nn.Linear(4, 4) for _ in range(2)], 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    first = (model(x) - target).pow(2).mean().item()
    for _ in range(200):
        optimizer.zero_grad()
        loss = (model(x) - target).pow(2).mean()
        loss.backward()
        optimizer.step()
    single = torch.linalg.lstsq(x.reshape(-1, 4), target.reshape(-1, 4))
    least = (x.reshape(-1, 4) @ single.solution - target.reshape(-1, 4)).pow(2).mean()
    assert loss < 0.25 * least < first


# upcycling


class Block(torch.nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(dim, 2, batch_first=True)
        self.norm = torch.nn.LayerNorm(dim)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(dim, 4 * dim),
            torch.nn.GELU(),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(4 * dim, dim),
        )

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.mlp(self.norm(x))


def transformer(dim=8):
    torch.manual_seed(0)
    head = torch.nn.Linear(dim, 3)
    return torch.nn.Sequential(Block(dim), Block(dim), head).double().eval()


def test_upcycled_models_start_where_the_model_was():
    x = gaussian(2, T, 8)
    expected = transformer()(x)
    model = moe.upcycle(transformer(), E, TokenChoice(2, 0.1, normalize=True, capacity=T)).double()
    layers = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    assert len(layers) == 2
    assert not model.training
    torch.testing.assert_close(model(x), expected)
    assert layers[0].router is not layers[1].router
    weights = [expert[0].weight for expert in layers[0].experts]
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    model.train()(x).pow(2).sum().backward()
    gradients = [expert[0].weight.grad for expert in layers[0].experts]
    assert not torch.equal(gradients[0], gradients[1])  # they part ways


def test_upcycling_with_the_default_router():
    """What found a slot is as it was, with weights that sum to 1; the rest is 0."""
    mlp_ = transformer()[0].mlp
    model = moe.upcycle(transformer(), experts=E).double()
    layer_, x = model[0].mlp, gaussian(2, T, 8)
    y, routing = layer_(x), layer_.routing
    total = torch.zeros(2, T, dtype=F64)
    total.scatter_add_(-1, routing.tokens.flatten(1), routing.weights.flatten(1))
    found = total > 0
    torch.testing.assert_close(total[found], torch.ones_like(total[found]))
    torch.testing.assert_close(y[found], mlp_(x)[found])
    assert found.float().mean() > 0.9
    assert (y[~found] == 0).all()


def test_upcycling_some():
    model = moe.upcycle(transformer(), where=lambda name, module: name == "1.mlp")
    assert isinstance(model[1].mlp, MixtureOfExperts)
    assert isinstance(model[0].mlp, torch.nn.Sequential)
    with pytest.raises(ValueError, match="where must take at least one module of model, got none"):
        moe.upcycle(torch.nn.Linear(2, 2))


def test_what_looks_like_an_mlp():
    assert moe.is_mlp("", mlp())
    assert not moe.is_mlp("", torch.nn.Linear(3, 3))
    assert not moe.is_mlp("", torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Linear(6, 4)))
    assert not moe.is_mlp("", torch.nn.Sequential(mlp(), torch.nn.LayerNorm(D)))
    assert not moe.is_mlp("", Block(8))


# errors


L = torch.zeros(3, 4)
BAD = [
    (
        lambda f: f(L[0], 1),
        ValueError,
        r"logits must have shape \[..., tokens, experts\], got \(4,\)",
    ),
    (lambda f: f(L.int(), 1), TypeError, r"logits must be a tensor of dtype float16"),
    (lambda f: f(L, 1, select_on="x"), ValueError, r"select_on must be one of 'logits', 'gates'"),
    (
        lambda f: f(L, 1, mask=L[:, 0]),
        TypeError,
        r"mask must be a tensor of booleans, .* dtype float32",
    ),
    (lambda f: f(L, 1, mask=L > 0), ValueError, r"mask must have shape \(3,\), got \(3, 4\)"),
    (lambda f: f(L, 5), ValueError, r"k must be in \[0, n\] with n="),
    (lambda f: f(L, 1, capacity=4), ValueError, r"capacity must be in \[1, 3\], got 4"),
    (lambda f: f(L, 1, capacity=0), ValueError, r"capacity must be in \[1, 3\], got 0"),
]


@pytest.mark.parametrize("choice", [st.expert_choice, st.token_choice])
@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_arguments_are_checked(choice, call, error, message):
    with pytest.raises(error, match=message):
        call(choice)


def test_modules_are_checked():
    with pytest.raises(ValueError, match=r"exactly one of k and capacity_factor must be given"):
        ExpertChoice()
    with pytest.raises(ValueError, match=r"exactly one of k and capacity_factor .* got k=2"):
        ExpertChoice(2, capacity_factor=1.0)
    with pytest.raises(ValueError, match=r"dim must be given when experts is a sequence"):
        MixtureOfExperts(ExpertChoice(1), [mlp()])
    with pytest.raises(ValueError, match=r"mask must have shape \(3, 12\), got \(12,\)"):
        layer(ExpertChoice(1))(gaussian(G, T, D), torch.ones(T, dtype=torch.bool))


@pytest.mark.parametrize("shape", [(0, 10, 8), (2, 0, 8), (0, 8), (0, 0, 8)], ids=str)
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize(
    "router",
    [
        st.nn.ExpertChoice(capacity_factor=1.0, normalize=True),
        st.nn.TokenChoice(2, normalize=True),
        st.nn.TokenChoice(2, capacity=3),
    ],
    ids=lambda router: type(router).__name__,
)
def test_nothing_is_routed_where_there_is_nothing(router, stacked, shape):
    experts = st.nn.ExpertMLP(4, 8, 16) if stacked else [torch.nn.Linear(8, 8) for _ in range(4)]
    layer = st.nn.MixtureOfExperts(router, experts, 8)
    x = torch.zeros(shape, requires_grad=True)
    y = layer(x)
    assert y.shape == shape
    (y.sum() + layer.routing.balance).backward()
    assert x.grad.shape == shape
    assert torch.equal(layer.gate.weight.grad, torch.zeros_like(layer.gate.weight))
    assert torch.equal(layer.routing.statistics()["load"], torch.zeros(4))


@pytest.mark.parametrize("router", [st.nn.ExpertChoice(capacity_factor=1.0), st.nn.TokenChoice(2)])
def test_layers_without_memory(router):
    layer = st.nn.MixtureOfExperts(router, st.nn.ExpertMLP(4, 8, 16)).to("meta")
    y = layer(torch.zeros(2, 10, 8, device="meta"))
    assert y.is_meta
    assert y.shape == (2, 10, 8)


def test_reentrant_checkpointing_is_warned_of():
    layer = st.nn.MixtureOfExperts(st.nn.TokenChoice(2), st.nn.ExpertMLP(4, 8, 16))
    x = torch.randn(2, 10, 8, requires_grad=True)
    (
        checkpoint(layer, x, use_reentrant=False).sum() + layer.routing.balance
    ).backward()  # no warning
    with pytest.warns(UserWarning, match=r"routing.balance had no gradient"):
        checkpoint(layer, x, use_reentrant=True).sum().backward()


class LlamaMlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(8, 20, bias=False) for _ in range(2))
        self.down_proj = torch.nn.Linear(20, 8, bias=False)

    def forward(self, x):
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def encoder():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 20, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize(
    ("make", "count"), [(lambda: torch.nn.Sequential(LlamaMlp()), 1), (encoder, 2)]
)
def test_upcycling_gated_mlps_and_layers_of_torch(make, count):
    model, x = make(), torch.randn(3, 7, 8)
    for training in (True, False):
        before = model.train(training)(x)
        router = TokenChoice(2, normalize=True, capacity=7)
        mixed = moe.upcycle(copy.deepcopy(model), 4, router)
        mixtures = [part for part in mixed.modules() if isinstance(part, MixtureOfExperts)]
        assert len(mixtures) == count
        torch.testing.assert_close(mixed(x), before, rtol=1e-4, atol=1e-5)
    mixed(x).square().sum().backward()
    assert all(w.grad is not None for w in mixed.parameters())


def test_gated_experts_are_those_of_the_formula():
    torch.manual_seed(0)
    experts = ExpertMLP(3, 4, 6, activation=torch.nn.functional.silu, gated=True).double()
    x = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    found = experts(x)
    for e in range(3):
        first, second = (
            x[e] @ getattr(experts, f"weight{i}")[e] + getattr(experts, f"bias{i}")[e]
            for i in (1, 3)
        )
        hidden = torch.nn.functional.silu(first) * second
        torch.testing.assert_close(found[e], hidden @ experts.weight2[e] + experts.bias2[e])
    assert torch.autograd.gradcheck(experts, (x,))
    assert "gated=True" in repr(experts)


def test_a_shared_expert_is_added():
    shared, x = torch.nn.Linear(8, 8), torch.randn(2, 6, 8)
    layer = MixtureOfExperts(TokenChoice(2), ExpertMLP(4, 8, 16), shared=shared)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    y = layer(x, mask)
    alone = copy.deepcopy(layer)
    alone.shared = None
    torch.testing.assert_close(y, alone(x, mask) + torch.where(mask[..., None], shared(x), 0.0))


@pytest.mark.parametrize("lam", [0.0, 0.3])
def test_dropless_token_choice(lam):
    """With all tokens for one expert nothing is dropped; slots are as many as that takes."""
    logits = torch.randn(2, 50, 4) + torch.tensor([6.0, 0.0, 0.0, 0.0])
    routing = TokenChoice(2, lam, capacity_factor=None)(logits)
    assert routing.tokens.shape[-1] == 50
    even = TokenChoice(1, lam, capacity_factor=None)(torch.randn(2, 400, 4))
    assert even.tokens.shape[-1] < 250
    assert (routing.dropped == 0).all()
    assert (even.dropped == 0).all()
    whole = st.token_choice(logits, 2, lam, capacity=50)
    dense = [torch.zeros(2, 4, 50).scatter(-1, r.tokens, r.weights) for r in (routing, whole)]
    torch.testing.assert_close(*dense)


def test_experts_that_choose_are_not_causal():
    with pytest.raises(ValueError, match=r"causal must be False.*TokenChoice"):
        ExpertChoice(2, causal=True)


@pytest.mark.parametrize("factor", [-1.0, 0.0, float("nan")])
def test_a_capacity_factor_must_be_positive(factor):
    with pytest.raises(ValueError, match="capacity_factor must be positive, got"):
        ExpertChoice(capacity_factor=factor)
