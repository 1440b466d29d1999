"""Options of the recipe: Muon, the decay of the learning rate, steps that grow; alone, resumed and on a mesh."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from helpers import needs_float8
from training import arguments, curve, longspan, metrics, ranks, trained, write_corpus

from longspan import AttentionConfig, LanguageModel, ModelConfig
from longspan.train.config import TrainConfig, resolve
from longspan.train.loggers import RunLogger
from longspan.train.muon import MuonAdamW, _orthogonal_steps, layer_matrices, orthogonalize
from longspan.train.setup import (
    batches_per_step,
    compile_mode,
    learning_rate,
    make_accelerator,
    make_optimizer,
    ngram_weight_decay,
)
from longspan.train.trainer import Trainer

# Everything that the options add to the state of a run.
RECIPE: dict[str, Any] = {
    "optimizer": "muon",
    "muon_lr": 0.02,
    "embedding_lr": 0.01,
    "ngram_decay": 5,
    "accumulate": 3,
    "ramp_up": 0.8,
    "decay_type": "linear",
    "decay_ratio": 0.5,
    "model.ngrams": "2,3",
    "model.ngram_buckets": 61,
    "model.logit_softcap": 11,
    "model.zero_init_residual": "true",
}

# Stop by a signal after a step, as a scheduler would: all processes save.
STOP = """
from longspan.train.trainer import Trainer
after = Trainer._after_step
def stop(self):
    after(self)
    self.signals.received = 15 if self.step == 3 else 0
