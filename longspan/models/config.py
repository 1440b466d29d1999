"""A model's description: plain values, checked where they are made, that go through JSON and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longspan.mechanisms import mechanisms
from longspan.utils import choose, nearest

Spec = str | Mapping[str, Any]  # a mechanism's name, or {"mechanism": name, **options}

ACTIVATIONS = ("gelu", "relu", "silu", "tanh", "sigmoid", "relu2", "identity")
ROTARIES = ("none", "halves", "interleaved")
NORMS = ("layer", "rms", "scale")
NORM_POSITIONS = ("pre", "post", "rezero")
RESIDUALS = ("single", "double", "hyper")
EXECUTIONS = ("keep", "recompute", "recompute_heads", "reverse")
POSITIONS = ("none", "learned", "sinusoidal", "axial")


@dataclass(frozen=True)
class AttentionConfig:
    """Heads, and what they compute.

    mechanism: a name, {"mechanism": name, **options}, or a sequence of those, one a layer, repeated to the depth.
    head_dim: dim / num_heads unless given. num_kv_heads: fewer key/value heads, shared by groups of query heads.
    shared_kv: values are the keys. qk_norm: queries and keys normalized, with a learned scale.
    rotary: "none", "halves" or "interleaved"; one for all, one for each part of a split, or one for each mechanism by
    its name (those not named have none), where layers differ in their parts.
    value_gates: each head's output times a gate read off the input. out_dim: a width between heads and output.
    dynamic_bias: width of a small network of the distance whose answer is added to the scores of local heads, one
    network for all layers; 0 is none.
    share_projection, rank_step: linformer's projection shared by all layers; R smaller by so much a layer, down to 1.
    """

    num_heads: int = 8
    mechanism: Spec | Sequence[Spec] = "softmax"
    head_dim: int | None = None
    num_kv_heads: int | None = None
    shared_kv: bool = False
    qkv_bias: bool = False
    out_bias: bool = True
    qk_norm: bool = False
    rotary: str | Sequence[str] | Mapping[str, str] = "none"
    rotary_base: float = 10000.0
    value_gates: bool = False
    out_dim: int | None = None
    dropout: float = 0.0
    dynamic_bias: int = 0
    share_projection: bool = False
    rank_step: int = 0

    def __post_init__(self) -> None:
        _freeze(self, "mechanism", "rotary")
        _check_positive(self, "num_heads", "head_dim", "num_kv_heads", "out_dim")
        _check_share(self, "dropout")
        for name in ("dynamic_bias", "rank_step"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 (none) or more, got {getattr(self, name)}")
        named = self.rotary if isinstance(self.rotary, Mapping) else {}
        for rotary in [self.rotary] if isinstance(self.rotary, str) else list(named.values()) or self.rotary:
            choose("rotary", rotary, ROTARIES)
        for name in named:
            choose("mechanism", name, mechanisms())
        one = isinstance(self.mechanism, str | Mapping)
        if not self.mechanism:
            raise ValueError("mechanism is empty: name at least one mechanism")
        for spec in [self.mechanism] if one else self.mechanism:
            if not isinstance(spec, str) and not (isinstance(spec, Mapping) and "mechanism" in spec):
                raise ValueError(f'a mechanism is a name or {{"mechanism": name, **options}}, got {spec!r}')
            choose("mechanism", spec if isinstance(spec, str) else spec["mechanism"], mechanisms())


@dataclass(frozen=True)
class FeedForwardConfig:
    """The layer between attentions.

    hidden: width inside, mult · dim unless given. activation: a name. gated: GLU, activation(a) · b.
    chunks: pieces along the sequence, computed one after the other to save memory. dropout: inside; out_dropout: after.
    product_keys: layers, counted from 0, that have a product-key memory of num_keys² values in place of it.
    """

    mult: float = 4
    hidden: int | None = None
    activation: str = "gelu"
    gated: bool = False
    bias: bool = True
    dropout: float = 0.0
    out_dropout: float = 0.0
    chunks: int = 1
    product_keys: tuple[int, ...] = ()
    num_keys: int = 128

    def __post_init__(self) -> None:
        _freeze(self, "product_keys")
        _check_positive(self, "hidden", "num_keys")
        _check_share(self, "dropout", "out_dropout")
        choose("activation", self.activation, ACTIVATIONS)
        if self.mult <= 0:
            raise ValueError(f"mult must be positive, got {self.mult}")
        if self.chunks < 1:
            raise ValueError(f"chunks must be at least 1, got {self.chunks}")


@dataclass(frozen=True)
class ModelConfig:
    """Everything that makes a model, as plain values: `to_dict` and `from_dict` round-trip through JSON.

    Size: dim, depth; inner_dim, the width between the first feed-forward layer and the last, where it differs, and
    resample, whether x then stays in the residual, by a learned map to the new width, or is left out.
    Layers: attention; cross, attention to a context after each self-attention; feed_forward. None leaves one out.
    side_feed_forward: that after axial and cross-attention, where it differs.
    Norms: norm "layer", "rms" or "scale"; norm_position "pre", "post" or "rezero"; final_norm, one after the last
    layer, of that kind (True) or of the one named; narrow_norm, one more before logits, embed_dim wide.
    Positions: positions "none", "learned", "sinusoidal" or "axial", with max_length, position_base and axial_shape;
    rotary positions belong to the attention.
    Sequence: causal; token_shift, offsets over equal parts of the features, such as (0, 1) or (−1, 0, 1), before
    self-attention and its feed-forward layer; axial_stride, an extra attention in each layer along every stride-th
    token, with axial for its heads where they differ from attention's.
    Residuals: residual "single", "double" or "hyper" with num_streams; sum_streams, double streams end as their sum
    and not as their mean; execution "keep", "recompute", "recompute_heads" or "reverse".
    Tokens: vocab_size; embed_dim, a narrower embedding; tie_embeddings; logits_bias, where they are not tied;
    embed_dropout. num_classes: for `Classifier`.
    """

    dim: int = 512
    depth: int = 6
    inner_dim: int | None = None
    resample: bool = False
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    cross: AttentionConfig | None = None
    feed_forward: FeedForwardConfig | None = field(default_factory=FeedForwardConfig)
    side_feed_forward: FeedForwardConfig | None = None
    norm: str = "layer"
    norm_position: str = "pre"
    final_norm: bool | str = True
    narrow_norm: bool = False
    positions: str = "none"
    max_length: int | None = None
    position_base: float = 10000.0
    axial_shape: tuple[int, ...] | None = None
    causal: bool = False
    token_shift: tuple[int, ...] = ()
    axial_stride: int | None = None
    axial: AttentionConfig | None = None
    residual: str = "single"
    num_streams: int = 4
    sum_streams: bool = False
    execution: str = "keep"
    vocab_size: int | None = None
    embed_dim: int | None = None
    tie_embeddings: bool = False
    logits_bias: bool = True
    embed_dropout: float = 0.0
    num_classes: int | None = None

    def __post_init__(self) -> None:
        _freeze(self, "axial_shape", "token_shift")
        _check_positive(self, "dim", "depth", "inner_dim", "max_length", "num_streams", "vocab_size", "embed_dim")
        _check_positive(self, "num_classes")
        _check_share(self, "embed_dropout")
        choose("norm", self.norm, NORMS)
        choose("norm_position", self.norm_position, NORM_POSITIONS)
        if isinstance(self.final_norm, str):
            choose("final_norm", self.final_norm, NORMS)
        choose("residual", self.residual, RESIDUALS)
        choose("execution", self.execution, EXECUTIONS)
        choose("positions", self.positions, POSITIONS)
        if self.positions == "learned" and self.max_length is None:
            raise ValueError('positions="learned" needs max_length, the number of positions')
        if self.positions == "axial" and self.axial_shape is None:
            raise ValueError('positions="axial" needs axial_shape, such as (1024, 1024)')
        if self.axial_shape is not None and self.positions != "axial":
            raise ValueError(f'axial_shape goes with positions="axial", got positions="{self.positions}"')
        if (
            self.axial_shape is not None
            and self.max_length is not None
            and math.prod(self.axial_shape) < self.max_length
        ):
            reach = math.prod(self.axial_shape)
            raise ValueError(
                f"axial_shape {self.axial_shape} reaches {reach} positions, max_length is {self.max_length}"
            )
        if self.causal and any(offset < 0 for offset in self.token_shift):
            raise ValueError(f"token_shift {self.token_shift} looks ahead; a causal model's offsets are 0 or more")
        if self.token_shift and self.dim < len(self.token_shift):
            raise ValueError(f"token_shift has {len(self.token_shift)} parts, more than dim ({self.dim})")
        if self.axial_stride is not None and self.axial_stride < 2:
            raise ValueError(f"axial_stride must be at least 2, or None, got {self.axial_stride}")
        if self.axial is not None and self.axial_stride is None:
            raise ValueError("axial describes the attention along every axial_stride-th token: set axial_stride too")
        beside = self.feed_forward is not None and (self.axial_stride is not None or self.cross is not None)
        if self.side_feed_forward is not None and not beside:
            raise ValueError("side_feed_forward goes with feed_forward, and with axial_stride or cross before it")
        if self.narrow_norm and self.embed_dim in (None, self.dim):
            raise ValueError("narrow_norm is for an embed_dim of its own: final_norm normalizes vectors as wide as dim")
        if self.inner_dim is not None and (self.feed_forward is None or self.depth < 2):
            raise ValueError("inner_dim needs feed-forward layers to change the width, and a depth of at least 2")
        for group in (self.feed_forward, self.side_feed_forward):
            far = () if group is None else group.product_keys
            if any(not 0 <= layer < self.depth for layer in far):
                raise ValueError(f"product_keys {far} must be layers from 0 to {self.depth - 1} (depth {self.depth})")
        if self.resample and self.inner_dim is None:
            raise ValueError("resample is for a width that changes: set inner_dim too")
        if self.sum_streams and self.residual != "double":
            raise ValueError(f'sum_streams needs residual="double", got residual="{self.residual}"')
        if self.tie_embeddings and self.vocab_size is None:
            raise ValueError("tie_embeddings needs vocab_size")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The configuration `to_dict` described; a field that does not exist is refused."""
        groups: dict[str, type] = dict.fromkeys(("attention", "cross", "axial"), AttentionConfig)
        groups |= dict.fromkeys(("feed_forward", "side_feed_forward"), FeedForwardConfig)
        given = dict(values)
        for name, group in groups.items():
            if isinstance(given.get(name), Mapping):
                given[name] = _build(group, migrated(given[name]), f"{name}.")
        return _build(cls, given, "")


def migrated(value: Any) -> Any:
    """Rename `normalise` to `normalize`, at any depth, in a configuration written before version 0.2."""
    if isinstance(value, Mapping):
        return {"normalize" if name == "normalise" else name: migrated(x) for name, x in value.items()}
    return [migrated(x) for x in value] if isinstance(value, list | tuple) else value


def _build(cls: Any, values: Mapping[str, Any], prefix: str) -> Any:
    names = [f.name for f in dataclasses.fields(cls)]
    for name in values:
        if name not in names:
            raise ValueError(f"unknown field {prefix}{name}; there is {', '.join(names)}{nearest(name, names)}")
    return cls(**values)


def _freeze(config: Any, *names: str) -> None:
    """Lists become tuples, so that a configuration equals the one that went through JSON."""
    for name in names:
        object.__setattr__(config, name, _frozen(getattr(config, name)))


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_frozen(x) for x in value)
    return {name: _frozen(x) for name, x in value.items()} if isinstance(value, Mapping) else value


def _check_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _check_share(config: Any, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(f"{name} must be in [0, 1), got {getattr(config, name)}")
