"""Every class and function of linear-attention-transformer's modules exists; the small ones beside the original's."""

import inspect
import pkgutil
from importlib import import_module

import older
import pytest
import torch
from torch import nn

from longspan.compat.linear_attention_transformer import linear_attention_transformer as ours

B, T, DIM, H = 2, 7, 6, 3


def library(module="linear_attention_transformer"):
    return older.original(f"linear_attention_transformer.{module}")


def defined(module):
    return [
        name
        for name, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module.__name__
    ]


def test_every_name_imports_from_the_same_module():
    package = older.original("linear_attention_transformer")
    names = 0
    for info in pkgutil.iter_modules(package.__path__):
        theirs = import_module(f"linear_attention_transformer.{info.name}")
        mine = import_module(f"longspan.compat.linear_attention_transformer.{info.name}")
        found = [name for name in defined(theirs) if not name.startswith("_")]
        assert [name for name in found if not hasattr(mine, name)] == []
        names += len(found)
        for name in found:
            function = getattr(theirs, name)
            if inspect.isfunction(function):
                given, wanted = (list(inspect.signature(f).parameters) for f in (getattr(mine, name), function))
                assert given[: len(wanted)] == wanted, name
    assert names == 42


def x(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


MASK = torch.arange(T) < torch.tensor([[T], [4]])
CALLS = {
    "exists": [(0,), (None,)],
    "default": [(None, 3), (0, 3)],
    "cast_tuple": [((1, 2),), ([1, 2],), (3,)],
    "safe_div": [(x(5), torch.zeros(5)), (x(5), x(5), 0.5)],
    "lcm": [(), (4, 6), (3, 5, 10), (7,)],
    "merge_dims": [(0, 1, x(2, 3, 5)), (1, 2, x(2, 3, 5, 7))],
    "expand_dim": [(x(2, 3), 1, 5), (x(2, 1, 3), 1, 5, False), (x(2, 3), -1, 5)],
    "split_at_index": [(1, 2, x(3, 5)), (0, 0, x(3, 5)), (1, -1, x(3, 5)), (1, 9, x(3, 5))],
    "max_neg_value": [(x(3),), (x(3).half(),)],
    "shift": [(x(B, T, DIM), amount, mask) for amount in (0, 1, -1, 3) for mask in (None, MASK)],
    "rotate_every_two": [(x(2, 3, DIM),)],
    "apply_rotory_pos_emb": [(x(B, H, T, DIM), x(B, H, T, DIM) + 1, x(1, T, DIM))],
}


@pytest.mark.parametrize("name", CALLS)
def test_functions(name):
    for arguments in CALLS[name]:
        results = []
        for module in (library(), ours):
            copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
            out = getattr(module, name)(*copies)
            results.append([out] if not isinstance(out, tuple) else list(out))
            results[-1] += [c for c in copies if isinstance(c, torch.Tensor)]  # what is changed in place
        for theirs, mine in zip(*results, strict=True):
            if isinstance(theirs, torch.Tensor):
                torch.testing.assert_close(mine, theirs)
            else:
                assert mine == theirs, arguments


def test_shift_by_more_than_there_is():
    assert not ours.shift(x(B, 2, DIM), 3).any()
    assert ours.shift(x(B, 0, DIM), 1).shape == (B, 0, DIM)


def test_always():
    assert ours.always(3)(1, two=2) == library().always(3)(1, two=2) == 3


@pytest.mark.parametrize(("multiple", "dim", "left"), [(5, -1, False), (5, -2, True), (7, -1, False), (3, -2, False)])
def test_pad_to_multiple(multiple, dim, left):
    from longspan.compat.linear_attention_transformer.autopadder import pad_to_multiple

    mine, padding = pad_to_multiple(x(2, 7, 7), multiple, dim, left)
    theirs, wanted = library("autopadder").pad_to_multiple(x(2, 7, 7), multiple, dim, left)
    assert padding == wanted
    assert torch.equal(mine, theirs)


def test_find_module():
    from longspan.compat.linear_attention_transformer.autopadder import find_module

    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    assert find_module(net, nn.ReLU) is net[1]
    assert find_module(net, nn.GELU) is None


class Scale(nn.Module):
    """A layer that remembers what it was given."""

    def forward(self, x, **kwargs):
        self.given = kwargs
        return x * 3 + 1


LAYERS = {
    "PreNorm": [(DIM, Scale())],
    "Chunk": [(1, Scale()), (3, Scale(), 1), (2, Scale())],
    "ProjectInOut": [(Scale(), DIM, 5), (Scale(), DIM, 5, False)],
    "PreShiftTokens": [((1, 0), Scale()), ((1, 0, -1), Scale()), ((1, 0, -1, 2), Scale())],
    "AbsolutePositionalEmbedding": [(DIM, 11)],
    "FixedPositionalEmbedding": [(DIM, 11)],
    "GELU_": [()],
    "FeedForward": [(DIM,), (DIM, 2, 0.0, nn.ReLU, True)],
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    for arguments in LAYERS[name]:
        theirs, mine = (getattr(module, name)(*arguments) for module in (library(), ours))
        mine.load_state_dict(theirs.state_dict())
        assert [n for n, _ in mine.named_modules()] == [n for n, _ in theirs.named_modules()]
        torch.testing.assert_close(mine(x(B, T, DIM)), theirs(x(B, T, DIM)))


def test_layers_pass_their_arguments_on():
    inner = Scale()
    for layer in (ours.PreNorm(DIM, inner), ours.Chunk(2, inner), ours.ProjectInOut(inner, DIM, 5)):
        layer(x(B, T, DIM), pos_emb=5)
        assert inner.given == {"pos_emb": 5}
    ours.PreShiftTokens((1, 0), inner)(x(B, T, DIM), mask=MASK, pos_emb=5)
    assert inner.given == {"mask": MASK, "pos_emb": 5}
    theirs, mine = (module.PreShiftTokens((1, 0, -1), Scale()) for module in (library(), ours))
    torch.testing.assert_close(mine(x(B, T, DIM), mask=MASK), theirs(x(B, T, DIM), mask=MASK))


@pytest.mark.parametrize("length", [10, 15])
def test_axial_folding(length):
    """A row for each of 5 columns; a length that is no multiple is padded, which fn learns from its mask."""
    mask = torch.arange(length) < torch.tensor([[length], [8]])
    theirs, mine = (module.FoldAxially(5, Scale()) for module in (library(), ours))
    for given in ({}, {"input_mask": mask}):
        torch.testing.assert_close(mine(x(B, length, DIM), **given), theirs(x(B, length, DIM), **given))
        found, wanted = mine.fn.given.get("input_mask"), theirs.fn.given["input_mask"]
        assert found is wanted is None or torch.equal(found, wanted)
    torch.testing.assert_close(mine(x(B, length, DIM)[:, :-2]), theirs(x(B, length, DIM))[:, :-2])
    assert mine.fn.given["input_mask"].sum() == B * (length - 2)
    assert mine(x(B, 0, DIM)).shape == (B, 0, DIM)


def test_clamped_denominators():
    q, k, v = x(3, B, H, 12, DIM)
    mask = torch.rand(B, 12, generator=torch.Generator().manual_seed(1)) < 0.7  # with holes
    for bucket_size in (1, 3):
        for eps in (1e-3, 0.5):
            theirs = library().causal_linear_attn(q, k.clone(), v.clone(), mask, bucket_size, eps)
            torch.testing.assert_close(ours.causal_linear_attn(q, k, v, mask, bucket_size, eps), theirs)


def test_positions_of_a_half_precision_model_are_exact():
    layer = ours.FixedPositionalEmbedding(DIM, 11).bfloat16()
    torch.testing.assert_close(layer(x(B, T, DIM).bfloat16()), ours.FixedPositionalEmbedding(DIM, 11)(x(B, T, DIM)))
    assert layer(x(B, 13, DIM).bfloat16()).shape == (1, 13, DIM)
    with pytest.raises(ValueError, match="even dimension, got 5"):
        ours.FixedPositionalEmbedding(5, 11)
    with pytest.raises(ValueError, match=r"13 tokens are more than the 11 positions .* larger max_seq_len"):
        ours.AbsolutePositionalEmbedding(DIM, 11)(x(B, 13, DIM))


def test_sinusoids_need_no_checkpoint():
    layer = ours.FixedPositionalEmbedding(DIM, 11)
    expected = layer.emb.clone()
    layer.load_state_dict({})
    layer.load_state_dict({"emb": torch.zeros(5, DIM)})
    assert torch.equal(layer.emb, expected)
    layer.load_state_dict({"emb": torch.zeros(11, DIM)})
    assert not layer(x(B, T, DIM)).any()
    with pytest.raises(RuntimeError, match="size mismatch for emb"):
        layer.load_state_dict({"emb": torch.zeros(11, DIM + 2)})


@pytest.mark.parametrize("length", [1, 7, 12])
def test_axial_positions(length):
    theirs = older.original("axial_positional_embedding").AxialPositionalEmbedding(DIM, axial_shape=(3, 4))
    mine = ours.AxialPositionalEmbedding(DIM, (3, 4))
    mine.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(mine(x(B, length, DIM)).expand(B, -1, -1), theirs(x(B, length, DIM)))


def test_product_key_memory():
    theirs = older.original("product_key_memory").PKM(DIM, num_keys=5, topk=3, dim_head=4)
    mine = ours.PKM(DIM, num_keys=5, topk=3, dim_head=4)
    mine.load_state_dict(theirs.state_dict())
    assert [n for n, _ in mine.named_modules()] == [n for n, _ in theirs.named_modules()]
    torch.testing.assert_close(mine(x(B, T, DIM)), theirs(x(B, T, DIM)))
    assert mine(x(B, 0, DIM)).shape == (B, 0, DIM)


def test_a_context_is_not_ignored():
    """The original ignores it without receives_context."""
    layer, tokens = ours.SelfAttention(DIM, H), x(B, T, DIM)
    theirs = library().SelfAttention(DIM, H)
    assert torch.equal(theirs(tokens, context=x(B, 5, DIM)), theirs(tokens))
    for given in ({"context": x(B, 5, DIM)}, {"context_mask": MASK}):
        with pytest.raises(ValueError, match="but this layer attends to x: build it with receives_context=True"):
            layer(tokens, **given)
    with pytest.raises(ValueError, match="this layer attends to a context: pass context="):
        ours.SelfAttention(DIM, H, receives_context=True)(tokens)
    for option in ({"causal": True}, {"n_local_attn_heads": 1}):
        with pytest.raises(ValueError, match="receives_context exclude each other"):
            ours.SelfAttention(DIM, H, receives_context=True, **option)
    with pytest.raises(ValueError, match=r"dim \(6\) must be a multiple of heads \(4\)"):
        ours.SelfAttention(DIM, 4)
    with pytest.raises(ValueError, match=r"n_local_attn_heads must be from 0 to heads \(3\), got 4"):
        ours.SelfAttention(DIM, H, n_local_attn_heads=4)


@pytest.mark.parametrize("causal", [False, True])
def test_axial_windows_of_one_token(causal):
    """Every column is the whole sequence."""
    options = {"dim": 8, "depth": 1, "max_seq_len": 8, "heads": 2, "attend_axially": True, "local_attn_window_size": 1}
    theirs, mine = (module.LinearAttentionTransformer(**options, causal=causal).eval() for module in (library(), ours))
    mine.load_state_dict(theirs.state_dict())
    tokens = x(B, 8, 8)
    older.assert_close(mine(tokens), theirs(tokens))
    older.assert_close(mine.to_longspan()(tokens), theirs(tokens))
