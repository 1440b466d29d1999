"""Where linear-attention-transformer is wrong for everyone: its answer and ours, and options that it ignored."""

import warnings

import lat_cases
import older
import pytest
import torch

from longspan.compat import linear_attention_transformer as ours
from longspan.compat.linear_attention_transformer import linear_attention_transformer as inner

MODEL, LM = "LinearAttentionTransformer", "LinearAttentionTransformerLM"


def library():
    return older.original("linear_attention_transformer")


def pair(name=MODEL, **options):
    """The original and ours, with the same weights."""
    theirs, mine = (lat_cases.build(package, name, **options) for package in (library(), ours))
    mine.load_state_dict(theirs.state_dict())
    return theirs.eval(), mine.eval()


def functions():
    return library().linear_attention_transformer


@pytest.mark.parametrize("bucket_size", [1, 4])
def test_the_mean_of_ones_is_one(bucket_size):
    """Its denominator is at least 0.001, which is more than small keys add up to."""
    q, k, v = torch.zeros(1, 1, 8, 64), torch.full((1, 1, 8, 64), -12.0), torch.ones(1, 1, 8, 64)
    theirs = functions().causal_linear_attn(q, k, v, bucket_size=bucket_size)
    mine = inner.causal_linear_attn(q, k, v, bucket_size=bucket_size)
    assert theirs.max() < 0.05
    # With buckets the first is empty, and is kept so: trained weights rely on it.
    expected = torch.ones_like(mine)
    if bucket_size > 1:
        expected[:, :, :bucket_size] = 0
    torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 90.0), (torch.float16, 12.0)])
def test_large_keys(dtype, size):
    """exp(k) of theirs overflows."""
    q, k, v = torch.randn(3, 1, 2, 8, 16).to(dtype).unbind(0)
    k = k + size
    assert not functions().causal_linear_attn(q, k, v, bucket_size=1).isfinite().all()
    mine = inner.causal_linear_attn(q, k, v, bucket_size=1)
    exact = inner.causal_linear_attn(q.double(), k.double(), v.double(), bucket_size=1)
    torch.testing.assert_close(mine.double(), exact, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-3)


def test_any_length():
    theirs, mine = pair(causal=True, n_local_attn_heads=2, blindspot_size=8, local_attn_window_size=16)
    x = torch.randn(2, 48, 32)
    with pytest.raises(AssertionError, match="divisible"):
        theirs(x[:, :37])
    older.assert_close(mine(x[:, :37]), theirs(x)[:, :37])


def test_left_padding_takes_no_positions():
    """In theirs every real token stands as many places later, in its table, its windows and its buckets."""
    theirs, mine = pair(LM, causal=True, n_local_attn_heads=2, blindspot_size=8)
    x, mask = torch.randint(0, 20, (2, 48)), torch.arange(48).expand(2, -1) >= 13
    real = x[:, 13:]
    older.assert_close(mine(x, input_mask=mask)[:, 13:], mine(real))
    older.assert_close(mine(real)[:, :32], theirs(real[:, :32]))
    assert (theirs(x, input_mask=mask)[:, 13:45] - theirs(real[:, :32])).abs().max() > 0.1


def test_left_padding_by_the_autopadder():
    from longspan.compat.linear_attention_transformer.autopadder import Autopadder

    theirs, mine = pair(LM, causal=True, n_local_attn_heads=2, blindspot_size=8)
    x = torch.randint(0, 20, (2, 37))
    older.assert_close(Autopadder(mine, pad_left=True)(x), mine(x))
    padded = library().autopadder.Autopadder(theirs, pad_left=True)(x)
    assert (padded - library().autopadder.Autopadder(theirs)(x)).abs().max() > 0.1


def test_token_shift_leaves_padding_where_it_is():
    theirs, mine = pair(shift_tokens=True)
    x, mask = torch.randn(2, 16, 32), torch.arange(16).expand(2, -1) < 11
    changed = torch.where(mask[..., None], x, torch.randn_like(x))
    assert (theirs(x, input_mask=mask) - theirs(changed, input_mask=mask))[:, :11].abs().max() > 1e-2
    older.assert_close(mine(x, input_mask=mask)[:, :11], mine(changed, input_mask=mask)[:, :11])
    older.assert_close(mine(x, input_mask=mask)[:, :11], mine(x[:, :11]))


