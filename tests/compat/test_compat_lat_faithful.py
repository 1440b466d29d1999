"""faithful=True: linear-attention-transformer's own numbers, where ours are corrected."""

import warnings

import older
import pytest
import torch

from longspan.compat import faithful
from longspan.compat import linear_attention_transformer as ours
from longspan.compat.linear_attention_transformer import linear_attention_transformer as inner
from longspan.compat.linear_attention_transformer.autopadder import Autopadder

B, T, S, DIM, V = 2, 15, 11, 12, 17
SMALL = {"dim": DIM, "depth": 2, "max_seq_len": 30, "heads": 3, "local_attn_window_size": 5}
TOKENS = {**SMALL, "num_tokens": V, "dim_head": 4}
CAUSAL = {"causal": True, "blindspot_size": 3, "n_local_attn_heads": 1}
RIGHT = torch.arange(T) < torch.tensor([[T], [8]])
LEFT, HOLES = RIGHT.flip(1), torch.rand(B, T, generator=torch.Generator().manual_seed(2)) < 0.6


def library(module=""):
    return older.original(f"linear_attention_transformer{module}")


def three(kind="LinearAttentionTransformer", **options):
    """The original, ours as the original, and ours corrected, with the same weights."""
    made = []
    for package, more in ((library(), {}), (ours, {"faithful": True}), (ours, {})):
        given = {**(TOKENS if kind.endswith("LM") else SMALL), **options, **more}
        for option, settings in (
            ("linformer_settings", package.LinformerSettings),
            ("context_linformer_settings", package.LinformerContextSettings),
        ):
            if option in given:
                given[option] = settings(**given[option])
        torch.manual_seed(1)
        made.append(getattr(package, kind)(**given).eval())
    made[1].load_state_dict(made[0].state_dict())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "this checkpoint was trained without")
        made[2].load_state_dict(made[0].state_dict())
    return made


