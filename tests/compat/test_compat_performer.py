"""Where performer-pytorch is wrong for everyone: its answer and ours; and options that it ignored."""

import copy

import pytest
import torch
from older import assert_close, copy_weights, original
from torch import nn

from longspan.compat import performer_pytorch as ours
from longspan.compat.performer_pytorch.options import resolve_kernel

B, T, H, D = 2, 17, 3, 10
LM = {"num_tokens": 13, "max_seq_len": 23, "dim": 18, "depth": 2, "heads": H, "dim_head": D}
LAYER = {"dim": 18, "heads": H, "dim_head": D}
BODY = {"dim": 18, "depth": 2, "heads": H, "dim_head": D}


@pytest.fixture
def theirs():
    return original("performer_pytorch")


def pair(theirs, name, **options):
    """The same module twice, of the original and of ours, in eval mode."""
    model, mine = getattr(theirs, name)(**options), getattr(ours, name)(**options)
    copy_weights(model, mine)
    return model.eval(), mine.eval()


def heads(*shape):
    return tuple(torch.randn(B, H, *shape, D) for _ in range(3))


def test_the_future_moves_the_past_there_and_not_here(theirs):
    model, mine = pair(theirs, "FastAttention", dim_heads=D, causal=True)
    q, k, v = heads(T)
    longer = k.clone()
    longer[:, :, -1] *= 5
    before = slice(None), slice(None), slice(None, -1)
    leak = (model(q, longer, v) - model(q, k, v))[before].abs().max()
    assert leak > 0.01 * model(q, k, v).abs().max()
    assert torch.equal(mine(q, longer, v)[before], mine(q, k, v)[before])
    for t in (1, 2, 9, T):
        prefix = model(q[:, :, :t], k[:, :, :t], v[:, :, :t])
        assert_close(mine(q, k, v)[:, :, t - 1], prefix[:, :, -1])
    assert_close(mine(q, k, v)[:, :, -1], model(q, k, v)[:, :, -1])


@pytest.mark.parametrize("no_projection", [False, True])
@pytest.mark.parametrize("name", ["SelfAttention", "PerformerLM"])
def test_padding_changes_answers_there_and_not_here(theirs, name, no_projection):
    model, mine = pair(theirs, name, **(LAYER if name == "SelfAttention" else LM), no_projection=no_projection)
    x = torch.randn(B, T, 18) if name == "SelfAttention" else torch.randint(0, 13, (B, T))
    mask = torch.arange(T) < torch.tensor([[T], [11]])
    alone = model(x[1:, :11])
    assert (model(x, mask=mask)[1:, :11] - alone).abs().max() > 0.01 * alone.abs().max()
    assert_close(mine(x, mask=mask)[1:, :11], alone)
    assert_close(mine(x, mask=mask)[:1], model(x[:1]))
    if name == "SelfAttention":
        assert torch.equal(mine(x, context_mask=mask), mine(x, mask=mask))
        with pytest.raises(ValueError, match="pass one of them"):
            mine(x, mask=mask, context_mask=mask)


def test_masks_of_contexts(theirs):
    model, mine = pair(theirs, "CrossAttention", **LAYER)
    x, context = torch.randn(B, T, 18), torch.randn(B, 7, 18)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    alone = model(x[1:], context=context[1:, :4])
    assert (model(x, context=context, context_mask=mask)[1:] - alone).abs().max() > 0.01 * alone.abs().max()
    assert_close(mine(x, context=context, context_mask=mask)[1:], alone)
    context[1, 4:] = float("nan")
    assert_close(mine(x, context=context, context_mask=mask)[1:], alone)
    seen = torch.arange(T) < 5
    assert_close(mine(x, context=context, context_mask=mask, mask=seen.expand(B, T))[1:, :5], alone[:, :5])


