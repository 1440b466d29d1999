"""Model configurations: frozen dataclasses that check their values and round-trip through JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin, get_type_hints

from longspan.mechanisms import find_mechanism
from longspan.utils import choose, nearest

Spec = str | Mapping[str, Any]  # a mechanism's name, or {"mechanism": name, **options}

Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "tanh", "sigmoid", "relu2", "identity"]
RotaryStyle = Literal["none", "halves", "interleaved"]
Norm = Literal["layer", "rms", "scale"]
NormPosition = Literal["pre", "post", "rezero"]
Residual = Literal["single", "parallel", "double", "hyper"]
Execution = Literal["keep", "recompute", "recompute_heads", "reverse"]
Positions = Literal["none", "learned", "sinusoidal", "axial"]
Pooling = Literal["mean", "none"]
OutGate = Literal["none", "sigmoid", "silu"]


@dataclass(frozen=True)
class AttentionConfig:
    """Configuration of an attention layer."""

    num_heads: int = 8
    """Number of query heads."""
    mechanism: Spec | Sequence[Spec] = "softmax"
    """Name, {"mechanism": name, **options}, or one of these per layer, repeated to the depth."""
    head_dim: int | None = None
    """Width of a head; dim / num_heads by default."""
    num_kv_heads: int | None = None
    """Number of key/value heads (grouped-query attention); num_heads by default."""
    num_qk_heads: int | None = None
    """Number of query and key heads where there are more value heads (Gated DeltaNet); num_heads by default."""
    shared_kv: bool = False
    """Use the keys as values."""
    qkv_bias: bool = False
    """Add a bias to the query, key and value projections."""
    out_bias: bool = True
    """Add a bias to the output projection."""
    qk_norm: bool = False
    """Normalize queries and keys (RMS norm with a learned scale)."""
    rotary: RotaryStyle | Sequence[RotaryStyle] | Mapping[str, RotaryStyle] = "none"
    """Rotary embeddings: none, halves, interleaved; a list for the parts of a split, or a mapping by mechanism."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""
    rotary_dim: int | None = None
    """Number of features of a head that are rotated, the first ones (partial rotary embedding); all by default."""
    conv_size: int = 0
    """Width of a causal convolution with SiLU over queries, keys and values, 4 in the literature; 0 for none."""
    value_embedding: bool = False
    """Add an embedding of the token, one for each layer, to the values."""
    value_gates: bool = False
    """Multiply each head's output by a sigmoid gate computed from the input."""
    out_norm: bool = False
    """Normalize each head's output (RMS norm with a learned scale)."""
    out_gate: OutGate = "none"
    """Multiply the heads' outputs, element by element, by this function of a projection of the input."""
    dropout: float = 0.0
    """Dropout after the output projection."""
    dynamic_bias: int = 0
    """Hidden width of the position-bias MLP that local heads of all layers share; 0 disables it."""
    share_projection: bool = False
    """Share one Linformer projection among all layers."""

    def __post_init__(self) -> None:
        _freeze(self, "mechanism", "rotary")
        _check_positive(self, "num_heads", "head_dim", "num_kv_heads", "num_qk_heads", "rotary_dim")
        check_fields(self)
        _check_fraction(self, "dropout")
        choose("out_gate", self.out_gate, get_args(OutGate))
        if self.conv_size < 0 or self.conv_size == 1:
            raise ValueError(f"conv_size must be 0 (no convolution) or at least 2, got {self.conv_size}")
        if self.num_qk_heads is not None:
            if self.num_heads % self.num_qk_heads:
                raise ValueError(
                    f"num_heads ({self.num_heads}) must be a multiple of num_qk_heads ({self.num_qk_heads})"
                )
            if self.num_kv_heads is not None or self.shared_kv:
                raise ValueError("num_qk_heads excludes num_kv_heads and shared_kv: each value head has its own memory")
        if self.value_embedding and self.shared_kv:
            raise ValueError("value_embedding adds to values, and shared_kv has none of its own: leave one of them out")
        if self.dynamic_bias < 0:
            raise ValueError(f"dynamic_bias must be 0 (none) or more, got {self.dynamic_bias}")
        if not isinstance(self.rotary, str | Mapping | Sequence):
            raise ValueError(f"rotary must be a name, a mapping, or a list of names, got {self.rotary!r}")
        by_name = self.rotary if isinstance(self.rotary, Mapping) else {}
        styles = [self.rotary] if isinstance(self.rotary, str) else list(by_name.values() if by_name else self.rotary)
        for style in styles:
            choose("rotary", style, get_args(RotaryStyle))
        for name in by_name:
            find_mechanism(name)
        if self.rotary_dim is not None and set(styles) <= {"none"}:
            raise ValueError(f"rotary_dim ({self.rotary_dim}) goes with rotary embeddings: set rotary, such as halves")
        if not isinstance(self.mechanism, str | Mapping | Sequence):
            raise ValueError(f"mechanism must be a name, a mapping, or a list of them, got {self.mechanism!r}")
        if not self.mechanism:
            raise ValueError("mechanism is empty: name at least one mechanism")
        for spec in _specs(self.mechanism):
            if not isinstance(spec, str) and not (isinstance(spec, Mapping) and "mechanism" in spec):
                raise ValueError(f'a mechanism is a name or {{"mechanism": name, **options}}, got {spec!r}')
            find_mechanism(spec if isinstance(spec, str) else spec["mechanism"])


