"""Pruning with the trainers that people use, and with models of the transformers library."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from sparsetopk.torch.prune import KeepSchedule, finalize, prune

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of the libraries, about themselves
]


def gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 30, "n_positions": 16}
    options = {"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **options, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(config).eval()


def logits(model):
    return model(torch.arange(12).reshape(2, 6)).logits.detach()


@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_pretrained_models_while_pruned(scope, tmp_path):
    model = gpt2()
    pruner = prune(model, 0.4, 0.1, scope=scope)
    assert pruner.coverage.left_out == ()  # its own Conv1D included
    seen = logits(model)
    model.tie_weights()
    torch.testing.assert_close(logits(model), seen)
    assert model.lm_head.parametrizations.weight.original is (
        model.transformer.wte.parametrizations.weight.original
    )
    model.save_pretrained(tmp_path / "pruned")
    with pytest.raises(
        RuntimeError, match=r"before prune; or finalize\(model\), resize, prune\(model\) again"
    ):
        model.resize_token_embeddings(40)
    other = copy.deepcopy(model)
    finalize(model, hard=True)
    model.save_pretrained(tmp_path / "final")
    again = type(model).from_pretrained(tmp_path / "final").eval()
    torch.testing.assert_close(logits(again), logits(model))
    model.tie_weights()
    model.resize_token_embeddings(40, mean_resizing=False)
    assert model.lm_head.weight is model.transformer.wte.weight
    torch.testing.assert_close(logits(other), seen)  # a copy is still pruned


def test_the_trainer_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from sparsetopk.torch.huggingface import PruneCallback

    data = [{"input_ids": row, "labels": row} for row in torch.randint(30, (16, 6))]

    def trainer(steps):
        model = gpt2()
        pruner = prune(model, 0.2, 0.1, schedule=KeepSchedule(6))
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=steps,
            save_steps=4,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        callbacks = [PruneCallback(pruner)]
        return transformers.Trainer(
            model, arguments, train_dataset=data, callbacks=callbacks
        ), pruner

    first, pruner = trainer(8)
    first.train()
    assert pruner.last_step == 8
    second, pruner = trainer(8)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert pruner.last_step == 8
    torch.testing.assert_close(logits(second.model.eval()), logits(first.model.eval()))


def test_the_trainer_of_lightning(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from sparsetopk.torch.lightning import PruneCallback

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 2))

        def training_step(self, batch, _):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-2)

    data = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}

    def run(steps, checkpoint=None):
        net = Net()
        pruner = prune(net, 0.2, 0.1, schedule=KeepSchedule(6))
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            accumulate_grad_batches=2,
            default_root_dir=str(tmp_path),
            enable_checkpointing=False,
            callbacks=[PruneCallback(pruner)],
            **quiet,
        )
        trainer.fit(net, data, ckpt_path=checkpoint)
        return trainer, pruner, net

    trainer, pruner, _ = run(4)
    assert pruner.last_step == 4  # of 8 batches
    trainer.save_checkpoint(tmp_path / "at4.ckpt")
    _, pruner, net = run(7, tmp_path / "at4.ckpt")
    assert pruner.last_step == 7
    assert int(net.net[0].weight.count_nonzero()) <= 0.35 * 128
