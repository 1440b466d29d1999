"""Softmax attention of many queries over few rows on the GPU kernels, with what makes the rows, and with a whole layer.

Each is one step with its gradients written out: host and device both have less to do than when every operation is
recorded by itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.ops.common import dispatch
from longspan.ops.common.autograd import once_differentiable


def attend_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (B, T, H, D), k (B, Hkv, R, D), v (B, Hkv, R, E), float32 or as q, -> (B, T, H, E).

    For arguments that `dispatch.why_not_triton_compressed` has nothing against.
    """
    if torch.is_grad_enabled():
        return _attend(q, k, v)
    return dispatch.rows_kernels().forward(q, k, v, q.shape[3] ** -0.5)[0]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = dispatch.rows_kernels().forward(q, k, v, q.shape[3] ** -0.5)
        ctx.save_for_backward(q, k, None if k is v else v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        d_q, D = torch.empty_like(q, memory_format=torch.contiguous_format), q.shape[3]
        d_rows = dispatch.rows_kernels().backward(d_out, out, lse, q, k, k if v is None else v, D**-0.5, d_q)
        if v is None:
            return d_q, d_rows.to(k.dtype), None
        return d_q, d_rows[..., :D].to(k.dtype), d_rows[..., D:].to(v.dtype)


def attend_tables(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q (B, T, H, D) over the rows that tables (1, at least S, R) make of k (B, S, Hkv, D) and v (B, S, Hkv, E).

    For arguments that `dispatch.why_not_triton_compressed` has nothing against.
    """
    return _tables(q, k, v, keys, values)


class _Tables(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        S, (heads, D), E = k.shape[1], k.shape[2:], v.shape[3]
        ctx.layer = layer = Layer(q.shape[2], heads, D, E, k is v and keys is values)
        ctx.tables = [(table.shape[1], table.dtype) for table in (keys, values)]
        e, x = keys[0, :S].to(q.dtype), k.flatten(2)
        f = e if keys is values else values[0, :S].to(q.dtype)
        y = x if k is v else v.flatten(2)
        rows = _compressed(e, x)
        others = rows if layer.shared else _compressed(f, y)
        out, lse = dispatch.rows_kernels().forward(q, *_pair(rows, others, layer), D**-0.5)
        ctx.save_for_backward(q, e, x, f, y, rows, others, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, e, x, f, y, rows, others, out, lse = ctx.saved_tensors
        layer, D = ctx.layer, ctx.layer.head_dim
        d_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        pair = _pair(rows, others, layer)
        d_rows = dispatch.rows_kernels().backward(d_out, out, lse, q, *pair, D**-0.5, d_q)
        made: list[Tensor | None] = []
        for i, (table, source, d) in enumerate(((e, x, d_rows[..., :D]), (f, y, d_rows[..., D:]))):
            if i and layer.shared:
                made += [None, None]
                continue
            d = d.transpose(1, 2).to(q.dtype, memory_format=torch.contiguous_format).flatten(2)
            made.append(_spread(table, d).unflatten(2, (layer.kv_heads, -1)))
            made.append(_table_gradient(source, d, *ctx.tables[i]) if ctx.needs_input_grad[3 + i] else None)
        return d_q, made[0], made[2], made[1], made[3]


class Layer(NamedTuple):
    """Heads of queries, of keys and values, their numbers, and whether values are the keys."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    shared: bool


def linformer_layer(
    x: Tensor,
    queries: Tensor,
    keys: Tensor,
    table: Tensor,
    out: Tensor,
    bias: Tensor | None,
    layer: Layer,
    dtype: torch.dtype,
) -> Tensor:
    """Bidirectional self-attention (B, T, dim) -> (B, T, ·), from tokens to the last map, in halves of this dtype.

    queries, keys, out: weights of maps, keys' with values' below; bias: of the last. table: (1, at least T, R). For
    arguments that `dispatch.why_not_triton_compressed` has nothing against.
    """
    if not torch.is_autocast_enabled("cuda"):
        return _linformer(x, queries, keys, table, out, bias, layer, dtype)
    with torch.autocast("cuda", enabled=False):
        return _linformer(x, queries, keys, table, out, bias, layer, dtype)


class _Linformer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> Tensor:
        queries, keys, table, out, bias, layer, dtype = given
        B, T, dim = x.shape
        source, e = x.to(dtype).reshape(-1, dim), table[0, :T].to(dtype)
        # Queries, keys and values in one product, which reads the tokens once.
        maps, out_map = torch.cat([queries, keys]).to(dtype), out.to(dtype)
        joint = torch.mm(source, maps.t())
        q, short = _parts(joint, B, layer)
        rows = _compressed(e, short)
        mixed, lse = dispatch.rows_kernels().forward(q, *_pair(rows, rows, layer), layer.head_dim**-0.5)
        ctx.save_for_backward(source, e, maps, out_map, joint, rows, mixed, lse)
        ctx.rest = layer, table.shape[1], [None if t is None else t.dtype for t in (x, *given[:5])]
        flat = mixed.view(B * T, -1)
        made = torch.mm(flat, out_map.t()) if bias is None else torch.addmm(bias.to(dtype), flat, out_map.t())
        return made.view(B, T, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        source, e, maps, out_map, joint, rows, mixed, lse = ctx.saved_tensors
        layer, longest, (x_dtype, q_dtype, k_dtype, table_dtype, out_dtype, bias_dtype) = ctx.rest
        (B, T), D, width = mixed.shape[:2], layer.head_dim, layer.heads * layer.head_dim
        d_x, d_maps, d_table, d_out, d_bias = None, None, None, None, None
        d = d.reshape(B * T, -1)
        if ctx.needs_input_grad[5]:
            # As a product: PyTorch's sum over many rows of few columns leaves most of a device idle.
            d_bias = _product(d.new_ones(1, B * T), d, bias_dtype)[0]
        if ctx.needs_input_grad[4]:
            d_out = _product(d.t(), mixed.view(B * T, -1), out_dtype)
        q, short = _parts(joint, B, layer)
        d_joint = torch.empty_like(joint)
        d_q, d_short = _parts(d_joint, B, layer)
        d_mixed = torch.mm(d, out_map).view(mixed.shape)
        pair = _pair(rows, rows, layer)
        d_rows = dispatch.rows_kernels().backward(d_mixed, mixed, lse, q, *pair, D**-0.5, d_q)
        if layer.kv_heads > 1:
            parts = (d_rows,) if layer.shared else (d_rows[..., :D], d_rows[..., D:])
            d_rows = torch.cat([part.transpose(1, 2).flatten(2) for part in parts], 2)
        d_rows = d_rows.view(rows.shape).to(joint.dtype)
        if B == 1:
            torch.mm(e, d_rows[0], out=d_short[0])
        else:
            d_short.copy_(_spread(e, d_rows))
        if ctx.needs_input_grad[3]:
            d_table = _table_gradient(short, d_rows, longest, table_dtype)
        if ctx.needs_input_grad[0]:
            d_x = _product(d_joint, maps, x_dtype).view(B, T, -1)
        if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):
            return d_x, None, None, d_table, d_out, d_bias, None, None
        d_maps = _product(d_joint.t(), source, q_dtype)
        return d_x, d_maps[:width], d_maps[width:].to(k_dtype), d_table, d_out, d_bias, None, None


def _parts(joint: Tensor, B: int, layer: Layer) -> tuple[Tensor, Tensor]:
    """Of (B·T, ·) the queries (B, T, H, D), and keys with values (B, T, ·)."""
    (tokens, all_of_it), D = joint.shape, layer.head_dim
    T, width = tokens // B, layer.heads * D
    q = joint.as_strided((B, T, layer.heads, D), (T * all_of_it, all_of_it, D, 1))
    return q, joint.as_strided((B, T, all_of_it - width), (T * all_of_it, all_of_it, 1), width)


def _pair(rows: Tensor, others: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
    """Of compressed rows (B, R, ·) keys (B, Hkv, R, D) and values (B, Hkv, R, E), which stand beside them or apart."""
    (B, R, width), heads, D, E = rows.shape, layer.kv_heads, layer.head_dim, layer.value_dim
    k = rows.as_strided((B, heads, R, D), (R * width, D, width, 1))
    if layer.shared:
        return k, k
    first, width = heads * D if others is rows else 0, others.shape[2]
    return k, others.as_strided((B, heads, R, E), (R * width, E, width, 1), first)


def _compressed(e: Tensor, x: Tensor) -> Tensor:
    """e (S, R), x (B, S, ·) -> (B, R, ·), the sums in float32."""
    # As a single product it is cut along the tokens, too, and fills the device.
    return _wide(e.t(), x[0])[None] if len(x) == 1 else _wide(e.t().expand(len(x), -1, -1), x)


def _spread(e: Tensor, d_rows: Tensor) -> Tensor:
    """e (S, R), d_rows (B, R, ·) -> (B, S, ·)."""
    return torch.mm(e, d_rows[0])[None] if len(d_rows) == 1 else e @ d_rows


def _table_gradient(x: Tensor, d_rows: Tensor, longest: int, dtype: torch.dtype) -> Tensor:
    """x (B, S, ·), d_rows (B, R, ·) -> (1, longest, R)."""
    d = _product(x.transpose(0, 1).flatten(1), d_rows.mT.flatten(0, 1), dtype)[None]
    return d if longest == x.shape[1] else torch.nn.functional.pad(d, (0, 0, 0, longest - x.shape[1]))


def _wide(a: Tensor, b: Tensor) -> Tensor:
    return (torch.mm if a.ndim == 2 else torch.bmm)(a, b, out_dtype=torch.float32)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b in this dtype; float32 is never rounded to halves on its way."""
    return torch.mm(a, b) if a.dtype == dtype else _wide(a, b).to(dtype)


# `Function.apply` looks for transforms of functorch first, as `dispatch.eager_untraced` has done.
_attend: Any = super(torch.autograd.Function, _Attend).apply
_tables: Any = super(torch.autograd.Function, _Tables).apply
_linformer: Any = super(torch.autograd.Function, _Linformer).apply
