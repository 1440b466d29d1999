"""What stands beside self-attention: axial attention's own heads, feed-forward layers after it, a narrow norm."""

import json
from dataclasses import fields, replace

import pytest
import torch
from helpers import assert_same

from longspan.models.config import AttentionConfig, FeedForwardConfig, LegacyConfig, ModelConfig
from longspan.models.layers import Attention, FeedForward, ProductKeyMemory
from longspan.models.transformer import LanguageModel, Transformer

BASE = ModelConfig(
    dim=12,
    depth=2,
    attention=AttentionConfig(num_heads=3, mechanism={"mechanism": "local", "window": 3}),
    feed_forward=FeedForwardConfig(mult=1),
    causal=True,
    cross=AttentionConfig(num_heads=2, mechanism="linear"),
    legacy=LegacyConfig(axial_stride=2, product_keys=(1,), num_keys=5),
)


def with_legacy(**options):
    return replace(BASE, legacy=replace(BASE.legacy, **options))


def shaken(module):
    for parameter in module.double().eval().parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return module


def test_axial_attention_has_heads_of_its_own():
    config = with_legacy(axial=AttentionConfig(num_heads=2, head_dim=7, mechanism=("linear", "softmax")))
    layers = [b.layer for b in Transformer(config).stack.branches if b.stride == 2]
    assert [type(layer.mechanism).__name__ for layer in layers] == ["LinearAttention", "SoftmaxAttention"]
    assert [(layer.mechanism.num_heads, layer.mechanism.head_dim) for layer in layers] == [(2, 7), (2, 7)]
    assert all(isinstance(layer, Attention) and not layer.cross for layer in layers)


def test_feed_forward_layers_after_axial_and_cross_attention():
    config = with_legacy(side_feed_forward=FeedForwardConfig(mult=2, gated=True, dropout=0.5))
    plain, gated, memory = (FeedForward, False), (FeedForward, True), (ProductKeyMemory, None)

    def kinds(config):
        layers = [branch.layer for branch in Transformer(config).stack.branches[1::2]]
        return [(type(layer), getattr(layer, "gated", None)) for layer in layers]

    assert kinds(BASE) == [plain] * 3 + [memory] * 3
    assert kinds(config) == [plain, gated, gated, memory, gated, gated]


def test_side_layers_stream():
    side = FeedForwardConfig(mult=2, gated=True)
    config = with_legacy(side_feed_forward=side, axial=AttentionConfig(num_heads=2, mechanism="linear"))
    model = shaken(Transformer(replace(config, token_shift=(0, 1))))
    x, context = torch.randn(2, 11, 12).double(), torch.randn(2, 5, 12).double()
    state, outs = model.new_state(2, context=context), []
    for piece in x.split([4, 1, 6], 1):
        out, state = model.extend(piece, state)
        outs.append(out)
    assert_same(torch.cat(outs, 1), model(x, context=context))


def test_a_norm_as_narrow_as_the_embedding():
    config = ModelConfig(dim=12, depth=1, attention=AttentionConfig(num_heads=3), vocab_size=7, embed_dim=5)
    model = shaken(LanguageModel(replace(config, legacy=LegacyConfig(narrow_norm=True), final_norm=False)))
    tokens = torch.randint(7, (2, 5))
    hidden = model.hidden(tokens)
    narrow = model.from_dim(hidden)
    normed = torch.nn.functional.layer_norm(narrow, (5,), model.narrow_norm.weight, model.narrow_norm.bias)
    assert_same(model(tokens), model.to_logits(normed))
    labels = torch.randint(7, (2, 5))
    assert_same(
        model.loss(tokens, labels), torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    )


def test_side_configurations_go_through_json():
    config = with_legacy(side_feed_forward=FeedForwardConfig(gated=True), axial=AttentionConfig(num_heads=2))
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


LEGACY = {field.name for field in fields(LegacyConfig)}


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("set axial_stride too", {"axial": AttentionConfig()}),
        ("side_feed_forward goes with", {"side_feed_forward": FeedForwardConfig()}),
        (
            "side_feed_forward goes with",
            {"side_feed_forward": FeedForwardConfig(), "feed_forward": None, "axial_stride": 2},
        ),
        ("narrow_norm is for an embed_dim of its own", {"narrow_norm": True}),
        ("narrow_norm is for an embed_dim of its own", {"narrow_norm": True, "dim": 8, "embed_dim": 8}),
        (r"product_keys \(6,\) must be layers", {"axial_stride": 2, "product_keys": (6,)}),
    ],
)
def test_side_options_that_cannot_hold(text, options):
    legacy = {name: options[name] for name in LEGACY & options.keys()}
    rest = {name: options[name] for name in options.keys() - LEGACY}
    with pytest.raises(ValueError, match=text):
        ModelConfig(**rest, legacy=LegacyConfig(**legacy))
