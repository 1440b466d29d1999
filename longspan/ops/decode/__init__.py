"""Decode steps: one token is written to the state and read from it, in place and without gradients.

Each function runs a Triton kernel or eager PyTorch. None of them changes lengths: the layers of a model share one,
which the caller increments. The README beside this file derives the steps with a write buffer.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor, addcmul, arange, cat, finfo, float32, float64, inference_mode, nn
from torch import device as Device
from torch import dtype as DType

from longspan.ops.common import dispatch
from longspan.ops.decode.torch import FUSED_ACTIVATIONS as FUSED_ACTIVATIONS
from longspan.ops.decode.torch import GateActivation as GateActivation
from longspan.ops.decode.torch import TokenShift as TokenShift
from longspan.ops.decode.torch import compressed_step as compressed_step
from longspan.ops.decode.torch import has_no_hooks, linear_layers
from longspan.ops.decode.torch import linear_step as linear_step
from longspan.ops.decode.torch import module_function as module_function
from longspan.ops.linear.triton import FEATURE_MAPS
from longspan.ops.rotary import rotate
from longspan.ops.window import Window

RotaryKind = tuple[int, float]  # what rotary angles depend on besides the position: R, the rotated features, and base
LARGE_BATCH = 128  # batch rows from which PyTorch's matrix products are faster than the kernel of `fused_linear`
ANGLE_BLOCK = 64  # positions whose rotary angles are computed at once on a CPU


class CosSin(NamedTuple):
    """Rotary angles of the next token, whose queries and keys are not rotated yet.

    Attributes:
        cos: (B or 1, 1, R / 2), for the first R features of a head.
        sin: (B or 1, 1, R / 2).
        interleaved: Rotate pairs (2i, 2i + 1); otherwise pairs (i, i + R / 2).
        doubled: [cos, cos] and [−sin, sin] (B or 1, 1, 1, R), with which a rotation takes three operations.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool
    doubled: tuple[Tensor, Tensor] | None = None

    def paired(self, interleaved: bool) -> CosSin:
        """Return the same angles for the given pairs."""
        return self if interleaved == self.interleaved else self._replace(interleaved=interleaved)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate x (B, 1, H, D)."""
        if self.doubled is None or self.interleaved or x.dtype != self.cos.dtype:
            return rotate(x, self.cos[:, :, None], self.sin[:, :, None], interleaved=self.interleaved)
        return _rotate_halves(x, *self.doubled)


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R features of x (..., D) in pairs (i, i + R / 2), by [cos, cos] and [−sin, sin] (..., R)."""
    rotary_dim, dim = cos.shape[-1], x.shape[-1]
    half = rotary_dim // 2
    if rotary_dim < dim:
        first, second, rest = x.split_with_sizes([half, half, dim - rotary_dim], -1)
        rotated = addcmul(x.narrow(-1, 0, rotary_dim) * cos, cat([second, first], -1), sin)
        return cat([rotated, rest], -1)
    first, second = x.split_with_sizes([half, half], -1)
    return addcmul(x * cos, cat([second, first], -1), sin)


def apply_rotary(rotary: CosSin | None, *xs: Tensor) -> tuple[Tensor, ...]:
    """Rotate each x (B, 1, heads, D), in one operation for all; None leaves them as they are."""
    if rotary is None:
        return xs
    return rotary.rotate(cat(xs, 2)).split_with_sizes([x.shape[2] for x in xs], 2)


def cos_sin_at(position: Tensor, kind: RotaryKind, dtype: DType) -> CosSin:
    """Return the rotary angles of positions (B,) for a kind, (R, base), in pairs (i, i + R / 2)."""
    if position.device.type == "cpu" and len(position) == 1:
        block, i = divmod(int(position), ANGLE_BLOCK)
        cos, sin, *doubled = (x[i : i + 1] for x in _cos_sin_block(block, kind, dtype))
        return CosSin(cos, sin, False, (doubled[0], doubled[1]))
    if not position.is_cuda or dtype != float32 or dispatch.why_no_triton() is not None:
        cos, sin, *doubled = _cos_sin(position, kind, dtype)
        return CosSin(cos, sin, False, (doubled[0], doubled[1]))
    cos, sin = kernels("rotary").decode_rotary(position, _frequencies(*kind, position.device))
    return CosSin(cos, sin, False)


