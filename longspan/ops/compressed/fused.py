"""Linformer on a GPU: matrix products of PyTorch around the attention kernel, with hand-written gradients.

One autograd function saves the host and the device what separate operations would cost.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.ops.common.autograd import lazy_module, once_differentiable
from longspan.ops.common.torch_private import direct_apply

kernels = lazy_module("longspan.ops.compressed.triton.compressed")


class CompressedProblem(NamedTuple):
    """Heads and dimensions of attention over compressed keys and values. shared_kv: values are the keys."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    rank: int
    shared_kv: bool = False

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def split_projected(self, qkv: Tensor, B: int) -> tuple[Tensor, Tensor]:
        """Return views of (B·T, ·): queries (B, T, H, D), and keys with values (B, T, ·)."""
        (tokens, width), D = qkv.shape, self.head_dim
        T, q_width = tokens // B, self.num_heads * D
        q = qkv.as_strided((B, T, self.num_heads, D), (T * width, width, D, 1))
        return q, qkv.as_strided((B, T, width - q_width), (T * width, width, 1), q_width)

    def split_heads(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return views (B, Hkv, R, D) and (B, Hkv, R, E) of compressed keys and values (B, R, ·), one tensor or two."""
        (B, R, width), heads, D, E = keys.shape, self.num_kv_heads, self.head_dim, self.value_dim
        k = keys.as_strided((B, heads, R, D), (R * width, D, width, 1))
        if self.shared_kv:
            return k, k
        first, width = heads * D if values is keys else 0, values.shape[2]
        return k, values.as_strided((B, heads, R, E), (R * width, E, width, 1), first)

    def join_heads(self, d_kv: Tensor, shape: torch.Size) -> Tensor:
        """Return gradients (B, Hkv, R, D + E), or (…, D) of shared keys and values, in the layout of `split_heads`."""
        if self.num_kv_heads > 1:
            parts = (d_kv,) if self.shared_kv else (d_kv[..., : self.head_dim], d_kv[..., self.head_dim :])
            d_kv = torch.cat([part.transpose(1, 2).flatten(2) for part in parts], 2)
        return d_kv.view(shape)


class _Attention(torch.autograd.Function):
    """Softmax attention of q (B, T, H, D) over k (B, Hkv, R, D) and v (B, Hkv, R, E)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = kernels().forward(q, k, v, q.shape[3] ** -0.5)
        ctx.save_for_backward(q, k, None if k is v else v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        d_q, D = torch.empty_like(q, memory_format=torch.contiguous_format), q.shape[3]
        d_kv = kernels().backward(d_out, out, lse, q, k, k if v is None else v, D**-0.5, d_q)
        if v is None:
            return d_q, d_kv.to(k.dtype), None
        return d_q, d_kv[..., :D].to(k.dtype), d_kv[..., D:].to(v.dtype)


class _Projected(torch.autograd.Function):
    """Compress k (B, S, Hkv, D) and v (B, S, Hkv, E) by tables (1, ≥ S, R), then attend."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, e_table: Tensor, f_table: Tensor) -> Tensor:
        S, shared_kv = k.shape[1], k is v and e_table is f_table
        (Hkv, D), E, R = k.shape[2:], v.shape[3], e_table.shape[2]
        ctx.problem = problem = CompressedProblem(q.shape[2], Hkv, D, E, R, shared_kv)
        ctx.tables = [(table.shape[1], table.dtype) for table in (e_table, f_table)]
        e, x = e_table[0, :S].to(q.dtype), k.flatten(2)
        f = e if e_table is f_table else f_table[0, :S].to(q.dtype)
        y = x if k is v else v.flatten(2)
        keys = _compress(e, x)
        values = keys if shared_kv else _compress(f, y)
        out, lse = kernels().forward(q, *problem.split_heads(keys, values), problem.scale)
        ctx.save_for_backward(q, e, x, f, y, keys, values, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, e, x, f, y, keys, values, out, lse = ctx.saved_tensors
        problem, D = ctx.problem, ctx.problem.head_dim
        d_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        d_kv = kernels().backward(d_out, out, lse, q, *problem.split_heads(keys, values), problem.scale, d_q)
        d_inputs: list[Tensor | None] = [None, None]
        d_tables: list[Tensor | None] = [None, None]
        for i, (table, source, d) in enumerate(((e, x, d_kv[..., :D]), (f, y, d_kv[..., D:]))):
            if i and problem.shared_kv:
                continue
            d = d.transpose(1, 2).to(q.dtype, memory_format=torch.contiguous_format).flatten(2)
            d_inputs[i] = _expand(table, d).unflatten(2, (problem.num_kv_heads, -1))
            d_tables[i] = _table_gradient(source, d, *ctx.tables[i]) if ctx.needs_input_grad[3 + i] else None
        return d_q, *d_inputs, *d_tables


class _Layer(torch.autograd.Function):
    """A bidirectional self-attention layer, from x (B, T, dim) to the output projection."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Any) -> Tensor:
        w_q, w_kv, table, w_out, bias, problem, dtype = weights
        B, T, dim = x.shape
        source, e = x.to(dtype).reshape(-1, dim), table[0, :T].to(dtype)
        # Queries, keys and values in one product, which reads the tokens once.
        w_qkv, w_out = torch.cat([w_q, w_kv]).to(dtype), w_out.to(dtype)
        qkv = torch.mm(source, w_qkv.t())
        q, kv = problem.split_projected(qkv, B)
        compressed = _compress(e, kv)
        attended, lse = kernels().forward(q, *problem.split_heads(compressed, compressed), problem.scale)
        ctx.save_for_backward(source, e, w_qkv, w_out, qkv, compressed, attended, lse)
        ctx.options = problem, table.shape[1], [None if t is None else t.dtype for t in (x, *weights[:5])]
        flat = attended.view(B * T, -1)
        out = torch.mm(flat, w_out.t()) if bias is None else torch.addmm(bias.to(dtype), flat, w_out.t())
        return out.view(B, T, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        source, e, w_qkv, w_out, qkv, compressed, attended, lse = ctx.saved_tensors
        problem, max_length, (x_dtype, q_dtype, kv_dtype, table_dtype, out_dtype, bias_dtype) = ctx.options
        (B, T), needs = attended.shape[:2], ctx.needs_input_grad
        d_x = d_q_weight = d_kv_weight = d_table = d_w_out = d_bias = None
        d = d.reshape(B * T, -1)
        if needs[5]:
            # As a matrix product: PyTorch's sum over many rows and few columns leaves most of the device idle.
            d_bias = _product(d.new_ones(1, B * T), d, bias_dtype)[0]
        if needs[4]:
            d_w_out = _product(d.t(), attended.view(B * T, -1), out_dtype)
        q, kv = problem.split_projected(qkv, B)
        d_qkv = torch.empty_like(qkv)
        d_q, d_kv = problem.split_projected(d_qkv, B)
        d_attended, pair = torch.mm(d, w_out).view(attended.shape), problem.split_heads(compressed, compressed)
        d_compressed = kernels().backward(d_attended, attended, lse, q, *pair, problem.scale, d_q)
        d_compressed = problem.join_heads(d_compressed, compressed.shape).to(qkv.dtype)
        if B == 1:
            torch.mm(e, d_compressed[0], out=d_kv[0])
        else:
            d_kv.copy_(_expand(e, d_compressed))
        if needs[3]:
            d_table = _table_gradient(kv, d_compressed, max_length, table_dtype)
        if needs[0]:
            d_x = _product(d_qkv, w_qkv, x_dtype).view(B, T, -1)
        if needs[1] or needs[2]:
            d_weights, width = _product(d_qkv.t(), source, q_dtype), problem.num_heads * problem.head_dim
            d_q_weight, d_kv_weight = d_weights[:width], d_weights[width:].to(kv_dtype)
        return d_x, d_q_weight, d_kv_weight, d_table, d_w_out, d_bias, None, None


def _compress(e: Tensor, x: Tensor) -> Tensor:
    """e (S, R), x (B, S, ·) -> (B, R, ·) in float32."""
    # A single matrix product is split along the tokens (split-K), a batched one is not.
    return _float32_product(e.t(), x[0])[None] if len(x) == 1 else _float32_product(e.t().expand(len(x), -1, -1), x)


def _expand(e: Tensor, d: Tensor) -> Tensor:
    """The transpose of `_compress`: e (S, R), d (B, R, ·) -> (B, S, ·)."""
    return torch.mm(e, d[0])[None] if len(d) == 1 else e @ d


def _table_gradient(x: Tensor, d: Tensor, max_length: int, dtype: torch.dtype) -> Tensor:
    """x (B, S, ·), d (B, R, ·) -> (1, max_length, R)."""
    d_table = _product(x.transpose(0, 1).flatten(1), d.mT.flatten(0, 1), dtype)[None]
    S = x.shape[1]
    return d_table if max_length == S else torch.nn.functional.pad(d_table, (0, 0, 0, max_length - S))


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    return (torch.mm if a.ndim == 2 else torch.bmm)(a, b, out_dtype=torch.float32)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a b in this dtype; a float32 result is never rounded to half precision on its way."""
    return torch.mm(a, b) if a.dtype == dtype else _float32_product(a, b).to(dtype)


attention = direct_apply(_Attention)
projected_attention = direct_apply(_Projected)
layer = direct_apply(_Layer)