@pytest.mark.parametrize("which", ["input_mask", "context_mask"])
def test_linformer_heeds_masks(which):
    x, mask = torch.randn(2, 16, 32), torch.arange(16).expand(2, -1) < 11
    changed = torch.where(mask[..., None], x, torch.randn_like(x))
    if which == "input_mask":
        theirs, mine = pair(linformer_settings={"k": 5})
        inputs = [{"x": x}, {"x": changed}]
    else:
        theirs, mine = pair(receives_context=True, context_linformer_settings={"seq_len": 16, "k": 5})
        inputs = [{"x": x, "context": x}, {"x": x, "context": changed}]
    first, second = (theirs(**given, **{which: mask})[:, :11] for given in inputs)
    assert (first - second).abs().max() > 1e-3
    first, second = (mine(**given, **{which: mask})[:, :11] for given in inputs)
    older.assert_close(first, second)


def test_reversible_layers_learn_from_vectors_that_need_no_gradient():
    theirs, mine = pair(reversible=True)
    x = torch.randn(2, 16, 32)
    assert not theirs.train()(x).requires_grad
    mine.train()(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in mine.parameters())


def test_reversible_layers_learn_in_eval_mode():
    theirs, mine = pair(reversible=True)
    x = torch.randn(2, 16, 32)
    with pytest.raises(TypeError):
        theirs(x.clone().requires_grad_()).sum().backward()
    found = []
    for training in (True, False):
        mine.zero_grad()
        mine.train(training)(x).square().sum().backward()
        found.append([p.grad.clone() for p in mine.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    older.assert_close(mine(x), theirs(x))


def test_axial_attention_with_rotary_positions():
    options = {"use_rotary_emb": True, "attend_axially": True, "causal": True}
    theirs, mine = pair(LM, **options)
    x = torch.randint(0, 20, (2, 32))
    with pytest.raises(RuntimeError):
        theirs(x)
    out = mine(x)
    assert out.shape == (2, 32, 20)
    older.assert_close(mine(x[:, :23]), out[:, :23])
    converted = mine.to_longspan()
    assert [len(b.layer.rotary) for b in converted.transformer.stack.branches if b.stride > 1] == [1, 1]
    older.assert_close(converted(x), out)


def test_embeddings_narrower_than_what_is_returned():
    options = {"emb_dim": 16, "return_embeddings": True}
    x = torch.randint(0, 20, (2, 32))
    with pytest.raises(RuntimeError):
        lat_cases.build(library(), LM, **options)(x)
    assert lat_cases.build(ours, LM, **options)(x).shape == (2, 32, 32)


def test_what_it_swallows_is_refused():
    theirs, mine = pair(LM)
    x, mask = torch.randint(0, 20, (2, 32)), torch.arange(32).expand(2, -1) < 11
    assert torch.equal(theirs(x, mask=mask), theirs(x))
    with pytest.raises(TypeError, match="mask"):
        mine(x, mask=mask)


def test_gates_dropout_and_the_number_of_keys_are_what_was_asked_for():
    options = {"ff_glu": True, "ff_dropout": 0.5, "pkm_layers": (2,), "pkm_num_keys": 7}
    theirs, mine = (lat_cases.build(package, LM, **options) for package in (library(), ours))
    first, second = "transformer.layers.layers.0.1.fn.fn.w1.weight", "transformer.layers.layers.1.1.fn.keys"
    shapes = [[tuple(module.state_dict()[name].shape) for name in (first, second)] for module in (theirs, mine)]
    assert shapes == [[(128, 32), (4, 128, 2, 128)], [(256, 32), (4, 7, 2, 128)]]
    x = torch.randint(0, 20, (2, 32))
    assert torch.equal(theirs(x), theirs(x))
    assert not torch.equal(mine(x), mine(x))
    assert torch.equal(mine.eval()(x), mine(x))


def test_dropout_after_linformer():
    options = {"linformer_settings": {"k": 5}, "attn_layer_dropout": 0.5}
    theirs, mine = (lat_cases.build(package, MODEL, **options) for package in (library(), ours))
    x = torch.randn(2, 16, 32)
    assert torch.equal(theirs(x), theirs(x))
    assert not torch.equal(mine(x), mine(x))


@pytest.mark.parametrize(
    "options",
    [
        {"attn_layer_dropout": 0.5},
        {"attn_dropout": 0.5, "n_local_attn_heads": 2},
        {"attn_dropout": 0.5, "linformer_settings": {"k": 5}},
        {"attn_dropout": 0.5, "receives_context": True, "context_linformer_settings": {"seq_len": 16, "k": 5}},
        {"ff_dropout": 0.5},
    ],
)
def test_each_dropout_drops(options):
    mine, x = lat_cases.build(ours, MODEL, **options), torch.randn(2, 16, 32)
    given = {"context": x} if "receives_context" in options else {}
    assert not torch.equal(mine(x, **given), mine(x, **given))
    assert torch.equal(mine.eval()(x, **given), mine(x, **given))


def test_chunks_are_computed_one_after_the_other():
    mine = lat_cases.build(ours, MODEL, ff_chunks=4, attend_axially=True, local_attn_window_size=16)
    layers = [module for module in mine.modules() if isinstance(module, inner.FeedForward)]
    sizes = []
    for layer in layers:
        layer.w1.register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[1]))
    mine(torch.randn(2, 16, 32))
    assert sizes == [4] * 4 * len(layers)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("attn_dropout", {"attn_dropout": 0.1}),
        ("n_local_attn_heads", {"n_local_attn_heads": 2, "linformer_settings": {"k": 5}}),
        ("blindspot_size", {"blindspot_size": 4}),
        ("context_linformer_settings", {"context_linformer_settings": {"seq_len": 16, "k": 5}}),
        ("pkm_layers beyond 1 to 2", {"pkm_layers": (1, 3)}),
        ("bucket_size", {"bucket_size": 32}),
    ],
)
def test_options_without_effect_say_so(text, options):
    with pytest.warns(UserWarning, match=rf"without effect.*, as in the original: {text}"):
        mine = lat_cases.build(ours, MODEL, **options)
    theirs = lat_cases.build(library(), MODEL, **options).eval()
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 16, 32)
    older.assert_close(mine.eval()(x), theirs(x))