def _cos_sin(position: Tensor, kind: RotaryKind, dtype: DType) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return cos and sin (B, 1, R / 2), [cos, cos] and [−sin, sin] (B, 1, 1, R)."""
    angle = (position[:, None, None] * _frequencies(*kind, position.device)).remainder_(2 * math.pi).to(dtype)
    cos, sin = angle.cos(), angle.sin()
    return cos, sin, cat([cos, cos], -1)[:, None], cat([-sin, sin], -1)[:, None]


@lru_cache(maxsize=32)
def _cos_sin_block(block: int, kind: RotaryKind, dtype: DType) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `_cos_sin` of `ANGLE_BLOCK` positions on a CPU, where one position costs as many calls as a block."""
    with inference_mode(False):  # The cache outlives the decode loop that fills it.
        return _cos_sin(arange(block * ANGLE_BLOCK, (block + 1) * ANGLE_BLOCK), kind, dtype)


class RotaryCache(dict[RotaryKind, CosSin]):
    """`cos_sin_at` of each kind, computed on first use and shared by all layers."""

    def __init__(self, position: Tensor, dtype: DType) -> None:
        self._position, self._dtype = position, dtype

    def __missing__(self, kind: RotaryKind) -> CosSin:
        self[kind] = cos_sin_at(self._position, kind, self._dtype)
        return self[kind]


class CurrentToken:
    """The token of a decode step of one sequence on a CPU: what its layers share.

    Args:
        token: (1,), or None if the sequence consists of vectors.
        position: Its position.
        dtype: The dtype of rotary angles.
    """

    __slots__ = ("_angles", "_dtype", "position", "token")

    def __init__(self, token: Tensor | None, position: int, dtype: DType) -> None:
        self.token, self.position, self._dtype = token, position, dtype
        self._angles: dict[RotaryKind, tuple[Tensor, Tensor]] = {}

    def rotate(self, kind: RotaryKind | None, *xs: Tensor) -> tuple[Tensor, ...]:
        """Rotate each x (1, heads, D), in pairs (i, i + R / 2), as `apply_rotary` does."""
        if kind is None:
            return xs
        angles = self._angles.get(kind)
        if angles is None:
            block, i = divmod(self.position, ANGLE_BLOCK)
            _, _, cos, sin = _cos_sin_block(block, kind, self._dtype)
            angles = self._angles[kind] = cos[i], sin[i]
        return _rotate_halves(cat(xs, 1), *angles).split_with_sizes([x.shape[1] for x in xs], 1)


# Maps q (1, H, D), k (1, Hkv, D), v (1, Hkv, E) and raw gates (1, Hkv, G) of a token to (1, H, E).
DecodeFunction = Callable[[Tensor, Tensor, Tensor, Tensor | None, CurrentToken], Tensor]


@cache
def _frequencies(dim: int, base: float, device: Device) -> Tensor:
    """Return base^(−2i/dim) in float64."""
    with inference_mode(False):  # The cache outlives the decode loop that fills it.
        return base ** -(arange(0, dim, 2, device=device, dtype=float64) / dim)


