"""Build a stack of layers from a configuration: mechanisms, branches, initial weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from longspan.models.config import AttentionConfig, ModelConfig
from longspan.models.layers import Attention, FeedForward, ProductKeyMemory, head_shape, mechanism_from
from longspan.models.positions import DynamicPositionBias
from longspan.models.residual import ResidualBranch, Stack
from longspan.protocol import Mechanism


def build_stack(config: ModelConfig) -> Stack:
    """Build the layers that a configuration describes, with initial weights."""
    widths = [config.dim, *[config.legacy.inner_dim or config.dim] * (config.depth - 1)]
    widths_by_layer = list(enumerate(widths))
    own = _own_mechanisms(config, widths_by_layer)
    cross = [] if config.cross is None else _mechanisms(config.cross, widths_by_layer, False)
    branches = []
    for i in range(config.depth):
        branches += _layer(config, i, own[i], cross[i : i + 1])
    stack = Stack(
        branches,
        config.dim,
        topology=config.residual,
        num_streams=config.num_streams,
        sum_streams=config.legacy.sum_streams,
        execution=config.execution,
    )
    # A ReZero branch begins at zero by its weight; with a zero projection too, neither would ever have a gradient.
    _initialize(stack, config.zero_init_residual and config.norm_position != "rezero")
    return stack


def _layer(config: ModelConfig, i: int, own: list[Mechanism], cross: list[Mechanism]) -> list[ResidualBranch]:
    """Build the branches of layer i: self-attention, axial attention, cross-attention, each with a feed-forward layer.

    Args:
        config: The model's configuration.
        i: The layer's number.
        own: The mechanisms of self-attention and of axial attention.
        cross: The mechanism of cross-attention.
    """
    legacy = config.legacy
    inner = legacy.inner_dim or config.dim
    width = config.dim if i == 0 else inner
    after = config.dim if i == config.depth - 1 else inner

    def branch(layer: nn.Module, dim: int, **more: Any) -> ResidualBranch:
        return ResidualBranch(layer, dim, norm=config.norm, norm_position=config.norm_position, **more)

    def feed_forward(out: int, place: int) -> list[ResidualBranch]:
        if config.feed_forward is None:
            return []
        side = None if place == 0 else legacy.side_feed_forward
        if i in legacy.product_keys and side is None:
            if width != out:
                raise ValueError(f"layer {i} changes the width, which a product-key memory cannot: move product_keys")
            layer: nn.Module = ProductKeyMemory(width, num_keys=legacy.num_keys)
        else:
            settings = side or config.feed_forward
            layer = FeedForward(width, settings, out_features=out, out_dropout=legacy.out_dropout)
        change: dict[str, Any] = {"out_features": out, "resample": legacy.resample}
        return [branch(layer, width, token_shift=config.token_shift if place == 0 else (), **change)]

    options: dict[str, Any] = {"causal": config.causal, "mid_features": legacy.out_dim}
    options["vocab_size"] = config.vocab_size
    attention = Attention(width, config.attention, mechanism=own[0], **options)
    attentions = [branch(attention, width, token_shift=config.token_shift)]
    if legacy.axial_stride is not None:
        axial = Attention(width, legacy.axial or config.attention, mechanism=own[1], **options)
        attentions.append(branch(axial, width, stride=legacy.axial_stride))
    if config.cross is not None:
        options = {"cross": True, "context_dim": config.dim, "mid_features": legacy.out_dim}
        layer = Attention(width, config.cross, mechanism=cross[0], **options)
        attentions.append(branch(layer, width))
    last = len(attentions) - 1
    return [
        part
        for place, attention_branch in enumerate(attentions)
        for part in [attention_branch, *feed_forward(after if place == last else width, place)]
    ]


def _spec(config: AttentionConfig, i: int) -> Any:
    """Return the mechanism of layer i: a sequence of mechanisms is repeated to the depth."""
    if isinstance(config.mechanism, str | Mapping):
        return config.mechanism
    return config.mechanism[i % len(config.mechanism)]


def _own_mechanisms(config: ModelConfig, widths_by_layer: list[tuple[int, int]]) -> list[list[Mechanism]]:
    """Build the mechanisms of self-attention and axial attention of each layer; a shared projection serves both."""
    if config.legacy.axial_stride is None:
        return [[mechanism] for mechanism in _mechanisms(config.attention, widths_by_layer, config.causal)]
    if config.legacy.axial is None:
        both = _mechanisms(config.attention, [item for item in widths_by_layer for _ in range(2)], config.causal)
        return [both[i : i + 2] for i in range(0, len(both), 2)]
    groups = [_mechanisms(group, widths_by_layer, config.causal) for group in (config.attention, config.legacy.axial)]
    return [list(pair) for pair in zip(*groups, strict=True)]


def _mechanisms(attention: AttentionConfig, widths_by_layer: list[tuple[int, int]], causal: bool) -> list[Mechanism]:
    """Build a mechanism for each layer and its width, with a shared Linformer projection if configured.

    The softmax feature map is normalized per query if causal and per feature if not, unless the options say otherwise.
    """

    def complete(options: dict[str, Any], num_heads: int) -> None:
        softmaxed = options["mechanism"] == "linear" and options.get("feature_map") == "softmax"
        if options["mechanism"] == "performer" and options.get("kernel", "softmax") == "softmax":
            softmaxed = options.get("projection") is False
        if softmaxed:
            options.setdefault("normalize", "query" if causal else "feature")
        if options["mechanism"] == "local" and attention.dynamic_bias:
            options["bias"] = biases.setdefault(num_heads, DynamicPositionBias(num_heads, attention.dynamic_bias))

    shared: Any = None
    biases: dict[int, DynamicPositionBias] = {}
    built: list[Mechanism] = []
    for i, width in widths_by_layer:
        spec = _spec(attention, i)
        shape = head_shape(width, attention)
        if attention.share_projection:
            options: dict[str, Any] = {"mechanism": spec} if isinstance(spec, str) else dict(spec)
            if options["mechanism"] != "linformer":
                raise ValueError(f"share_projection is for linformer; layer {i} is {options['mechanism']}")
            if shared is not None:
                options["projection"] = shared
            else:
                options["share_projection"] = True
            spec = options
        mechanism = mechanism_from(_each_part(spec, attention.num_heads, complete), *shape)
        if attention.share_projection and shared is None:
            shared = mechanism.keys
        built.append(mechanism)
    if attention.dynamic_bias and not biases:
        raise ValueError("attention.dynamic_bias is for local attention, and no layer has any: set it to 0")
    return built


def _each_part(spec: Any, num_heads: int, change: Callable[[dict[str, Any], int], None]) -> Any:
    """Apply `change` to the options of a mechanism, or of each part of a split."""
    options: Any = {"mechanism": spec} if isinstance(spec, str) else spec
    if not isinstance(options, Mapping) or "mechanism" not in options:
        return spec
    options = dict(options)
    if options["mechanism"] == "split":
        parts = options.get("parts", ())
        options["parts"] = [
            _each_part(part, part.get("num_heads", 0) if isinstance(part, Mapping) else 0, change) for part in parts
        ]
    else:
        change(options, num_heads)
    return options


def _initialize(stack: Stack, zero: bool) -> None:
    """Draw weights of order 1/√fan-in; output projections are divided by the square root of the number of branches.

    Args:
        stack: The layers.
        zero: Set the output projections to zero instead.
    """
    scale = 0.0 if zero else len(stack.branches) ** -0.5
    for branch in stack.branches:
        for name, parameter in branch.named_parameters():
            if name.endswith("bias") and parameter.ndim == 1:
                nn.init.zeros_(parameter)
        layer = getattr(branch, "layer", None)
        if isinstance(layer, Attention | FeedForward):
            for module in layer.modules():
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=module.in_features**-0.5)
            with torch.no_grad():
                layer.to_out.weight.mul_(scale)