def test_a_part_of_a_checkpoint_undoes_nothing():
    theirs, mine = (lat_cases.build(package, LM, ff_glu=True, pkm_layers=(1,)) for package in (library(), ours))
    mine.load_state_dict({"token_emb.weight": torch.zeros(20, 32)}, strict=False)
    assert mine.options == lat_cases.build(ours, LM, ff_glu=True, pkm_layers=(1,)).options
    with pytest.warns(UserWarning, match="trained without ff_glu"):
        mine.load_state_dict(theirs.state_dict())
    kept = dict(mine.named_modules())
    mine.load_state_dict({"token_emb.weight": torch.zeros(20, 32)}, strict=False)
    assert dict(mine.named_modules()) == kept
    wrong = {
        name: tensor[:, :9] if name.endswith("fn.keys") else tensor for name, tensor in theirs.state_dict().items()
    }
    with pytest.warns(UserWarning, match="ff_glu"), pytest.raises(RuntimeError, match=r"size mismatch for .*fn.keys"):
        mine.load_state_dict(wrong)


@pytest.mark.parametrize(
    ("options", "ignored"),
    [
        ({"ff_glu": True}, ["ff_glu"]),
        ({"pkm_layers": (1,), "pkm_num_keys": 7}, ["pkm_num_keys"]),
        ({"pkm_layers": [2]}, ["pkm_layers"]),
        ({"ff_glu": True, "reversible": True, "shift_tokens": True, "pkm_layers": (2,)}, ["ff_glu"]),
        ({"ff_glu": True, "pkm_layers": (1, 2), "pkm_num_keys": 7}, ["pkm_num_keys"]),
    ],
)
def test_the_shapes_of_an_old_checkpoint_win_with_one_warning(options, ignored):
    theirs, mine = (lat_cases.build(package, LM, **options).eval() for package in (library(), ours))
    fresh, x = mine.state_dict(), torch.randint(0, 20, (2, 32))
    mine = torch.nn.ModuleDict({"net": mine.double().float()})
    with pytest.warns(UserWarning, match=f"trained without {', '.join(ignored)}, which the original ignored") as caught:
        mine.load_state_dict({f"net.{name}": tensor for name, tensor in theirs.state_dict().items()})
    assert len(caught) == 1
    assert not any(module.training for module in mine["net"].modules())
    assert not mine["net"].altered()
    older.assert_close(mine["net"].to_longspan()(x), theirs(x))
    older.assert_close(mine["net"](x), theirs(x))
    assert {k: v.shape for k, v in mine["net"].state_dict().items()} == {
        k: v.shape for k, v in theirs.state_dict().items()
    }
    # A checkpoint of ours, in which the options took effect, loads into the same module without a word.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine["net"].load_state_dict(fresh)
    assert {k: v.shape for k, v in mine["net"].state_dict().items()} == {k: v.shape for k, v in fresh.items()}


def test_a_mask_with_holes_for_a_causal_model():
    _, mine = pair(causal=True)
    mask = torch.tensor([[True, False, True, True]])
    with pytest.raises(ValueError, match="each row of key_mask must be one run of True"):
        mine(torch.randn(1, 4, 32), input_mask=mask)
