"""Layers and functions of linformer-pytorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from longspan.compat.compressed import (
    attend_compressed,
    attention_weights,
    has_hooks,
    is_plain_dropout,
    is_product,
    zero_fill,
)
from longspan.compat.faithful import resolve_faithful
from longspan.compat.layers import inverse_frequencies
from longspan.compat.linformer_pytorch.options import ACTIVATIONS, CHECKPOINT_LEVELS, METHODS, POSITION_BASE, SHARING
from longspan.mechanisms.linformer import LinformerAttention, Projection
from longspan.mechanisms.softmax import SoftmaxAttention
from longspan.models.config import AttentionConfig
from longspan.models.layers import Attention
from longspan.ops.rotary import angles
from longspan.ops.softmax import attend
from longspan.protocol import Mechanism
from longspan.utils import choose


def identity(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the first argument."""
    return x


def get_act(activation: str | None) -> Callable[[Tensor], Tensor] | None:
    """Return the function "gelu" or "relu", or None for any other name."""
    if activation == "gelu":
        return F.gelu
    return F.relu if activation == "relu" else None


def gen_causal_mask(input_size: int, dim_k: int, full_attention: bool = False) -> Tensor:
    """Return the mask that makes a layer causal: (input_size, dim_k), or square for full attention."""
    return torch.ones(input_size, input_size if full_attention else dim_k, dtype=torch.bool).tril()


def get_EF(  # noqa: N802
    input_size: int, dim: int, method: str = "learnable", head_dim: int | None = None, bias: bool = True
) -> nn.Module | Tensor:
    """Return a projection from input_size to dim tokens, which layers can share.

    Args:
        input_size: The number of tokens.
        dim: The number of compressed tokens.
        method: "learnable" for an nn.Linear, "convolution" for an nn.Conv1d, "no_params" for a random tensor.
        head_dim: The width of the tokens, for a convolution.
        bias: Whether an nn.Linear has a bias.
    """
    choose("method", method, METHODS)
    if method == "no_params":
        return torch.randn(input_size, dim) / dim
    if method == "convolution":
        if head_dim is None:
            raise ValueError('method="convolution" needs head_dim, the width of its input')
        stride = input_size // dim
        convolution = nn.Conv1d(head_dim, head_dim, kernel_size=stride, stride=stride)
        convolution.input_size = input_size  # type: ignore[assignment]
        nn.init.normal_(convolution.weight, std=(stride * head_dim) ** -0.5)
        assert convolution.bias is not None
        nn.init.zeros_(convolution.bias)
        return convolution
    linear = nn.Linear(input_size, dim, bias)
    # Scaled by length, not by rank: compressed keys have the magnitude of keys however long the sequence.
    nn.init.normal_(linear.weight, std=input_size**-0.5)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