def x(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


# What is corrected: the options of a model, and arguments for which the answers differ.
CORRECTIONS = {
    "left padding": (CAUSAL, {"input_mask": LEFT}),
    "left padding of linear heads": ({"causal": True, "blindspot_size": 5}, {"input_mask": LEFT}),
    "token shift": ({"shift_tokens": True}, {"input_mask": RIGHT}),
    "token shift, causal": ({"shift_tokens": True, **CAUSAL}, {"input_mask": LEFT}),
    "linformer": ({"linformer_settings": {"k": 5}}, {"input_mask": RIGHT}),
    "context linformer": (
        {"receives_context": True, "context_linformer_settings": {"seq_len": S, "k": 4}},
        {"context": x(B, S, DIM), "context_mask": RIGHT[:, :S]},
    ),
    "reversible": ({"reversible": True, "shift_tokens": True, **CAUSAL}, {"input_mask": LEFT}),
    "axial": ({"attend_axially": True, **CAUSAL}, {"input_mask": LEFT}),
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_answers(name):
    """At every token, also at padding, which the original lets into the others."""
    options, given = CORRECTIONS[name]
    theirs, same, corrected = three(**options)
    expected = theirs(x(B, T, DIM), **given)
    older.assert_close(same(x(B, T, DIM), **given), expected, tolerance=2e-6)
    seen = given.get("input_mask", torch.ones(B, T).bool())
    assert ((corrected(x(B, T, DIM), **given) - expected) * seen[..., None]).abs().max() > 1e-3


@pytest.mark.parametrize("options", [{}, CAUSAL, {"n_local_attn_heads": 3}, {"n_local_attn_heads": 2}])
def test_masks_with_holes(options):
    """Of causal models too, which corrected ones refuse."""
    theirs, same, _ = three(**options)
    older.assert_close(same(x(B, T, DIM), HOLES), theirs(x(B, T, DIM), input_mask=HOLES), tolerance=2e-6)


def test_small_denominators():
    theirs, same, corrected = three(causal=True)
    with torch.no_grad():
        for model in (theirs, same, corrected):
            for pair in model.layers.layers:  # keys of −12
                pair[0].norm.bias.fill_(1)
                pair[0].fn.to_k.weight.fill_(-1)
    expected = theirs(x(B, T, DIM))
    older.assert_close(same(x(B, T, DIM)), expected, tolerance=2e-6)
    assert (corrected(x(B, T, DIM)) - expected).abs().max() > 1e-3
    layers = [module.SelfAttention(DIM, 3, True) for module in (library(".linear_attention_transformer"), inner)]
    with faithful():
        layers.append(inner.SelfAttention(DIM, 3, True))
    for layer in layers:
        layer.load_state_dict(layers[0].state_dict())
        with torch.no_grad():
            layer.to_k.weight.fill_(-1)
    theirs, corrected, same = (layer(x(B, T, DIM) + 1) for layer in layers)
    older.assert_close(same, theirs, tolerance=2e-6)
    assert (corrected - theirs).abs().max() > 1e-3


def test_functions_inside_the_block():
    q, v = x(2, 1, 1, 8, 64).unbind(0)
    k = torch.full_like(q, -12.0)
    expected = library(".linear_attention_transformer").causal_linear_attn(q, k.clone(), v.clone(), bucket_size=1)
    with faithful():
        older.assert_close(inner.causal_linear_attn(q, k, v, bucket_size=1), expected, tolerance=2e-6)
    assert (inner.causal_linear_attn(q, k, v, bucket_size=1) - expected).abs().max() > 0.1


def test_options_that_the_original_ignores():
    options = {"ff_glu": True, "ff_dropout": 0.5, "pkm_num_keys": 7, "attend_axially": True}
    for more in ({"pkm_layers": (2,)}, {"pkm_layers": [2]}):
        theirs, same, _ = three("LinearAttentionTransformerLM", **options, **more)
        wanted, found = ({n: p.shape for n, p in model.named_parameters()} for model in (theirs, same))
        assert found == wanted
        tokens = torch.randint(0, V, (B, T))
        older.assert_close(same(tokens), theirs(tokens), tolerance=2e-6)
    _, same, _ = three(linformer_settings={"k": 5}, attn_layer_dropout=0.5, ff_dropout=0.5)
    same.train()
    assert torch.equal(same(x(B, T, DIM)), same(x(B, T, DIM)))


@pytest.mark.parametrize("pad_left", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_autopadder(causal, pad_left):
    options = {**CAUSAL, "causal": causal} if causal else {"n_local_attn_heads": 1}
    theirs, same, corrected = three("LinearAttentionTransformerLM", **options)
    tokens = torch.randint(0, V, (B, 13), generator=torch.Generator().manual_seed(3))
    expected = library(".autopadder").Autopadder(theirs, pad_left=pad_left)(tokens)
    older.assert_close(Autopadder(same, pad_left=pad_left)(tokens), expected, tolerance=2e-6)
    different = (Autopadder(corrected, pad_left=pad_left)(tokens) - expected).abs().max() > 1e-3
    assert different == (causal and pad_left)


def test_loss_and_generation_of_padded_rows():
    theirs, same, corrected = three("LinearAttentionTransformerLM", **CAUSAL)
    with torch.no_grad():
        theirs.token_emb.weight.mul_(3)
    tokens = torch.randint(0, V, (B, T + 1), generator=torch.Generator().manual_seed(3))
    mask = torch.arange(T + 1) < torch.tensor([[T + 1], [8]])
    losses, said = [], []
    for package, model in ((library(), theirs), (ours, same), (ours, corrected)):
        model.load_state_dict(theirs.state_dict())
        wrapper = package.AutoregressiveWrapper(model)
        losses.append([wrapper(tokens, return_loss=True, input_mask=m).item() for m in (mask, mask[:, :-1])])
        torch.manual_seed(5)
        said.append(wrapper.generate(tokens[:, :11], 7, input_mask=mask[:, :11]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] != pytest.approx(losses[0], rel=1e-3)
    assert torch.equal(said[1], said[0])
    assert not torch.equal(said[2], said[0])


def test_the_argument_overrides_the_block():
    with faithful():
        assert ours.LinearAttentionTransformerLM(**TOKENS).faithful
        assert not ours.LinearAttentionTransformerLM(**TOKENS, faithful=False).faithful
    model = ours.LinearAttentionTransformer(**SMALL, faithful=True)
    layers = [module for module in model.modules() if isinstance(module, inner.SelfAttention)]
    assert all(layer.faithful and layer.local_attn.faithful for layer in layers)
    with pytest.raises(ValueError, match="a faithful model computes what no longspan model does"):
        model.to_longspan()
