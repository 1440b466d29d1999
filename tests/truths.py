"""What each case of `helpers` must return, by the quadratic definitions of `ops.*.reference`."""

from __future__ import annotations

from typing import Any

import torch
from helpers import Case, D
from torch import Tensor, nn

from longspan import FeatureMap, Mechanism
from longspan.mechanisms.feature_maps import ACTIVATIONS
from longspan.ops.compressed import reference as linformer_reference
from longspan.ops.linear import reference
from longspan.ops.window import reference as window_reference


def truth(
    case: Case,
    mechanism: Mechanism,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
) -> Tensor:
    """What `mechanism`, built from `case`, must return, by `ops.*.reference`; differentiable in its parameters too.

    Hidden slots must be finite here. A causal key_mask is one run for each row.
    """
    if causal and key_mask is not None:
        rows = []
        for b, mask in enumerate(key_mask):
            row = q.new_zeros(1, q.shape[1], case.num_heads, case.value_dim)
            if mask.any():
                part = truth(case, mechanism, q[b, mask][None], k[b, mask][None], v[b, mask][None], causal=True)
                row = row.index_copy(1, mask.nonzero()[:, 0], part)
            rows.append(row)
        return torch.cat(rows)
    visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    if causal:
        visible = window_reference.causal_visibility(q.shape[1])
    visible = visible.expand(q.shape[0], 1, -1, -1)
    if key_mask is not None:
        visible = visible & key_mask[:, None, None]
    return _TRUTHS[case.name](case, mechanism, q, k, v, visible, causal)


def has_truth(case: Case) -> bool:
    """Whether `truth` knows the case; laws/test_options_gated.py has the definitions of those with gates."""
    return case.name in _TRUTHS and not case.build().num_gates


def _softmax(case: Case, m: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, causal: bool) -> Tensor:
    return window_reference.softmax_attention(q, k, v, visible, scale=case.options.get("scale"))


