"""Softmax attention inside a window (local attention): O(T·W) time and memory, for any length.

    out_i = Σ_j exp(s_ij) v_j / Σ_j exp(s_ij),   s_ij = scale · q_i·k_j + bias_ij,   over the keys j in the window of i

The README beside this file derives the tiled forward and backward passes.
"""

from __future__ import annotations

import math
from typing import Any, Final, Literal, NamedTuple

from torch import Tensor, arange, bfloat16, float16, float32, is_grad_enabled, promote_types, randint
from torch import bool as bool_
from torch.nn.functional import pad

from longspan.ops.common import dispatch
from longspan.ops.common.autograd import (
    DifferentiableOp,
    differentiable_op,
    group,
    lazy_module,
    refuse_forward_mode,
    run_planned,
)
from longspan.ops.common.plans import cached, dense_rows, signature
from longspan.ops.rotary import Rotate
from longspan.ops.window.torch import (
    BLIND,
    Window,
    table_bias,
    tiled_window_attention,
    tiled_window_attention_with_lse,
    xpos_cos_sin,
    xpos_rotate,
)

__all__ = [
    "BLIND",
    "Window",
    "WindowProblem",
    "table_bias",
    "why_not_triton",
    "window_attention",
    "window_attention_with_lse",
    "xpos_rotate",
]

kernels = lazy_module("longspan.ops.window.triton.window")


OPERATION = "windowed attention"
BIAS_BLOCK = 64  # tokens in a block of a bias by distance, as the kernels take it


