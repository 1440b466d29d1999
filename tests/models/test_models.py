"""Models: streaming agrees with forward over the whole grid, padding and packing change nothing, options arrive."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import pytest
import torch
from helpers import assert_same, check_gradients_by_name, gradients, leaves, lengths_to_mask
from model_cases import DIM, MECHANISMS, B, T, V, attentions, config, shaken, stream, tokens
from torch import Tensor, nn

from longspan import Packing
from longspan.layout import TokenLayout
from longspan.models.config import AttentionConfig, ModelConfig
from longspan.models.layers import Attention, FeedForward, ProductKeyMemory, ScaleNorm
from longspan.models.transformer import LanguageModel, Transformer

POSITIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "learned": {"positions": "learned", "max_length": 20},
    "sinusoidal": {"positions": "sinusoidal", "position_base": 100.0},
    "axial": {"positions": "axial", "axial_shape": (4, 5)},
    "halves": {"rotary": "halves"},
    "interleaved": {"rotary": "interleaved", "rotary_base": 50.0},
    "partial": {"rotary": "halves", "rotary_dim": 2},
}
SHIFTS: list[tuple[int, ...]] = [(), (0, 1), (2, 0, 1)]
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "single": {},
    "post": {"norm_position": "post", "norm": "rms"},
    "rezero": {"norm_position": "rezero"},
    "parallel": {"residual": "parallel", "execution": "recompute"},
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


def build(point: tuple[Any, ...]) -> LanguageModel:
    mechanism, positions, shift, topology, fold = point
    options = {**POSITIONS[positions], **TOPOLOGIES[topology], "token_shift": shift, "axial_stride": fold}
    return shaken(LanguageModel(config(mechanism=MECHANISMS[mechanism], **options)))


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
def test_rank_step_of_old_configurations_reaches_every_layer(where: str) -> None:
    shrinking = {"num_heads": 2, "mechanism": LINFORMER, "rank_step": 2}
    values = config(depth=3).to_dict() | {"cross" if where == "cross" else "attention": shrinking}
    if where == "axial":
        values["axial_stride"] = 2
    model = Transformer(ModelConfig.from_dict(values))
    layers = [a for a in attentions(model) if a.cross == (where == "cross")]
    ranks = [layer.mechanism.rank for layer in layers]
    assert ranks == ([4, 4, 2, 2, 1, 1] if where == "axial" else [4, 2, 1])


def test_combinations_of_linformer_options_that_cannot_hold() -> None:
    with pytest.raises(ValueError, match="rank_step is for linformer; layer 1 is linear"):
        ModelConfig.from_dict({"attention": {"mechanism": (LINFORMER, "linear"), "rank_step": 1}})
    with pytest.raises(ValueError, match="is for linformer; layer 1 is linear"):
        Transformer(config(mechanism=(LINFORMER, "linear"), share_projection=True))
    with pytest.raises(ValueError, match="is for linformer; layer 0 is split"):
        Transformer(config(mechanism=MECHANISMS["split"], share_projection=True))
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
    model = Transformer(config(depth=3, inner_dim=24, product_keys=(1,), num_keys=3))
    assert isinstance(model.stack.branches[3].layer, ProductKeyMemory)
    with pytest.raises(ValueError, match="layer 0 changes the width"):
        Transformer(config(depth=2, inner_dim=24, product_keys=(0,)))


def test_a_context_may_be_longer_than_the_model() -> None:
    cross = AttentionConfig(num_heads=2, mechanism=("softmax", {"mechanism": "linformer", "max_length": 9}))
    model = shaken(LanguageModel(config(cross=cross, mechanism="linear")))
    x, context = tokens(), torch.randn(B, 9, DIM).double()
    with torch.no_grad():
        assert_same(stream(model, x[:, :4], [1, 3], max_length=4, context=context), model(x[:, :4], context=context))
        assert model.new_state(B, max_length=50, context=context).length.tolist() == [0, 0]
    with pytest.raises(ValueError, match="this model attends to a context: pass context="):
        model.new_state(B)
    with pytest.raises(ValueError, match="this model attends to a context: pass context="):
        model(x)
    plain = LanguageModel(config())
    for given in ({"context": context}, {"context_mask": torch.ones(B, 9, dtype=torch.bool)}):
        with pytest.raises(ValueError, match="this model has no cross-attention"):
            plain(x, **given)
        with pytest.raises(ValueError, match="this model has no cross-attention"):
            plain.new_state(B, **given)


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
        out = model.stack(x, TokenLayout.of(x, causal=True))
        assert 0.5 < (out - x).std() / x.std() < 2, depth