def test_token_shift_carries_padding_there_and_not_here(theirs):
    options = {**LM, "shift_tokens": True, "causal": True, "generalized_attention": True}
    model, mine = pair(theirs, "PerformerLM", **options)
    x = torch.randint(0, 13, (B, T))
    mask = (torch.arange(T) >= torch.tensor([[0], [6]])).expand(B, T)
    wanted = mine(x[1:, 6:])
    assert_close(wanted, model(x[1:, 6:]))
    assert (model(x, mask=mask)[1:, 6:] - wanted).abs().max() > 0.1 * wanted.abs().max()
    assert_close(mine(x, mask=mask)[1:, 6:], wanted)


def test_local_heads_attend_to_padding_there_and_not_here(theirs):
    model, mine = pair(theirs, "SelfAttention", **LAYER, local_heads=3, local_window_size=5)
    x = torch.randn(B, 18, 18)
    wanted = model(x, mask=torch.ones(B, 18, dtype=torch.bool))
    assert (model(x) - wanted).abs().max() > 0.01 * wanted.abs().max()
    assert_close(mine(x), wanted)


def test_large_keys_overflow_there_and_not_here(theirs):
    model, mine = pair(theirs, "FastAttention", dim_heads=D, causal=True, no_projection=True)
    q, k, v = heads(T)
    assert not model(q, 60 * k, v).isfinite().all()
    assert mine(q, 60 * k, v).isfinite().all()
    assert_close(mine(q, k, v), model(q, k, v))
    # Sums of exponentials that are as small as what the original adds to them.
    assert_close(mine(q, k - 14, v), model(q, k - 14, v))
    assert (model(q, k - 14, v) - model(q, k, v)).abs().max() > 0.1


def test_half_precision(theirs):
    for options in ({}, {"causal": True}, {"generalized_attention": True, "causal": True}):
        mine = ours.FastAttention(D, **options)
        exact = [x.requires_grad_() for x in heads(T)]
        wanted = mine(*exact)
        for dtype in (torch.float16, torch.bfloat16):
            inputs = [x.detach().to(dtype).requires_grad_() for x in exact]
            out = mine(*inputs)
            assert out.dtype == dtype
            assert (out - wanted).abs().max() < 0.03 * wanted.abs().max()
            out.sum().backward()
            assert all(x.grad.isfinite().all() for x in inputs)


def test_a_reversible_body_gets_no_gradient_there_if_its_input_needs_none(theirs):
    def missing(model):
        x = torch.randn(B, T, 18)
        out = model(x)
        if out.requires_grad:
            out.sum().backward()
        return sum(parameter.grad is None for parameter in model.parameters())

    model, mine = (library.Performer(**BODY, reversible=True) for library in (theirs, ours))
    assert missing(model) == len(list(model.parameters()))
    assert missing(mine) == 0
    x = torch.randn(B, T, 18, requires_grad=True)
    with pytest.raises(TypeError):  # It looks for random numbers that it kept in training only.
        theirs.Performer(**BODY, reversible=True).eval()(x).sum().backward()
    mine.eval()(x).sum().backward()
    assert x.grad.abs().max() > 0


def test_unknown_arguments_are_swallowed_there_and_refused_here(theirs):
    tokens = torch.randint(0, 13, (B, T))
    assert theirs.PerformerLM(**LM)(tokens, input_mask=tokens > 0).shape == (B, T, 13)
    with pytest.raises(TypeError, match="input_mask"):
        ours.PerformerLM(**LM)(tokens, input_mask=tokens > 0)
    with pytest.raises(TypeError, match="mask_"):
        ours.Performer(**BODY)(torch.randn(B, T, 18), mask_=None)
    with pytest.raises(TypeError, match="local_atn_heads"):
        ours.PerformerLM(**LM, local_atn_heads=2)
    with pytest.raises(ValueError, match="has no cross-attention"):
        ours.PerformerLM(**LM)(tokens, context=torch.randn(B, 3, 18))


