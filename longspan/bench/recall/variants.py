"""The models of the recall benchmark: mechanisms with states of equal size, and how each task trains them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from longspan.models.config import AttentionConfig, FeedForwardConfig, ModelConfig
from longspan.train.presets import half_local
from longspan.train.synthetic.tasks import ListOps, Needle, Parity, Recall, SelectiveCopy, SyntheticTask

Spec = dict[str, Any] | list[dict[str, Any]]  # as in AttentionConfig: of all layers, or of each
_DELTA_NEGATIVE = {"mechanism": "delta", "negative_eigenvalues": True}


def mechanisms(num_heads: int, head_dim: int, length: int) -> dict[str, Spec]:
    """Return the mechanisms by name, as in AttentionConfig, with D·E numbers of state per head.

    A window of D/2 keys and values, D/2 compressed rows and D random features have as many; softmax, which stores
    every token, is the reference. `local+…` has a window in half of the heads, `local/…` in every other layer.

    Args:
        num_heads: H.
        head_dim: D, and E.
        length: Tokens of the longest sequence.
    """
    half = max(2, head_dim // 2)
    linformer = {"mechanism": "linformer", "rank": half, "max_length": length}
    single: dict[str, dict[str, Any]] = {
        "softmax": {"mechanism": "softmax"},
        "local": {"mechanism": "local", "window": half},
        "linear": {"mechanism": "linear", "feature_map": "softmax"},
        "performer": {"mechanism": "performer", "num_features": head_dim, "redraw_interval": None},
        "linformer": linformer,
        "decay-fixed": {"mechanism": "decay", "gate": "fixed"},
        "decay-head": {"mechanism": "decay", "gate": "head"},
        "decay-channel": {"mechanism": "decay", "gate": "channel"},
        "delta": {"mechanism": "delta", "gate": "none"},
        "delta-head": {"mechanism": "delta", "gate": "head"},
        "delta-channel": {"mechanism": "delta", "gate": "channel"},
        "delta-negative": {**_DELTA_NEGATIVE, "gate": "none"},
        "delta-head-negative": {**_DELTA_NEGATIVE, "gate": "head"},
        "delta-channel-negative": {**_DELTA_NEGATIVE, "gate": "channel"},
    }
    layers = ("linear", "decay-head", "delta", "delta-head")
    hybrids: dict[str, Spec] = {f"{name}/local": [single[name], single["local"]] for name in layers}
    if num_heads > 1:
        for name, spec in single.items():
            if name not in ("softmax", "local"):
                hybrids[f"local+{name}"] = half_local(num_heads, half, spec)
        decay = {**single["decay-head"], "num_heads": num_heads // 2}
        delta = {**single["delta-head"], "num_heads": num_heads - num_heads // 2}
        hybrids["decay-head+delta-head"] = {"mechanism": "split", "parts": [decay, delta]}
    return {**single, **hybrids}


@dataclass(frozen=True)
class LayerOptions:
    """Sizes and options that all models of a benchmark share; defaults are those of Gated DeltaNet."""

    dim: int = 128
    """Width of the models."""
    depth: int = 2
    """Number of layers."""
    heads: int = 2
    """Number of heads."""
    conv_size: int = 4
    """Width of the convolution over queries, keys and values; 0 for none."""

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise ValueError(f"dim ({self.dim}) must be a multiple of heads ({self.heads})")


@dataclass(frozen=True)
class Recipe:
    """How models are trained and scored on a task.

    Attributes:
        score: The task to score.
        train: The tasks to train on, step by step in turn: shorter sequences too where those of `score` are learned
            late or not at all without them.
        steps: Steps of a run; a learning rate is chosen after a quarter of them.
        batch_tokens: Tokens of a step.
        train_tokens: Tokens of each training task's data set, which is sampled with replacement.
        lrs: Learning rates to choose from.
        length_buckets: Batches are drawn from this many parts of a data set in turn, by length, to save padding.
        solved: Training ends when the mean loss of a block of steps is below this (nats per answer).
        precision: "bf16" by autocast on a GPU, or "fp32".
        gate_noise: Standard deviation of Gaussian noise that is added to mechanisms' raw gates in training. Gates that
            are open or closed do not pass it on, so that a model learns such gates (Salakhutdinov and Hinton, 2009).
        compile: Whether the model is compiled by torch.compile. Its results differ by rounding alone.
        layer: Sizes and options of the models.
    """

    score: SyntheticTask
    train: tuple[SyntheticTask, ...]
    steps: int
    batch_tokens: int = 8192
    train_tokens: int = 2**24
    lrs: tuple[float, ...] = (3e-3, 1e-2)
    length_buckets: int = 1
    solved: float = 0.005
    precision: Literal["bf16", "fp32"] = "bf16"
    gate_noise: float = 0.0
    compile: bool = False
    layer: LayerOptions = LayerOptions()

    @property
    def mechanisms(self) -> dict[str, Spec]:
        """The mechanisms to compare, by name: those that fit into the layers."""
        found = mechanisms(self.layer.heads, self.layer.dim // self.layer.heads, self.score.length)
        return {name: spec for name, spec in found.items() if isinstance(spec, dict) or len(spec) <= self.layer.depth}


def _mqar(length: int) -> Recipe:
    score = Recall(length, length // 16, 8192)
    shorter = [(length // 16, 16), (length // 4, 4)]
    train = [Recall(n, n // ratio, 8192) for n, ratio in shorter if n >= 64]
    return Recipe(score, (*train, score), steps=6000)


def _with_shorter(make: Callable[[int], SyntheticTask], steps: int) -> Callable[[int], Recipe]:
    """A task that is also trained on a sixteenth, an eighth and a quarter of its length."""

    def recipe(length: int) -> Recipe:
        train = [make(length // part) for part in (16, 8, 4) if length // part >= 64]
        return Recipe(make(length), (*train, make(length)), steps, lrs=(1e-3, 3e-3))

    return recipe


def _parity(length: int) -> Recipe:
    short = max(2, length * 40 // 256)
    return Recipe(
        Parity(length, first=short),
        (Parity(short),),
        steps=3000,
        batch_tokens=5120,
        train_tokens=2**22,
        lrs=(1e-2, 3e-2),
        solved=0.0,  # errors too small to matter at 40 bits add up over 256
        precision="fp32",
        # Without it the loss leaves β of a zero bit at 0.005, say: its writes matter after 200 bits and not after 40.
        # On average it multiplies a small β by e², more than the lengths differ.
        gate_noise=2.0,
        # A convolution, or a layer before, lets keys depend on the bits before: reflections along different axes add up
        # to a rotation.
        layer=LayerOptions(depth=1, conv_size=0),
    )


def _listops(length: int) -> Recipe:
    task = ListOps(length)
    return Recipe(
        task,
        (task,),
        steps=30_000,  # 20 epochs
        batch_tokens=64 * length,
        train_tokens=96_000 * length,
        lrs=(1e-3, 3e-3),
        length_buckets=8,
        layer=LayerOptions(depth=4, heads=4),
    )


# The recipe of each task for a length, and the length by default.
RECIPES: dict[str, tuple[Callable[[int], Recipe], int]] = {
    "mqar": (_mqar, 1024),
    "parity": (_parity, 256),
    "selective-copy": (_with_shorter(SelectiveCopy, 4000), 1024),
    "needle": (_with_shorter(Needle, 1600), 1024),
    "listops": (_listops, 2000),
}

# What is run first, by task; the rest follows in the order of the tables above.
FIRST: Mapping[str, tuple[str, ...]] = {
    "mqar": (
        *("delta", "delta/local", "delta-head/local", "local+delta-head", "delta-head", "local+delta", "decay-head"),
        *("linear", "softmax", "local", "performer", "linformer"),
    ),
    "parity": ("delta-negative", "delta-head-negative", "delta", "delta-head", "linear", "softmax", "decay-head"),
    "selective-copy": ("delta-head", "decay-head", "linear", "softmax", "local+delta-head"),
    "needle": ("delta-head", "decay-head", "linear", "softmax", "local+delta-head"),
    "listops": ("decay-head", "delta-head", "decay-channel", "linear", "softmax"),
}


def model_config(score: SyntheticTask, spec: Spec, layer: LayerOptions) -> ModelConfig:
    """Return the model of a run.

    Token models are causal and tie their embeddings, as the models of Arora et al. (2023); classifiers are
    bidirectional and read the class from the first token, as BERT does. None has embeddings of positions.
    """
    causal = score.num_classes is None
    # Bidirectional `decay` and `delta` sum both directions alike: rotation tells a token before from one after.
    rotated = ("softmax", "local") if causal else ("softmax", "local", "decay", "delta")
    attention = AttentionConfig(
        num_heads=layer.heads,
        mechanism=spec,
        rotary=dict.fromkeys(rotated, "halves"),
        conv_size=layer.conv_size,
        out_norm=True,
        out_gate="silu",
        out_bias=False,
    )
    return ModelConfig(
        dim=layer.dim,
        depth=layer.depth,
        attention=attention,
        feed_forward=FeedForwardConfig(mult=2, bias=False),
        causal=causal,
        vocab_size=score.vocab_size,
        tie_embeddings=causal,
        num_classes=score.num_classes,
        pooling="none",
    )


def described(task: SyntheticTask) -> dict[str, Any]:
    """Return a task as JSON values."""
    return {"task": task.name, **asdict(task)}
