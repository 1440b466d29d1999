"""Linear attention by chunks: prefix sums of outer products, in time and memory linear in the sequence.

    num_i = Σ_{j ≤ i} (φ(q_i) · f_j) exp(β_j − c_i) v_j,      c_i = max_{j ≤ i} β_j,      φ(k_j) = f_j exp(β_j)

Keys carry their size as a log scale β, so `exp` never sees a positive argument, and the row reference c_i depends on
the past alone, so the future moves no bit of it. The normalizer is the same sum over v ≡ 1; c_i cancels in the ratio.
Feature maps are applied chunk by chunk: φ(q) and φ(k) are never whole in memory, and only q, k, v and the result are
kept for the backward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.ops.common import dispatch
from longspan.ops.common.autograd import once_differentiable, refuse_double_backward
from longspan.ops.linear import torch_chunk as chunks
from longspan.ops.linear.torch_chunk import FLOOR, Arguments, is_nothing, over


class Sums(NamedTuple):
    """What linear attention remembers: kv = Σ φ(k)vᵀ (B, Hkv, M, E) and z = Σ φ(k) (B, Hkv, M), both divided by
    exp(shift), with shift (B, Hkv) the largest log scale so far.
    """

    kv: Tensor
    z: Tensor
    shift: Tensor


def no_sums(batch_size: int, num_heads: int, num_features: int, value_dim: int, like: Tensor) -> Sums:
    """The sums of no keys at all."""
    kv = like.new_zeros(batch_size, num_heads, num_features, value_dim)
    return Sums(kv, kv.new_zeros(kv.shape[:3]), kv.new_full(kv.shape[:2], FLOOR))


def accumulate(sums: Sums, f: Tensor, v: Tensor, log_scale: Tensor | None) -> Sums:
    """The sums after key features f (B, S, Hkv, M) of log scale (B, S, Hkv) and values v (B, S, Hkv, E)."""
    if log_scale is None:
        return Sums(sums.kv + torch.einsum("bshm,bshe->bhme", f, v), sums.z + f.sum(1), sums.shift)
    shift = torch.maximum(sums.shift, log_scale.amax(1))
    f = f * (log_scale - shift[:, None]).exp()[..., None]
    decay = (sums.shift - shift).exp()[..., None]
    kv = decay[..., None] * sums.kv + torch.einsum("bshm,bshe->bhme", f, v)
    return Sums(kv, decay * sums.z + f.sum(1), shift)


def causal_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str = "identity",
    weight: Tensor | None = None,
    log_scale: Tensor | None = None,
    lengths: Tensor | None = None,
    sums: Sums | None = None,
    normalize: bool = True,
    bucket: int = 1,
) -> tuple[Tensor, Sums]:
    """Causal linear attention (B, T, H, E) in q's dtype, num_i / den_i or num_i alone, and the sums after it.

    q: (B, T, H, D), k: (B, T, Hkv, D), v: (B, T, Hkv, E). feature_map: one of `features.MAPS`, with its weight.
    log_scale: (B, T, Hkv) for keys that are features already. lengths: (B,) tokens in each row, the rest is padding.
    sums: what came before. bucket: more than 1 hides from a query its own bucket of that size and all after it.
    """
    kv, shift = None, None
    if sums is not None:
        kv, shift = torch.cat([sums.kv, sums.z[..., None]], -1) if normalize else sums.kv, sums.shift
    given = q, k, v, weight, log_scale, lengths, kv, shift, feature_map, normalize
    if (
        dispatch.eager_untraced(q)
        and dispatch.why_not_triton(q, k, v, weight, log_scale, kv, feature_map, bucket) is None
    ):
        if torch.is_grad_enabled():
            out, kv, shift = _apply(*given)
        else:
            (out, _, kv, shift), _ = dispatch.linear_kernels().forward(*given)
    else:
        out, _, kv, shift, _, _ = _causal_linear(*given, bucket)
    return out, Sums(kv[..., :-1], kv[..., -1], shift) if normalize else Sums(kv, kv[..., 0], shift)


def causal_linear_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str = "identity",
    weight: Tensor | None = None,
    lengths: Tensor | None = None,
    normalize: bool = True,
) -> Tensor:
    """`causal_linear` with nothing before it, where nobody asks for the sums after it: a third less for the host."""
    given = q, k, v, weight, None, lengths, None, None, feature_map, normalize
    if (
        not dispatch.eager_untraced(q)
        or dispatch.why_not_triton(q, k, v, weight, None, None, feature_map, 1) is not None
    ):
        return _causal_linear(*given, 1)[0]
    if torch.is_grad_enabled():
        return _apply_out(*given)
    return dispatch.linear_kernels().forward(*given, ends=False)[0][0]


def attend_sums(query: Tensor, sums: Sums, normalize: str, constant: Tensor | None = None) -> Tensor:
    """Attention of query features (B, T, H, M), each after everything the sums hold: (B, T, H, E).

    constant: (B, Hkv, E + 1) epsilon·[Σv, count], where every key has a constant added to its features.
    """
    q = query.unflatten(2, (sums.kv.shape[1], -1))  # (B, T, Hkv, G, M)
    if normalize == "none":
        return torch.einsum("bthgm,bhme->bthge", q, sums.kv).flatten(2, 3)
    if normalize == "feature":
        return torch.einsum("bthgm,bhme->bthge", q, over(sums.kv, sums.z[..., None])).flatten(2, 3)
    out = torch.einsum("bthgm,bhme->bthge", q, torch.cat([sums.kv, sums.z[..., None]], -1))
    if constant is not None:
        out = out + q.sum(-1, keepdim=True) * constant[:, None, :, None]
    return divide(out[..., :-1], out[..., -1]).flatten(2, 3)


def attend_prefixes(
    query: Tensor,
    f: Tensor,
    v: Tensor,
    log_scale: Tensor | None,
    sums: Sums,
    normalize: str,
    *,
    constant: Tensor | None = None,
    bucket: int = 1,
    pending: Sums | None = None,
) -> Tensor:
    """As `attend_sums`, each query after its own prefix; features are given whole. Any map and any normalizer.

    constant: (B, T, Hkv, E + 1), one for each token. pending: sums at the shift of `sums` that later buckets see, but
    not the first.
    """

    def prefixes(query: Tensor, f: Tensor, v: Tensor, kv: Tensor, late: Tensor | None) -> Tensor:
        before = Sums(kv, kv[..., 0], sums.shift)
        out, _ = causal_linear(query, f, v, log_scale=log_scale, sums=before, normalize=False, bucket=bucket)
        if late is None:
            return out
        read = attend_sums(query[:, bucket:], Sums(late, late[..., 0], sums.shift), "none")
        if log_scale is not None:
            reference = torch.maximum(log_scale.cummax(1).values, sums.shift[:, None])[:, bucket:]
            factor = (sums.shift[:, None] - reference).exp().repeat_interleave(query.shape[2] // f.shape[2], 2)
            read = read * factor[..., None]
        return torch.cat([out[:, :bucket], out[:, bucket:] + read], 1)

    late = pending
    if normalize == "none":
        return prefixes(query, f, v, sums.kv, None if late is None else late.kv)
    if normalize == "feature":
        ones = f.new_ones(*f.shape[:3], 1)
        z = prefixes(ones, ones, f, sums.z[:, :, None], None if late is None else late.z[:, :, None])
        z = z.repeat_interleave(query.shape[2] // f.shape[2], 2)
        # In two parts, the second of them z/z = 1: a gradient with z² below it would overflow.
        unit = z.detach()
        query = over(query, unit) / (over(z, unit) + is_nothing(unit))
        return prefixes(query, f, v, sums.kv, None if late is None else late.kv)
    v = torch.cat([v, v.new_ones(*v.shape[:3], 1)], -1)
    with_z = [None if s is None else torch.cat([s.kv, s.z[..., None]], -1) for s in (sums, late)]
    assert with_z[0] is not None
    out = prefixes(query, f, v, with_z[0], with_z[1])
    if constant is not None:
        group = query.shape[2] // f.shape[2]
        out = out + query.sum(-1, keepdim=True) * constant.repeat_interleave(group, 2)
    return divide(out[..., :-1], out[..., -1])


def sum_dtype(x: Tensor) -> torch.dtype:
    """Sums over a sequence are float32 whatever the inputs, and float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def divide(num: Tensor, den: Tensor) -> Tensor:
    """num (..., E) / den (...); where den is 0, nothing was seen and the answer is 0."""
    return over(num, den[..., None])


