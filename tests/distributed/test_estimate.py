"""`longspan estimate`: its figures are those of benchmarks/results, its formulas give what is computed by hand."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longspan import AttentionConfig, FeedForwardConfig, LanguageModel, ModelConfig
from longspan.cli import main
from longspan.cli.estimate import parse_tokens
from longspan.distributed.estimate import (
    Hardware,
    TrainingLoad,
    collect,
    estimate,
    exchange_bytes,
    load_figures,
    meshes,
)
from longspan.distributed.mesh import MeshShape
from longspan.mechanisms import build_mechanism

sys.path.append(str(Path(__file__).parent.parent))
from training import ranks

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FIGURES: dict[str, Any] = {
    "mechanisms": {
        "linear": {"head_dims": {"8": 3e-9}},
        "softmax": {"head_dims": {"4": 5e-12}},
        "local": {"head_dims": {"8": 7e-12}},
    },
    "dense": {"seconds": 2e-14},
    "activations": {"bytes": 10.0},
}
HARDWARE = Hardware(gpus_per_node=4, memory=1e9, link=100e9, network=10e9, latency=1e-6)


def workload(mechanism: Any = "linear", context: int = 1000, **options: Any) -> TrainingLoad:
    attention = AttentionConfig(num_heads=2, mechanism=mechanism, out_bias=False)
    feed_forward = FeedForwardConfig(mult=2, bias=False)
    config = ModelConfig(
        dim=16,
        depth=3,
        causal=True,
        vocab_size=11,
        attention=attention,
        feed_forward=feed_forward,
        norm="rms",
        tie_embeddings=True,
    )
    return TrainingLoad(config, context, **options)


# Embedding, and per layer q, k, v, out (4 × 16²), feed-forward (2 × 16 × 32) and two norms; a final norm.
PARAMETERS = 11 * 16 + 3 * (4 * 16**2 + 2 * 16 * 32 + 2 * 16) + 16
STATE = 4 * 2 * (8 * 8 + 8 + 1)  # kv, z and the shift of two heads in float32
BRANCHES = [4 * 16**2 + 16, 2 * 16 * 32 + 16]


def test_the_figures_are_those_of_the_results() -> None:
    assert load_figures() == json.loads(json.dumps(collect(RESULTS)))
    rows = json.loads((RESULTS / "h200-train.json").read_text())["rows"]
    row = next(r for r in rows if r["name"] == "linear" and r["case"]["length"] == 65536)
    heads = {"mechanism": "linear", "feature_map": "softmax"}
    attention = AttentionConfig(num_heads=8, mechanism=heads)
    config = ModelConfig(dim=512, depth=6, causal=True, vocab_size=256, attention=attention)
    step = estimate(TrainingLoad(config, 65536), MeshShape(), Hardware(), load_figures())
    assert 1e3 * step.seconds == pytest.approx(row["step_ms"], rel=0.02)  # The figures come from this row.


def test_tables_of_ngrams_take_memory_and_no_time() -> None:
    plain = workload(batch_size=5)
    tables = replace(plain, config=replace(plain.config, ngrams=(2, 3), ngram_buckets=701))
    one, other = (estimate(work, MeshShape(), HARDWARE, FIGURES) for work in (plain, tables))
    assert other.seconds == one.seconds
    assert other.weights == one.weights + 16 * 2 * 701 * 16


def test_one_gpu() -> None:
    step = estimate(workload(batch_size=5), MeshShape(), HARDWARE, FIGURES)
    assert step.tokens == 5000
    assert step.seconds == pytest.approx(2e-14 * PARAMETERS * 5000 + 3 * 2 * 3e-9 * 5000)
    assert (step.weights_sent, step.exchange_sent, step.gathered, step.states) == (0, 0, 0, 0)
    assert step.weights == 16 * PARAMETERS
    assert step.activations == 10 * 16 * 3 * 5000 + 8 * 11 * 5000
    recomputed = estimate(workload(batch_size=5, recompute=True), MeshShape(), HARDWARE, FIGURES)
    assert recomputed.compute == pytest.approx(4 / 3 * step.compute)
    assert recomputed.activations == 10 * 16 * 5000 + 4 * 16 * 6 * 5000 + 8 * 11 * 5000


def test_a_mesh() -> None:
    step = estimate(workload(batch_size=5), MeshShape(dp=2, fsdp=3, cp=4), HARDWARE, FIGURES)
    assert step.tokens == 6 * 5000
    assert step.compute == pytest.approx(2e-14 * PARAMETERS * 1250 + 3 * 2 * 3e-9 * 1250)
    assert step.weights == pytest.approx(16 * PARAMETERS / 12)
    gathers, copies = 12 * PARAMETERS * 11 / 12, 8 * PARAMETERS / 12 / 2
    assert step.weights_sent == pytest.approx(gathers + copies)
    assert step.weights_time == pytest.approx(gathers / 10e9 + 3 * 7 * 1e-6 + copies / 10e9 + 7e-6)  # between nodes
    assert step.exchange_sent == 2 * 3 * 3 * 5 * STATE
    assert step.exchange_time == pytest.approx(step.exchange_sent / 100e9 + 2 * 3 * 1e-6)  # inside a node
    assert step.states == 4 * 3 * 5 * STATE
    assert step.gathered == 4 * (11 * 16 + 16 + 2 * max(BRANCHES))
    assert step.seconds == max(step.compute, step.weights_time) + step.exchange_time
    assert step.memory == step.weights + step.gathered + step.activations + step.states


def test_traffic_of_states_does_not_grow_with_the_context_and_that_of_softmax_does() -> None:
    shape = MeshShape(cp=4)
    sent = {
        name: [estimate(workload(name, n), shape, HARDWARE, FIGURES).exchange_sent for n in (1000, 64000)]
        for name in ("linear", "softmax")
    }
    assert sent["linear"][0] == sent["linear"][1]
    assert sent["softmax"] == [2 * 3 * 3 * 2 * 16 * 2 * n / 4 for n in (1000, 64000)]
    softmax = estimate(workload("softmax", 1000), shape, HARDWARE, FIGURES)
    pairs = 250 * (1000 - 125)  # of the last rank
    assert softmax.compute == pytest.approx(2e-14 * PARAMETERS * 250 + 3 * 2 * 2 * 5e-12 * pairs)


def test_a_bidirectional_memory_reads_twice() -> None:
    figures = {**FIGURES, "mechanisms": {**FIGURES["mechanisms"], "delta": {"head_dims": {"8": 7e-9}}}}
    load = workload("delta", 1000)
    both = replace(load, config=replace(load.config, causal=False))
    dense = 2e-14 * sum(p.numel() for p in LanguageModel(load.config).parameters()) * 1000
    times = [estimate(each, MeshShape(), HARDWARE, figures).compute - dense for each in (load, both)]
    assert times == pytest.approx([3 * 2 * 7e-9 * 1000, 2 * 3 * 2 * 7e-9 * 1000])


@pytest.mark.parametrize(
    ("mechanism", "expected"),
    [
        ({"mechanism": "local", "window": 7}, 12 * 2 * (8 + 8) * 2),
        ({"mechanism": "softmax"}, 250 * 2 * (8 + 8) * 2),
        ({"mechanism": "decay"}, 2 * 4 * 2 * (8 * 8 + 1)),
        ({"mechanism": "linear"}, STATE),
    ],
    ids=lambda x: x["mechanism"] if isinstance(x, dict) else "",
)
def test_what_a_rank_of_a_bidirectional_model_passes_on(mechanism: dict[str, Any], expected: int) -> None:
    options = {name: value for name, value in mechanism.items() if name != "mechanism"}
    built = build_mechanism(mechanism["mechanism"], 2, 8, **options)
    assert exchange_bytes(built, 1000, 4, causal=False) == expected
    assert exchange_bytes(built, 1000, 1, causal=False) == 0


def test_parts_of_a_split_and_pieces() -> None:
    local = {"mechanism": "local", "window": 7, "num_heads": 1}
    split = {"mechanism": "split", "parts": [local, {"mechanism": "linear", "num_heads": 1}]}
    step = estimate(workload(split), MeshShape(), HARDWARE, FIGURES)
    assert step.compute == pytest.approx(2e-14 * PARAMETERS * 1000 + 3 * 1000 * (7e-12 * 7 + 3e-9))
    pieces = estimate(workload(chunk_length=300), MeshShape(fsdp=2), HARDWARE, FIGURES)
    assert pieces.activations == 10 * 16 * 3 * 300 + 8 * 11 * 300
    assert pieces.states == 4 * 3 * STATE
    assert pieces.weights_sent == pytest.approx(4 * 12 * PARAMETERS / 2)


def test_every_mesh_is_tried() -> None:
    found = set(meshes(12, 1000))
    assert len(found) == 18  # ordered factorizations of 12 into three
    assert all(shape.ranks == 12 for shape in found)
    assert {shape.cp for shape in meshes(12, 3)} == {1, 2, 3}


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["estimate", "--gpus", "64", "--context", "1M", "--mesh", "fsdp=-1,cp=8", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == "fsdp=8,cp=8"
    assert found["tokens"] == 8 * 2**20
    assert found["tokens_per_second"] == found["tokens"] / found["seconds"]
    main(["estimate", "--gpus", "2", "--context", "64k", "--dim", "256", "--depth", "3", "--num-heads", "4"])
    out = capsys.readouterr().out
    for words in ("tokens in sequences of 65,536", "ms per step", "GB of 141 per GPU", "MB of weights and gradients"):
        assert words in out
    slow = ["estimate", "--gpus", "16", "--mesh", "cp=16", "--json"]
    seconds = []
    for more in ([], ["--network", "1"], ["--latency", "900"], ["--gpus-per-node", "16"], ["--batch-size", "3"]):
        main([*slow, *more])
        seconds.append(json.loads(capsys.readouterr().out)["exchange_time"])
    assert len(set(seconds)) == 5
    assert seconds[3] == min(seconds)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "3", "--mesh", "cp=2"], "--mesh cp=2 needs 2 processes, and there are 3"),
        (["--context", "many"], "--context must be a number of tokens such as 131072, 128k or 1M, got 'many'"),
        (
            ["--mechanism", '{"mechanism": "delta", "gate": "channel"}'],
            "there is no measured figure for the mechanism 'delta, gate per channel'",
        ),
        (["--memory", "0"], "--memory must be above 0, got 0"),
        (["--latency", "-1"], "--latency must be 0 or more, got -1"),
        (["--latency", "nan"], "--latency must be 0 or more, got nan"),
        (["--gpus", "0"], "--gpus must be at least 1, got 0"),
        (["--memory", "0.001"], "GB and has 0.001: use more --gpus"),
        (["--context", "4", "--gpus", "8", "--mesh", "cp=8"], "the context, 4 tokens, is shorter than cp=8 ranks"),
    ],
)
def test_wrong_input(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["estimate", *words])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_numbers_of_tokens() -> None:
    assert [parse_tokens("--context", text) for text in ("1M", "128k", "1.5k", "70,000")] == [2**20, 2**17, 1536, 70000]


# Count the bytes of every collective of a forward and backward pass, by one rank of two.
COUNT = """
import json, os, torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from longspan import LanguageModel, ModelConfig
from longspan.distributed import context_parallel
from longspan.distributed.mesh import Mesh, MeshShape, shard_weights

