"""A causal window and a memory with Hedgehog features before it, joined: one differentiable call of their kernels.

The same as `hedgehog_features`, `window_attention_with_lse2`, `feature_attention` and `merge_attention` one after the
other. Gradients of queries, keys and values that come from several of them are added inside the kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, is_grad_enabled
from torch.autograd import Function

from longspan.ops import features, hedgehog, merge, window
from longspan.ops.common.autograd import once_differentiable
from longspan.ops.common.torch_private import direct_apply
from longspan.ops.features import FeatureInputs, FeatureProblem, FeatureSaved
from longspan.ops.merge import MergeInputs, MergeSaved
from longspan.ops.window import Window, WindowProblem, WindowSaved

__all__ = ["MixtureInputs", "mixture_attention"]


class MixtureInputs(NamedTuple):
    """Tensors of `mixture_attention`.

    q (B, T, H, D), k (B, T, Hkv, D), v (B, T, Hkv, E); W of the features of queries (H, F, D) and of keys (Hkv, F, D);
    the others as in `merge_attention`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    query_weight: Tensor
    key_weight: Tensor
    weight: Tensor
    bias: Tensor
    value: Tensor | None


def mixture_attention(x: MixtureInputs, size: int, scale: float) -> Tensor:
    """Return softmax over the last keys and a memory of those before them: (B, T, H, E), for T > size.

    For eager calls whose arguments the kernels of all four operations take.

    Args:
        x: The tensors.
        size: Keys in the window, a query's own included.
        scale: Scale of the scores in the window.
    """
    out: Tensor = _apply(size, scale, *x) if is_grad_enabled() else _forward(x, size, scale)[0]
    return out


def _window(x: MixtureInputs, size: int, scale: float) -> WindowProblem:
    seen = Window(0, size - 1, 0, True, False)
    return WindowProblem(x.q, x.k, x.v, None, None, None, None, None, *seen, scale, 0.0, False)


def _forward(x: MixtureInputs, size: int, scale: float) -> tuple[Tensor, ...]:
    """Return the result and what the backward pass takes."""
    near, lse = window.kernels().forward(_window(x, size, scale))
    query, f = hedgehog.kernels().forward(x.q, x.query_weight), hedgehog.kernels().forward(x.k, x.key_weight)
    inputs, problem = FeatureInputs(query, f, x.v, None, None), FeatureProblem(size, False)
    far, mass, _, _, states, states_z = features._kernels().forward(inputs, problem, traced=False)
    out = merge._kernels().forward(MergeInputs(near, lse, far, mass, None, None, x.q, x.weight, x.bias, x.value))
    return out, near, lse, query, f, far, mass, states, states_z


class _Mixture(Function):
    @staticmethod
    def forward(ctx: Any, size: int, scale: float, *args: Any) -> Tensor:
        x = MixtureInputs(*args)
        out, *saved = _forward(x, size, scale)
        ctx.options = size, scale
        ctx.save_for_backward(*saved, *x)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        (d_out,) = grad_outputs
        assert d_out is not None
        near, lse, query, f, far, mass, states, states_z, *inputs = ctx.saved_tensors
        x, (size, scale) = MixtureInputs(*inputs), ctx.options
        joined = MergeInputs(near, lse, far, mass, None, None, x.q, x.weight, x.bias, x.value)
        d_near, d_lse, d_far, d_mass, _, _, d_query, *learned = merge._kernels().backward(
            MergeSaved(d_out), joined, traced=False
        )
        d_q, d_k, d_v, _ = window.kernels().backward(WindowSaved(d_near, d_lse, near, lse), _window(x, size, scale))
        saved = FeatureSaved(d_far, d_mass, None, None, far, mass, states, states_z)
        inputs, problem = FeatureInputs(query, f, x.v, None, None), FeatureProblem(size, False)
        d_features, d_f, d_v, _, _ = features._kernels().backward(saved, inputs, problem, traced=False, d_v=d_v)
        d_q, d_query_weight = hedgehog.kernels().backward(d_features, x.q, x.query_weight, d_q, d_query)
        d_k, d_key_weight = hedgehog.kernels().backward(d_f, x.k, x.key_weight, d_k)
        return None, None, d_q, d_k, d_v, d_query_weight, d_key_weight, *learned


_apply = direct_apply(_Mixture)
