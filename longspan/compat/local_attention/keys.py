"""local-attention's arguments and tensors in longspan's words."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from longspan.compat.local_attention.local_attention import windows_ahead
from longspan.compat.local_attention.rotary import frequencies
from longspan.compat.state_dict import KeyMapping, constant, rename, rename_layer
from longspan.models.config import AttentionConfig, FeedForwardConfig
from longspan.models.residual import ResidualBranch

CONNECTION = [
    rename("static_alpha", "static_mix"),
    rename("dynamic_alpha_fn", "dynamic_mix"),
    rename("dynamic_alpha_scale", "mix_scale"),
    rename("static_beta", "static_out"),
    rename("dynamic_beta_fn", "dynamic_out"),
    rename("dynamic_beta_scale", "out_scale"),
    rename("norm.gamma", "norm.offset"),
]


def attention_config(
    *,
    dim_head: int,
    heads: int,
    window_size: int,
    causal: bool,
    dropout: float,
    use_xpos: bool,
    xpos_scale_base: float | None,
    qk_rmsnorm: bool = False,
    qk_scale: float = 8,
    exact_windowsize: bool | None = None,
    gate_values_per_head: bool = False,
    look_backward: int = 1,
    look_forward: int | None = None,
    shared_qk: bool = False,
    rel_pos_emb_config: tuple[int, int] | None = None,
    use_rotary_pos_emb: bool = True,
    dynamic_bias: int = 0,
) -> AttentionConfig:
    """The older arguments in longspan's words."""
    if rel_pos_emb_config is not None and rel_pos_emb_config[0] != dim_head:
        raise ValueError(f"rel_pos_emb_config is for {rel_pos_emb_config[0]} features, but dim_head is {dim_head}")
    ahead = windows_ahead(causal, look_forward)
    spec: dict[str, Any] = {"mechanism": "local", "dropout": dropout, "shared_qk": shared_qk}
    if exact_windowsize is None or exact_windowsize:
        spec["window"] = look_backward * window_size, ahead * window_size
    else:
        spec |= {"window": window_size, "look_back": look_backward, "look_ahead": ahead}
    if qk_rmsnorm:
        spec["scale"] = qk_scale / dim_head  # our norm makes vectors of length √dim_head, theirs of length one
    if use_rotary_pos_emb:
        # A query has the angle of the last window that it sees: where it looks ahead, trained weights expect that.
        spec["query_offset"] = ahead * window_size
        if use_xpos:
            spec["xpos"] = float(window_size // 2 if xpos_scale_base is None else xpos_scale_base)
    return AttentionConfig(
        num_heads=heads,
        head_dim=dim_head,
        mechanism=spec,
        out_bias=False,
        qk_norm=qk_rmsnorm,
        rotary="halves" if use_rotary_pos_emb and not use_xpos else "none",
        value_gates=gate_values_per_head,
        dynamic_bias=dynamic_bias,
    )


def feed_forward_config(dim: int, mult: float, dropout: float) -> FeedForwardConfig:
    return FeedForwardConfig(hidden=int(dim * mult * 2 / 3), gated=True, bias=False, dropout=dropout)


def attention_entries(branch: ResidualBranch, config: AttentionConfig) -> Iterator[KeyMapping]:
    head_dim, spec = config.head_dim, config.mechanism
    assert head_dim is not None
    assert isinstance(spec, Mapping)
    inner = config.num_heads * head_dim
    if branch.norm is not None:
        yield from rename_layer("norm", "norm")
    yield KeyMapping(
        ("to_qkv.weight",),
        ("layer.to_q.weight", "layer.to_kv.weight"),
        lambda old: old[0].split([inner, 2 * inner]),
        lambda new: [torch.cat(list(new))],
    )
    yield rename("to_out.weight", "layer.to_out.weight")
    if config.qk_norm:
        yield rename("q_scale", "layer.q_norm.weight")
        yield rename("k_scale", "layer.k_norm.weight")
    if config.value_gates:
        yield from rename_layer("to_v_gate.0", "layer.to_gates")
    if config.rotary != "none" or "xpos" in spec:
        yield constant("attn_fn.rel_pos.inv_freq", lambda: frequencies(head_dim))


def feed_forward_entries() -> Iterator[KeyMapping]:
    yield from rename_layer("0", "norm")
    # They gate by the second half, we by the first.
    yield KeyMapping(("1.weight",), ("layer.to_hidden.weight",), _exchanged, _exchanged)
    yield rename("4.weight", "layer.to_out.weight")


def bias_entries(old: str, new: list[str]) -> Iterator[KeyMapping]:
    """One network, which every attention layer holds."""
    for theirs, ours in (("0", "0"), ("2", "1"), ("4", "2")):
        for part in ("weight", "bias"):
            names = tuple(f"{prefix}layers.{ours}.{part}" for prefix in new)
            yield KeyMapping((f"{old}mlp.{theirs}.{part}",), names, lambda x: [x[0]] * len(new), lambda x: [x[0]])


def _exchanged(halves: Any) -> list[Tensor]:
    first, second = halves[0].chunk(2)
    return [torch.cat([second, first])]


def with_children(module: Any, **children: nn.Module) -> Any:
    """The same module, its weights not copied, with other children."""
    twin = copy.copy(module)
    twin._modules = {**module._modules, **children}
    return twin


def refuse_unknown(name: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise TypeError(f"{name} got unknown arguments {', '.join(unknown)}; further ones are {', '.join(known)}")