@dataclass(frozen=True)
class FeedForwardConfig:
    """Configuration of a feed-forward layer."""

    mult: float = 4
    """Hidden width as a multiple of dim."""
    hidden: int | None = None
    """Hidden width; mult · dim by default."""
    activation: Activation = "gelu"
    """Activation function."""
    gated: bool = False
    """Gated linear unit: activation(a) · b."""
    bias: bool = True
    """Add biases to both linear layers."""
    dropout: float = 0.0
    """Dropout of the hidden activations."""
    chunks: int = 1
    """Compute the sequence in this many chunks, one after another, to save memory."""

    def __post_init__(self) -> None:
        _check_positive(self, "hidden")
        check_fields(self)
        _check_fraction(self, "dropout")
        if self.mult <= 0:
            raise ValueError(f"mult must be positive, got {self.mult}")
        if self.chunks < 1:
            raise ValueError(f"chunks must be at least 1, got {self.chunks}")


@dataclass(frozen=True)
class LegacyConfig:
    """Options that only checkpoints of the older packages need; new models leave them at their defaults."""

    inner_dim: int | None = None
    """Width between the first and the last feed-forward layer; dim by default."""
    resample: bool = False
    """Project the residual to the new width where inner_dim changes it, instead of dropping it."""
    axial_stride: int | None = None
    """Add attention along every axial_stride-th token to each layer; 1: along all of them."""
    axial: AttentionConfig | None = None
    """Configuration of the axial attention; that of the self-attention by default."""
    side_feed_forward: FeedForwardConfig | None = None
    """Feed-forward layers after axial and cross-attention; the same as after self-attention by default."""
    out_dim: int | None = None
    """Width of an extra linear layer between the heads and the output projection of every attention."""
    product_keys: tuple[int, ...] = ()
    """Layers, counted from 0, with a product-key memory instead of a feed-forward layer."""
    num_keys: int = 128
    """A product-key memory holds num_keys² values."""
    out_dropout: float = 0.0
    """Dropout after every feed-forward layer."""
    narrow_norm: bool = False
    """Normalize after the projection to embed_dim."""
    sum_streams: bool = False
    """Add the two streams of residual="double" at the end instead of averaging them."""
    position_base: float = 10000.0
    """Base of the sinusoidal position frequencies."""
    logits_bias: bool = True
    """Add a bias to the logits where the embeddings are not tied."""

    def __post_init__(self) -> None:
        _freeze(self, "product_keys")
        _check_positive(self, "inner_dim", "out_dim", "num_keys")
        check_fields(self)
        _check_fraction(self, "out_dropout")
        if self.axial_stride is not None and self.axial_stride < 1:
            raise ValueError(f"axial_stride must be at least 1, or None, got {self.axial_stride}")
        if self.axial is not None and self.axial_stride is None:
            raise ValueError("axial describes the attention along every axial_stride-th token: set axial_stride too")
        if self.resample and self.inner_dim is None:
            raise ValueError("resample is for a width that changes: set inner_dim too")


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of a model; `to_dict` and `from_dict` round-trip through JSON."""

    dim: int = 512
    """Width of the model."""
    depth: int = 6
    """Number of layers."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """Self-attention."""
    cross: AttentionConfig | None = None
    """Cross-attention after each self-attention; None for no cross-attention."""
    feed_forward: FeedForwardConfig | None = field(default_factory=FeedForwardConfig)
    """Feed-forward layer after each attention; None for no feed-forward layers."""
    norm: Norm = "layer"
    """Normalization: layer norm, RMS norm, or ScaleNorm."""
    norm_eps: float | None = None
    """Epsilon of the layer and RMS norms, 1e-5 and 1e-6 by default; pretrained models bring their own."""
    norm_position: NormPosition = "pre"
    """Pre-norm, post-norm, or ReZero."""
    final_norm: bool | Norm = True
    """Norm after the last layer; true: of the same kind."""
    positions: Positions = "none"
    """Absolute position embeddings."""
    max_length: int | None = None
    """Number of positions of learned and axial embeddings."""
    axial_shape: tuple[int, ...] | None = None
    """Grid of the axial position embeddings, such as 64,64."""
    causal: bool = False
    """Let tokens attend to themselves and earlier tokens only."""
    token_shift: tuple[int, ...] = ()
    """Offsets in tokens by which equal parts of the features are shifted."""
    residual: Residual = "single"
    """One residual stream, one that attention and feed-forward layers read in parallel, two, or hyper-connections."""
    num_streams: int = 4
    """Number of streams of hyper-connections."""
    residual_in_fp32: bool = True
    """Keep the residual stream of a language model in float32 under autocast; false: in autocast's dtype."""
    execution: Execution = "keep"
    """Keep, recompute or reverse activations in the backward pass."""
    vocab_size: int | None = None
    """Number of tokens."""
    embed_dim: int | None = None
    """Width of the token embeddings; dim by default."""
    tie_embeddings: bool = False
    """Compute logits with the token embeddings."""
    embed_dropout: float = 0.0
    """Dropout of the embeddings."""
    ngrams: tuple[int, ...] = ()
    """Lengths of n-grams whose hashed embeddings are added to those of the tokens, such as 2,3,4."""
    ngram_buckets: int = 16_384
    """Rows of each table of n-gram embeddings."""
    logit_softcap: float | None = None
    """Limit logits to ± this number by a tanh; None for no limit."""
    zero_init_residual: bool = False
    """Initialize the output projections of all layers to zero; those of ReZero, which begins at zero, stay random."""
    num_classes: int | None = None
    """Number of outputs of a `Classifier`: classes, or numbers to predict."""
    pooling: Pooling = "mean"
    """Outputs of a `Classifier`: one for the mean of all tokens, or one for each token."""
    input_dim: int | None = None
    """Width of the vectors that a `Classifier` reads instead of tokens, and projects to dim."""
    legacy: LegacyConfig = field(default_factory=LegacyConfig)
    """Options that only checkpoints of the older packages need."""

    def __post_init__(self) -> None:
        _freeze(self, "axial_shape", "token_shift", "ngrams")
        _check_positive(self, "dim", "depth", "max_length", "num_streams", "vocab_size", "embed_dim", "ngram_buckets")
        _check_positive(self, "num_classes", "input_dim")
        check_fields(self)
        if not isinstance(self.legacy, LegacyConfig):
            raise ValueError(f"legacy must be a LegacyConfig, got {self.legacy!r}")
        _check_fraction(self, "embed_dropout")
        if self.norm_eps is not None and self.norm_eps <= 0:
            raise ValueError(f"norm_eps must be positive, got {self.norm_eps}")
        if not isinstance(self.final_norm, bool):
            choose("final_norm", self.final_norm, get_args(Norm))
        for name, group in (*_GROUPS.items(), ("legacy", LegacyConfig)):
            value = getattr(self, name, None)
            if not isinstance(value, group) and (value is not None or name in ("attention", "legacy")):
                raise ValueError(f"{name} must be a {group.__name__}, got {value!r}")
        self._check_positions()
        if self.residual == "parallel" and self.feed_forward is None:
            raise ValueError('residual="parallel" needs feed_forward, the layer that runs in parallel with attention')
        if self.causal and any(offset < 0 for offset in self.token_shift):
            raise ValueError(f"token_shift {self.token_shift} looks ahead; a causal model's offsets are 0 or more")
        if self.token_shift and self.dim < len(self.token_shift):
            raise ValueError(f"token_shift has {len(self.token_shift)} parts, more than dim ({self.dim})")
        if self.tie_embeddings and self.vocab_size is None:
            raise ValueError("tie_embeddings needs vocab_size")
        if len(set(self.ngrams)) < len(self.ngrams) or any(n < 2 for n in self.ngrams):
            raise ValueError(f"ngrams must be different lengths of at least 2, such as 2,3, got {self.ngrams}")
        if self.logit_softcap is not None and not self.logit_softcap > 0:
            raise ValueError(f"logit_softcap must be above 0, or None for no limit, got {self.logit_softcap}")
        if self.attention.value_embedding and self.legacy.axial_stride is not None:
            raise ValueError("value_embedding cannot be combined with axial_stride: leave one of them out")
        for name, other in (("cross", self.cross), ("legacy.axial", self.legacy.axial)):
            if other is not None and other.value_embedding:
                raise ValueError(f"value_embedding is for self-attention: set it in attention, not in {name}")
        if self.input_dim is not None and self.vocab_size is not None:
            raise ValueError("a model reads tokens or vectors: set vocab_size or input_dim, not both")
        self._check_legacy()

    def _check_positions(self) -> None:
        if self.positions == "learned" and self.max_length is None:
            raise ValueError('positions="learned" needs max_length, the number of positions')
        if self.positions == "axial" and self.axial_shape is None:
            raise ValueError('positions="axial" needs axial_shape, such as (1024, 1024)')
        if self.axial_shape is None:
            return
        if self.positions != "axial":
            raise ValueError(f'axial_shape goes with positions="axial", got positions="{self.positions}"')
        reach = math.prod(self.axial_shape)
        if self.max_length is not None and reach < self.max_length:
            raise ValueError(
                f"axial_shape {self.axial_shape} reaches {reach} positions, max_length is {self.max_length}"
            )

    def _check_legacy(self) -> None:
        legacy = self.legacy
        has_side = self.feed_forward is not None and (legacy.axial_stride is not None or self.cross is not None)
        if legacy.side_feed_forward is not None and not has_side:
            raise ValueError("side_feed_forward goes with feed_forward, and with axial_stride or cross before it")
        if legacy.narrow_norm and self.embed_dim in (None, self.dim):
            raise ValueError("narrow_norm is for an embed_dim of its own: final_norm normalizes vectors as wide as dim")
        if legacy.inner_dim is not None and (self.feed_forward is None or self.depth < 2):
            raise ValueError("inner_dim needs feed-forward layers to change the width, and a depth of at least 2")
        if any(not 0 <= layer < self.depth for layer in legacy.product_keys):
            raise ValueError(
                f"product_keys {legacy.product_keys} must be layers from 0 to {self.depth - 1} (depth {self.depth})"
            )
        if legacy.sum_streams and self.residual != "double":
            raise ValueError(f'sum_streams needs residual="double", got residual="{self.residual}"')

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as values that JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Build the configuration that `to_dict` returned, in this or an earlier version.

        Raises:
            ValueError: If a field does not exist, or a value is not allowed.
        """
        given = _migrated(values)
        given["legacy"] = _with_groups(LegacyConfig, given["legacy"], "legacy.")
        return _with_groups(cls, given, "")


# Fields of the embeddings of tokens, with their values in a model that reads vectors.
OF_TOKENS: dict[str, Any] = {"positions": "none", "ngrams": (), "embed_dim": None, "embed_dropout": 0.0}

_GROUPS: dict[str, type] = {
    "attention": AttentionConfig,
    "cross": AttentionConfig,
    "axial": AttentionConfig,
    "feed_forward": FeedForwardConfig,
    "side_feed_forward": FeedForwardConfig,
}


def _with_groups(cls: Any, values: Mapping[str, Any], prefix: str) -> Any:
    """Build cls from a mapping in which nested configurations may be mappings too."""
    given = dict(values)
    for name, group in _GROUPS.items():
        if isinstance(given.get(name), Mapping):
            given[name] = _build(group, given[name], f"{prefix}{name}.")
    return _build(cls, given, prefix)


def _build(cls: Any, values: Mapping[str, Any], prefix: str) -> Any:
    names = [f.name for f in dataclasses.fields(cls)]
    for name in values:
        if name not in names:
            raise ValueError(f"unknown field {prefix}{name}; there is {', '.join(names)}{nearest(name, names)}")
    return cls(**values)


def _migrated(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values written before version 0.2.

    These have `normalise`, `rank_step`, legacy fields outside `legacy`, and ⌊D ln D⌋ features where none are given.
    """
    given: dict[str, Any] = _respelled(values)
    legacy = given.pop("legacy", {})
    outside = {f.name: given.pop(f.name) for f in dataclasses.fields(LegacyConfig) if f.name in given}
    legacy |= outside
    groups = {name: group for name in _GROUPS if isinstance(group := {**given, **legacy}.get(name), dict)}
    for name in ("attention", "cross", "axial") if outside else ():
        if name in groups:
            heads = groups[name].get("num_heads", AttentionConfig.num_heads)
            head_dim = groups[name].get("head_dim") or given.get("dim", ModelConfig.dim) // heads
            spec = groups[name].get("mechanism", AttentionConfig.mechanism)
            groups[name]["mechanism"] = _with_features(spec, head_dim)
    for name in ("attention", "cross", "axial"):
        step = groups.get(name, {}).pop("rank_step", 0)
        if step:
            groups[name]["mechanism"] = _shrinking(groups[name], step, given.get("depth", ModelConfig.depth))
    side = groups.get("side_feed_forward", {})
    if side.pop("product_keys", ()):
        raise ValueError("product keys in side_feed_forward are not supported since version 0.2")
    side.pop("num_keys", None)
    for name in ("out_dim", "product_keys", "num_keys", "out_dropout"):
        found = [group.pop(name) for group in groups.values() if name in group]
        if any(value != found[0] for value in found):
            raise ValueError(f"{name} must be the same in all layers of a kind since version 0.2, got {found}")
        if found:
            legacy[name] = found[0]
    return {**given, "legacy": legacy}