def _local(case: Case, m: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, causal: bool) -> Tensor:
    o, length = case.options, q.shape[1]
    back, ahead = o.get("look_back"), o.get("look_ahead")
    window = o.get("window", 256)
    blocks = back is not None or ahead is not None
    back, ahead = back or 0, ahead or 0
    if blocks:
        near = window_reference.block_visibility(window, back, ahead, length)
    elif isinstance(window, tuple):
        near = window_reference.window_visibility(*window, length)
    else:
        near = window_reference.window_visibility(window - 1, window - 1, length)
    visible = visible & near
    if o.get("shared_qk"):
        visible = window_reference.self_as_last_resort(visible)
        k = k / k.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    bias = None
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    if isinstance(m.bias, nn.Module):
        bias = m.bias((i - j).flatten()).unflatten(1, (length, length))
    elif m.bias is not None:
        column = (j - (i // window - back) * window).masked_fill(~near, 0)
        bias = m.bias[:, i % window, column]
    if o.get("xpos") is None:
        return window_reference.softmax_attention(q, k, v, visible, bias=bias, scale=o.get("scale"))
    scores = window_reference.xpos_scores(q, k, o["xpos"]) * o.get("scale", q.shape[3] ** -0.5)
    return window_reference.softmax_over(scores if bias is None else scores + bias, v, visible)


def _linear(case: Case, m: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, causal: bool) -> Tensor:
    o = case.options
    kind = o.get("feature_map", "elu")
    if causal:
        buckets = reference.blind_spot_visibility(o.get("blind_spot", 1), o.get("first_bucket", "causal"), q.shape[1])
        visible = visible & buckets
    if kind == "hedgehog":
        query, key = _hedgehog(q, m.feature_map.query_weight), _hedgehog(k, m.feature_map.key_weight)
    elif isinstance(kind, FeatureMap):
        f, scale = m.feature_map.key(k)
        query, key = m.feature_map.query(q), f if scale is None else f * scale[..., None].exp()
    else:
        of_query, of_key = _FEATURES[kind]
        query, key = of_query(q), of_key(k)
    out = reference.linear_attention(query, key, v, visible, o.get("normalize", "query"))
    return out * o.get("output_scale", 1.0)


def _hedgehog(x: Tensor, weight: Tensor) -> Tensor:
    projected = torch.stack([x[:, :, h] @ weight[h].T for h in range(x.shape[2])], 2)
    return torch.cat([projected.softmax(-1), (-projected).softmax(-1)], -1)


def _mixture(case: Case, m: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, causal: bool) -> Tensor:
    """Softmax weights inside the window, hedgehog's outside it, one normalizer for both."""
    group, window, phi = q.shape[2] // k.shape[2], case.options["window"], m.memory.feature_map
    near = window_reference.window_visibility(window - 1, window - 1, q.shape[1])
    fk = _hedgehog(k, phi.key_weight).repeat_interleave(group, 2)
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[3] ** -0.5
    far = torch.einsum("bthf,bshf->bhts", _hedgehog(q, phi.query_weight), fk)
    mix = torch.einsum("bthd,hd->bht", q, m.mix_weight) + m.mix_bias[:, None]
    top = scores.masked_fill(~near, float("-inf")).amax(-1, keepdim=True)
    weights = torch.where(near, (scores - top).exp(), far * (mix[..., None] - top).exp()) * visible
    total = weights.sum(-1, keepdim=True)
    return torch.einsum("bhts,bshe->bthe", weights / total.masked_fill(total == 0, 1), v)


def _performer(case: Case, m: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, causal: bool) -> Tensor:
    o = case.options
    kernel, projected = o.get("kernel", "softmax"), o.get("projection", True)
    epsilon, normalize = o.get("epsilon"), o.get("normalize", "query")
    if kernel == "softmax":
        if not projected:
            return reference.linear_attention(q.softmax(-1), k.exp(), v, visible, normalize)
        w = m.feature_map.projection
        if epsilon:
            return reference.favor_attention(q, k, v, w, visible, epsilon=epsilon)
        if normalize == "query":
            return reference.favor_attention(q, k, v, w, visible)
        query = reference.favor_features(q, w)
        query = query / query.sum(-1, keepdim=True)  # so that weights over features, and over keys, sum to one
        return reference.linear_attention(query, reference.favor_features(k, w), v, visible, normalize)

    def features(x: Tensor) -> Tensor:
        x = x * D**-0.25
        x = x @ m.feature_map.projection.T if projected else x
        return (ACTIVATIONS[kernel] if isinstance(kernel, str) else kernel)(x) + (1e-3 if epsilon is None else epsilon)

    return reference.linear_attention(features(q), features(k), v, visible, normalize)


def _linformer(case: Case, m: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, causal: bool) -> Tensor:
    if not causal:  # Visible tokens are numbered in order.
        visible = visible.expand(len(k), -1, -1, -1)
        order = [torch.cat([row.nonzero()[:, 0], (~row).nonzero()[:, 0]]) for row in visible[:, 0, 0]]
        k, v, visible = (
            torch.stack([x.index_select(dim, index) for x, index in zip(of, order, strict=True)])
            for of, dim in ((k, 0), (v, 0), (visible, 2))
        )
    if m.keys.kind == "convolution":
        project = linformer_reference.convolution_projection
        (e, k), (f, v) = (project(x, p.kernel, p.rank) for x, p in ((k, m.keys), (v, m.values)))
        stride = m.keys.kernel.shape[-3]
    else:
        e, f = (linformer_reference.table_projection(p.table, k.shape[1]) for p in (m.keys, m.values))
        stride = None
    period = case.options["max_length"] if case.options.get("periodic") else None
    bias = {"key_bias": m.keys.bias, "value_bias": m.values.bias}
    return linformer_reference.linformer_attention(q, k, v, e, f, visible[:, 0], period=period, stride=stride, **bias)


def _split(case: Case, m: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, causal: bool) -> Tensor:
    outs, first = [], 0
    group = case.num_heads // case.num_kv_heads
    for part, built in zip(case.options["parts"], m.parts, strict=True):
        heads = part["num_heads"]
        kv = slice(0, 1) if case.num_kv_heads == 1 else slice(first // group, (first + heads) // group)
        options = {key: value for key, value in part.items() if key != "mechanism"}
        options["num_kv_heads"] = 1 if case.num_kv_heads == 1 else heads // group
        own = Case(part["mechanism"], options)
        out = _TRUTHS[own.name](own, built, q[:, :, first : first + heads], k[:, :, kv], v[:, :, kv], visible, causal)
        outs.append(out)
        first += heads
    return torch.cat(outs, 2)


def _decay(case: Case, m: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, causal: bool) -> Tensor:
    """RetNet: γ to the number of visible tokens from the earlier to the later one."""
    k, v = (window_reference.repeat_kv(x, q.shape[2]) for x in (k, v))
    head = torch.arange(case.num_kv_heads).repeat_interleave(case.num_heads // case.num_kv_heads)
    gamma = 1 - 2.0 ** (-5 - head.to(q.dtype))[:, None, None]
    seen = (visible[:, 0].any(1) if not causal else torch.ones(len(q), q.shape[1], dtype=torch.bool)).int()
    count = seen.cumsum(1)
    before, after = count[:, :, None] - count[:, None], (count[:, None] - 1) - (count - seen)[:, :, None]
    i, j = torch.arange(q.shape[1])[:, None], torch.arange(q.shape[1])
    weights = torch.einsum("bthd,bshd->bhts", q, k) * gamma ** torch.where(j <= i, before, after).clamp(min=0)[:, None]
    return torch.einsum("bhts,bshe->bthe", weights * visible * q.shape[3] ** -0.5, v)


_FEATURES = {
    "elu": (lambda x: torch.where(x > 0, x + 1, x.clamp(max=0).exp()),) * 2,
    "relu": (lambda x: x.clamp(min=0) + 1e-3,) * 2,
    "identity": (lambda x: x,) * 2,
    "softmax": (lambda x: x.exp() / x.exp().sum(-1, keepdim=True), torch.exp),
}
_TRUTHS = {
    "softmax": _softmax,
    "local": _local,
    "linear": _linear,
    "performer": _performer,
    "linformer": _linformer,
    "decay": _decay,
    "split": _split,
    "mixture": _mixture,
}