def test_what_does_not_go_is_said():
    with pytest.raises(ValueError, match=r"x has 24 tokens, more than max_seq_len \(23\)"):
        ours.PerformerLM(**LM)(torch.zeros(1, 24, dtype=torch.int64))
    with pytest.raises(ValueError, match="self-attention takes no context"):
        ours.SelfAttention(**LAYER)(torch.randn(B, T, 18), context=torch.randn(B, T, 18))
    with pytest.raises(ValueError, match="cross-attention needs a context"):
        ours.CrossAttention(**LAYER)(torch.randn(B, T, 18))
    with pytest.raises(ValueError, match="local heads cannot attend to a context"):
        ours.CrossAttention(**LAYER, local_heads=1)
    with pytest.raises(ValueError, match="local_attn_heads must be one number, or one for each of 2 layers"):
        ours.PerformerLM(**LM, local_attn_heads=(1, 2, 3))
    with pytest.raises(ValueError, match=r"of shape \(1, 17, 10\), such as FixedPositionalEmbedding\(10, …\) returns"):
        ours.SelfAttention(**LAYER)(torch.randn(B, T, 18), pos_emb=torch.zeros(1, T, 18))
    with pytest.raises(ValueError, match="must be a multiple of heads"):
        ours.Performer(dim=17, depth=1, heads=4)
    with pytest.raises(ValueError, match="kernel_fn must be a function or one of relu, elu"):
        resolve_kernel(3)
    with pytest.raises(ValueError, match="unknown kernel_fn 'reelu'"):
        ours.FastAttention(8, generalized_attention=True, kernel_fn="reelu")


def test_options_that_exclude_others_say_so():
    with pytest.warns(UserWarning, match="kernel_fn have no effect with it"):
        ours.FastAttention(8, generalized_attention=True, no_projection=True)
    with pytest.warns(UserWarning, match="use_rezero has no effect with use_scalenorm"):
        model = ours.PerformerLM(**LM, use_scalenorm=True, use_rezero=True)
    assert "performer.net.layers.0.0.g" in model.state_dict()
    with pytest.warns(UserWarning, match="pos_emb has no effect"):
        ours.CrossAttention(**LAYER)(torch.randn(B, T, 18), context=torch.randn(B, 3, 18), pos_emb=torch.zeros(1, T, D))


def test_kernels_by_name_can_be_saved():
    assert resolve_kernel(nn.ReLU(inplace=True)) == resolve_kernel(torch.relu) == resolve_kernel("relu") == "relu"
    assert resolve_kernel(nn.Softplus()) == "softplus"
    own = nn.Softplus(beta=2)
    assert resolve_kernel(own) is own


# Redrawing the random features.


def projections(model):
    return [x.clone() for name, x in model.state_dict().items() if name.endswith("projection_matrix")]


def same(first, second):
    return [torch.equal(a, b) for a, b in zip(first, second, strict=True)]


@pytest.mark.parametrize("interval", [0, 1, 3])
def test_redraws_fall_where_they_fell(theirs, interval):
    tokens = torch.randint(0, 13, (B, 5))
    model, mine = (library.PerformerLM(**LM, feature_redraw_interval=interval) for library in (theirs, ours))
    for _ in range(9):
        changed = []
        for module in (model, mine):
            before = projections(module)
            module(tokens)
            changed.append([not equal for equal in same(before, projections(module))])
            assert all(changed[-1]) == any(changed[-1])
        assert changed[0] == changed[1]
        calls = [module.state_dict()["performer.proj_updater.calls_since_last_redraw"] for module in (model, mine)]
        assert calls[0] == calls[1] == mine.performer.proj_updater.calls_since_last_redraw
    for module in (model, mine):
        before = projections(module.eval())
        for _ in range(5):
            module(tokens)
        assert all(same(before, projections(module)))