Trainer._after_step = stop
"""


def train_config(**options: Any) -> TrainConfig:
    return TrainConfig(data=("x",), out="y", **{"steps": 100, **options})


def test_orthogonal_factors() -> None:
    torch.manual_seed(0)
    for shape in ((3, 31, 17), (2, 17, 31), (1, 1, 7)):
        matrices = torch.randn(shape)
        found = orthogonalize(matrices)
        assert found.dtype == torch.bfloat16
        values = torch.linalg.svdvals(found.float())
        assert 0.6 < values.min() <= values.max() < 1.3
        u, _, v = torch.linalg.svd(matrices, full_matrices=False)
        assert torch.cosine_similarity((u @ v).flatten(1), found.float().flatten(1)).min() > 0.97
    assert not orthogonalize(torch.zeros(1, 3, 5)).any()


def test_steps_of_tall_matrices() -> None:
    """With the wide ones of the same sizes, and contiguous, so that one kernel adds all of them."""
    directions = [torch.randn(shape) for shape in ((31, 17), (17, 31), (17, 17), (31, 17))]
    found = _orthogonal_steps(directions)
    for step, direction in zip(found, directions, strict=True):
        assert step.shape == direction.shape
        assert step.is_contiguous()
        (alone,) = _orthogonal_steps([direction.mT])
        torch.testing.assert_close(step, alone.mT, atol=0.02, rtol=0)


def test_muon_takes_the_steps_of_pytorch() -> None:
    """Batched by shape, with AdamW beside it in one optimizer."""
    torch.manual_seed(0)
    shapes = [(7, 13), (13, 7), (7, 13), (5,)]
    ours, theirs = ([torch.nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    for parameter, other in zip(ours, theirs, strict=True):
        torch.nn.init.normal_(parameter)
        other.data.copy_(parameter.data)
    groups = [{"params": ours[:3], "weight_decay": 0.3, "muon": True}, {"params": ours[3:], "weight_decay": 0.2}]
    one = MuonAdamW(groups, lr=0.05, betas=(0.8, 0.93))
    muon = torch.optim.Muon(theirs[:3], lr=0.05, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(theirs[3:], lr=0.05, betas=(0.8, 0.93), weight_decay=0.2, fused=True)
    for _ in range(3):
        for parameter, other in zip(ours, theirs, strict=True):
            parameter.grad = torch.randn_like(parameter)
            other.grad = parameter.grad.clone()
        for optimizer in (one, muon, adamw):
            optimizer.step()
    assert torch.equal(ours[3], theirs[3])
    for parameter, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(parameter, other, atol=2e-3, rtol=0)  # bfloat16, in another order
    assert set(one.state[ours[0]]) == {"momentum_buffer"}
    assert len(one.param_groups) == 2


def test_muon_gets_the_matrices_of_the_layers() -> None:
    attention = AttentionConfig(num_heads=4, mechanism="delta", out_gate="silu", conv_size=4, value_gates=True)
    config = ModelConfig(dim=16, depth=2, causal=True, vocab_size=11, attention=attention, ngrams=(2,), ngram_buckets=7)
    model = LanguageModel(config)
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)].split(".layer.")[1] for p in layer_matrices(model)}
    assert found == {f"{name}.weight" for name in ("to_q", "to_kv", "to_out", "to_out_gate", "to_hidden")}
    optimizer = make_optimizer(train_config(optimizer="muon", muon_lr=0.03, lr=0.01), model)
    assert [(g["muon"], g["lr_ratio"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (True, 3.0, 0.1),
        (False, 1.0, 0.1),
        (False, 1.0, 0.0),
    ]
    assert len(optimizer.param_groups[0]["params"]) == 12
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(names)
    optimizer = make_optimizer(train_config(optimizer="muon", embedding_lr=0.02, lr=0.01), model)
    ((rows, decay),) = [(g["params"], g["weight_decay"]) for g in optimizer.param_groups if g["lr_ratio"] == 2.0]
    assert (names[id(rows[0])], decay) == ("embedding.weight", 0.0)
    model.transformer.requires_grad_(False)
    with pytest.raises(ValueError, match="and this run trains none: use --optimizer adamw"):
        make_optimizer(train_config(optimizer="muon"), model)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_biases_and_norms_of_heads_do_not_decay(optimizer: str) -> None:
    mechanisms = ({"mechanism": "decay", "gate": "channel"}, {"mechanism": "mixture", "memory": "delta"})
    attention = AttentionConfig(num_heads=2, mechanism=mechanisms)
    model = LanguageModel(ModelConfig(dim=8, depth=2, causal=True, vocab_size=11, attention=attention))
    groups = make_optimizer(train_config(optimizer=optimizer), model).param_groups
    still = {id(p) for group in groups if not group["weight_decay"] for p in group["params"]}
    found = {
        name.split(".mechanism.")[1]: id(p) in still for name, p in model.named_parameters() if ".mechanism." in name
    }
    assert found == {
        **dict.fromkeys(
            ("gate_bias", "mix_bias", "memory_norm", "memory.time_step.A_log", "memory.time_step.dt_bias"), True
        ),
        "mix_weight": False,
    }


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_embeddings_have_a_rate_of_their_own(corpus: Path, tmp_path: Path, optimizer: str) -> None:
    """The first step of AdamW moves every row that has a gradient by the rate."""
    flags = {"optimizer": optimizer, "steps": 1, "warmup": 0, "weight_decay": 0.0, "lr": 1e-4, "embedding_lr": 3e-3}
    flags |= {"muon_lr": 1e-4} if optimizer == "muon" else {}
    words = {**flags, "model.ngrams": [2], "model.ngram_buckets": 61, "data": [str(corpus)], "eval_data": []}
    settings = resolve({**words, "preset": "tiny", "context": 61, "batch_size": 3, "out": str(tmp_path / "run")})
    trainer = Trainer(settings, RunLogger(tmp_path / "run"), make_accelerator("cpu", "fp32"))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.run()
    moved = {name: float((p.detach() - before[name]).abs().max()) for name, p in trainer.model.named_parameters()}
    for name in ("embedding.weight", "ngrams.tables.0.weight"):
        assert moved.pop(name) == pytest.approx(3e-3, rel=0.02)
    assert max(moved.values()) < 1e-3
    assert moved["to_logits.weight"] == pytest.approx(1e-4, rel=0.02)


def test_tables_of_ngrams_are_a_group_of_their_own_if_they_decay() -> None:
    config = ModelConfig(dim=16, depth=1, causal=True, vocab_size=11, ngrams=(2, 3), ngram_buckets=7)
    model = LanguageModel(config)
    assert model.ngrams is not None
    tables = [id(p) for p in model.ngrams.parameters()]
    for options, expected in (({}, (1.0, 0.1)), ({"embedding_lr": 0.02}, (2.0, 0.0))):
        for optimizer in ("adamw", "muon"):
            given = train_config(optimizer=optimizer, ngram_decay=8, lr=0.01, **options)
            groups = make_optimizer(given, model).param_groups
            (own,) = [group for group in groups if group.get("ngrams")]
            assert [id(p) for p in own["params"]] == tables
            assert (own.get("lr_ratio", 1.0), own["weight_decay"]) == expected
            everything = [id(p) for group in groups for p in group["params"]]
            assert sorted(everything) == sorted(id(p) for p in model.parameters())
    assert not any("ngrams" in group for group in make_optimizer(train_config(), model).param_groups)


def test_tables_of_ngrams_decay_from_the_second_epoch_on() -> None:
    config = train_config(ngram_decay=8, lr=0.01, weight_decay=0.3)
    assert ngram_weight_decay(config, 40, 0.0) == 0.3
    assert ngram_weight_decay(config, 200, 2.0) == pytest.approx(8 / 100 / 0.01)  # an epoch has 100 steps
    assert ngram_weight_decay(config, 10**6, 1.001) == 0.3  # no less than without
    assert ngram_weight_decay(config, 3, 2.5) == pytest.approx(0.5 / 0.01)  # at most a half in one step
    config = train_config(ngram_decay=8, lr=0.01, embedding_lr=0.04, weight_decay=0.3)
    assert ngram_weight_decay(config, 50, 0.0) == 0
    assert ngram_weight_decay(config, 200, 2.0) == pytest.approx(8 / 100 / 0.04)


@pytest.mark.parametrize("form", ["windows", "carry_state", "sources"])
def test_rows_that_do_not_occur_shrink_when_the_data_is_repeated(tmp_path: Path, form: str) -> None:
    """The first epoch is the same, bit for bit, with and without. One of two sources may be repeated."""
    (tmp_path / "text.txt").write_bytes(b"the cat sat on the mat. " * 50)
    (tmp_path / "scored.txt").write_bytes(b"the cat sat on the mat. " * 5)
    given = {"preset": "tiny", "data": (str(tmp_path / "text.txt"),), "eval_data": (str(tmp_path / "scored.txt"),)}
    given |= {"context": 61, "batch_size": 3, "steps": 12, "warmup": 0, "min_lr": 1.0, "embedding_lr": 1e-3}
    given |= {"model.dim": 24, "model.attention.num_heads": 4, "model.ngrams": [2], "model.ngram_buckets": 997}
    given |= {"log_every": 1, "sample_tokens": 0, "carry_state": form == "carry_state"}
    if form == "sources":
        (tmp_path / "large.txt").write_bytes(b"the dog lay on the log. " * 900)
        given["data"] = (f"8={tmp_path / 'text.txt'}", f"1={tmp_path / 'large.txt'}")
    found = []
    for decay in (0.0, 3.0):
        settings = resolve({**given, "ngram_decay": decay, "out": str(tmp_path / str(decay))})
        trainer = Trainer(settings, RunLogger(tmp_path / str(decay)), make_accelerator("cpu", "fp32"))
        assert trainer.model.ngrams is not None
        table = trainer.model.ngrams.tables[0].weight
        before, expected, steps = table.detach().clone(), 1.0, 0
        step = trainer.train_step

        def counted(trainer: Trainer = trainer, step: Any = step, decay: float = decay) -> None:
            nonlocal expected, steps
            step()
            if trainer.batches.repetition:
                expected *= 1 - decay * trainer.batches.repetition / trainer.step
            else:
                steps += 1

        trainer.train_step = counted  # type: ignore[method-assign]
        trainer.run()
        assert 3 < steps < 8
        unseen = (trainer.optimizer.optimizer.state[table]["exp_avg_sq"] == 0).all(1)
        assert unseen.sum() > 900
        torch.testing.assert_close(table[unseen], before[unseen] * expected)
        assert (expected == 1) == (decay == 0)
        found.append(([r["loss"] for r in metrics(tmp_path / str(decay)) if "loss" in r], steps))
    (one, steps), (other, _) = found
    assert one[: steps + 1] == other[: steps + 1]
    assert one[steps + 2 :] != other[steps + 2 :]


def test_a_trained_model_does_not_forget_its_ngrams() -> None:
    given = {"data": ("x",), "out": "y", "preset": "tiny"}
    assert resolve(given).train.ngram_decay == resolve({**given, "optimizer": "adamw"}).train.ngram_decay > 0
    guard = Path(__file__).parents[1] / "guards" / "fixtures" / "checkpoints" / "split"
    assert resolve({**given, "init": str(guard)}).train.ngram_decay == 0
    assert resolve({**given, "init": str(guard), "ngram_decay": 2.0}).train.ngram_decay == 2


def test_the_learning_rate_decays_as_asked() -> None:
    def rates(**options: Any) -> list[float]:
        config = train_config(lr=2.0, warmup=10, **options)
        return [learning_rate(config, step, step / 100) for step in (0, 9, 25, 50, 75, 100)]

    assert rates()[:2] == [0.2, pytest.approx(1 + math.cos(math.pi * 0.09))]
    np.testing.assert_allclose(rates(decay_type="linear")[2:], [1.5, 1.0, 0.5, 0.0])
    np.testing.assert_allclose(rates(decay_type="linear", decay_ratio=0.5)[1:], [2, 2, 2, 1, 0])
    np.testing.assert_allclose(rates(decay_ratio=0.5, min_lr=0.5)[3:], [2, 1.5, 1])


def test_cuda_graphs_do_not_accumulate_gradients() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert compile_mode(train_config(), cuda) == "reduce-overhead"
    assert compile_mode(train_config(accumulate=2), cuda) is None
    assert compile_mode(train_config(), cpu) is None


def test_steps_grow() -> None:
    config = train_config(accumulate=5, ramp_up=0.4)
    assert [batches_per_step(config, done / 10) for done in range(6)] == [1, 2, 3, 3, 5, 5]
    assert batches_per_step(train_config(accumulate=5), 0.0) == 5


def test_a_run_with_everything_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "text", documents=6, words=(60, 100))
    expected = curve(trained(corpus, tmp_path / "whole", **RECIPE))
    assert [r["tokens"] for r in metrics(tmp_path / "whole") if "loss" in r][:2] == [183, 366]  # one batch at first
    assert [r["tokens"] for r in metrics(tmp_path / "whole") if "loss" in r][-1] < 12 * 3 * 183
    words = arguments(corpus, tmp_path / "stopped", **RECIPE)
    assert longspan(*words, log=tmp_path / "log", before=STOP).status == 143
    done = longspan(*words, log=tmp_path / "log")
    assert done.status == 0
    assert "it is repeated from here on, and n-gram tables decay (--ngram-decay)" in done.stderr
    assert "the training data was read 1." in done.stderr
    assert curve(metrics(tmp_path / "stopped")) == expected
    files = [(tmp_path / name / "checkpoint" / "model.safetensors").read_bytes() for name in ("whole", "stopped")]
    assert files[0] == files[1]


def test_rates_can_be_lowered_in_a_run_that_is_resumed(corpus: Path, tmp_path: Path) -> None:
    """Each by itself: a group has the rate of the settings, not the ratio of before."""
    run, rates = tmp_path / "run", {"lr": 3e-3, "muon_lr": 2e-2, "embedding_lr": 1e-2}
    trained(corpus, run, **RECIPE | rates | {"steps": 2})
    lower = {"lr": 1e-3, "muon_lr": 5e-3, "embedding_lr": 4e-3}
    for steps, name in enumerate(lower, 3):
        rates[name] = lower[name]
        done = longspan(*arguments(corpus, run, **RECIPE | rates | {"steps": steps}), log=tmp_path / "log")
        assert done.status == 0, done.stderr
        groups = torch.load(run / "checkpoint" / "training.pt", weights_only=True)["optimizer"]["param_groups"]
        found = {group["lr_ratio"] * rates["lr"] for group in groups}
        assert sorted(found) == pytest.approx(sorted(rates.values()))
    done = longspan(*arguments(corpus, run, **RECIPE | rates | {"muon_lr": 0.5}), log=tmp_path / "log")
    assert done.status == 2
    assert "train.muon_lr 0.005 → 0.5" in done.stderr


@needs_float8
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # by PyTorch, of norms under autocast
def test_float8_products_train(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where PyTorch has FP8 products for tests, and `longspan train` refuses them."""
    monkeypatch.setattr("longspan.train.setup.why_not_float8", lambda device: None)
    given = {"model.dim": 32, "model.attention.num_heads": 2, "steps": 2, "context": 17, "batch_size": 3}
    given |= {"preset": "tiny", "data": (str(corpus),), "sample_tokens": 0, "eval_tokens": 50}
    losses = []
    AcceleratorState._reset_state()  # of another precision, in the same process
    for precision in ("bf16", "fp8"):
        settings = resolve({**given, "precision": precision, "out": str(tmp_path / precision)})
        trainer = Trainer(settings, RunLogger(tmp_path / precision), make_accelerator("cpu", precision))
        assert trainer.run()["eval_loss"] > 0
        losses.append([record["loss"] for record in metrics(tmp_path / precision) if "loss" in record])
        assert json.loads((tmp_path / precision / "run.json").read_text())["precision"] == precision
    AcceleratorState._reset_state()
    assert losses[0] != losses[1]
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.01)
    with pytest.raises(ValueError, match="--precision fp8 is for layers that are trained themselves: use bf16 with"):
        train_config(precision="fp8", lora_rank=3, init="z")


@pytest.mark.slow
def test_a_mesh_takes_the_steps_of_one_process(corpus: Path, tmp_path: Path) -> None:
    """Sharded weights and divided sequences: matrices are gathered, n-grams reach into the piece before.

    Runs are stopped and resumed: on the same mesh, and by one process.
    """
    settings = {**RECIPE, "steps": 5}
    trained(corpus, tmp_path / "one", **settings, batch_size=4)
    for name, mesh, size in (("shards", "fsdp=2", 2), ("pieces", "cp=2", 4)):
        words = arguments(corpus, tmp_path / name, **settings, batch_size=size, mesh=mesh)
        done = ranks(2, words, tmp_path / f"{name}-log", before=STOP)
        assert [result.status for result in done] == [143, 143], done
        if name == "shards":
            done = ranks(2, words, tmp_path / f"{name}-log")
            assert [result.status for result in done] == [0, 0], done
        else:
            trained(corpus, tmp_path / name, **settings, batch_size=4)
        found, wanted = ([r["loss"] for r in metrics(tmp_path / x) if "loss" in r] for x in (name, "one"))
        np.testing.assert_allclose(found, wanted, rtol=2e-3)  # bfloat16 rounds sums of another order
