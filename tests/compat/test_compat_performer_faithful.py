"""faithful=True: where a correction changes what a trained model answers, the original's numbers."""

import pytest
import torch
from older import assert_close, copy_weights, original
from torch import nn

from longspan.compat import faithful
from longspan.compat import performer_pytorch as ours
from longspan.compat.performer_pytorch.performer_pytorch import FixedPositionalEmbedding

B, T, S, H, D = 2, 17, 7, 3, 10
LM = {"num_tokens": 13, "max_seq_len": 23, "dim": 18, "depth": 2, "heads": H, "dim_head": D}
LAYER = {"dim": 18, "heads": H, "dim_head": D}
LOCAL = {"local_attn_heads": 1, "local_window_size": 5}


@pytest.fixture
def theirs():
    return original("performer_pytorch")


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def tokens(*shape):
    return torch.randint(1, 13, shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_faithful(theirs, name, options, call, corrected=True, tolerance=1e-9):
    """The original's outputs and gradients, which a corrected model does not have if `corrected`."""
    model = getattr(theirs, name)(**options).double()
    results = []
    for module in (model, getattr(ours, name)(**options, faithful=True), getattr(ours, name)(**options)):
        copy_weights(model, module)
        out = call(module.double().eval())
        out.square().sum().backward()
        results.append((out.detach(), {key: p.grad for key, p in module.named_parameters() if p.grad is not None}))
    (wanted, gradients), (got, found), (other, _) = results
    assert_close(got, wanted, tolerance=tolerance)
    assert found.keys() == gradients.keys()
    for key, gradient in gradients.items():
        assert_close(found[key], gradient, key, tolerance=10 * tolerance)
    apart = float((other - wanted).abs().max() / wanted.abs().max())
    assert (apart > 1e-4) == corrected, apart


RIGHT = (torch.arange(T) < torch.tensor([[T], [11]])).expand(B, T)
LEFT = (torch.arange(T) >= torch.tensor([[0], [6]])).expand(B, T)
HOLES = RIGHT & (torch.arange(T) != 4)


@pytest.mark.parametrize("kernel", [{}, {"generalized_attention": True}, {"no_projection": True}])
@pytest.mark.parametrize("causal", [False, True])
def test_padded_keys_stay_in_the_normalizer(theirs, kernel, causal):
    x = tokens(B, T)
    # What follows the last real token is no key of a causal token before it.
    mask = LEFT if causal else RIGHT
    assert_faithful(theirs, "PerformerLM", {**LM, **kernel, "causal": causal}, lambda model: model(x, mask=mask))
    vectors = random(B, T, 18).double()
    options = {**LAYER, **kernel, "causal": causal}
    assert_faithful(theirs, "SelfAttention", options, lambda layer: layer(vectors, mask=mask))


def test_padded_contexts(theirs):
    x, context = random(B, T, 18).double(), random(B, S, 18).double()
    mask = torch.arange(S) < torch.tensor([[S], [4]])
    assert_faithful(theirs, "CrossAttention", LAYER, lambda layer: layer(x, context=context, context_mask=mask))
    options = {**LM, "cross_attend": True}
    call = lambda model: model(tokens(B, T), context=context, context_mask=mask)  # noqa: E731
    assert_faithful(theirs, "PerformerLM", options, call)


def test_causal_features_depend_on_the_future(theirs):
    q, k, v = (3 * random(B, H, T + i, D)[:, :, :T] for i in range(3))
    fast = theirs.FastAttention(D, causal=True)
    mine, corrected = (ours.FastAttention(D, causal=True, faithful=given) for given in (True, False))
    for module in (mine, corrected):
        copy_weights(fast, module)
    assert_close(mine(q, k, v), fast(q, k, v), tolerance=1e-6)
    assert (corrected(q, k, v) - fast(q, k, v)).abs().max() > 1e-4
    options, x = {**LAYER, "causal": True}, 5 * random(B, T, 18).double()
    assert_faithful(theirs, "SelfAttention", options, lambda layer: layer(x))


@pytest.mark.parametrize("mask", [LEFT, HOLES])
@pytest.mark.parametrize("rotary", [False, True])
def test_left_padding_takes_positions_and_masks_have_holes(theirs, mask, rotary):
    options = {**LM, "causal": True, "rotary_position_emb": rotary, "generalized_attention": True}
    model, mine = theirs.PerformerLM(**options), ours.PerformerLM(**options, faithful=True)
    copy_weights(model, mine)
    assert_close(mine.eval()(tokens(B, T), mask=mask), model.eval()(tokens(B, T), mask=mask), tolerance=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_token_shift_carries_padding(theirs, causal):
    options = {**LM, "shift_tokens": True, "no_projection": True, "causal": causal}
    assert_faithful(theirs, "PerformerLM", options, lambda model: model(tokens(B, T), mask=LEFT if causal else RIGHT))


@pytest.mark.parametrize("mask", [None, RIGHT, torch.ones(B, T, dtype=torch.bool)])
def test_local_heads_attend_past_the_end(theirs, mask):
    options = {**LM, **LOCAL}
    full = mask is not None and bool(mask.all())
    call = lambda model: model(tokens(B, T), mask=mask)  # noqa: E731
    # Their angles are float32 in a float64 model too.
    assert_faithful(theirs, "PerformerLM", options, call, corrected=not full, tolerance=1e-6)


def test_axial_positions_are_ignored_beside_rotary_ones(theirs):
    options = {**LM, "axial_position_emb": True, "axial_position_shape": (4, 7)}
    model, mine = theirs.PerformerLM(**options), ours.PerformerLM(**options, faithful=True)
    copy_weights(model, mine)
    assert_close(mine(tokens(B, T)), model(tokens(B, T)), tolerance=1e-6)


def test_far_positions_are_rounded_as_they_were(theirs):
    inner = original("performer_pytorch.performer_pytorch")
    wanted = inner.FixedPositionalEmbedding(D, 70_001).emb
    with faithful():
        mine = FixedPositionalEmbedding(D, 70_001)
    assert torch.equal(mine.emb, wanted)
    exact = FixedPositionalEmbedding(D, 70_001)
    assert (exact.emb - wanted).abs().max() > 1e-4
    exact.load_state_dict({"emb": wanted})
    assert (exact.emb - wanted).abs().max() > 1e-4
    mine.load_state_dict({"emb": 2 * wanted})
    assert torch.equal(mine.emb, 2 * wanted)


def test_layers_do_not_redraw_by_themselves():
    layer = ours.SelfAttention(**LAYER, feature_redraw_interval=0, faithful=True)
    before = layer.fast_attention.projection_matrix.clone()
    layer(random(B, T, 18))
    assert torch.equal(layer.fast_attention.projection_matrix, before)


def wrapped(library, options, **more):
    return library.AutoregressiveWrapper(library.PerformerLM(**{**LM, "causal": True, **options}), **more)


def test_the_loss_counts_predictions_of_padding(theirs):
    model = wrapped(theirs, {"no_projection": True}, ignore_index=-100)
    with faithful():
        mine = wrapped(ours, {"no_projection": True}, ignore_index=-100)
    corrected = wrapped(ours, {"no_projection": True}, ignore_index=-100)
    for module in (mine, corrected):
        copy_weights(model, module)
    x, mask = tokens(B, T + 1), torch.arange(T + 1) < torch.tensor([[T + 1], [11]])
    assert_close(mine(x, mask=mask), model(x, mask=mask), tolerance=1e-6)
    assert (corrected(x, mask=mask) - model(x, mask=mask)).abs() > 1e-3


def test_generated_tokens(theirs):
    model, mine = wrapped(theirs, {}), wrapped(ours, {"faithful": True})
    assert mine.faithful
    copy_weights(model, mine)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    calls = [
        {},
        {"mask": mask},
        {"temperature": 0.7, "filter_thres": 0.5},
        {"repetition_penalty": 1.5},
        {"eos_token": 3},
    ]
    for options in calls:
        found = []
        for module in (model, mine):
            torch.manual_seed(5)
            found.append(module.generate(tokens(B, 7), 9, **{"filter_thres": 0.8, **options}))
        assert torch.equal(*found), options
    assert mine.training
    assert mine.net.performer.training
    assert mine.generate(tokens(1, 7)[0], 3, filter_thres=0.5).shape == (3,)


def test_encoder_and_decoder(theirs):
    side = {"num_tokens": 13, "max_seq_len": 23, "depth": 1, "heads": H, "dim_head": D}
    options = {"dim": 18, **{f"{which}_{name}": value for which in ("enc", "dec") for name, value in side.items()}}
    model, mine = theirs.PerformerEncDec(**options), ours.PerformerEncDec(**options, faithful=True)
    assert mine.enc.faithful
    assert mine.dec.faithful
    assert mine.dec.net.performer.net.layers[1][0].fn.fast_attention.faithful
    copy_weights(model, mine)
    mask = torch.arange(T) < torch.tensor([[T], [11]])
    arguments = {"enc_mask": mask}
    assert_close(mine(tokens(B, T), tokens(B, S), **arguments), model(tokens(B, T), tokens(B, S), **arguments))
    found = []
    for module in (model, mine):
        torch.manual_seed(5)
        found.append(module.generate(tokens(B, T), tokens(B, 3), 9, filter_thres=0.5, **arguments))
    assert torch.equal(*found)


def test_the_argument_decides_and_then_the_block(theirs):
    with faithful():
        assert ours.PerformerLM(**LM).performer.faithful
        assert not ours.PerformerLM(**LM, faithful=False).performer.net.layers[0][0].fn.fast_attention.faithful
        assert ours.FastAttention(D).faithful
    assert not ours.PerformerLM(**LM).faithful
    with pytest.raises(ValueError, match="faithful to the original, whose numbers no longspan model computes"):
        ours.PerformerLM(**LM, faithful=True).to_longspan()


def test_a_kernel_with_weights(theirs):
    options = {"dim_heads": D, "generalized_attention": True, "kernel_fn": nn.PReLU(init=0.4)}
    fast, mine = theirs.FastAttention(**options), ours.FastAttention(**options, faithful=True)
    copy_weights(fast, mine)
    q, k, v = (random(B, H, T + i, D)[:, :, :T] for i in range(3))
    assert_close(mine(q, k, v), fast(q, k, v), tolerance=1e-5)