def test_a_loaded_count_goes_on(theirs):
    model, mine = (library.PerformerLM(**LM, feature_redraw_interval=3) for library in (theirs, ours))
    tokens = torch.randint(0, 13, (B, 5))
    for _ in range(2):
        model(tokens)
    mine.load_state_dict(model.state_dict())
    before = projections(mine)
    mine(tokens)
    assert all(same(before, projections(mine)))
    mine(tokens)
    assert not any(same(before, projections(mine)))


def test_fixed_projections_stay():
    model, tokens = ours.PerformerLM(**LM, feature_redraw_interval=1), torch.randint(0, 13, (B, 5))
    model.fix_projection_matrices_()
    before = projections(model)
    for _ in range(5):
        model(tokens)
    assert all(same(before, projections(model)))
    assert model.to_longspan().config.attention.mechanism["redraw_interval"] is None
    body = ours.Performer(**BODY, feature_redraw_interval=1)
    body.fix_projection_matrices_()
    assert body.proj_updater.feature_redraw_interval is None
    body.proj_updater.feature_redraw_interval = 0
    before = projections(body)
    body(torch.randn(B, T, 18))
    assert not any(same(before, projections(body)))


def test_redraws_by_hand(theirs):
    with pytest.raises(AttributeError):
        theirs.PerformerLM(**LM).check_redraw_projections()
    model = ours.PerformerLM(**LM, auto_check_redraw=False, feature_redraw_interval=2)
    tokens, before = torch.randint(0, 13, (B, 5)), projections(model)
    for _ in range(5):
        model(tokens)
    assert all(same(before, projections(model)))
    for call in range(3):
        assert all(same(before, projections(model))), call
        model.check_redraw_projections()
    assert not any(same(before, projections(model)))
    before = projections(model.eval())
    for _ in range(5):
        model.check_redraw_projections()
    assert all(same(before, projections(model)))
    model.train().performer.check_redraw_projections()
    assert model.performer.proj_updater.calls_since_last_redraw == 1


def test_layers_redraw_by_themselves_here(theirs):
    x = torch.randn(B, T, 18)
    for library, redrawn in ((theirs, False), (ours, True)):
        layer = library.SelfAttention(**LAYER, feature_redraw_interval=2)
        before = projections(layer)
        for _ in range(2):
            layer(x)
        assert all(same(before, projections(layer)))
        layer(x)
        assert same(before, projections(layer)) == [not redrawn]
    cross = ours.CrossAttention(**LAYER, feature_redraw_interval=0)
    before = projections(cross)
    cross(x, context=x)
    assert not any(same(before, projections(cross)))
    kept = projections(cross.eval())
    cross(x, context=x)
    assert all(same(kept, projections(cross)))


def test_an_updater_for_ones_own_layers(theirs):
    for library in (theirs, ours):
        net = nn.ModuleList([library.FastAttention(D), library.FastAttention(D, causal=True), nn.Linear(2, 3)])
        updater = library.ProjectionUpdater(net, 2)
        before = projections(net)
        for _ in range(2):
            updater.redraw_projections()
        assert all(same(before, projections(net)))
        assert updater.calls_since_last_redraw == 2
        updater.redraw_projections()
        assert not any(same(before, projections(net)))
        before = projections(net)
        updater.eval().redraw_projections()
        updater.train().fix_projections_()
        for _ in range(5):
            updater.redraw_projections()
        assert all(same(before, projections(net)))
        net[0].redraw_projection_matrix(torch.device("cpu"))
        assert same(before, projections(net)) == [False, True]


def test_copies_are_their_own():
    model = ours.PerformerLM(**LM, feature_redraw_interval=0)
    twin = copy.deepcopy(model)
    before = projections(model)
    twin(torch.randint(0, 13, (B, 5)))
    twin.fix_projection_matrices_()
    assert all(same(before, projections(model)))
    assert not any(same(before, projections(twin)))
    assert model.performer.proj_updater.feature_redraw_interval == 0
