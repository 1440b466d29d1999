"""Estimate time, memory and traffic of a training step on a mesh of GPUs from measured figures and link speeds.

The formulas are those of docs/distributed.md. Figures are rows of `longspan bench` on one GPU, which `collect` has put
into the file `figures.json` beside this one; link speeds are the caller's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longspan.distributed.mesh import MeshShape
from longspan.mechanisms import list_mechanisms
from longspan.mechanisms.gated import GatedMechanism
from longspan.mechanisms.linformer import LinformerAttention
from longspan.mechanisms.local import LocalAttention
from longspan.mechanisms.performer import PerformerAttention
from longspan.mechanisms.softmax import SoftmaxAttention
from longspan.mechanisms.split import SplitAttention
from longspan.models.config import ModelConfig
from longspan.models.residual import ResidualBranch
from longspan.models.transformer import LanguageModel
from longspan.ops.loss import MAX_LOGITS
from longspan.protocol import Mechanism

FIGURES = Path(__file__).with_name("figures.json")
_FP32, _BF16 = 4, 2  # bytes


@dataclass(frozen=True)
class Hardware:
    """A cluster.

    Attributes:
        gpus_per_node: GPUs of a node.
        memory: Bytes of a GPU.
        link: Bytes per second that a GPU sends to another of its node.
        network: Bytes per second that a GPU sends to another node.
        latency: Seconds to start a collective.
    """

    gpus_per_node: int = 8
    memory: float = 141e9
    link: float = 450e9
    network: float = 50e9
    latency: float = 20e-6

    def seconds(self, sent: float, span: int, collectives: int) -> float:
        """Return the time to send bytes in a group whose ranks are among `span` neighboring GPUs."""
        if sent == 0:
            return 0.0
        return sent / (self.link if span <= self.gpus_per_node else self.network) + collectives * self.latency


@dataclass(frozen=True)
class Step:
    """What a GPU does in one step: seconds, bytes of memory, bytes sent.

    Attributes:
        shape: The mesh.
        tokens: Tokens of all GPUs.
        compute: Seconds of kernels.
        weights_time: Seconds of the traffic of weights and gradients, which overlaps with the kernels.
        exchange_time: Seconds of the exchange of context parallelism.
        weights: Bytes of weights, gradients and optimizer state.
        gathered: Bytes of the weights that are gathered at one time.
        activations: Bytes saved for the backward pass, and of logits.
        states: Bytes of the states that are held.
        weights_sent: Bytes of weights and gradients that a GPU sends.
        exchange_sent: Bytes of states, or keys and values, that a GPU sends.
    """

    shape: MeshShape
    tokens: int
    compute: float
    weights_time: float
    exchange_time: float
    weights: float
    gathered: float
    activations: float
    states: float
    weights_sent: float
    exchange_sent: float

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return max(self.compute, self.weights_time) + self.exchange_time

    @property
    def memory(self) -> float:
        """The bytes that a GPU needs."""
        return self.weights + self.gathered + self.activations + self.states


@dataclass(frozen=True)
class TrainingLoad:
    """A model and its batches.

    Attributes:
        config: The model.
        context: Tokens of a sequence.
        batch_size: Sequences of one group of cp ranks in a step.
        recompute: Whether layers are recomputed in the backward pass.
        chunk_length: The length of pieces, for training in pieces of the sequence.
    """

    config: ModelConfig
    context: int
    batch_size: int = 1
    recompute: bool = False
    chunk_length: int | None = None


def load_figures() -> dict[str, Any]:
    """Return the measured figures."""
    return json.loads(FIGURES.read_text(encoding="utf-8"))


def estimate(work: TrainingLoad, shape: MeshShape, hardware: Hardware, figures: dict[str, Any]) -> Step:
    """Estimate a step.

    Args:
        work: The model and its batches.
        shape: The mesh, without −1.
        hardware: The cluster.
        figures: Measured figures, from `load_figures`.

    Raises:
        ValueError: There is no figure for a mechanism of the model, or the sequence is shorter than the cp ranks.
    """
    config, B = work.config, work.batch_size
    if shape.cp > work.context:
        raise ValueError(f"the context, {work.context} tokens, is shorter than cp={shape.cp} ranks")
    with torch.device("meta"):
        model = LanguageModel(config)
    mechanisms = _mechanisms(model)
    length = -(-work.context // shape.cp)  # of a piece
    parameters = sum(p.numel() for p in model.parameters())
    # Of a table of n-grams a token reads a few rows.
    tables = 0 if model.ngrams is None else sum(p.numel() for p in model.ngrams.parameters())
    dense = figures["dense"]["seconds"] * (parameters - tables) * B * length
    attention = sum(_attention_seconds(m, work, shape.cp, figures) for m in mechanisms)
    compute = (dense + attention) * (4 / 3 if work.recompute or work.chunk_length else 1)
    exchanged = sum(exchange_bytes(m, work.context, shape.cp, causal=config.causal) for m in mechanisms) * B
    # The forward pass sends what the rank wrote to the others, the backward pass gradients of as many bytes.
    exchange_sent = 2 * (shape.cp - 1) * exchanged
    shards = shape.fsdp * shape.cp
    gathers = 3 * _FP32 * parameters * (shards - 1) / shards  # weights twice, gradients once
    copies = 2 * _FP32 * parameters / shards * (shape.dp - 1) / shape.dp  # an all-reduce of the shards' gradients
    groups = len(model.transformer.stack.branches) + 1
    pieces = 1 if work.chunk_length is None else -(-work.context // work.chunk_length)
    return Step(
        shape=shape,
        tokens=B * work.context * shape.data_ranks,
        compute=compute,
        weights_time=hardware.seconds(gathers * pieces, shards, 3 * groups * pieces)
        + hardware.seconds(copies, shape.ranks, groups),
        exchange_time=hardware.seconds(exchange_sent, shape.cp, 2 * len(mechanisms)),
        weights=4 * _FP32 * parameters / shards,  # with gradients and two moments
        gathered=0.0 if shards == 1 else _FP32 * _largest_groups(model),
        activations=_activation_bytes(model, work, length, figures) + _logit_bytes(work, length),
        states=_state_bytes(mechanisms, work, pieces) * B if pieces > 1 else shape.cp * exchanged,
        weights_sent=gathers * pieces + copies,
        exchange_sent=exchange_sent,
    )


def meshes(gpus: int, context: int) -> Iterator[MeshShape]:
    """Yield every mesh of a number of GPUs whose cp ranks have tokens."""
    for cp in range(1, min(gpus, context) + 1):
        for fsdp in range(1, gpus // cp + 1):
            if gpus % (cp * fsdp) == 0:
                yield MeshShape(gpus // (cp * fsdp), fsdp, cp)


def state_bytes(mechanism: Mechanism) -> int:
    """Return the bytes of one sequence's state that ranks exchange: its floating-point tensors."""
    state = mechanism.new_state(1, transition=True, device="meta", dtype=torch.bfloat16)
    return sum(x.numel() * x.element_size() for x in state.tensors().values() if x.is_floating_point())