class StepInputs(NamedTuple):
    """A token of a decode step.

    Attributes:
        q: Queries (B, 1, H, D).
        k: Key (B, 1, Hkv, D).
        v: Value (B, 1, Hkv, E).
        rotary: Rotary angles; None for no rotation.
        out: Where to write the result; None for a new tensor.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rotary: CosSin | None = None
    out: Tensor | None = None

    def empty_output(self) -> Tensor:
        """Return an uninitialized result (B, 1, H, E)."""
        return self.q.new_empty(*self.q.shape[:3], self.v.shape[3])


def linear_decode_step(
    inputs: StepInputs,
    state: tuple[Tensor, Tensor, Tensor],
    *,
    feature_map: str,
    weight: Tensor | None,
    normalize: str,
    pending: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Decode one token with linear attention: kv ← kv + φ(k)vᵀ, z ← z + φ(k), out = φ(q)·kv / φ(q)·z.

    Args:
        inputs: The token.
        state: kv (B, Hkv, M, E), z (B, Hkv, M) and their log scale (B, Hkv); updated in place.
        feature_map: One of `ops.linear.torch.MAPS`.
        weight: Projection of random features.
        normalize: "query", "feature" or "none".
        pending: The write buffer, for the Triton kernel: lengths (B,), features (B, Hkv, slots, M), values
            (B, Hkv, slots, E) and log scales (B, Hkv, slots) of the tokens that the state does not hold yet.

    Returns:
        (B, 1, H, E) in the dtype of q.
    """
    if dispatch.recording is not None:  # `linear_step` reads values.
        return inputs.empty_output()
    if pending is not None:
        return kernels("linear").decode_linear(inputs, state, pending, feature_map, weight, normalize)
    q, k, v, rotary, out = inputs
    dtype = q.dtype
    q, k = apply_rotary(rotary, q, k)
    result = linear_step(q.squeeze(1), k.squeeze(1), v.squeeze(1), state, feature_map, weight, normalize).unsqueeze(1)
    return copy_out(result if result.dtype == dtype else result.to(dtype), out)


def window_decode_step(
    inputs: StepInputs, ring: tuple[Tensor, Tensor], window: Window, *, length: Tensor, scale: float
) -> Tensor:
    """Decode one token with windowed attention, by the Triton kernel: for arguments without `why_not_triton`.

    Args:
        inputs: The token.
        ring: Ring buffers of keys (B, Hkv, slots, D) and values (B, Hkv, slots, E), updated in place.
        window: Which keys the token sees; it is causal.
        length: (B,) position of the token.
        scale: Scale of the scores.

    Returns:
        (B, 1, H, E) in the dtype of q.
    """
    if dispatch.recording is not None:
        return inputs.empty_output()
    return kernels("window").decode_window(inputs, length, ring, window, scale)