def _respelled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {"normalize" if name == "normalise" else name: _respelled(x) for name, x in value.items()}
    return [_respelled(x) for x in value] if isinstance(value, list | tuple) else value


def _with_features(spec: Any, head_dim: int) -> Any:
    """Return mechanisms in which performer has the number of features that it had by default before version 0.2."""
    if isinstance(spec, list | tuple):
        return [_with_features(each, head_dim) for each in spec]
    options = {"mechanism": spec} if isinstance(spec, str) else dict(spec)
    if "parts" in options:
        options["parts"] = _with_features(options["parts"], head_dim)
    if options.get("mechanism") == "performer" and options.get("projection", True):
        options["num_features"] = options.get("num_features") or max(1, math.floor(head_dim * math.log(head_dim)))
    return options


def _shrinking(attention: Mapping[str, Any], step: int, depth: int) -> list[Spec]:
    """The Linformer of each layer, where the rank is smaller by `step` in each, down to 1."""
    specs = _specs(attention.get("mechanism", AttentionConfig.mechanism))
    found: list[Spec] = []
    for i in range(depth):
        spec = specs[i % len(specs)]
        options: dict[str, Any] = {"mechanism": spec} if isinstance(spec, str) else dict(spec)
        if options["mechanism"] != "linformer":
            raise ValueError(f"rank_step is for linformer; layer {i} is {options['mechanism']}")
        found.append({**options, "rank": max(1, options.get("rank", 256) - i * step)})
    return found