class _Kernels(torch.autograd.Function):
    """`longspan::causal_linear` on the kernels, without its outputs that only its backward pass needs."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        (out, den, kv, shift), kept = dispatch.linear_kernels().forward(*given)
        _keep(ctx, out, den, kept, given)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(shift)
        return out, kv, shift

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_kv: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, d_out, d_kv)


class _KernelsOut(torch.autograd.Function):
    """The first of them alone."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        (out, den, _, _), kept = dispatch.linear_kernels().forward(*given, ends=False)
        _keep(ctx, out, den, kept, given)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, d_out, None)


def _keep(ctx: Any, out: Tensor, den: Tensor, kept: Tensor | None, given: tuple[Any, ...]) -> None:
    *tensors, feature_map, normalize = given
    ctx.save_for_backward(out if normalize else None, den, *tensors)
    ctx.rest = feature_map, normalize, kept


def _gradients(ctx: Any, d_out: Tensor | None, d_kv: Tensor | None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    if d_out is None:
        q, v = tensors[2], tensors[4]
        d_out = v.new_zeros(*q.shape[:3], v.shape[3])
    grads = dispatch.linear_kernels().backward(d_out, d_kv, *tensors, *ctx.rest)
    return *grads[:3], None, None, None, grads[3], None, None, None


# `Function.apply` looks for transforms of functorch first, as `dispatch.eager_untraced` has done.
_apply: Any = super(torch.autograd.Function, _Kernels).apply
_apply_out: Any = super(torch.autograd.Function, _KernelsOut).apply


@torch.library.custom_op("longspan::causal_linear", mutates_args=())
def _causal_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    log_scale: Tensor | None,
    lengths: Tensor | None,
    kv: Tensor | None,
    shift: Tensor | None,
    feature_map: str,
    normalize: bool,
    bucket: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The result, its normalizer, the sums and shift after it, and what the backward pass starts from."""
    given = q, k, v, weight, log_scale, lengths, kv, shift, feature_map, normalize
    if dispatch.why_not_triton(q, k, v, weight, log_scale, kv, feature_map, bucket) is None:
        results, kept = dispatch.linear_kernels().forward(*given, zeroed=True)
        nothing = results[1].new_empty(0)
        return *results, nothing if kept is None else kept, results[1].new_empty(0)
    return chunks.forward(_arguments(*given, bucket))


@_causal_linear.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    given = _arguments(*args)
    q, k, v, kv = given.q, given.k, given.v, given.kv
    if dispatch.why_not_triton(q, k, v, given.weight, given.log_scale, kv, given.feature_map, given.bucket) is None:
        kernels = dispatch.linear_kernels()
        size = kernels.kept_size(q, k, v, given.weight, given.log_scale, given.feature_map, given.normalize)
        starts, references = kv.new_empty(size), kv.new_empty(0)
    else:
        starts, references = chunks.new_starts(given)
    den = kv.new_empty(*q.shape[:2], q.shape[2] if given.normalize else 0)
    after = kv.new_empty(kv.shape), given.shift.new_empty(given.shift.shape)
    return v.new_empty(*q.shape[:3], v.shape[3]), den, *after, starts, references


def _arguments(*args: Any) -> Arguments:
    """With no sums for sums that were not given."""
    q, k, v, weight, log_scale, lengths, kv, shift, feature_map, normalize, bucket = args
    if kv is None:
        M = k.shape[3] if weight is None else len(weight)
        before = no_sums(q.shape[0], k.shape[2], M, v.shape[3] + int(normalize), k.new_empty(0, dtype=sum_dtype(k)))
        kv, shift = before.kv, before.shift
    return Arguments(q, k, v, weight, log_scale, lengths, kv, shift, feature_map, normalize, bucket)


@torch.library.custom_op("longspan::causal_linear_backward", mutates_args=())
def _causal_linear_backward(
    d_out: Tensor,
    d_kv: Tensor | None,
    out: Tensor,
    den: Tensor,
    starts: Tensor,
    references: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    log_scale: Tensor | None,
    lengths: Tensor | None,
    kv: Tensor | None,
    shift: Tensor | None,
    feature_map: str,
    normalize: bool,
    bucket: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and of kv, which is empty where no kv was given."""
    given = q, k, v, weight, log_scale, lengths, kv, shift, feature_map, normalize
    if dispatch.why_not_triton(q, k, v, weight, log_scale, kv, feature_map, bucket) is None:
        kept = starts if starts.numel() else None
        grads = dispatch.linear_kernels().backward(d_out, d_kv, out, den, *given, kept)
        d_q, d_k, d_v, d_start = grads
    else:
        full = _arguments(*given, bucket)
        d_kv = torch.zeros_like(full.kv) if d_kv is None else d_kv
        d_q, d_k, d_v, d_start = chunks.backward(d_out, d_kv, out, den, starts, references, full)
    return d_q, d_k, d_v, den.new_empty(0) if kv is None else d_start


@_causal_linear_backward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    den, q, k, v, kv = args[3], args[6], args[7], args[8], args[12]
    grads = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    return *grads, den.new_empty(0) if kv is None else kv.new_empty(kv.shape)


_causal_linear_backward.register_autograd(refuse_double_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.feature_map, ctx.normalize, ctx.bucket = inputs
    out, den, _, _, starts, references = output
    # Only normalizers need the result.
    ctx.save_for_backward(out if ctx.normalize else None, den, starts, references, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, d_out: Tensor | None, d_den: None, d_kv: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    out, *tensors = ctx.saved_tensors
    q, v = tensors[3], tensors[5]
    d_out = v.new_zeros(*q.shape[:3], v.shape[3]) if d_out is None else d_out
    dq, dk, dv, d_start = _causal_linear_backward(
        d_out, d_kv, d_out if out is None else out, *tensors, ctx.feature_map, ctx.normalize, ctx.bucket
    )
    given = tensors[9] is not None
    return dq, dk, dv, None, None, None, d_start if given else None, None, None, None, None


_causal_linear.register_autograd(_differentiate, setup_context=_save)