def compressed_decode_step(
    inputs: StepInputs,
    state: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    *,
    length: Tensor,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    periodic: bool = False,
    pending: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Decode one token with Linformer: K̃ ← K̃ + e kᵀ, Ṽ ← Ṽ + f vᵀ, out = softmax(q K̃ᵀ / √D) Ṽ.

    Args:
        inputs: The token.
        state: Compressed keys (B, Hkv, R, D) and values (B, Hkv, R, E), updated in place.
        tables: Projections of keys and values (1 or Hkv, max_length, R).
        length: (B,) position of the token.
        biases: Biases of K̃ and Ṽ. Triton only.
        periodic: The projections wrap around, and K̃ and Ṽ are means over the periods.
        pending: The write buffer, for the Triton kernel: keys and values (B, Hkv, slots, ·) that the state does not
            hold yet, and copies of the state in their dtype. Without it, B is 1.

    Returns:
        (B, 1, H, E) in the dtype of q.
    """
    if pending is not None:
        if dispatch.recording is not None:
            return inputs.empty_output()
        return kernels("compressed").decode_compressed(inputs, length, state, pending, tables, biases, periodic)
    q, k, v, rotary, out = inputs
    q, k = apply_rotary(rotary, q, k)
    return copy_out(compressed_step(q, k, v, state, tables, int(length)), out)


def gated_decode_step(
    inputs: StepInputs,
    gates: Tensor | None,
    state: tuple[Tensor, Tensor | None],
    activation: GateActivation,
    *,
    delta: bool,
    scale: float,
) -> Tensor:
    """Decode one token with gated linear attention or the gated delta rule, by the Triton kernel.

    Args:
        inputs: The token.
        gates: Raw gates (B, 1, Hkv, G).
        state: The memory (B, Hkv, D, E) and Σ log α (B, Hkv, 1 or D) or None, float32, updated in place.
        activation: What log α and β are.
        delta: Whether to follow the delta rule, and to normalize q and k to length 1.
        scale: Factor of the queries.

    Returns:
        (B, 1, H, E) in the dtype of q.
    """
    if dispatch.recording is not None:
        return inputs.empty_output()
    return kernels("gated").decode_gated(inputs, gates, activation, state, delta, scale)


def mixture_decode_step(
    inputs: StepInputs,
    ring: tuple[Tensor, Tensor],
    memory: tuple[Tensor, Tensor],
    *,
    feature_map: str,
    weights: tuple[Tensor | None, Tensor | None],
    mix: tuple[Tensor, Tensor],
    sink: tuple[Tensor, Tensor, Tensor] | None = None,
    length: Tensor,
    scale: float,
) -> Tensor:
    """Decode one token with a window and a linear memory of the tokens before it, by the Triton kernel.

    Args:
        inputs: The token.
        ring: Ring buffers of the window's keys (B, Hkv, W, D) and values (B, Hkv, W, E), updated in place.
        memory: kv (B, Hkv, M, E) and z (B, Hkv, M) of the tokens that left the window, float32, updated in place.
        feature_map: "hedgehog", or a bounded one of `ops.linear.triton.FEATURE_MAPS`.
        weights: Of the map "hedgehog": of queries (H, D, D) and keys (Hkv, D, D).
        mix: Weight (H, D) and bias (H,) of the memory's score.
        sink: The same of the learned sink, and its value (H, E).
        length: (B,) position of the token.
        scale: Scale of the scores.

    Returns:
        (B, 1, H, E) in the dtype of q.
    """
    if dispatch.recording is not None:
        return inputs.empty_output()
    sink_tensors = (None, None, None) if sink is None else sink
    tensors = *memory, *(None if x is None else x.contiguous() for x in (*weights, *mix, *sink_tensors))
    return kernels("mixture").decode_mixture(inputs, length, ring, tensors, feature_map, scale)


def copy_out(result: Tensor, out: Tensor | None) -> Tensor:
    """Return `result`, copied to `out` if that is given."""
    return result if out is None else out.copy_(result)


def fused_linear(
    x: Tensor,
    *layers: nn.Module | Tensor,
    norm: nn.Module | None = None,
    activation: str = "identity",
    residual: Tensor | None = None,
    shift: TokenShift | None = None,
) -> tuple[Tensor, ...]:
    """Compute residual + activation(layer(shift(norm(x)))) of one token for each layer.

    One kernel, which reads the weights once, does all of it where the batch is small.

    Args:
        x: One token (B, 1, dim).
        *layers: Modules, or weights (N, dim) of linear layers without a bias.
        norm: Applied to x first.
        activation: One of `FUSED_ACTIVATIONS`.
        residual: Added to each result.
        shift: Token shift of what is normalized.

    Returns:
        One result (B, 1, N) per layer.
    """
    large = len(x) >= LARGE_BATCH
    weights = None if large or why_not_triton(x) is not None else _layer_weights(x, layers, norm, residual)
    if weights is None:
        return linear_layers(x, layers, norm, activation, residual, shift)
    out = kernels("gemv").decode_linear_layers(x, *weights, activation, residual, shift)
    return out.split([len(weight) for weight, _ in weights[0]], 2)


def _layer_weights(
    x: Tensor, layers: Sequence[nn.Module | Tensor], norm: nn.Module | None, residual: Tensor | None
) -> tuple[list[tuple[Tensor, Tensor | None]], tuple[int, Tensor | None, Tensor | None, float]] | None:
    """Return what the kernel needs to replace these modules: weights and biases of the layers, and the norm as kind
    (0 none, 1 LayerNorm, 2 RMSNorm), weight, bias and epsilon. None if it cannot replace them.
    """
    normed: tuple[int, Tensor | None, Tensor | None, float] = (0, None, None, 0.0)
    if norm is not None:
        # Subclasses and modules with hooks are called.
        if type(norm) is nn.LayerNorm:
            normed = 1, norm.weight, norm.bias, norm.eps
        elif type(norm) is nn.RMSNorm:
            normed = 2, norm.weight, None, finfo(float32).eps if norm.eps is None else norm.eps
        if normed[0] == 0 or norm.normalized_shape != (x.shape[2],) or not has_no_hooks(norm):
            return None
    weights: list[tuple[Tensor, Tensor | None]] = []
    for layer in layers:
        if isinstance(layer, Tensor):
            weights.append((layer, None))
        elif type(layer) is nn.Linear and has_no_hooks(layer):
            weights.append((layer.weight, layer.bias))
        else:
            return None
    tensors = [x, residual, *normed[1:3], *(tensor for pair in weights for tensor in pair)]
    same_dtype = all(t is None or (t.dtype == x.dtype and t.stride(-1) == 1) for t in tensors)
    contiguous = all(weight.is_contiguous() for weight, _ in weights)
    return (weights, normed) if same_dtype and contiguous and x.shape[2] <= 8192 else None


def fused_embedding(
    tokens: Tensor,
    recent: Tensor,
    embedding: nn.Module,
    tables: Sequence[nn.Module],
    lengths: Sequence[int],
    hashing: tuple[int, int],
) -> Tensor | None:
    """Embed one token and the n-grams that end with it, and append its code to `recent`, in one kernel.

    Args:
        tokens: (B,).
        recent: The codes (B, reach, 1) before the tokens, updated in place: token + 1, or 0 for none.
        embedding: Of tokens.
        tables: Of n-grams, one per length.
        lengths: Ascending, the last one reach + 1.
        hashing: Multiplier and modulus of the hash h ← (h · multiplier + code) mod modulus, latest code first.

    Returns:
        The sum (B, dim), or None if no kernel supports these tensors and modules; then nothing is updated.
    """
    found = [_embedding_weight(module) for module in (embedding, *tables)]
    weights = tuple(weight for weight in found if weight is not None)
    if len(weights) < len(found) or why_not_triton(weights[0]) is not None:
        return None
    shapes = {weight.shape for weight in weights[1:]}
    alike = len(shapes) == 1 and weights[1].shape[1] == weights[0].shape[1] <= 8192
    contiguous = all(x.is_contiguous() for x in (tokens, recent, *weights))
    if not alike or not contiguous or not _same_layout(weights) or tokens.dtype != recent.dtype:
        return None
    return kernels("embedding").decode_embedding(tokens, recent, weights, tuple(lengths), hashing)


def _embedding_weight(module: nn.Module) -> Tensor | None:
    """Return the weight of an embedding that a kernel can replace."""
    return module.weight if type(module) is nn.Embedding and not module.max_norm and has_no_hooks(module) else None


def fused_heads(
    q: Tensor,
    kv: Tensor,
    heads: tuple[int, int, int],
    convolution: tuple[Tensor, Tensor] | None,
    norms: tuple[nn.Module, nn.Module] | None,
) -> Tensor | None:
    """Apply a short convolution and the norms of queries and keys to one token, in one kernel.

    Args:
        q: Queries of one token (B, 1, H D).
        kv: Its keys, then its values.
        heads: Query heads, key heads, and their dimension.
        convolution: Weight (size, N) over queries, keys and values, the latest token first, and the tokens before this
            one (B, size − 1, N), updated in place; SiLU follows.
        norms: Of queries and of keys, one head at a time.

    Returns:
        (B, 1, N), or None if no kernel supports these tensors and modules; then nothing is updated.
    """
    if why_not_triton(q) is not None:
        return None
    scales = [rms_norm_scale(norm, heads[2]) for norm in norms or ()]
    known = [scale for scale in scales if scale is not None]
    tensors = [q, kv, *(convolution or ()), *(weight for weight, _ in known)]
    if len(known) < len(scales) or not _same_layout(tensors):
        return None
    both = None if norms is None else (known[0][0], known[1][0], known[0][1])
    return kernels("heads").decode_heads(q, kv, heads, convolution, both)


def gate_heads(
    out: Tensor, norm: nn.Module | None, gates: Tensor | None, activation: str, head_gates: Tensor | None
) -> Tensor | None:
    """Normalize and gate the heads of one token: norm(out) ∘ activation(gates) · σ(head_gates), in one kernel.

    Args:
        out: A mechanism's output (B, 1, H, E).
        norm: Applied to each head.
        gates: Raw gates (B, 1, H E).
        activation: "silu" or "sigmoid", of the gates.
        head_gates: Raw gates (B, 1, H).

    Returns:
        (B, 1, H E), or None if no kernel supports these tensors and modules.
    """
    if why_not_triton(out) is not None:
        return None
    scale = None if norm is None else rms_norm_scale(norm, out.shape[3])
    tensors = [out.flatten(2), *(x for x in (gates, head_gates) if x is not None), *(scale or ())[:1]]
    if (norm is not None and scale is None) or not _same_layout(tensors):
        return None
    return kernels("heads").decode_output(out, scale, gates, activation, head_gates)


def rms_norm_scale(norm: nn.Module, dim: int) -> tuple[Tensor, float] | None:
    """Return weight and epsilon of an RMS norm that a kernel can replace."""
    if type(norm) is not nn.RMSNorm or norm.normalized_shape != (dim,) or not has_no_hooks(norm):
        return None
    return None if norm.weight is None else (norm.weight, finfo(float32).eps if norm.eps is None else norm.eps)


def _same_layout(tensors: Sequence[Tensor]) -> bool:
    """Whether all have the dtype of the first and contiguous rows."""
    return all(x.dtype == tensors[0].dtype and x.stride(-1) == 1 for x in tensors)


def sample(logits: Tensor, *buffers: Tensor, append: bool, sampling: Any) -> None:
    """Sample the next token of each batch row by the Triton kernel, for logits without `why_not_triton_sample`.

    Args:
        logits: (B, V).
        *buffers: Tensors of the decode loop, updated in place: recent tokens (B, window), −1 where none; tokens (B,);
            uniform numbers (B, block) float64; index (B,) of the next number; stop tokens; ended (B,) bool; answer
            (2, B) float64, token and log-probability.
        append: Append the current token to the recent ones first.
        sampling: The options, `longspan.Sampling`.
    """
    kernels("sample").decode_sample(logits, *buffers, append=append, sampling=sampling)


def sample_slots(logits: Tensor, *buffers: Tensor, append: bool) -> None:
    """Sample the next token of rows that have options of their own, as `sample` does for rows that share them.

    Args:
        logits: (B, V).
        *buffers: Tensors of the decode loop, updated in place but for the options: recent tokens (B, window), −1 where
            none; tokens (B,); uniform numbers (B, block) float64; index (B,) of the next number, which starts again at
            the end of the block; options (B, 6) float32: temperature, 0 for the likeliest token; top_k, at most V;
            min_p, 0 for none; top_p, above 1 for none; repetition penalty; repetition window.
        append: Append the current token to the recent ones first.
    """
    kernels("sample").decode_slot_sample(logits, *buffers, append=append)


def why_not_triton_sample(logits: Tensor) -> str | None:
    """Return why tokens are sampled in eager PyTorch; None if the kernel supports these logits."""
    why = why_not_triton(logits)
    if why is None and logits.shape[1] > (largest := kernels("sample").MAX_VOCABULARY):
        return f"a vocabulary of {logits.shape[1]} is over {largest}"
    return why


def kernels(name: str) -> ModuleType:
    """Import a module of Triton kernels on first use."""
    return importlib.import_module(f"longspan.ops.decode.triton.{name}")


def why_not_triton(*tensors: Tensor, feature_map: str = "identity") -> str | None:
    """Return why a step of these tensors, q, k, v and the state, runs in eager PyTorch; None if kernels support it."""
    why = _why_not_triton(tensors, feature_map)
    if dispatch.recording is not None:
        dispatch.record("decode step", "decode", why)
    return why


def _why_not_triton(tensors: tuple[Tensor, ...], feature_map: str) -> str | None:
    q = tensors[0]
    if not q.is_cuda:
        return "the tensors are not on a GPU; the kernels need CUDA"  # without formatting: called for every layer
    missing = dispatch.why_no_triton()
    if missing is not None:
        return missing
    if any(x.dtype not in dispatch.DTYPES for x in tensors):
        return "a tensor is not bfloat16, float16 or float32"
    if any(not x.is_contiguous() for x in tensors[3:]):
        return "the state is not contiguous"
    if feature_map not in FEATURE_MAPS:
        return f"the feature map {feature_map!r}; the kernels implement {', '.join(FEATURE_MAPS)}"
    return None if q.numel() else "an empty tensor"