def _specs(mechanism: Spec | Sequence[Spec]) -> Sequence[Spec]:
    return [mechanism] if isinstance(mechanism, str | Mapping) else mechanism


def check_fields(config: Any, label: Callable[[str], str] = str) -> None:
    """Check the fields of a configuration that are numbers, booleans or Literals.

    Raises:
        ValueError: If a value is of another type, not finite, or not allowed. `label` gives the name of a field in the
            message.
    """
    for name, kind in get_type_hints(type(config)).items():
        value, options = getattr(config, name), set(get_args(kind)) - {type(None)}
        if get_origin(kind) is Literal:
            choose(label(name), value, get_args(kind))
            continue
        if value is None and options != set(get_args(kind)):
            continue
        kind = options.pop() if len(options) == 1 and type(None) in get_args(kind) else kind
        if kind is bool and not isinstance(value, bool):
            raise ValueError(f"{label(name)} must be true or false, got {value!r}")
        if kind is int and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise ValueError(f"{label(name)} must be an integer, got {value!r}")
        if kind is float and (isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value)):
            raise ValueError(f"{label(name)} must be a finite number, got {value!r}")


def _freeze(config: Any, *names: str) -> None:
    """Turn lists into tuples, so that a configuration equals the one that went through JSON."""
    for name in names:
        value = getattr(config, name)
        if name not in ("mechanism", "rotary") and not isinstance(value, list | tuple | None):
            raise ValueError(f"{name} must be a list of integers, got {value!r}")
        object.__setattr__(config, name, _frozen(value))


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_frozen(x) for x in value)
    return {name: _frozen(x) for name, x in value.items()} if isinstance(value, Mapping) else value


def _check_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _check_fraction(config: Any, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(f"{name} must be in [0, 1), got {getattr(config, name)}")