# Tokens over which the kernels take xPos, in units of its scale base. Scales relative to the middle are then at most
# e^40, and e^4 in float16.
XPOS_SPAN = {bfloat16: 64, float32: 64, float16: 6}


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    *,
    key_mask: Tensor | None = None,
    start: Tensor | None = None,
    bounds: Tensor | None = None,
    bias: Tensor | None = None,
    xpos: float | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend to the keys inside a window.

    Args:
        q: Queries (B, T, H, D), which belong to the last T keys.
        k: Keys (B, S, Hkv, D).
        v: Values (B, S, Hkv, E).
        window: Which keys a query sees.
        key_mask: (B, S), True for keys that are visible.
        start: (B,) position of the first key, where batch rows differ; keys at negative positions are hidden.
            None is 0.
        bounds: (2, T) int32, first and end index of the sequence of each token of a packed row. Triton only.
        bias: Added to the scores: (H, P, (back + 1 + ahead)·P), by a query's place in its block of P tokens and a key's
            place in that and the neighboring blocks, as many as `Window.blocks(P)` says. Not with `bounds`.
        xpos: Scale base of xPos. Positions are relative to a tile, in the kernels to the middle of the keys, since
            absolute scales overflow.
        scale: Scale of the scores, 1/√D by default.
        dropout: Probability of dropping a weight.

    Returns:
        (B, T, H, E) in the dtype of q; zeros for queries that see no key.
    """
    plain = key_mask is None and start is None and bounds is None and bias is None and xpos is None and not dropout
    if plain and dispatch.recording is None and dispatch.eager_untraced(q):
        key = _Plain, q.get_device(), signature(q, k, v), window, scale
        plan = cached(key, _eager_plan, q, k, v, window, scale)
        if plan:
            return run_planned(plan, q, k, v)
    why = why_not_triton(q, k, v, window, xpos=xpos, packed=bounds is not None)
    if dispatch.recording is not None:
        dispatch.record(OPERATION, "window", why)
    if why is not None:
        assert bounds is None
        return tiled_window_attention(
            q, k, v, window, key_mask=key_mask, start=start, bias=bias, xpos=xpos, scale=scale, dropout=dropout
        )
    if xpos is not None and (largest := _xpos_limit(q, xpos)) < k.shape[1]:
        span = largest - sum(window.reach())
        options: dict[str, Any] = {"bias": bias, "xpos": xpos, "scale": scale, "dropout": dropout}
        return _attend_spans(q, k, v, window, span, key_mask, start, options)
    if xpos is not None:
        q, k = _rotated(q, k, xpos)
    seed = randint(2**31 - 1, (1,), device=q.device) if dropout else None
    scale = q.shape[3] ** -0.5 if scale is None else scale
    assert bias is None or bounds is None
    bias = _by_blocks(bias, window) if bias is not None and bias.shape[1] == 1 else bias
    bias_grad = bias is not None and bias.requires_grad and is_grad_enabled()
    arguments = WindowProblem(q, k, v, key_mask, start, bounds, seed, bias, *window, scale, dropout, bias_grad)
    return _Window.run(*arguments)


class _Plain:
    """Eager calls of tensors of one signature without masks and other options, see `EagerPlan`."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float) -> None:
        self.options = *window, scale, 0.0, False
        self.plans = kernels().WindowPlan
        self.attend = self.plans.of((q, k, v, *NO_OPTIONS), *self.options).attend
        self.differentiate: dict[Any, Any] = {}  # by layout: hooks may change that of saved tensors

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        out, lse = self.attend(q, k, v, *NO_OPTIONS)
        return out, (out, lse)

    def backward(self, d_out: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
        out, lse, q, k, v = saved
        strides = d_out.stride(), q.stride(), k.stride(), v.stride()
        layout = *strides, d_out.data_ptr() & 15, q.data_ptr() & 15, k.data_ptr() & 15, v.data_ptr() & 15
        differentiate = self.differentiate.get(layout)
        if differentiate is None:
            d_out, q, k, v = map(dense_rows, (d_out, q, k, v))
            plan = self.plans.of((q, k, v, *NO_OPTIONS, d_out, out, lse, None), *self.options)
            differentiate = plan.differentiate
            if strides == (d_out.stride(), q.stride(), k.stride(), v.stride()):  # Nothing was copied.
                self.differentiate[layout] = differentiate
        d_q, d_k, d_v, _ = differentiate(d_out, None, out, lse, q, k, v, *NO_OPTIONS)
        return d_q, d_k, d_v


def _eager_plan(q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float | None) -> _Plain | Literal[False]:
    """Return the plan of a call without other options; False if there is none."""
    dense = all(dense_rows(x) is x for x in (q, k, v))
    if not dense or why_not_triton(q, k, v, window) is not None:
        return False
    return _Plain(q, k, v, window, q.shape[3] ** -0.5 if scale is None else scale)


def _by_blocks(bias: Tensor, window: Window) -> Tensor:
    """Return a bias by distance (H, 1, K) as one of blocks of `BIAS_BLOCK` tokens, whose rows are shifted copies."""
    (back, ahead), before = window.blocks(BIAS_BLOCK), window.blocks(1)[0]
    width = (back + 1 + ahead) * BIAS_BLOCK
    # Row r is shifted by r. No query sees a key where the copies end.
    first = before - back * BIAS_BLOCK - (BIAS_BLOCK - 1)
    line = pad(bias[:, 0], (-first, max(0, first + width + BIAS_BLOCK - 1 - bias.shape[2])))
    return line[:, : width + BIAS_BLOCK - 1].unfold(1, width, 1).flip(1)


def _xpos_limit(q: Tensor, xpos: float) -> int:
    """Return the number of tokens over which scales of xPos are in range."""
    return int(XPOS_SPAN[q.dtype] * xpos)


def _attend_spans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    span: int,
    key_mask: Tensor | None,
    start: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Compute `window_attention` of `span` queries and the keys that they see as one row of a larger batch."""
    (B, T), S, (back, ahead) = q.shape[:2], k.shape[1], window.reach()
    n, first = -(-T // span), S - T - back  # first: the index of the first key of the first span

    def spans(x: Tensor, before: int, size: int) -> Tensor:
        """(B, ·, ...) -> (B·n, size, ...), `before` slots added in front."""
        x = pad(x, (*[0] * (2 * x.ndim - 4), before, (n - 1) * span + size - x.shape[1] - before))
        return x.unfold(1, size, span).movedim(-1, 2).flatten(0, 1)

    queries = spans(q, 0, span + ahead)
    keys, values = (spans(x, -first, back + span + ahead) for x in (k, v))
    if not window.causal or start is not None or key_mask is not None:
        present = key_mask if key_mask is not None else k.new_ones(B, S, dtype=bool_)
        key_mask = spans(present, -first, back + span + ahead)
    begin = first + span * arange(n, device=q.device)
    start = (begin.expand(B, n) if start is None else start[:, None] + begin).flatten()
    out = window_attention(queries, keys, values, window, key_mask=key_mask, start=start, **options)
    return out[:, :span].unflatten(0, (B, n)).flatten(1, 2)[:, :T]


def _rotated(q: Tensor, k: Tensor, xpos: float) -> tuple[Tensor, Tensor]:
    """Return queries and keys rotated by xPos, relative to the middle of the keys."""
    S = k.shape[1]
    position = arange(S, device=k.device) - S // 2
    q = Rotate.run(q, *xpos_cos_sin(position[S - q.shape[1] :], q.shape[3], xpos, float32))
    return q, Rotate.run(k, *xpos_cos_sin(position, k.shape[3], -xpos, float32))


def window_attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, window: Window, *, key_mask: Tensor | None = None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend to the keys inside an exact window; also return the log-sum-exp of the scores. Both have gradients.

    Args:
        q: Queries (B, T, H, D), which belong to the last T keys.
        k: Keys (B, S, Hkv, D).
        v: Values (B, S, Hkv, E).
        window: Which keys a query sees; block_size is 0.
        key_mask: (B, S), True for keys that are visible.
        scale: Scale of the scores.

    Returns:
        (B, T, H, E) and (B, T, H), in the dtype of the inputs or float32, whichever is wider. A query that sees no key
        gets zeros and `BLIND`.
    """
    why = why_not_triton(q, k, v)
    if dispatch.recording is not None:
        dispatch.record(OPERATION, "window", why)
    if why is not None:
        return tiled_window_attention_with_lse(q, k, v, window, key_mask=key_mask, scale=scale)
    arguments = WindowProblem(q, k, v, key_mask, None, None, None, None, *window, scale, 0.0, False)
    out, lse = _WindowLse.run(*arguments)
    lse = math.log(2) * lse.sum(-1).transpose(1, 2)
    return out.to(promote_types(q.dtype, float32)), lse.masked_fill(lse.isinf(), BLIND)


LEAVES = (0, 1, 2, 7)  # fields of a WindowProblem with gradients
TENSORS: Final = 8  # of a WindowProblem, before its options
NO_OPTIONS: Final = (None,) * (TENSORS - 3)  # q, k and v alone


class WindowProblem(NamedTuple):
    """The arguments of the Triton kernels: tensors, window, options.

    Attributes:
        seed: (1,) int64, of dropout.
        bias: (H, P, K), see `window_attention`.
        bias_grad: Whether the backward pass computes the gradient of the bias.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    start: Tensor | None
    bounds: Tensor | None
    seed: Tensor | None
    bias: Tensor | None
    block_size: int
    back: int
    ahead: int
    causal: bool
    shared_qk: bool
    scale: float
    dropout: float
    bias_grad: bool

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:TENSORS]

    @property
    def options(self) -> tuple[Any, ...]:
        return self[TENSORS:]

    def empty_outputs(self) -> tuple[Tensor, Tensor]:
        """Return uninitialized out and lse, the log-sum-exp of the scores; that of float32 inputs has two parts."""
        (B, T, H, _), parts = self.q.shape, 2 if self.q.dtype == float32 else 1
        return self.q.new_empty(B, T, H, self.v.shape[3]), self.q.new_empty(B, H, T, parts, dtype=float32)


class WindowSaved(NamedTuple):
    """What the backward pass takes beside the problem."""

    d_out: Tensor
    d_lse: Tensor | None
    out: Tensor
    lse: Tensor


@differentiable_op("longspan::window_attention", (WindowProblem,), (WindowSaved,), outputs=2, grads=4, leaves=LEAVES)
class _Window(DifferentiableOp):
    @staticmethod
    def forward(*arguments: Any, traced: bool = True) -> tuple[Tensor, Tensor]:
        return kernels().forward(WindowProblem(*arguments))

    @staticmethod
    def fake(*arguments: Any) -> tuple[Tensor, Tensor]:
        return WindowProblem(*arguments).empty_outputs()

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output, *inputs[:TENSORS])
        ctx.options = inputs[TENSORS:]

    @staticmethod
    def differentiate(backward: Any, ctx: Any, d_out: Tensor, d_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        return _differentiate(backward, ctx, d_out, None)

    @staticmethod
    def backward(*arguments: Any, traced: bool = True) -> tuple[Any, ...]:
        saved, problem = group(arguments, WindowSaved, WindowProblem)
        *grads, d_bias = kernels().backward(saved, problem)
        # torch.library takes no None.
        return *grads, problem.q.new_empty(0) if d_bias is None and traced else d_bias

    @staticmethod
    def backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
        _, problem = group(arguments, WindowSaved, WindowProblem)
        bias = problem.bias if problem.bias_grad else None
        d_bias = problem.q.new_empty(0) if bias is None else bias.new_empty(bias.shape)
        return *(x.new_empty(x.shape) for x in (problem.q, problem.k, problem.v)), d_bias


@differentiable_op(
    "longspan::window_attention_with_lse",
    (WindowProblem,),
    (WindowSaved,),
    outputs=2,
    grads=4,
    leaves=LEAVES,
    differentiable=2,
)
class _WindowLse(_Window):
    @staticmethod
    def visible(outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return outputs

    @staticmethod
    def differentiate(backward: Any, ctx: Any, d_out: Tensor, d_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        return _differentiate(backward, ctx, d_out, d_lse)


def _differentiate(backward: Any, ctx: Any, d_out: Tensor, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    *grads, d_bias = backward(*refuse_forward_mode(d_out, d_lse, *ctx.saved_tensors), *ctx.options)
    d_bias = d_bias if ctx.options[-1] else None
    return *grads, *[None] * (TENSORS - 4), d_bias, *[None] * len(ctx.options)


def why_not_triton(
    q: Tensor, k: Tensor, v: Tensor, window: Window | None = None, *, xpos: float | None = None, packed: bool = False
) -> str | None:
    """Return why windowed attention of these arguments runs in eager PyTorch; None if the kernels support them."""
    why = dispatch.unavailable(q) or why_unsupported(q, k, v, window, xpos=xpos, packed=packed)
    large = q.dtype != float32 and max(q.shape[3], v.shape[3]) > 128
    return why or (dispatch.insufficient_shared_memory(q, 163) if large else None)


def why_unsupported(
    q: Tensor, k: Tensor, v: Tensor, window: Window | None = None, *, xpos: float | None = None, packed: bool = False
) -> str | None:
    """Return what in the arguments themselves the kernels do not support; None if nothing."""
    if (why := dispatch.unsupported_dtypes(q, k, v)) is not None:
        return why
    if xpos is not None and k.shape[1] > (limit := _xpos_limit(q, xpos)):
        seen = k.shape[1] if window is None else 1 + sum(window.reach())
        if packed:
            return f"xPos over {k.shape[1]} packed tokens; in this dtype its scales are in range over up to {limit}"
        # A span of queries and the keys that they see is in range, the queries at least a third of it.
        if 3 * seen > 2 * limit:
            largest = 2 * limit // 3
            return f"xPos in a window of {seen} keys; in this dtype its scales are in range for up to {largest}"
    if max(q.shape[3], v.shape[3]) > dispatch.LARGEST:
        return f"head or value dimension ({q.shape[3]}, {v.shape[3]}) is over {dispatch.LARGEST}"
    if not q.numel() or not v.numel():
        return "an empty tensor"
    return None