def exchange_bytes(mechanism: Mechanism, context: int, cp: int, *, causal: bool) -> float:
    """Return the bytes of one sequence that a rank passes to the others in a layer: its state, or keys and values."""
    if cp == 1:
        return 0.0
    if isinstance(mechanism, SplitAttention):
        parts: Sequence[Any] = list(mechanism.parts)
        return sum(exchange_bytes(part, context, cp, causal=causal) for part in parts)
    width, length = mechanism.num_kv_heads * (mechanism.head_dim + mechanism.value_dim), -(-context // cp)
    if isinstance(mechanism, SoftmaxAttention):
        return float(length * width * _BF16)
    if isinstance(mechanism, LocalAttention) and not causal:
        return float(min(length, sum(mechanism.window.reach())) * width * _BF16)
    if not causal and not mechanism.supports_cross:  # a state of the tokens before, and one of those after
        return 2.0 * state_bytes(mechanism)
    return float(state_bytes(mechanism))


def _state_bytes(mechanisms: list[Mechanism], work: TrainingLoad, pieces: int) -> float:
    """Return the bytes of one sequence's states before each piece; those of `softmax` hold the tokens before it."""
    total = 0.0
    for mechanism in mechanisms:
        held = exchange_bytes(mechanism, work.context, 2, causal=True)
        total += held * (pieces - 1) if isinstance(mechanism, SoftmaxAttention) else state_bytes(mechanism) * pieces
    return total


def _mechanisms(model: LanguageModel) -> list[Mechanism]:
    return [layer.mechanism for _, layer in model.transformer.stack.attention_layers()]


def _attention_seconds(mechanism: Mechanism, work: TrainingLoad, cp: int, figures: dict[str, Any]) -> float:
    """Return the time of a mechanism's kernels, forward and backward, on the slowest rank."""
    if isinstance(mechanism, SplitAttention):
        parts: Sequence[Any] = list(mechanism.parts)
        return sum(_attention_seconds(part, work, cp, figures) for part in parts)
    name = next(name for name, cls in list_mechanisms().items() if cls is type(mechanism))
    passes = 1
    if isinstance(mechanism, GatedMechanism):
        name = f"{name}, gate per channel" if getattr(mechanism, "gate", None) == "channel" else name
        passes = 1 if work.config.causal else 2  # The sum of both directions.
    elif not work.config.causal:
        name = f"{name}, bidirectional"
    known = figures["mechanisms"].get(name)
    if known is None:
        measured = ", ".join(figures["mechanisms"])
        raise ValueError(f"there is no measured figure for the mechanism {name!r}; there are figures for {measured}")
    width = min(known["head_dims"], key=lambda d: abs(int(d) - mechanism.head_dim))
    rate = known["head_dims"][width] * mechanism.head_dim / int(width)
    return passes * rate * work.batch_size * mechanism.num_heads * _units(mechanism, work, cp)


def _units(mechanism: Mechanism, work: TrainingLoad, cp: int) -> float:
    """Return what the time of a mechanism is proportional to, per head: tokens, times keys or features for each."""
    length = -(-work.context // cp)
    if isinstance(mechanism, SoftmaxAttention):
        return length * (work.context - length / 2 if work.config.causal else work.context)  # of the last rank
    if isinstance(mechanism, LocalAttention):
        back, ahead = mechanism.window.reach()
        return length * (back + 1 + (0 if work.config.causal else ahead))
    if isinstance(mechanism, LinformerAttention):
        return length * mechanism.rank
    if isinstance(mechanism, PerformerAttention):
        return length * mechanism.num_features
    return length


def _activation_bytes(model: LanguageModel, work: TrainingLoad, length: int, figures: dict[str, Any]) -> float:
    """Return the bytes saved for the backward pass."""
    config = model.config
    tokens = work.batch_size * min(length, work.chunk_length or length)
    layer = figures["activations"]["bytes"] * config.dim * tokens
    if work.recompute:  # the input of every branch, and the activations of one layer
        return layer + _FP32 * config.dim * tokens * len(model.transformer.stack.branches)
    return layer * config.depth


def _logit_bytes(work: TrainingLoad, length: int) -> float:
    vocabulary = work.config.vocab_size or 0
    tokens = work.batch_size * min(length, work.chunk_length or length)
    return 2 * _FP32 * min(MAX_LOGITS, tokens * vocabulary)


def _largest_groups(model: LanguageModel) -> int:
    """Return the number of weights that are gathered at one time: those outside the layers and of two branches."""
    sizes = sorted(sum(p.numel() for p in b.parameters()) for b in model.modules() if isinstance(b, ResidualBranch))
    return sum(p.numel() for p in model.parameters()) - sum(sizes) + sum(sizes[-2:])


# The mechanism of a figure, its file and row, and what its time is divided by besides tokens and heads.
_ROWS: tuple[tuple[str, str, str, int], ...] = (
    ("linear", "h200-causal", "linear, softmax map", 1),
    ("linear, bidirectional", "h200-bidirectional", "linear, softmax map, normalized per query", 1),
    ("performer", "h200-causal", "performer, 256 features", 256),
    ("performer, bidirectional", "h200-bidirectional", "performer, 256 features", 256),
    ("linformer", "h200-causal", "linformer, rank 256", 256),
    ("linformer, bidirectional", "h200-bidirectional", "linformer, rank 256", 256),
    ("local", "h200-local", "local, 256 keys", 256),
    ("decay", "h200-gated", "decay, gate per head", 1),
    ("delta", "h200-gated", "delta, gate per head", 1),
    ("softmax", "h200-causal", "PyTorch SDPA", 0),
    ("softmax, bidirectional", "h200-bidirectional", "PyTorch SDPA", 0),
)


def collect(results: Path) -> dict[str, Any]:
    """Return the figures that the results of `longspan bench` in a folder contain.

    `dense`: seconds per token and parameter of everything but attention kernels. `mechanisms`: seconds per head and
    unit (`_units`), forward and backward, by head dimension. `activations`: bytes per token, layer and dim.
    """
    mechanisms: dict[str, Any] = {}
    for name, file, row, keys in _ROWS:
        found: dict[str, tuple[int, float]] = {}
        for each in _rows(results, file):
            case = each["case"]
            if each["name"] == row and case["dtype"] == "bfloat16" and "forward_backward_graph_ms" in each:
                T = case["length"]
                units = T * (keys or (T / 2 if case["causal"] else T)) * case["batch_size"] * case["num_heads"]
                width = str(case["head_dim"])
                if found.get(width, (0, 0.0))[0] < T:
                    found[width] = T, each["forward_backward_graph_ms"] / 1e3 / units
        mechanisms[name] = {"file": file, "row": row, "head_dims": {width: rate for width, (_, rate) in found.items()}}
    steps = [r for r in _rows(results, "h200-train") if r["name"] == "linear"]
    longest = max(steps, key=lambda r: r["case"]["length"])
    case = longest["case"]
    rate = mechanisms["linear"]["head_dims"][str(case["head_dim"])]
    tokens = case["length"] * case["batch_size"]
    seconds = longest["step_ms"] / 1e3 - case["depth"] * case["num_heads"] * tokens * rate
    eager = next(r for r in steps if r["compile"] == "default")
    dim, batch = eager["case"]["num_heads"] * eager["case"]["head_dim"], eager["case"]
    saved = eager["peak_mb"] * 1e6 - 4 * _FP32 * eager["parameters"]
    return {
        "mechanisms": mechanisms,
        "dense": {"file": "h200-train", "seconds": seconds / tokens / longest["parameters"]},
        "activations": {
            "file": "h200-train",
            "bytes": saved / (batch["length"] * batch["batch_size"] * batch["depth"] * dim),
        },
    }


def _rows(results: Path, name: str) -> list[dict[str, Any]]:
    return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))["rows"]