class ProjectionShape(NamedTuple):
    """The kind and sizes of E or F, for the `Projection` in its place."""

    kind: str
    rank: int
    max_length: int
    stride: int
    dim: int | None
    bias: bool

    @classmethod
    def of(cls, given: Any) -> ProjectionShape | None:
        """Describe E or F; None if it is neither a tensor nor a layer of `get_EF`, or has a hook."""
        if isinstance(given, Tensor):
            return cls("random", given.shape[1], given.shape[0], 1, None, False)
        if not isinstance(given, nn.Module) or has_hooks(given):
            return None
        bias = getattr(given, "bias", None) is not None
        if type(given) is nn.Linear:
            return cls("learned", given.out_features, given.in_features, 1, None, bias)
        length = getattr(given, "input_size", None)
        if type(given) is not nn.Conv1d or length is None or given.stride != given.kernel_size:
            return None
        return cls("convolution", length // given.stride[0], length, given.stride[0], given.in_channels, bias)

    def build(self, num_heads: int | None) -> Projection:
        """Build a projection of this shape on the meta device."""
        convolution = self.kind == "convolution"
        with torch.device("meta"):
            projection = Projection(
                self.rank,
                self.max_length,
                kind=self.kind,
                num_heads=num_heads,
                dim=self.dim,
                whole_stretches=convolution,
                bias=self.bias,
            )
        projection.stride, projection.rank = self.stride, self.rank
        return projection


def projection_tensors(given: Sequence[Any]) -> dict[str, Tensor]:
    """Return the tensors of a `Projection` that does what these layers or tables do, one per head or one for all."""
    if isinstance(given[0], Tensor):
        return {"table": torch.stack(list(given))}

    def stacked(tensors: list[Tensor]) -> Tensor:
        return torch.stack(tensors) if len(tensors) > 1 else tensors[0][None]

    weight, convolution = stacked([x.weight for x in given]), isinstance(given[0], nn.Conv1d)
    found = {"kernel": weight.permute(0, 3, 2, 1)} if convolution else {"table": weight.mT}
    if given[0].bias is not None:
        bias = stacked([x.bias for x in given])
        found["bias"] = bias[:, None] if convolution else bias[..., None]
    if len(given) > 1:
        return found
    # A projection for all heads has no dimension of heads, but for its table.
    return {name: x.contiguous() if name == "table" else x[0].contiguous() for name, x in found.items()}


def draw_fixed_tables(layers: Iterable[MHAttention]) -> None:
    """Draw the tables of method="no_params", equal in all models of a shape since checkpoints do not contain them."""
    generator = torch.Generator().manual_seed(0)
    heads = [[head for head in layer.heads if isinstance(head, LinearAttentionHead)] for layer in layers]
    drawn: dict[int, tuple[Tensor, Tensor]] = {}  # what replaces a table; the table itself keeps its id in use
    for group in heads:
        for side in "EF":
            tables = {id(x): x for x in (getattr(head, side) for head in group)}
            if not drawn.keys() & tables.keys():
                length, rank = next(iter(tables.values())).shape
                new = torch.randn(len(tables), length, rank, generator=generator, device="cpu") / rank
                drawn |= {key: (x, tables[key]) for key, x in zip(tables, new, strict=True)}
    for head in (head for group in heads for head in group):
        head.E, head.F = drawn[id(head.E)][0], drawn[id(head.F)][0]


class LinearAttentionHead(nn.Module):
    """One attention head without projections of Q, K and V: (B, n, dim) -> (B, n, dim).

    Args:
        E_proj: The projection of keys from `get_EF`, or any module (B, dim, n) -> (B, dim, k).
        F_proj: The projection of values.
        causal_mask: None, or the result of `gen_causal_mask` for causal attention.
        full_attention: Whether to attend to all tokens; E_proj and F_proj are then unused.
        faithful: Whether to compute as the original does: masks set keys, values and queries to zero, and causal_mask
            hides compressed keys, not tokens.
    """

    # What models that were pickled by the original lack.
    faithful = False
    _prefixes: tuple[_Prefixes, ...] = ()

    def __init__(
        self,
        dim: int,
        dropout: float,
        E_proj: nn.Module | Tensor | None,
        F_proj: nn.Module | Tensor | None,
        causal_mask: Tensor | None,
        full_attention: bool = False,
        *,
        faithful: bool | None = None,
    ) -> None:
        super().__init__()
        for name, given in (("E_proj", E_proj), ("F_proj", F_proj)):
            if not isinstance(given, nn.Module | Tensor) and not (full_attention and given is None):
                raise ValueError(f"{name} must be a layer or a tensor, as from get_EF, got a {type(given).__name__}")
        self.E, self.F = E_proj, F_proj
        self.dim, self.full_attention, self.causal_mask = dim, full_attention, causal_mask
        self.dropout = nn.Dropout(dropout)
        self.P_bar: Tensor | None = None
        self.is_proj_tensor = isinstance(E_proj, Tensor)
        self.faithful = resolve_faithful(faithful)
        if not self.faithful:
            _check_causal(causal_mask, full_attention)
        # In a tuple, so that it is no submodule: the tensors of E and F take the place of its own.
        if causal_mask is not None and not full_attention and not self.faithful:
            self._prefixes = self._new_prefixes()

    def _new_prefixes(self) -> tuple[_Prefixes, ...]:
        """Return a mechanism with the shapes of E and F, or () if they are not layers of `get_EF`."""
        keys, values = ProjectionShape.of(self.E), ProjectionShape.of(self.F)
        if keys is None or values is None:
            return ()
        return (_Prefixes(_linformer(1, self.dim, keys, values, self.E is self.F, None)),)

    def forward(
        self,
        Q: Tensor,
        K: Tensor,
        V: Tensor,
        *,
        input_mask: Tensor | None = None,
        embeddings_mask: Tensor | None = None,
        visualize: bool = False,
    ) -> Tensor:
        """Attend.

        Args:
            Q: Queries (B, n, dim).
            K: Keys (B, m, dim).
            V: Values (B, m, dim).
            input_mask: (B, m), True for keys to attend to.
            embeddings_mask: (B, n), False for queries to set to zero; with faithful=True only.
            visualize: Whether to store the attention weights as `P_bar`, (B, n, k), for `Visualizer`.
        """
        if Q.shape[2] != self.dim:  # The original scales by dim, whatever the width is.
            Q = Q * (Q.shape[2] / self.dim) ** 0.5
        K, V = zero_fill(K, input_mask), zero_fill(V, input_mask)
        if self.faithful:
            return self._attend_faithfully(zero_fill(Q, embeddings_mask), K, V, visualize)
        if embeddings_mask is not None:
            raise ValueError("a head takes the mask of its keys as input_mask; it has no embeddings_mask")
        if self.causal_mask is not None and not self.full_attention:
            return self._attend_prefixes(Q, K, V, input_mask, visualize)
        live = None if input_mask is None else input_mask.bool()
        if not self.full_attention:
            k = _compress(self.E, K)
            V = _compress(self.F, V)
            if live is not None:
                V = V.masked_fill(~live.any(1)[:, None, None], 0)
            live, K = _live(self.E, live, K, k.shape[1]), k
        q, k, v = Q[:, :, None], K[:, None], V[:, None]
        mask, causal = None if live is None else live[:, None, None], self.causal_mask is not None
        if not visualize and not self.full_attention:
            return attend_compressed(q, k, v, self.dropout, live)[:, :, 0]
        if not visualize and is_plain_dropout(self.dropout) and not (causal and live is not None):
            rate = self.dropout.p if self.dropout.training else 0.0
            return attend(q.transpose(1, 2), k, v, mask, causal=causal, dropout=rate)[:, 0]
        if causal:
            earlier = torch.ones(Q.shape[1], K.shape[1], dtype=torch.bool, device=Q.device).tril()
            mask = earlier if mask is None else earlier & mask
        return self._weigh(attention_weights(q, k, mask)[:, 0], V, visualize)

    def _attend_faithfully(self, Q: Tensor, K: Tensor, V: Tensor, visualize: bool) -> Tensor:
        if not self.full_attention:
            K, V = _compress(self.E, K), _compress(self.F, V)
        scores = Q @ K.mT * Q.shape[2] ** -0.5
        if self.causal_mask is not None:
            mask = self.causal_mask.to(Q.device)[: scores.shape[1], : scores.shape[2]]
            scores = scores.masked_fill(~mask, float("-inf"))
        return self._weigh(scores.softmax(-1), V, visualize)

    def _attend_prefixes(self, Q: Tensor, K: Tensor, V: Tensor, input_mask: Tensor | None, visualize: bool) -> Tensor:
        """Attend to the compression of each query's own prefix."""
        if not self._prefixes:
            self._prefixes = self._new_prefixes()
        if not self._prefixes or None in (ProjectionShape.of(self.E), ProjectionShape.of(self.F)):
            raise ValueError(
                "a causal head compresses prefixes, for which E and F must be layers of get_EF without hooks: replace "
                "them by such layers, or build the model with causal=False or full_attention=True"
            )
        if not is_plain_dropout(self.dropout) and not isinstance(self.dropout, nn.Identity):
            raise ValueError(
                f"a causal head applies its dropout inside the sums over prefixes: it must be an nn.Dropout without "
                f"hooks, got {self.dropout}"
            )
        mechanism = self._prefixes[0].mechanism
        mechanism.head_dim, mechanism.value_dim = Q.shape[2], V.shape[2]
        mechanism.dropout = getattr(self.dropout, "p", 0.0) if self.dropout.training else 0.0
        tensors, masks = _mechanism_tensors([self.E], [self.F], Q.device), {"key_mask": input_mask}
        q, k, v = Q[:, :, None], K[:, :, None], V[:, :, None]
        if visualize:
            self.P_bar = functional_call(self._prefixes[0], tensors, (q, k), masks, tie_weights=False)[:, 0].detach()
        return functional_call(self._prefixes[0], tensors, (q, k, v), masks, tie_weights=False)[:, :, 0]

    def _weigh(self, weights: Tensor, V: Tensor, visualize: bool) -> Tensor:
        if visualize:
            self.P_bar = weights.detach()
        return self.dropout(weights) @ V


_head_forward = LinearAttentionHead.forward


class _Prefixes(nn.Module):
    """A causal Linformer, called by `functional_call` with the tensors of a head."""

    def __init__(self, mechanism: LinformerAttention) -> None:
        super().__init__()
        self.mechanism = mechanism

    def forward(self, q: Tensor, k: Tensor, v: Tensor | None = None, *, key_mask: Tensor | None) -> Tensor:
        """Return the output (B, T, H, E), or without values the weights (B, H, T, R)."""
        if v is None:
            return self.mechanism.compressed_weights(q, k, causal=True, key_mask=key_mask)
        return self.mechanism(q, k, v, causal=True, key_mask=key_mask)


class MHAttention(nn.Module):
    """Multi-head Linformer or full attention, (B, n, channels) -> (B, n, channels).

    The heads are computed together unless one of their modules was replaced or has a hook.

    Args:
        E_proj: The projection of keys from `get_EF`, for parameter_sharing="layerwise".
        F_proj: The projection of values from `get_EF`, for parameter_sharing="layerwise".
        causal_mask: None, or the result of `gen_causal_mask` for causal attention.
        faithful: See `LinearAttentionHead`.
    """

    # What models that were pickled by the original lack.
    faithful = False
    _layer: tuple[Attention, ...] = ()

    def __init__(
        self,
        input_size: int,
        dim: int,
        channels: int,
        dim_k: int,
        nhead: int,
        dropout: float,
        checkpoint_level: str,
        parameter_sharing: str,
        E_proj: nn.Module | Tensor | None,
        F_proj: nn.Module | Tensor | None,
        full_attention: bool,
        causal_mask: Tensor | None,
        w_o_intermediate_dim: int | None = None,
        decoder_mode: bool = False,
        method: str = "learnable",
        *,
        faithful: bool | None = None,
    ) -> None:
        super().__init__()
        choose("parameter_sharing", parameter_sharing, SHARING)
        choose("checkpoint_level", checkpoint_level, CHECKPOINT_LEVELS)
        self.heads = nn.ModuleList()
        self.input_size, self.dim_k, self.channels, self.nhead = input_size, dim_k, channels, nhead
        self.causal_mask, self.checkpoint_level, self.decoder_mode = causal_mask, checkpoint_level, decoder_mode
        self.w_o_intermediate_dim = w_o_intermediate_dim
        self.faithful = resolve_faithful(faithful)
        if not self.faithful:
            _check_causal(causal_mask, full_attention, dim_k)
        self.to_q, self.to_k, self.to_v = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()

        def project() -> nn.Module | Tensor:
            return get_EF(input_size, dim_k, method, dim)

        if parameter_sharing != "layerwise":
            E_proj = project()
            F_proj = E_proj if parameter_sharing == "kv" else project()
        for h in range(nhead):
            if parameter_sharing == "none" and h > 0:
                E_proj, F_proj = project(), project()
            self.heads.append(
                LinearAttentionHead(dim, dropout, E_proj, F_proj, causal_mask, full_attention, faithful=self.faithful)
            )
            for maps in (self.to_q, self.to_k, self.to_v):
                maps.append(nn.Linear(channels, dim, bias=False))
        if w_o_intermediate_dim is None:
            self.w_o = nn.Linear(dim * nhead, channels)
        else:
            self.w_o_1 = nn.Linear(dim * nhead, w_o_intermediate_dim)
            self.w_o_2 = nn.Linear(w_o_intermediate_dim, channels)
        self.mh_dropout = nn.Dropout(dropout)
        if method == "no_params" and parameter_sharing != "layerwise" and not self.faithful:
            draw_fixed_tables([self])
        self._head_dim, self._shapes = dim, self._projection_shapes()
        # In a tuple, so that it is no submodule: the tensors of the heads take the place of its own.
        if not self.faithful:
            self._layer = self._new_layer()

    @property
    def full_attention(self) -> bool:
        """Whether the heads attend to all tokens."""
        return bool(getattr(self.heads[0], "full_attention", False))

    @property
    def w_out(self) -> nn.Linear:
        """The last output projection."""
        last = self.w_o if self.w_o_intermediate_dim is None else self.w_o_2
        assert isinstance(last, nn.Linear)
        return last

    def forward(
        self,
        tensor: Tensor,
        *,
        input_mask: Tensor | None = None,
        embeddings: Tensor | None = None,
        embeddings_mask: Tensor | None = None,
        visualize: bool = False,
    ) -> Tensor:
        """Attend to tensor (B, n, channels), or with decoder_mode to embeddings (B, m, channels).

        Masks are True for tokens to attend to. visualize: Whether heads store their attention weights.
        """
        if self.faithful:
            given = {"input_mask": input_mask, "embeddings_mask": embeddings_mask, "visualize": visualize}
            if self.decoder_mode and embeddings is None:
                raise ValueError("this layer needs embeddings: pass embeddings= (decoder_mode=True)")
            source = embeddings if self.decoder_mode and embeddings is not None else tensor
            return self._project_out(self._each_head(tensor, source, given))
        if self.decoder_mode != (embeddings is not None) or (embeddings is None and embeddings_mask is not None):
            need = "needs embeddings: pass embeddings=" if self.decoder_mode else "takes no embeddings"
            raise ValueError(f"this layer {need} (decoder_mode={self.decoder_mode})")
        source, mask = (tensor, input_mask) if embeddings is None else (embeddings, embeddings_mask)
        if source.shape[1] > self.input_size and not self.full_attention:
            raise ValueError(
                f"{source.shape[1]} tokens are more than input_size ({self.input_size}): build the model with a larger "
                "input_size"
            )
        if not visualize and self.checkpoint_level != "C2" and self._heads_are_plain():
            arguments = {"key_mask": input_mask, "context": embeddings, "context_mask": embeddings_mask}
            return self._project_out(self._all_heads(tensor, arguments))
        tensor = zero_fill(tensor, input_mask)
        source = tensor if embeddings is None else zero_fill(embeddings, embeddings_mask)
        return self._project_out(self._each_head(tensor, source, {"input_mask": mask, "visualize": visualize}))

    def _project_out(self, out: Tensor) -> Tensor:
        out = self.w_o(out) if self.w_o_intermediate_dim is None else self.w_o_2(self.w_o_1(out))
        return self.mh_dropout(out)

    def _each_head(self, tensor: Tensor, source: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Call every head: (B, n, nhead · dim)."""
        arguments = {name: value for name, value in arguments.items() if value is not None and value is not False}
        outs = []
        for head, to_q, to_k, to_v in zip(self.heads, self.to_q, self.to_k, self.to_v, strict=True):
            inputs = to_q(tensor), to_k(source), to_v(source)
            if self.checkpoint_level == "C2" and torch.is_grad_enabled():
                outs.append(checkpoint(head, *inputs, use_reentrant=False, **arguments))
            else:
                outs.append(head(*inputs, **arguments))
        return torch.cat(outs, -1)

    def _all_heads(self, tensor: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Compute all heads together: (B, n, nhead · dim)."""
        layer, dropout = self._layer[0], self.heads[0].dropout
        assert isinstance(layer.mechanism, LinformerAttention | SoftmaxAttention)
        assert isinstance(dropout, nn.Dropout)
        layer.mechanism.dropout = dropout.p
        layer.train(dropout.training)
        maps = {"to_q.weight": [*self.to_q], "to_kv.weight": [*self.to_k, *self.to_v]}
        tensors = {name: torch.cat([cast("nn.Linear", x).weight for x in given]) for name, given in maps.items()}
        if not self.full_attention:
            keys, values = self._projections(tensor.device)
            tensors |= _mechanism_tensors(keys, values, tensor.device)
        return functional_call(layer, tensors, (tensor,), arguments, tie_weights=False)

    def _projections(self, device: torch.device | None = None) -> list[list[Any]]:
        """Return E of every head, or of the first if all share it, and F; tables are moved to the device for good."""
        moved: dict[int, Any] = {}
        sides = []
        for side in "EF":
            for head in self.heads:
                given = getattr(head, side)
                if isinstance(given, Tensor) and device is not None and given.device != device:
                    given = moved.setdefault(id(given), given.to(device))
                    setattr(head, side, given)
            sides.append(list({id(x): x for x in (getattr(head, side) for head in self.heads)}.values()))
        return sides

    def _projection_shapes(self) -> tuple[bool, list[int], list[set[ProjectionShape | None]]]:
        """Return whether E is F, how many there are of each, and their shapes."""
        keys, values = self._projections()
        shapes: list[set[ProjectionShape | None]] = [{ProjectionShape.of(x) for x in side} for side in (keys, values)]
        return keys[0] is values[0], [len(keys), len(values)], shapes

    def _heads_are_plain(self) -> bool:
        """Whether the heads can be computed together: none of their modules was replaced or has a hook."""
        if not self._layer or LinearAttentionHead.forward is not _head_forward:
            return False
        dropouts = set()
        for head, *maps in zip(self.heads, self.to_q, self.to_k, self.to_v, strict=True):
            if type(head) is not LinearAttentionHead or has_hooks(head) or not is_plain_dropout(head.dropout):
                return False
            if not all(is_product(map) and getattr(map, "out_features", None) == self._head_dim for map in maps):
                return False
            dropouts.add((head.dropout.p, head.dropout.training))
        return len(dropouts) == 1 and (self.full_attention or self._projection_shapes() == self._shapes)

    def _new_layer(self) -> tuple[Attention, ...]:
        """Return a layer that computes all heads together, or () if they differ in kind."""
        mechanism: Mechanism
        if self.full_attention:
            mechanism = SoftmaxAttention(self.nhead, self._head_dim)
        else:
            shared, numbers, found = self._shapes
            shapes = [shape for side in found for shape in side if shape is not None]
            if len(shapes) != 2 or any(len(side) != 1 for side in found) or numbers not in ([1, 1], [self.nhead] * 2):
                return ()
            per_head = None if numbers[0] == 1 else self.nhead
            mechanism = _linformer(self.nhead, self._head_dim, shapes[0], shapes[1], shared, per_head)
        config = AttentionConfig(num_heads=self.nhead, head_dim=self._head_dim)
        options = {"causal": self.causal_mask is not None, "cross": self.decoder_mode}
        with torch.device("meta"):
            layer = Attention(self.channels, config, mechanism=mechanism, **options)
        layer.to_out = nn.Identity()  # type: ignore[assignment]
        return (layer,)


class FeedForward(nn.Module):
    """Compute activation(x W₁) W₂ with dropout after both: (B, n, input_channels) -> (B, n, output_channels)."""

    def __init__(
        self, input_channels: int, output_channels: int, ff_dim: int, dropout: float, activation: str | None = "gelu"
    ) -> None:
        super().__init__()
        if activation is not None:
            choose("activation", activation, ACTIVATIONS)
        self.w_1, self.w_2 = nn.Linear(input_channels, ff_dim), nn.Linear(ff_dim, output_channels)
        self.activation = get_act(activation)
        self.dropout, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(
        self,
        tensor: Tensor,
        *,
        input_mask: Tensor | None = None,
        embeddings: Tensor | None = None,
        embeddings_mask: Tensor | None = None,
        visualize: bool = False,
    ) -> Tensor:
        """Map tensor (B, n, input_channels); the other arguments, which all layers of a model receive, are unused."""
        hidden = self.w_1(tensor)
        hidden = hidden if self.activation is None else self.activation(hidden)
        return self.dropout2(self.w_2(self.dropout(hidden)))


class Residual(nn.Module):
    """Compute norm(x + fn(x)), where x passes through a linear map if fn changes the width."""

    def __init__(self, fn: nn.Module, input_channels: int = 0, output_channels: int = 0) -> None:
        super().__init__()
        self.fn = fn
        self.resample = nn.Linear(input_channels, output_channels) if input_channels != output_channels else None
        self.norm = nn.LayerNorm(output_channels)

    def forward(self, tensor: Tensor, **kwargs: Any) -> Tensor:
        """Map tensor (B, n, input_channels); keyword arguments are fn's."""
        residual = tensor if self.resample is None else self.resample(tensor)
        return self.norm(residual + self.fn(tensor, **kwargs))


class ProjectInOut(nn.Module):
    """Compute fn between linear maps from dim_in to dim_out and back; without project_out, the first only."""

    def __init__(self, fn: nn.Module, dim_in: int, dim_out: int, project_out: bool = True) -> None:
        super().__init__()
        self.fn = fn
        self.project_in = nn.Linear(dim_in, dim_out)
        self.project_out = nn.Linear(dim_out, dim_in) if project_out else identity

    def forward(self, tensor: Tensor, **kwargs: Any) -> Tensor:
        """Map tensor (B, n, dim_in); keyword arguments are fn's."""
        return self.project_out(self.fn(self.project_in(tensor), **kwargs))


class PositionalEmbedding(nn.Module):
    """Sinusoidal positions (1, n, channels), sines first, for a tensor (B, n, …).

    Args:
        faithful: Whether to multiply positions by the buffer `inv_freq` in its dtype, as the original does; otherwise
            angles are computed in float64, and the buffer is there for checkpoints only.
    """

    inv_freq: Tensor
    faithful = False  # in models that were pickled by the original

    def __init__(self, channels: int, *, faithful: bool | None = None) -> None:
        super().__init__()
        if channels % 2:
            raise ValueError(f"sinusoidal positions need an even number of channels, got {channels}")
        self.faithful = resolve_faithful(faithful)
        self.register_buffer("inv_freq", inverse_frequencies(channels, POSITION_BASE))

    def forward(self, tensor: Tensor) -> Tensor:
        """Return the embeddings of the positions of tensor."""
        position = torch.arange(tensor.shape[1], device=tensor.device)[None]
        if self.faithful:
            angle = position[..., None].to(self.inv_freq.dtype) * self.inv_freq
        else:
            angle = angles(position, 2 * len(self.inv_freq), POSITION_BASE, torch.float32)
        return torch.cat([angle.sin(), angle.cos()], -1)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.setdefault(f"{prefix}inv_freq", self.inv_freq)  # a constant, which a checkpoint need not have
        super()._load_from_state_dict(state_dict, prefix, *args)


def _mechanism_tensors(keys: list[Any], values: list[Any], device: torch.device) -> dict[str, Tensor]:
    """Return the tensors of a mechanism's projections by name; values that share the keys' have none of their own."""
    sides = {"keys": keys} if keys[0] is values[0] else {"keys": keys, "values": values}
    return {
        f"mechanism.{side}.{name}": x.to(device)
        for side, given in sides.items()
        for name, x in projection_tensors(given).items()
    }


def _linformer(
    num_heads: int, dim: int, keys: ProjectionShape, values: ProjectionShape, shared: bool, per_head: int | None
) -> LinformerAttention:
    """Build a mechanism with projections of these shapes, whose tensors `functional_call` replaces."""
    if keys.rank != values.rank:
        raise ValueError(f"E_proj and F_proj must have the same output length, got {keys.rank} and {values.rank}")
    projection = keys.build(per_head)
    mechanism = LinformerAttention(num_heads, dim, projection=projection, keep_slots=True)
    mechanism.values = projection if shared else values.build(per_head)
    return mechanism


def _compress(projection: Any, x: Tensor) -> Tensor:
    """Compress x (B, n, dim) to (B, k, dim); fewer tokens than the projection covers are followed by zeros."""
    n, table = x.shape[1], projection if isinstance(projection, Tensor) else None
    limit = (
        len(table) if table is not None else getattr(projection, "in_features", getattr(projection, "input_size", n))
    )
    if n > limit:
        raise ValueError(f"{n} tokens are more than input_size ({limit}): build the model with a larger input_size")
    if table is not None:
        return table[:n].to(x).T @ x
    return projection(F.pad(x, (0, 0, 0, limit - n)).mT).mT


def _live(projection: Any, mask: Tensor | None, x: Tensor, rank: int) -> Tensor | None:
    """Return which compressed keys (B, rank) of tokens x (B, n, dim) hold a visible token; None if all do."""
    if not isinstance(projection, nn.Conv1d):
        return None
    stride, n = projection.stride[0], x.shape[1]
    if mask is None and n >= rank * stride:
        return None
    visible = torch.ones_like(x[..., 0], dtype=torch.bool) if mask is None else mask
    return F.pad(visible, (0, rank * stride - n)).unflatten(1, (rank, stride)).any(2)


def _check_causal(mask: Tensor | None, full_attention: bool, dim_k: int | None = None) -> None:
    """Raise ValueError unless a mask is None or the triangular one of `gen_causal_mask`."""
    if mask is None or mask.is_meta:
        return
    if mask.ndim == 2:
        width = mask.shape[1] if dim_k is None else dim_k
        if torch.equal(mask.cpu(), gen_causal_mask(len(mask), width, full_attention)):
            return
    raise ValueError(
        "causal_mask must be None or gen_causal_mask(input_size, dim_k, full_attention), a triangular mask, got "
        f"another mask of shape {tuple(mask.shape)}: pass a mask of tokens as input_mask"
    )
