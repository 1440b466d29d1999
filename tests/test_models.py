"""Models: streaming agrees with forward over the whole grid, padding and packing change nothing, options arrive."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import combinations, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, check_gradients_by_name, gradients, leaves, lengths_to_mask
from torch import Tensor, nn

from longspan import Packing
from longspan.config import AttentionConfig, FeedForwardConfig, ModelConfig
from longspan.layers import Attention, FeedForward, ProductKeyMemory, ScaleNorm
from longspan.models import Classifier, EncoderDecoder, LanguageModel, Transformer
from longspan.rows import Rows

B, T, DIM, V = 2, 11, 12, 13

MECHANISMS: dict[str, Any] = {
    "softmax": "softmax",
    "local": {"mechanism": "local", "window": 4},
    "blocks": {"mechanism": "local", "window": 3, "look_back": 1},
    "linear": "linear",
    "blind": {"mechanism": "linear", "feature_map": "softmax", "blind_spot": 3},
    "performer": {"mechanism": "performer", "num_features": 5},
    "linformer": {"mechanism": "linformer", "rank": 3, "max_length": 40},
    "split": {
        "mechanism": "split",
        "parts": [{"mechanism": "local", "num_heads": 1, "window": 3}, {"mechanism": "linear", "num_heads": 2}],
    },
    "mixed": ({"mechanism": "local", "window": 3}, "linear"),
}
POSITIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "learned": {"positions": "learned", "max_length": 20},
    "sinusoidal": {"positions": "sinusoidal", "position_base": 100.0},
    "axial": {"positions": "axial", "axial_shape": (4, 5)},
    "halves": {"rotary": "halves"},
    "interleaved": {"rotary": "interleaved", "rotary_base": 50.0},
}
SHIFTS: list[tuple[int, ...]] = [(), (0, 1), (2, 0, 1)]
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "single": {},
    "post": {"norm_position": "post", "norm": "rms"},
    "rezero": {"norm_position": "rezero"},
    "double": {"residual": "double", "execution": "reverse"},
    "hyper": {"residual": "hyper", "num_streams": 2, "execution": "recompute"},
}
FOLDS: list[int | None] = [None, 3]
GRID = list(product(MECHANISMS, POSITIONS, SHIFTS, TOPOLOGIES, FOLDS))


def covering(grid: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """As few points as a greedy search needs for every pair of values of two axes to occur."""

    def pairs(point: tuple[Any, ...]) -> set[Any]:
        return set(combinations(enumerate(point), 2))

    missing = set().union(*map(pairs, grid))
    while missing:
        best = max(grid, key=lambda point: len(pairs(point) & missing))
        missing -= pairs(best)
        yield best


def shaken(module: Any) -> Any:
    """In float64, every parameter random: those that begin at 0 or 1 would hide mistakes."""
    module = module.double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


def config(**options: Any) -> ModelConfig:
    """A small causal language model; fields of the attention are recognised by name."""
    of_attention = {f.name for f in fields(AttentionConfig)} - {"dropout"}
    attention = {"num_heads": 3, **{k: v for k, v in options.items() if k in of_attention}}
    rest = {k: v for k, v in options.items() if k not in of_attention}
    defaults = {"dim": DIM, "depth": 2, "causal": True, "vocab_size": V, "feed_forward": FeedForwardConfig(mult=1)}
    return ModelConfig(**{**defaults, "attention": AttentionConfig(**attention), **rest})


def tokens(batch: int = B, length: int = T) -> Tensor:
    return torch.randint(V, (batch, length))


def build(point: tuple[Any, ...]) -> LanguageModel:
    mechanism, positions, shift, topology, fold = point
    options = {**POSITIONS[positions], **TOPOLOGIES[topology], "token_shift": shift, "axial_stride": fold}
    return shaken(LanguageModel(config(mechanism=MECHANISMS[mechanism], **options)))


def stream(model: LanguageModel, x: Tensor, splits: list[int], **options: Any) -> Tensor:
    state, outs = model.new_state(len(x), **options), []
    for piece in x.split(splits, 1):
        out, state = model.extend(piece, state)
        outs.append(out)
    assert state.length.tolist() == [x.shape[1]] * len(x)
    return torch.cat(outs, 1)


def check_laws(point: tuple[Any, ...]) -> None:
    model, x = build(point), tokens()
    expected = model(x)
    with torch.no_grad():
        assert_same(stream(model, x, [1] * T, max_length=T), expected, "step by step")
        assert_same(stream(model, x, [5, 1, 5]), expected, "in pieces")
    assert_same(stream(model, x, [2, 9]), expected, "with gradients")

    other = x.clone()
    other[:, 7:] = (other[:, 7:] + 1) % V
    assert torch.equal(model(other)[:, :7], expected[:, :7]), "the future moved the past"
    assert not torch.allclose(model(other)[:, 7:], expected[:, 7:])

    for side in ("left", "right"):
        mask = lengths_to_mask([T, 6], T, side)
        padded = model(x, key_mask=mask)
        for b in range(B):
            assert_same(padded[b, mask[b]], model(x[b, mask[b]][None])[0], f"padded {side}")
        with torch.no_grad():
            streamed, state = model.extend(x, model.new_state(B), key_mask=mask)
            assert_same(streamed[mask], padded[mask], f"streamed, padded {side}")
            more, _ = model.extend(x[:, :3], state)
        whole = torch.cat([x[1, mask[1]], x[1, :3]])[None]
        assert_same(more[1:], model(whole)[:, 6:], f"on from a row padded {side}")

    lengths = [4, 1, 6]
    packed = model(x[:1], packing=Packing.from_lengths(lengths))
    separate = torch.cat([model(piece) for piece in x[:1].split(lengths, 1)], 1)
    assert_same(packed, separate, "packed")


@pytest.mark.parametrize("point", list(covering(GRID)), ids=str)
def test_extend_padding_and_packing_are_forward(point: tuple[Any, ...]) -> None:
    check_laws(point)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_extend_padding_and_packing_are_forward_everywhere(mechanism: str, topology: str) -> None:
    for point in GRID:
        if point[0] == mechanism and point[3] == topology:
            check_laws(point)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_any_length(mechanism: str) -> None:
    for options in ({}, {"axial_stride": 4, "rotary": "halves", "token_shift": (0, 1)}):
        model = shaken(LanguageModel(config(mechanism=MECHANISMS[mechanism], **options)))
        x = tokens(1, 20)
        whole = model(x)
        for length in range(21):
            out = model(x[:, :length])
            assert out.shape == (1, length, V)
            assert_same(out, whole[:, :length])
    bidirectional = shaken(LanguageModel(config(mechanism=MECHANISMS[mechanism], causal=False, axial_stride=3)))
    for length in range(1, 20):
        assert bidirectional(x[:, :length]).isfinite().all()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_nothing_new_changes_nothing(mechanism: str) -> None:
    model = shaken(LanguageModel(config(mechanism=MECHANISMS[mechanism], token_shift=(0, 1), axial_stride=2)))
    x = tokens()
    with torch.no_grad():
        _, state = model.extend(x[:, :4], model.new_state(B))
        for mask in (None, torch.zeros(B, 0, dtype=torch.bool)):
            out, state = model.extend(x[:, :0], state, key_mask=mask)
            assert out.shape == (B, 0, V)
        _, state = model.extend(x[:, :2], state, key_mask=torch.zeros(B, 2, dtype=torch.bool))
        out, _ = model.extend(x[:, 4:], state)
    assert_same(out, model(x)[:, 4:])


def test_gradients_through_a_streamed_model() -> None:
    model = shaken(LanguageModel(config(mechanism=MECHANISMS["mixed"], token_shift=(0, 1), axial_stride=3)))
    x = tokens()
    expected = gradients(model(x), leaves(model))
    check_gradients_by_name(gradients(stream(model, x, [1, 4, 1, 5]), leaves(model)), expected)


def test_only_causal_models_stream() -> None:
    model = LanguageModel(config(causal=False))
    with pytest.raises(ValueError, match="only a causal model can be extended: build it with causal=True"):
        model.extend(tokens(), model.new_state(B))


def test_states_that_do_not_fit_are_refused() -> None:
    model = LanguageModel(config(mechanism="linear"))
    other = LanguageModel(config(mechanism="softmax"))
    with pytest.raises(ValueError, match="LinearAttention needs a LinearState"):
        model.extend(tokens(), other.new_state(B))
    with pytest.raises(ValueError, match="the state holds 3 sequences, the input 2"):
        model.extend(tokens(), model.new_state(3))


def test_bad_tokens_are_refused() -> None:
    model = LanguageModel(config())
    with pytest.raises(ValueError, match=r"tokens must be \(B, T\) integers, got \(2, 11\) torch.float32"):
        model(tokens().float())
    with pytest.raises(ValueError, match=r"tokens must be \(B, T\) integers, got \(11,\)"):
        model(tokens()[0])
    with pytest.raises(ValueError, match=r"packing.offsets must rise from 0 to the row's length 11, got \[0, 3\]"):
        model(tokens(1), packing=Packing.from_lengths([3]))
    with pytest.raises(ValueError, match="packing and key_mask exclude each other"):
        model(tokens(1), packing=Packing.from_lengths([T]), key_mask=torch.ones(1, T, dtype=torch.bool))


# What the options build.


def attentions(model: Any) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def test_mechanisms_are_repeated_to_the_depth() -> None:
    model = LanguageModel(config(depth=5, mechanism=("local", {"mechanism": "local", "window": 7}, "performer")))
    names = [type(layer.mechanism).__name__ for layer in attentions(model)]
    assert names == ["LocalAttention", "LocalAttention", "PerformerAttention", "LocalAttention", "LocalAttention"]
    windows = [layer.mechanism.window.back for layer in attentions(model) if hasattr(layer.mechanism, "window")]
    assert windows == [255, 6, 255, 6]
    cross = AttentionConfig(num_heads=2, mechanism=("linear", "softmax"))
    names = [type(a.mechanism).__name__ for a in attentions(Transformer(config(depth=3, cross=cross))) if a.cross]
    assert names == ["LinearAttention", "SoftmaxAttention", "LinearAttention"]


def test_the_order_of_branches() -> None:
    cross = AttentionConfig(num_heads=2)
    model = Transformer(config(depth=1, cross=cross, axial_stride=2, token_shift=(0, 1)))
    kinds = [type(branch.layer) for branch in model.stack.branches]
    assert kinds == [Attention, FeedForward] * 3
    assert [branch.stride for branch in model.stack.branches] == [1, 1, 2, 1, 1, 1]
    assert [branch.layer.cross for branch in model.stack.branches[::2]] == [False, False, True]
    assert [len(branch.token_shift) for branch in model.stack.branches] == [2, 2, 0, 0, 0, 0]
    bare = Transformer(config(depth=2, feed_forward=None))
    assert [type(branch.layer) for branch in bare.stack.branches] == [Attention, Attention]


LINFORMER = {"mechanism": "linformer", "rank": 4, "max_length": 30}


@pytest.mark.parametrize("where", ["own", "axial", "cross"])
def test_share_projection_reaches_every_layer(where: str) -> None:
    options: dict[str, Any] = {"mechanism": LINFORMER, "share_projection": True}
    if where == "axial":
        options["axial_stride"] = 2
    if where == "cross":
        options = {"cross": AttentionConfig(num_heads=2, mechanism=LINFORMER, share_projection=True)}
    model = Transformer(config(depth=3, **options))
    layers = [layer for layer in attentions(model) if layer.cross == (where == "cross")]
    assert len(layers) == (6 if where == "axial" else 3)
    assert len({id(p) for layer in layers for p in (layer.mechanism.keys, layer.mechanism.values)}) == 1
    shared = [name for name, _ in model.named_parameters() if name.endswith("table")]
    assert len(shared) == 1


@pytest.mark.parametrize("where", ["own", "axial", "cross"])
def test_rank_step_reaches_every_layer(where: str) -> None:
    options: dict[str, Any] = {"mechanism": LINFORMER, "rank_step": 2}
    if where == "axial":
        options["axial_stride"] = 2
    if where == "cross":
        options = {"cross": AttentionConfig(num_heads=2, mechanism=LINFORMER, rank_step=2)}
    layers = [a for a in attentions(Transformer(config(depth=3, **options))) if a.cross == (where == "cross")]
    ranks = [layer.mechanism.rank for layer in layers]
    assert ranks == ([4, 4, 2, 2, 1, 1] if where == "axial" else [4, 2, 1])


def test_combinations_of_linformer_options_that_cannot_hold() -> None:
    with pytest.raises(ValueError, match="share_projection and rank_step exclude each other"):
        Transformer(config(mechanism=LINFORMER, share_projection=True, rank_step=1))
    for options in ({"share_projection": True}, {"rank_step": 1}):
        with pytest.raises(ValueError, match="are for linformer; layer 1 is linear"):
            Transformer(config(mechanism=(LINFORMER, "linear"), **options))
        with pytest.raises(ValueError, match="are for linformer; layer 0 is split"):
            Transformer(config(mechanism=MECHANISMS["split"], **options))
    with pytest.raises(ValueError, match="rank"):
        Transformer(config(mechanism=(LINFORMER, {**LINFORMER, "rank": 3}), share_projection=True))
    convolution = {**LINFORMER, "projection": "convolution"}
    with pytest.raises(ValueError, match="convolution takes dim 4"):
        Transformer(config(mechanism=convolution, share_projection=True, inner_dim=24))


def test_dynamic_bias_without_local_attention_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dynamic_bias is for local attention, and no layer has any"):
        Transformer(config(mechanism="linear", dynamic_bias=4))


def test_inner_dim_is_the_width_between() -> None:
    cross = AttentionConfig(num_heads=2)
    model = shaken(Transformer(config(depth=3, inner_dim=18, token_shift=(0, 1), axial_stride=2, cross=cross)))
    widths = [branch.dim for branch in model.stack.branches]
    assert widths == [12] * 6 + [18] * 12
    assert [branch.residual for branch in model.stack.branches] == [i not in (5, 17) for i in range(18)]
    x, context = torch.randn(B, T, DIM).double(), torch.randn(B, 5, DIM).double()
    expected = model(x, context=context)
    assert expected.shape == (B, T, DIM)
    state, outs = model.new_state(B, context=context), []
    for piece in x.split([4, 1, 6], 1):
        out, state = model.extend(piece, state)
        outs.append(out)
    assert_same(torch.cat(outs, 1), expected)


def test_product_keys_cannot_change_the_width() -> None:
    feed_forward = FeedForwardConfig(product_keys=(1,), num_keys=3)
    model = Transformer(config(depth=3, inner_dim=24, feed_forward=feed_forward))
    assert isinstance(model.stack.branches[3].layer, ProductKeyMemory)
    with pytest.raises(ValueError, match="layer 0 changes the width"):
        Transformer(config(depth=2, inner_dim=24, feed_forward=FeedForwardConfig(product_keys=(0,))))


def test_a_context_may_be_longer_than_the_model() -> None:
    cross = AttentionConfig(num_heads=2, mechanism=("softmax", {"mechanism": "linformer", "max_length": 9}))
    model = shaken(LanguageModel(config(cross=cross, mechanism="linear")))
    x, context = tokens(), torch.randn(B, 9, DIM).double()
    with torch.no_grad():
        assert_same(stream(model, x[:, :4], [1, 3], max_length=4, context=context), model(x[:, :4], context=context))
        assert model.new_state(B, max_length=50, context=context).length.tolist() == [0, 0]
    with pytest.raises(ValueError, match="this model attends to a context: new_state needs context="):
        model.new_state(B)
    with pytest.raises(ValueError, match="this model attends to a context: pass context="):
        model(x)
    plain = LanguageModel(config())
    for given in ({"context": context}, {"context_mask": torch.ones(B, 9, dtype=torch.bool)}):
        with pytest.raises(ValueError, match="this model has no cross-attention"):
            plain(x, **given)


def test_the_tokens_and_the_layers_between() -> None:
    model = shaken(LanguageModel(config(embed_dim=5, positions="learned", max_length=T)))
    x = tokens()
    embedded = model.embedding.weight[x] + model.positions.table
    vectors = embedded @ model.to_dim.weight.T + model.to_dim.bias
    hidden = model.transformer(vectors)
    assert_same(model.hidden(x), hidden)
    narrow = hidden @ model.from_dim.weight.T + model.from_dim.bias
    assert_same(model(x), narrow @ model.to_logits.weight.T + model.to_logits.bias)
    assert model.embedding.weight.shape == (V, 5)


@pytest.mark.parametrize("embed_dim", [None, 5])
def test_tied_embeddings_are_one_table(embed_dim: int | None) -> None:
    tied = shaken(LanguageModel(config(tie_embeddings=True, embed_dim=embed_dim)))
    x = tokens()
    hidden = tied.hidden(x) if embed_dim is None else tied.from_dim(tied.hidden(x))
    assert_same(tied(x), hidden @ tied.embedding.weight.T)
    free = LanguageModel(config(embed_dim=embed_dim))
    extra = V * (embed_dim or DIM) + V
    count = {True: sum(p.numel() for p in tied.parameters()), False: sum(p.numel() for p in free.parameters())}
    assert count[False] - count[True] == extra


def test_logits_without_a_bias() -> None:
    model, x = shaken(LanguageModel(config(logits_bias=False))), tokens()
    assert "to_logits.bias" not in model.state_dict()
    assert_same(model(x), model.hidden(x) @ model.to_logits.weight.T)


def test_embed_dropout_in_training_only() -> None:
    model, x = shaken(LanguageModel(config(embed_dropout=0.5))), tokens()
    assert torch.equal(model(x), model(x))
    seen: list[Tensor] = []
    model.transformer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.train()(x)
    assert 0.35 < (seen[0] == 0).double().mean() < 0.65


def test_final_norm_can_be_left_out() -> None:
    model, x = shaken(Transformer(config())), torch.randn(B, T, DIM).double()
    bare = shaken(Transformer(config(final_norm=False)))
    bare.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("norm.")})
    assert bare.norm is None
    assert_same(model(x), model.norm(bare(x)))


def test_final_norm_can_be_of_another_kind() -> None:
    model = Transformer(config(norm="scale", final_norm="layer"))
    assert isinstance(model.norm, nn.LayerNorm)
    assert isinstance(model.stack.branches[0].norm, ScaleNorm)
    with pytest.raises(ValueError, match="unknown final_norm 'layers'; there is layer, rms, scale"):
        config(final_norm="layers")


def test_state_size_by_hand() -> None:
    counters = 8 * 4  # the lengths of the stack, its two branches, and the attention's state
    window = LanguageModel(config(depth=1, mechanism=MECHANISMS["local"]))
    assert window.state_size() == counters + 2 * 3 * 4 * 4 * 4  # k and v: heads · W · D · float32
    linear = LanguageModel(config(depth=1, mechanism="linear"))
    assert linear.state_size() == counters + 3 * (4 * 4 + 4 + 1) * 4  # kv, z, shift
    linformer = LanguageModel(config(depth=1, mechanism=MECHANISMS["linformer"], num_kv_heads=1))
    assert linformer.state_size() == counters + 2 * 3 * 4 * 4  # k and v: R · D
    shifted = LanguageModel(config(depth=1, mechanism="linear", token_shift=(0, 2)))
    assert shifted.state_size() == linear.state_size() + 2 * 2 * DIM * 4  # two branches, two tokens
    deep = LanguageModel(config(depth=3, mechanism="linear"))
    assert deep.state_size() - 8 == 3 * (linear.state_size() - 8)
    cross = AttentionConfig(num_heads=2, mechanism="linear")
    assert LanguageModel(config(depth=1, mechanism="linear", cross=cross)).state_size() > linear.state_size()
    assert window.double().state_size() == counters + 2 * 3 * 4 * 4 * 8


def test_initial_values_keep_the_residual_small() -> None:
    for depth in (1, 8):
        model = Transformer(config(depth=depth, dim=64, num_heads=8, qkv_bias=True))
        scale = (2 * depth) ** -0.5
        for branch in model.stack.branches:
            weight = branch.layer.to_out.weight
            assert 0.8 < weight.std() / (scale * weight.shape[1] ** -0.5) < 1.2
            assert all(not p.any() for name, p in branch.layer.named_parameters() if name.endswith("bias"))
        x = torch.randn(B, 50, 64)
        out = model.stack(x, Rows.of(x, causal=True))
        assert 0.5 < (out - x).std() / x.std() < 2, depth


# Random features.


PERFORMER = {"mechanism": "performer", "num_features": 5, "redraw_interval": 1}


@pytest.mark.parametrize("execution", ["keep", "recompute", "recompute_heads", "reverse"])
def test_features_are_redrawn_once_for_each_training_forward(execution: str) -> None:
    model = LanguageModel(config(mechanism=PERFORMER, residual="double", axial_stride=2)).double()
    layers = attentions(model)
    assert len(layers) == 4
    x = tokens()

    def run(name: str) -> dict[str, Tensor]:
        model.transformer.stack.execution = name
        torch.manual_seed(5)
        model.zero_grad()
        before = [layer.mechanism.draw for layer in layers]
        model(x).square().sum().backward()
        assert [layer.mechanism.draw - draw for layer, draw in zip(layers, before, strict=True)] == [1] * 4
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = run("keep")
    check_gradients_by_name(run(execution), expected)
    model.eval()
    before = [layer.mechanism.draw for layer in layers]
    model(x).sum().backward()
    assert [layer.mechanism.draw for layer in layers] == before


def test_features_are_redrawn_at_their_interval() -> None:
    model = LanguageModel(config(depth=1, mechanism={**PERFORMER, "redraw_interval": 3}))
    (layer,) = attentions(model)
    draws = []
    for _ in range(7):
        model(tokens())
        draws.append(layer.mechanism.draw)
    assert draws == [0, 0, 1, 1, 1, 2, 2]


def test_performer_heads_in_a_split_are_redrawn_too() -> None:
    parts = [{"mechanism": "local", "num_heads": 1, "window": 3}, {**PERFORMER, "num_heads": 2}]
    model = LanguageModel(config(depth=1, mechanism={"mechanism": "split", "parts": parts}))
    (layer,) = attentions(model)
    before = layer.mechanism.parts[1].feature_map.projection.clone()
    model(tokens())
    assert not torch.equal(layer.mechanism.parts[1].feature_map.projection, before)


def test_encoder_and_decoder_redraw_once() -> None:
    model = seq2seq(mechanism=PERFORMER, cross_mechanism=PERFORMER)
    model.train()
    model(tokens(), tokens())
    assert {layer.mechanism.draw for layer in attentions(model)} == {1}


def test_a_stale_state_raises() -> None:
    model, x = LanguageModel(config(mechanism=PERFORMER)), tokens()
    _, state = model.extend(x, model.new_state(B))
    model.eval()(x)
    model.extend(x, state)
    model.train()(x)
    with pytest.raises(ValueError, match=r"written with draw 0 .* now has draw 1: start from new_state"):
        model.extend(x, state)


# Encoder and decoder.


def seq2seq(cross_mechanism: Any = "linear", **options: Any) -> EncoderDecoder:
    encoder = config(causal=False, **options)
    decoder = config(cross=AttentionConfig(num_heads=2, mechanism=cross_mechanism), **options)
    return shaken(EncoderDecoder(encoder, decoder))


def sentences(lengths: list[int], size: int) -> Tensor:
    return torch.randint(1, V, (len(lengths), size)).masked_fill(~lengths_to_mask(lengths, size), 0)


CROSS: list[Any] = ["softmax", "linear", MECHANISMS["performer"], MECHANISMS["linformer"]]


@pytest.mark.parametrize("cross", CROSS, ids=["softmax", "linear", "performer", "linformer"])
@pytest.mark.parametrize("mechanism", ["softmax", "local", "linear", "performer", "linformer", "split"])
def test_more_padding_changes_no_loss_and_no_gradient(mechanism: str, cross: Any) -> None:
    model = seq2seq(cross, mechanism=MECHANISMS[mechanism])
    source, target = sentences([7, 4], 7), sentences([6, 3], 6)
    loss = model(source, target)
    longer = model(F.pad(source, (0, 3)), F.pad(target, (0, 4)))
    assert_same(longer, loss)
    check_gradients_by_name(gradients(longer, leaves(model)), gradients(loss, leaves(model)))
    masks = {"source_mask": source != 0, "target_mask": target != 0}
    garbage = model(source + 5 * (source == 0), target + 5 * (target == 0), **masks)
    assert_same(garbage, loss)


def test_padding_on_the_left_is_padding() -> None:
    model = seq2seq(mechanism=MECHANISMS["split"], token_shift=(0, 1))
    source, target = sentences([7, 4], 7), sentences([6, 3], 6)
    left = target.clone()
    left[1] = target[1].roll(3)
    assert_same(model(source, left), model(source, target))


def test_the_loss_by_hand() -> None:
    model = seq2seq()
    source, target = sentences([7, 4], 7), sentences([6, 3], 6)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for b, (s, t) in enumerate([(7, 6), (4, 3)]):
        context = model.encoder.hidden(source[b : b + 1, :s])
        logits = model.decoder(target[b : b + 1, : t - 1], context=context)[0]
        for i in range(t - 1):
            total = total - logits[i].log_softmax(0)[target[b, i + 1]]
            count += 1
    assert_same(model(source, target), total / count)
    assert model(source, target).dtype == torch.float64


def test_the_decoder_is_causal_and_the_source_matters() -> None:
    model = seq2seq(mechanism=MECHANISMS["split"])
    source, target = sentences([7, 4], 7), sentences([6, 6], 6)
    context, mask = model.encode(source)

    def logits(target: Tensor, source: Tensor = source) -> Tensor:
        context, mask = model.encode(source)
        return model.decoder(target, context=context, context_mask=mask)

    other = target.clone()
    other[:, 4:] = other[:, 4:] % (V - 1) + 1
    assert torch.equal(logits(other)[:, :4], logits(target)[:, :4])
    assert not torch.allclose(logits(other)[:, 4:], logits(target)[:, 4:])
    changed = source.clone()
    changed[:, 0] = changed[:, 0] % (V - 1) + 1
    assert not torch.allclose(logits(target, changed)[:, 0], logits(target)[:, 0])
    assert mask.tolist() == (source != 0).tolist()
    # The encoder's mask reaches the decoder: without it the padding is seen.
    unmasked = model.decoder(target, context=context)
    assert_same(unmasked[:1], logits(target)[:1])
    assert not torch.allclose(unmasked[1:], logits(target)[1:])


def test_the_decoder_streams_after_its_source() -> None:
    model = seq2seq(mechanism=MECHANISMS["mixed"], token_shift=(0, 1))
    source, target = sentences([7, 4], 7), sentences([6, 6], 6)
    with torch.no_grad():
        context, mask = model.encode(source)
        expected = model.decoder(target, context=context, context_mask=mask)
        got = stream(model.decoder, target, [1, 3, 2], max_length=6, context=context, context_mask=mask)
    assert_same(got, expected)


def test_encoder_and_decoder_that_do_not_fit() -> None:
    encoder, decoder = config(causal=False), config(cross=AttentionConfig(num_heads=2))
    with pytest.raises(ValueError, match="the encoder must be bidirectional"):
        EncoderDecoder(config(), decoder)
    with pytest.raises(ValueError, match="the decoder must have causal=True and cross"):
        EncoderDecoder(encoder, config())
    with pytest.raises(ValueError, match="one dim, got 24 and 12"):
        EncoderDecoder(config(causal=False, dim=24), decoder)
    with pytest.raises(ValueError, match="tie_embeddings needs one vocab_size"):
        EncoderDecoder(replace(encoder, vocab_size=V + 1), decoder, tie_embeddings=True)
    tied = EncoderDecoder(encoder, decoder, tie_embeddings=True)
    assert tied.encoder.embedding is tied.decoder.embedding


def test_every_parameter_of_an_encoder_decoder_is_trained() -> None:
    model = seq2seq(embed_dim=5)
    found = gradients(model(sentences([7, 4], 7), sentences([6, 3], 6)), leaves(model))
    assert all(grad.any() for grad in found.values()), [name for name, grad in found.items() if not grad.any()]


# Classifier.


@pytest.mark.parametrize("mechanism", ["softmax", "local", "linear", "performer", "linformer", "split"])
def test_a_classifier_looks_at_real_tokens_only(mechanism: str) -> None:
    model = shaken(Classifier(config(mechanism=MECHANISMS[mechanism], causal=False, num_classes=4)))
    x, mask = tokens(), lengths_to_mask([T, 6], T)
    out = model(x, key_mask=mask)
    assert out.shape == (B, 4)
    separate = torch.cat([model(x[:1]), model(x[1:, :6])])
    assert_same(out, separate)
    assert_same(out[:1], model.to_classes(model.body.hidden(x[:1]).mean(1)))
    check_gradients_by_name(gradients(out, leaves(model)), gradients(separate, leaves(model)))
    found = gradients(out, leaves(model))
    assert all(grad.any() for grad in found.values()), [name for name, grad in found.items() if not grad.any()]


def test_a_classifier_of_vectors_with_nan_in_the_padding() -> None:
    model = shaken(Classifier(config(vocab_size=None, causal=False, num_classes=4)))
    mask = lengths_to_mask([T, 6, 0], T)
    x = torch.randn(3, T, DIM).double().masked_fill(~mask[..., None], float("nan"))
    out = model(x, key_mask=mask)
    assert_same(out[:2], torch.cat([model(x[:1]), model(x[1:2, :6])]))
    assert_same(out[2], model.to_classes.bias)
    assert all(grad.isfinite().all() for grad in gradients(out, leaves(model)).values())


def test_models_say_what_they_need() -> None:
    with pytest.raises(ValueError, match="a language model needs vocab_size"):
        LanguageModel(config(vocab_size=None))
    with pytest.raises(ValueError, match="a classifier needs num_classes"):
        Classifier(config())


# The configuration.


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
    feed_forward=FeedForwardConfig(mult=2.5, product_keys=(0, 2), num_keys=3),
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
    feed_forward = replace(RICH.feed_forward, product_keys=[0, 2])
    lists = replace(RICH, token_shift=[0, 1], axial_shape=[3, 4], feed_forward=feed_forward)
    assert lists == RICH
    assert Transformer(lists).stack.branches[0].token_shift == (0, 1)


def test_an_unknown_field_gives_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown field dept;.*did you mean 'depth'"):
        ModelConfig.from_dict({"dept": 3})
    with pytest.raises(ValueError, match=r"unknown field attention.num_head;.*did you mean 'num_heads'"):
        ModelConfig.from_dict({"attention": {"num_head": 3}})
    with pytest.raises(ValueError, match=r"unknown field feed_forward.multt;.*did you mean 'mult'"):
        ModelConfig.from_dict({"feed_forward": {"multt": 3}})


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("dim must be a positive integer, got 0", {"dim": 0}),
    ("dim must be a positive integer, got 1.5", {"dim": 1.5}),
    ("depth must be a positive integer, got -1", {"depth": -1}),
    ("inner_dim must be a positive integer, got 0", {"inner_dim": 0}),
    ("inner_dim needs feed-forward layers", {"inner_dim": 24, "feed_forward": None}),
    ("inner_dim needs .* depth of at least 2", {"inner_dim": 24, "depth": 1}),
    ("unknown norm 'layr'.*did you mean 'layer'", {"norm": "layr"}),
    ("unknown norm_position 'Pre'.*did you mean 'pre'", {"norm_position": "Pre"}),
    ("unknown positions 'learnt'.*did you mean 'learned'", {"positions": "learnt"}),
    ("unknown residual 'doubl'.*did you mean 'double'", {"residual": "doubl"}),
    ("unknown execution 'recomput'.*did you mean 'recompute'", {"execution": "recomput"}),
    ('positions="learned" needs max_length', {"positions": "learned"}),
    ('positions="axial" needs axial_shape', {"positions": "axial"}),
    ('axial_shape goes with positions="axial"', {"axial_shape": (2, 3)}),
    ("reaches 6 positions, max_length is 7", {"positions": "axial", "axial_shape": (2, 3), "max_length": 7}),
    ("max_length must be a positive integer, got 0", {"positions": "learned", "max_length": 0}),
    ("token_shift .* looks ahead", {"token_shift": (-1, 0), "causal": True}),
    ("token_shift has 5 parts, more than dim", {"token_shift": (0,) * 5, "dim": 4}),
    ("axial_stride must be at least 2, or None, got 1", {"axial_stride": 1}),
    ("num_streams must be a positive integer, got 0", {"num_streams": 0}),
    ("vocab_size must be a positive integer, got 0", {"vocab_size": 0}),
    ("embed_dim must be a positive integer, got -3", {"embed_dim": -3}),
    ("num_classes must be a positive integer, got 0", {"num_classes": 0}),
    (r"embed_dropout must be in \[0, 1\), got 1", {"embed_dropout": 1}),
    ("tie_embeddings needs vocab_size", {"tie_embeddings": True}),
    (r"product_keys \(6,\) must be layers from 0 to 5", {"feed_forward": FeedForwardConfig(product_keys=(6,))}),
]


@pytest.mark.parametrize(("text", "options"), REFUSED)
def test_a_model_configuration_names_the_field_that_is_wrong(text: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=text):
        ModelConfig(**options)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("num_heads must be a positive integer, got 0", {"num_heads": 0}),
        ("out_dim must be a positive integer, got 0", {"out_dim": 0}),
        (r"dropout must be in \[0, 1\), got -0.1", {"dropout": -0.1}),
        ("rank_step must be 0 .* got -1", {"rank_step": -1}),
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
        ("num_keys must be a positive integer, got 0", {"num_keys": 0}),
        (r"out_dropout must be in \[0, 1\), got 2", {"out_dropout": 2}),
        (r"dropout must be in \[0, 1\), got 1", {"dropout": 1}),
    ],
)
def test_a_feed_forward_configuration_names_the_field_that_is_wrong(text: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=text):
        FeedForwardConfig(**options)


def test_softmaxed_features_are_normalised_by_direction() -> None:
    """Per query where the model is causal, per feature where it is not, in every part; what is asked for stays."""
    softmax = {"mechanism": "linear", "feature_map": "softmax"}
    plain = {"mechanism": "performer", "projection": False}
    split = {"mechanism": "split", "parts": [{**softmax, "num_heads": 2}, {**plain, "num_heads": 2}]}

    def found(mechanism: Any, causal: bool) -> list[str]:
        attention = AttentionConfig(num_heads=4, mechanism=mechanism)
        model = Transformer(ModelConfig(dim=16, depth=1, causal=causal, attention=attention, cross=attention))
        layers = [branch.layer for branch in model.stack.branches if isinstance(branch.layer, Attention)]
        parts = [part for layer in layers for part in getattr(layer.mechanism, "parts", [layer.mechanism])]
        return [part.normalise for part in parts]

    assert found(softmax, True) == ["query", "feature"]
    assert found(plain, False) == ["feature", "feature"]
    assert found(split, True) == ["query", "query", "feature", "feature"]
    assert found({**softmax, "normalise": "query"}, False) == ["query", "query"]
    assert found("linear", False) == found("performer", False) == ["query", "query"]
