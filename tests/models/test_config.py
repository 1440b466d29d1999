"""Configurations: through JSON and back, and what they refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import pytest
from model_cases import MECHANISMS, V, config

from longspan import build_mechanism
from longspan.models.config import Activation, AttentionConfig, FeedForwardConfig, LegacyConfig, ModelConfig, Norm
from longspan.models.layers import ACTIVATIONS, NORMS, Attention
from longspan.models.transformer import Transformer

RICH = ModelConfig(
    dim=24,
    depth=3,
    attention=AttentionConfig(
        num_heads=3,
        mechanism=(
            "local",
            {"mechanism": "local", "window": (3, 2)},
            MECHANISMS["split"],
        ),
        rotary="halves",
        num_kv_heads=1,
    ),
    cross=AttentionConfig(num_heads=2, mechanism={"mechanism": "linformer", "rank": 3}, dropout=0.1),
    feed_forward=FeedForwardConfig(mult=2.5),
    legacy=LegacyConfig(product_keys=(0, 2), num_keys=3, axial_stride=2, axial=AttentionConfig(num_heads=2)),
    positions="axial",
    axial_shape=(3, 4),
    token_shift=(0, 1),
    causal=True,
    vocab_size=V,
)


@pytest.mark.parametrize(
    "given",
    [ModelConfig(), RICH, config(feed_forward=None), config(rotary=("halves", "none"), mechanism=MECHANISMS["split"])],
    ids=["default", "rich", "bare", "parts"],
)
def test_a_configuration_goes_through_json(given: ModelConfig) -> None:
    again = ModelConfig.from_dict(json.loads(json.dumps(given.to_dict())))
    assert again == given
    assert again.to_dict() == given.to_dict()
    assert type(again.attention) is AttentionConfig
    assert again.token_shift.__class__ is tuple


def test_lists_and_tuples_are_one_configuration() -> None:
    legacy = replace(RICH.legacy, product_keys=[0, 2])
    lists = replace(RICH, token_shift=[0, 1], axial_shape=[3, 4], legacy=legacy)
    assert lists == RICH
    assert Transformer(lists).stack.branches[0].token_shift == (0, 1)


def test_an_unknown_field_gives_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown field dept;.*did you mean 'depth'"):
        ModelConfig.from_dict({"dept": 3})
    with pytest.raises(ValueError, match=r"unknown field attention.num_head;.*did you mean 'num_heads'"):
        ModelConfig.from_dict({"attention": {"num_head": 3}})
    with pytest.raises(ValueError, match=r"unknown field feed_forward.multt;.*did you mean 'mult'"):
        ModelConfig.from_dict({"feed_forward": {"multt": 3}})
    with pytest.raises(ValueError, match=r"unknown field legacy.axial.num_head;.*did you mean 'num_heads'"):
        ModelConfig.from_dict({"legacy": {"axial_stride": 2, "axial": {"num_head": 3}}})


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("dim must be a positive integer, got 0", {"dim": 0}),
    ("dim must be a positive integer, got 1.5", {"dim": 1.5}),
    ("depth must be a positive integer, got -1", {"depth": -1}),
    ("inner_dim needs feed-forward layers", {"legacy": LegacyConfig(inner_dim=24), "feed_forward": None}),
    ("inner_dim needs .* depth of at least 2", {"legacy": LegacyConfig(inner_dim=24), "depth": 1}),
    ("unknown norm 'layr'.*did you mean 'layer'", {"norm": "layr"}),
    ("unknown norm_position 'Pre'.*did you mean 'pre'", {"norm_position": "Pre"}),
    ("unknown positions 'learnt'.*did you mean 'learned'", {"positions": "learnt"}),
    ("unknown residual 'doubl'.*did you mean 'double'", {"residual": "doubl"}),
    ('residual="parallel" needs feed_forward', {"residual": "parallel", "feed_forward": None}),
    ("unknown execution 'recomput'.*did you mean 'recompute'", {"execution": "recomput"}),
    ('positions="learned" needs max_length', {"positions": "learned"}),
    ('positions="axial" needs axial_shape', {"positions": "axial"}),
    ('axial_shape goes with positions="axial"', {"axial_shape": (2, 3)}),
    ("reaches 6 positions, max_length is 7", {"positions": "axial", "axial_shape": (2, 3), "max_length": 7}),
    ("max_length must be a positive integer, got 0", {"positions": "learned", "max_length": 0}),
    ("token_shift .* looks ahead", {"token_shift": (-1, 0), "causal": True}),
    ("token_shift has 5 parts, more than dim", {"token_shift": (0,) * 5, "dim": 4}),
    ("num_streams must be a positive integer, got 0", {"num_streams": 0}),
    ("vocab_size must be a positive integer, got 0", {"vocab_size": 0}),
    ("embed_dim must be a positive integer, got -3", {"embed_dim": -3}),
    ("num_classes must be a positive integer, got 0", {"num_classes": 0}),
    (r"embed_dropout must be in \[0, 1\), got 1", {"embed_dropout": 1}),
    ("embed_dropout must be a finite number, got nan", {"embed_dropout": float("nan")}),
    ("causal must be true or false, got 'yes'", {"causal": "yes"}),
    ("attention must be a AttentionConfig, got 3", {"attention": 3}),
    ("tie_embeddings needs vocab_size", {"tie_embeddings": True}),
    (
        "value_embedding is for self-attention: set it in attention, not in legacy.axial",
        {"vocab_size": 9, "legacy": LegacyConfig(axial_stride=2, axial=AttentionConfig(value_embedding=True))},
    ),
    (r"product_keys \(6,\) must be layers from 0 to 5", {"legacy": LegacyConfig(product_keys=(6,))}),
]


@pytest.mark.parametrize(("text", "options"), REFUSED)
def test_a_model_configuration_names_the_field_that_is_wrong(text: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=text):
        ModelConfig(**options)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("num_heads must be a positive integer, got 0", {"num_heads": 0}),
        (r"dropout must be in \[0, 1\), got -0.1", {"dropout": -0.1}),
        ("dynamic_bias must be 0 .* got -4", {"dynamic_bias": -4}),
        ("unknown mechanism 'linea'.*did you mean 'linear'", {"mechanism": "linea"}),
        ("unknown mechanism 'loc'.*did you mean 'local'", {"mechanism": ("linear", {"mechanism": "loc"})}),
        ("a mechanism is a name or", {"mechanism": {"window": 5}}),
        ("mechanism is empty", {"mechanism": ()}),
    ],
)
def test_an_attention_configuration_names_the_field_that_is_wrong(text: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=text):
        AttentionConfig(**options)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("mult must be positive, got 0", {"mult": 0}),
        ("hidden must be a positive integer, got 0", {"hidden": 0}),
        (r"dropout must be in \[0, 1\), got 1", {"dropout": 1}),
    ],
)
def test_a_feed_forward_configuration_names_the_field_that_is_wrong(text: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=text):
        FeedForwardConfig(**options)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("inner_dim must be a positive integer, got 0", {"inner_dim": 0}),
        ("axial_stride must be at least 1, or None, got 0", {"axial_stride": 0}),
        ("out_dim must be a positive integer, got 0", {"out_dim": 0}),
        ("num_keys must be a positive integer, got 0", {"num_keys": 0}),
        (r"out_dropout must be in \[0, 1\), got 2", {"out_dropout": 2}),
    ],
)
def test_a_legacy_configuration_names_the_field_that_is_wrong(text: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=text):
        LegacyConfig(**options)


def test_performers_of_version_0_1_keep_their_number_of_features() -> None:
    parts = [{"mechanism": "performer", "num_heads": 1}, {"mechanism": "linear", "num_heads": 1}]
    plain, given = {"mechanism": "performer", "projection": False}, {"mechanism": "performer", "num_features": 7}
    mechanisms = ["performer", {"mechanism": "split", "parts": parts}, plain, given]
    old = {"dim": 16, "attention": {"num_heads": 2, "mechanism": mechanisms}, "sum_streams": False}
    layers = ModelConfig.from_dict(old).attention.mechanism
    first, part = layers[0]["num_features"], layers[1]["parts"][0]["num_features"]
    assert first == part == 16  # ⌊8 ln 8⌋
    assert layers[2:] == (plain, given)
    cross = {"num_heads": 2, "head_dim": 5, "mechanism": {"mechanism": "performer", "num_features": None}}
    assert ModelConfig.from_dict({**old, "cross": cross}).cross.mechanism["num_features"] == 8
    del old["sum_streams"]  # as in later versions
    assert ModelConfig.from_dict(old).attention.mechanism[0] == "performer"


def test_configurations_of_version_0_1_are_migrated() -> None:
    linformer = {"mechanism": "linformer", "rank": 5}
    linear = {"mechanism": "linear", "normalise": "query"}
    old = {
        "depth": 3,
        "inner_dim": 24,
        "axial_stride": 2,
        "axial": {"mechanism": linear, "out_dim": 6, "rank_step": 0},
        "attention": {"mechanism": linformer, "out_dim": 6, "rank_step": 2},
        "feed_forward": {"mult": 2, "product_keys": [1], "num_keys": 9, "out_dropout": 0.5},
        "side_feed_forward": {"gated": True, "product_keys": [], "num_keys": 128, "out_dropout": 0.5},
    }
    kept = json.dumps(old)
    found = ModelConfig.from_dict(old)
    assert json.dumps(old) == kept
    assert [spec["rank"] for spec in found.attention.mechanism] == [5, 3, 1]
    assert found.feed_forward == FeedForwardConfig(mult=2)
    assert found.legacy == LegacyConfig(
        inner_dim=24,
        axial_stride=2,
        axial=AttentionConfig(mechanism={"mechanism": "linear", "normalize": "query"}),
        side_feed_forward=FeedForwardConfig(gated=True),
        out_dim=6,
        product_keys=(1,),
        num_keys=9,
        out_dropout=0.5,
    )
    assert ModelConfig.from_dict(found.to_dict()) == found
    with pytest.raises(ValueError, match="out_dropout must be the same"):
        ModelConfig.from_dict({**old, "side_feed_forward": {"out_dropout": 0.1}})
    with pytest.raises(ValueError, match="product keys in side_feed_forward"):
        ModelConfig.from_dict({**old, "side_feed_forward": {"product_keys": [1]}})


def test_names_in_the_configuration_are_those_of_the_layers() -> None:
    assert set(get_args(Activation)) == ACTIVATIONS.keys()
    assert set(get_args(Norm)) == NORMS.keys()


def test_softmaxed_features_are_normalized_by_direction() -> None:
    """Per query where the model is causal, per feature where it is not, in every part; what is asked for stays."""
    softmax = {"mechanism": "linear", "feature_map": "softmax"}
    plain = {"mechanism": "performer", "projection": False}
    split = {"mechanism": "split", "parts": [{**softmax, "num_heads": 2}, {**plain, "num_heads": 2}]}

    def found(mechanism: Any, causal: bool) -> list[str]:
        attention = AttentionConfig(num_heads=4, mechanism=mechanism)
        model = Transformer(ModelConfig(dim=16, depth=1, causal=causal, attention=attention, cross=attention))
        layers = [branch.layer for branch in model.stack.branches if isinstance(branch.layer, Attention)]
        parts = [part for layer in layers for part in getattr(layer.mechanism, "parts", [layer.mechanism])]
        return [part.normalize for part in parts]

    assert found(softmax, True) == ["query", "feature"]
    assert found(plain, False) == ["feature", "feature"]
    assert found(split, True) == ["query", "query", "feature", "feature"]
    assert found({**softmax, "normalize": "query"}, False) == ["query", "query"]
    assert found("linear", False) == found("performer", False) == ["query", "query"]


@pytest.mark.parametrize(
    ("cls", "options", "text"),
    [
        (AttentionConfig, {"rotary_base": float("nan")}, "rotary_base must be a finite number, got nan"),
        (AttentionConfig, {"mechanism": 5}, "mechanism must be a name, a mapping, or a list of them, got 5"),
        (AttentionConfig, {"num_heads": True}, "num_heads must be an integer, got True"),
        (FeedForwardConfig, {"mult": float("inf")}, "mult must be a finite number, got inf"),
        (LegacyConfig, {"position_base": "x"}, "position_base must be a finite number, got 'x'"),
    ],
)
def test_numbers_are_finite_and_of_their_type(cls: type, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        cls(**options)


def test_options_of_a_mechanism_are_finite() -> None:
    with pytest.raises(ValueError, match="scale of softmax must be finite, got nan"):
        build_mechanism("softmax", 2, 3, scale=float("nan"))