sent = {}
class Count(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().partition("::")[2]
        if function.namespace == "c10d" and ("allgather" in name or "reduce_scatter" in name):
            inputs = args[1] if isinstance(args[1], torch.Tensor) else args[1][0]
            inputs = inputs if isinstance(inputs, torch.Tensor) else inputs[0]
            if inputs.is_floating_point():
                kind = "gather" if "allgather" in name else "scatter"
                sent[kind] = sent.get(kind, 0) + inputs.numel() * inputs.element_size()
        return function(*args, **(kwargs or {}))

dist.init_process_group("gloo")
config = ModelConfig.from_dict(json.loads(os.environ["CONFIG"]))
found, tokens = {}, torch.randint(11, (5, 37))
for name, shape in (("cp", MeshShape(cp=2)), ("fsdp", MeshShape(fsdp=2))):
    torch.manual_seed(0)
    model, mesh = LanguageModel(config), Mesh.create(shape, torch.device("cpu"))
    sent.clear()
    if name == "cp":
        divided = context_parallel(model, mesh.cp)
        with Count():
            divided.loss(tokens)
    else:
        shard_weights(model, mesh)
        with Count():
            model(tokens).sum().backward()
    found[name] = dict(sent)
if dist.get_rank() == 0:
    open(os.environ["FOUND"], "w").write(json.dumps(found))
dist.barrier()
os._exit(0)
"""


def test_traffic_is_that_of_a_run(tmp_path: Path) -> None:
    work = workload(batch_size=5)
    env = {"CONFIG": json.dumps(work.config.to_dict()), "FOUND": str(tmp_path / "found")}
    done = ranks(2, ["--version"], tmp_path / "log", before=COUNT, env=env)
    assert [result.status for result in done] == [0, 0], done
    found = json.loads((tmp_path / "found").read_text())
    divided = estimate(work, MeshShape(cp=2), HARDWARE, FIGURES)
    assert found["cp"]["gather"] == divided.exchange_sent / 2  # of the forward pass
    sharded = estimate(work, MeshShape(fsdp=2), HARDWARE, FIGURES)
    # Two ranks: a gather sends the rank's half, a scatter the other half of what is put in. FSDP pads odd rows.
    assert found["fsdp"]["gather"] + found["fsdp"]["scatter"] / 2 == pytest.approx(sharded.weights_sent, rel=0.02)
