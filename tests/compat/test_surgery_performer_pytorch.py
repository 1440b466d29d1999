"""What fine-tuning scripts do to the modules of performer-pytorch, each by its effect; all of its names, by value."""

from __future__ import annotations

import copy
import inspect
import io
from importlib import import_module

import older
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from longspan.compat import performer_pytorch as ours
from longspan.compat.performer_pytorch import performer_enc_dec, reversible
from longspan.compat.performer_pytorch import performer_pytorch as inner

B, T, H, D = 2, 11, 3, 4
BODY = {"dim": 12, "depth": 2, "heads": H, "dim_head": D}
LM = {"num_tokens": 13, "max_seq_len": 17, **BODY}
LOCAL = {"local_attn_heads": (1, 3), "local_window_size": 5}
OPTIONS = [
    {},
    {"causal": True, **LOCAL},
    {"reversible": True, "cross_attend": True, "use_rezero": True},
    {"cross_attend": True, "shift_tokens": True, "ff_glu": True, "ff_chunks": 3},
    {"shift_tokens": True, "use_scalenorm": True, "tie_embed": True, "qkv_bias": True, "attn_out_bias": True},
    {"rotary_position_emb": False, "no_projection": True},
    {"rotary_position_emb": False, "axial_position_emb": True, "axial_position_shape": (4, 5)},
    {"generalized_attention": True, "kernel_fn": nn.PReLU(), "emb_dropout": 0.1},
]


def model(**options) -> ours.PerformerLM:
    torch.manual_seed(0)
    return ours.PerformerLM(**LM, **options)


def tokens(length: int = T) -> torch.Tensor:
    return torch.randint(13, (B, length), generator=torch.Generator().manual_seed(length))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


# The tree.


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_tree_is_the_originals(options: dict) -> None:
    theirs = older.original("performer_pytorch")
    lm = theirs.PerformerLM(**LM, **options), ours.PerformerLM(**LM, **options)
    older.assert_same_tree(*lm)
    for kinds in ("modules", "children"):
        assert [type(x).__name__ for x in getattr(lm[0], kinds)()] == [
            type(x).__name__ for x in getattr(lm[1], kinds)()
        ]
    body = {name: value for name, value in options.items() if "emb" not in name and "position" not in name}
    older.assert_same_tree(theirs.Performer(**BODY, **body), ours.Performer(**BODY, **body))


def test_the_trees_of_layers_and_wrappers() -> None:
    theirs = older.original("performer_pytorch")
    sides = {f"{side}_{k}": v for side in ("enc", "dec") for k, v in LM.items() if k != "dim"}
    for tied in (False, True):
        options = {"dim": 12, "tie_token_embeds": tied, **sides}
        older.assert_same_tree(theirs.PerformerEncDec(**options), ours.PerformerEncDec(**options))
    for build in (
        lambda m: m.AutoregressiveWrapper(m.PerformerLM(**LM, causal=True)),
        lambda m: m.SelfAttention(12, heads=H, dim_head=D, local_heads=1),
        lambda m: m.CrossAttention(12, heads=H, dim_head=D),
        lambda m: m.FastAttention(D, generalized_attention=True),
        lambda m: m.ProjectionUpdater(m.SelfAttention(12, heads=H), 5),
    ):
        older.assert_same_tree(build(theirs), build(ours))


def test_every_name_is_here() -> None:
    names = older.defined_names("performer_pytorch")
    assert len(names) == 51
    for name in names:
        submodule, _, attribute = name.partition(".")
        mine = getattr(import_module(f"longspan.compat.performer_pytorch.{submodule}"), attribute)
        theirs = getattr(older.original(f"performer_pytorch.{submodule}"), attribute)
        if inspect.isfunction(theirs):
            assert [(p.name, p.kind) for p in inspect.signature(mine).parameters.values()] == [
                (p.name, p.kind) for p in inspect.signature(theirs).parameters.values()
            ], name
        else:
            assert inspect.isclass(mine), name


def test_one_seed_draws_the_same_weights() -> None:
    theirs = older.original("performer_pytorch")
    drawn = []
    for library in (theirs, ours):
        torch.manual_seed(3)
        drawn.append(library.PerformerLM(**LM, **LOCAL, use_rezero=True).state_dict())
    for name in drawn[0]:
        # Random features of either sign: theirs favor one.
        mine, wanted = (x[name].abs() if "projection" in name else x[name] for x in drawn[::-1])
        older.assert_close(mine, wanted, name)


# Functions and small layers, by value.


def test_helpers_agree() -> None:
    theirs = older.original("performer_pytorch.performer_pytorch")
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 2)))
    for module in (theirs, inner):
        assert module.exists(0)
        assert not module.exists(None)
        assert module.default(None, 5) == 5
        assert module.default(0, 5) == 0
        assert module.empty(torch.ones(2, 0))
        assert not module.empty(torch.ones(1))
        assert module.cast_tuple((1, 2)) == (1, 2)
        assert module.cast_tuple(3) == (3,)
        assert module.get_module_device(net) == torch.device("cpu")
        assert module.find_modules(net, nn.Linear) == [net[0], net[2][0]]
        assert module.Always(7)(1, two=2) == 7
        with module.null_context() as nothing:
            assert nothing is None
    x = random(B, 5, 6)
    assert torch.equal(inner.rotate_every_two(x), theirs.rotate_every_two(x))
    mask = torch.tensor([[True] * 5, [True, True, False, False, True]])
    for amount in (-3, -1, 0, 1, 4):
        assert torch.equal(inner.shift(x, amount), theirs.shift(x, amount))
        assert torch.equal(inner.shift(x, amount, mask), theirs.shift(x, amount, mask))
    assert not inner.shift(x, -7).any()  # crashed


def test_grouped_arguments_agree() -> None:
    theirs = older.original("performer_pytorch.performer_enc_dec")
    given = {"enc_mask": 1, "dec_mask": 2, "enc_depth": 3, "mask": 4}
    for module in (theirs, performer_enc_dec):
        assert module.group_dict_by_key(lambda key: "mask" in key, given)[1] == {"enc_depth": 3}
        assert module.string_begins_with("enc_", "enc_mask")
        assert not module.string_begins_with("enc_", "dec_enc_")
        assert module.group_by_key_prefix("dec_", given)[0] == {"dec_mask": 2}
        rest = {"dec_mask": 2, "mask": 4}
        assert module.group_by_key_prefix_and_remove_prefix("enc_", given) == ({"mask": 1, "depth": 3}, rest)
        assert module.extract_enc_dec_kwargs(given) == ({"mask": 1, "depth": 3}, {"mask": 2}, {"mask": 4})
        wanted = {"mask": 1, "depth": 3}, {"mask": 2, "context_mask": 1}, {"mask": 4}
        assert module.extract_and_set_enc_dec_kwargs(given) == wanted


def test_kernels_agree() -> None:
    theirs = older.original("performer_pytorch.performer_pytorch")
    x, matrix = random(B, H, T, D), random(7, D)
    for options in ({}, {"normalize_data": False}, {"eps": 0.01, "device": "cpu"}):
        for is_query in (False, True):
            given = {"projection_matrix": matrix, "is_query": is_query, **options}
            older.assert_close(inner.softmax_kernel(x, **given), theirs.softmax_kernel(x, **given))
    for options in ({}, {"kernel_fn": torch.exp, "kernel_epsilon": 0.1}, {"normalize_data": False}):
        for given in ({"projection_matrix": matrix, **options}, {"projection_matrix": None, **options}):
            older.assert_close(inner.generalized_kernel(x, **given), theirs.generalized_kernel(x, **given))


def test_attention_functions_agree() -> None:
    theirs = older.original("performer_pytorch.performer_pytorch")
    q, k, v = random(B, H, T, 7).exp(), random(B, H, T, 7).flip(2).exp(), random(B, H, T, D)
    older.assert_close(
        inner.linear_attention(q, k[:, :, :5], v[:, :, :5]), theirs.linear_attention(q, k[:, :, :5], v[:, :, :5])
    )
    for options in ({}, {"eps": 0.5}, {"chunk_size": 3}):
        wanted = theirs.causal_linear_attention_noncuda(q, k, v, **options)
        older.assert_close(inner.causal_linear_attention_noncuda(q, k, v, **options), wanted)
    # Theirs needs an extension that is not built for recent releases of PyTorch.
    older.assert_close(inner.causal_linear_attention(q, k, v), theirs.causal_linear_attention_noncuda(q, k, v))
    table = inner.FixedPositionalEmbedding(D, 23)(q[:, 0])
    for mine, wanted in zip(
        inner.apply_rotary_pos_emb(q[..., :D], k[..., :D], table),
        theirs.apply_rotary_pos_emb(q[..., :D], k[..., :D], table),
        strict=True,
    ):
        older.assert_close(mine, wanted)


@pytest.mark.parametrize(("rows", "scaling"), [(5, 0), (4, 1), (11, 0), (13, 1)])
def test_random_matrices_agree_but_for_signs(rows: int, scaling: int) -> None:
    drawn = []
    for module in (older.original("performer_pytorch.performer_pytorch"), inner):
        torch.manual_seed(rows)
        chunk = module.orthogonal_matrix_chunk(D, device=torch.device("cpu"))
        older.assert_close(chunk @ chunk.T, torch.eye(D))
        drawn.append((chunk.abs(), module.gaussian_orthogonal_random_matrix(rows, D, scaling=scaling).abs()))
    for mine, wanted in zip(*drawn[::-1], strict=True):
        older.assert_close(mine, wanted)
    with pytest.raises(ValueError, match="scaling must be 0 or 1, got 2"):
        inner.gaussian_orthogonal_random_matrix(rows, D, scaling=2)
    # A QR decomposition alone makes the first element of the first row negative.
    first = [float(inner.orthogonal_matrix_chunk(D)[0, 0]) for _ in range(40)]
    assert 8 < sum(x > 0 for x in first) < 32


class Marked(nn.Module):
    """A layer whose output depends on a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor, scale: float = 1.0, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.linear(x).tanh() * scale


@pytest.mark.parametrize(
    "build",
    [
        lambda m: m.ReZero(Marked()),
        lambda m: m.PreScaleNorm(12, Marked()),
        lambda m: m.PreScaleNorm(12, Marked(), eps=5.0),
        lambda m: m.PreLayerNorm(12, Marked()),
        lambda m: m.Chunk(3, Marked(), along_dim=1),
        lambda m: m.Chunk(1, Marked()),
        lambda m: m.PreShiftTokens((-1, 0, 2), Marked()),
        lambda m: m.PreShiftTokens((1, 0, -1, 1, 0), Marked()),
        lambda m: m.FeedForward(12),
        lambda m: m.FeedForward(12, 2, activation=nn.Tanh, glu=True),
        lambda m: m.AbsolutePositionalEmbedding(12, 17),
        lambda m: m.FixedPositionalEmbedding(12, 17),
        lambda m: m.AxialPositionalEmbedding(12, (3, 2, 4)),
        lambda m: m.AxialPositionalEmbedding(12, (5, 4), (3, 9)),
    ],
)
def test_small_layers_agree(build) -> None:
    theirs, mine = build(older.original("performer_pytorch.performer_pytorch")).double(), build(inner).double()
    scaled = any(isinstance(part, Marked) for part in mine.modules())

    def call(module: nn.Module):
        inputs = {"x": random(B, T, 12).double().requires_grad_()}
        out = module(**inputs, **({"scale": 0.7} if scaled else {}))
        return out + 0 * inputs["x"].sum(), inputs

    older.assert_same_tree(theirs, mine)
    older.assert_parity(theirs, mine, call)


def test_a_layer_serves_itself_and_a_context() -> None:
    theirs, mine = (
        m.Attention(12, heads=H, dim_head=D) for m in (older.original("performer_pytorch.performer_pytorch"), inner)
    )
    for context in ({}, {"context": random(B, 5, 12)}):
        older.assert_parity(theirs, mine, lambda layer, context=context: (layer(random(B, T, 12), **context), {}))
    with pytest.raises(ValueError, match="local heads cannot attend to a context"):
        inner.Attention(12, heads=H, dim_head=D, local_heads=1)(random(B, T, 12), context=random(B, 5, 12))


def test_sequences_are_those_of_the_module() -> None:
    net = model(reversible=True).performer.net
    assert isinstance(net, reversible.ReversibleSequence)
    assert isinstance(net.blocks[0], reversible.ReversibleBlock)
    assert isinstance(net.blocks[0].f, reversible.Deterministic)
    routed = reversible.route_args({"mask": ((True, False), (False, True))}, {"mask": 3, "other": 4}, 2)
    assert routed == [({"mask": 3}, {}), ({}, {"mask": 3})]


# Surgery.


def test_weights_are_read_and_written() -> None:
    lm, x = model(), tokens()
    before = lm(x)
    attention = lm.performer.net.layers[0][0].fn
    assert attention.to_q.weight.shape == (H * D, 12)
    assert attention.fast_attention.projection_matrix.shape == (5, D)
    assert lm.performer.net.layers[-1][1].fn.fn.w1.weight.shape == (48, 12)
    with torch.no_grad():
        attention.to_v.weight.zero_()
    assert not torch.allclose(lm(x), before)
    with torch.no_grad():
        lm.norm.weight.zero_()
        lm.norm.bias.zero_()
    assert torch.equal(lm(x), lm.to_out.bias.expand(B, T, 13))


class Classifier(nn.Module):
    """A head as single-cell projects put in the place of to_out: a convolution over features, then dense layers."""

    def __init__(self, dropout: float = 0.0, h_dim: int = 5, out_dim: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 1, (1, 12))
        self.fc1, self.act, self.dropout = nn.Linear(T, h_dim), nn.ReLU(), nn.Dropout(dropout)
        self.fc2 = nn.Linear(h_dim, out_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv1(x[:, None]).flatten(1)
        return self.fc2(self.dropout(self.act(self.fc1(x))))


def test_all_but_a_layer_are_frozen_and_the_head_is_replaced() -> None:
    lm = model()
    pretrained = copy.deepcopy(lm.state_dict())
    for p in lm.parameters():
        p.requires_grad = False
    for p in lm.norm.parameters():
        p.requires_grad = True
    for p in lm.performer.net.layers[-2].parameters():
        p.requires_grad = True
    lm.to_out = Classifier(dropout=0.0, h_dim=7)
    assert lm(tokens()).shape == (B, 3)
    assert lm(tokens(), return_encodings=True).shape == (B, T, 12)
    optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, lm.parameters()), lr=0.02)
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(lm(tokens()), torch.tensor([0, 2]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    changed = {
        name for name, x in lm.state_dict().items() if name in pretrained and not torch.equal(x, pretrained[name])
    }
    trained = {n for n in changed if "calls" not in n and "instance" not in n}
    assert trained == {
        "norm.weight",
        "norm.bias",
        *(f"performer.net.layers.0.{n}" for n, _ in lm.performer.net.layers[0].named_parameters()),
    }
    # The checkpoint of the pretrained model goes into one with another head.
    other = model()
    other.to_out = Classifier()
    left = other.load_state_dict(pretrained, strict=False)
    assert {name.partition(".")[0] for name in left.missing_keys} == {"to_out"}
    assert set(left.unexpected_keys) == {"to_out.weight", "to_out.bias"}
    assert torch.equal(other.token_emb.weight, pretrained["token_emb.weight"])


def test_embeddings_are_replaced() -> None:
    class Given(nn.Module):
        """Positions from a table of one's own, one row longer than the sequence."""

        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding.from_pretrained(random(17, 12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.emb(torch.arange(x.shape[1]))

    lm, x = model(), tokens()
    before = lm(x)
    lm.pos_emb = Given()
    assert not torch.allclose(lm(x), before)
    lm.layer_pos_emb = inner.Always(None)
    lm.token_emb = nn.Embedding.from_pretrained(random(13, 12), freeze=False)
    plain = ours.PerformerLM(**LM, rotary_position_emb=False)
    held = lm.state_dict()
    held["pos_emb.emb.weight"] = lm.pos_emb.emb.weight
    plain.load_state_dict(held)
    assert torch.equal(plain(x), lm(x))
    lm(x).sum().backward()
    assert lm.token_emb.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("reversible", [False, True])
def test_layers_are_replaced(reversible: bool) -> None:
    class Scaled(nn.Module):
        def __init__(self, fn: nn.Module) -> None:
            super().__init__()
            self.fn = fn

        def forward(self, x: torch.Tensor, **kwargs) -> torch.Tensor:
            return 3 * self.fn(x, **kwargs)

    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 0.5 * x

    lm, x = model(reversible=reversible).eval(), tokens()
    before = lm(x)
    if reversible:
        lm.performer.net.blocks[0].f.net = Scaled(lm.performer.net.blocks[0].f.net)
        lm.performer.net.blocks[1].g.net = Own()
    else:
        lm.performer.net.layers[0][0] = Scaled(lm.performer.net.layers[0][0])
        lm.performer.net.layers[1][1] = Own()
        lm.performer.net.layers[0][0].fn.fn.fast_attention = Mean()
    mask = torch.arange(T) < torch.tensor([[T], [7]])
    out = lm(x, mask=mask)
    assert not torch.allclose(out, before)
    out.sum().backward()
    assert lm.performer.net.state_dict().keys() == lm.performer.proj_updater.instance.state_dict().keys()
    with pytest.raises(ValueError, match="was replaced"):
        lm.to_longspan()


class Mean(nn.Module):
    """Attention of one's own in the place of FastAttention: masked values are zero, as in the original."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return v.mean(2, keepdim=True).expand_as(q)


@pytest.mark.parametrize("reversible", [False, True])
def test_hooks_fire(reversible: bool) -> None:
    lm, x, seen = model(reversible=reversible, causal=True, **LOCAL), tokens(), []
    names = [name for name, module in lm.named_modules() if not isinstance(module, nn.ModuleList)]
    uncalled = ("proj_updater", "kernel_fn", "rel_pos", "local_attn.dropout", ".blocks.", "1.0.fn.fast_attention")
    for name in names:
        lm.get_submodule(name).register_forward_hook(lambda module, args, out, name=name: seen.append(name))
    out = lm(x)
    quiet = {name for name in names if name not in seen}
    assert all(any(part in name for part in uncalled) for name in quiet), quiet
    if reversible:
        assert {"performer.net.blocks.0", "performer.net.blocks.1.g", "performer.net.blocks.0.f.net.fn"} <= set(seen)
    handle = lm.performer.net.register_forward_pre_hook(lambda module, args: (0 * args[0],))
    assert not torch.allclose(lm(x), out)
    handle.remove()
    assert torch.allclose(lm(x), out)
    handle = lm.performer.register_forward_hook(lambda module, args, out: 2 * out)
    captured = []
    lm.norm.register_forward_hook(lambda module, args, out: captured.append(args[0]))
    lm(x)
    handle.remove()
    lm(x)
    older.assert_close(captured[0], 2 * captured[1])


def test_a_hooked_or_changed_model_generates_by_its_own_forward() -> None:
    lm = model(causal=True)
    wrapper, start = ours.AutoregressiveWrapper(lm), tokens(5)
    assert lm.altered() == ""
    lm.to_out = nn.Linear(12, 13)
    with torch.no_grad():
        lm.to_out.weight.zero_()
        lm.to_out.bias.copy_(F.one_hot(torch.tensor(7), 13) * 50.0)
    assert lm.altered() == ""
    assert (wrapper.generate(start, 4) == 7).all()
    lm.to_out = nn.Sequential(lm.to_out)
    with pytest.warns(
        UserWarning, match="PerformerLM cannot be converted, because to_out.*each token recomputes all tokens"
    ):
        assert (wrapper.generate(start, 4) == 7).all()
    older.assert_close(wrapper(tokens()), F.cross_entropy(lm(tokens()[:, :-1]).mT, tokens()[:, 1:], ignore_index=0))
    lm.to_out = nn.Linear(12, 13)
    lm.to_out.register_forward_hook(lambda module, args, out: out + F.one_hot(torch.tensor(5), 13) * 50.0)
    with pytest.warns(UserWarning, match="to_out has a hook"):
        assert (wrapper.generate(start, 4) == 5).all()
    older.assert_close(wrapper(tokens()), F.cross_entropy(lm(tokens()[:, :-1]).mT, tokens()[:, 1:], ignore_index=0))


@pytest.mark.parametrize("patched", ["forward", "hook for all modules"])
def test_the_loss_calls_a_patched_output_layer(patched: str) -> None:
    lm, x, handle = model(causal=True), tokens(), None
    if patched == "forward":
        lm.to_out.forward = lambda hidden: hidden.new_ones(*hidden.shape[:2], 13)
    else:
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, args, out: out.new_ones(*out.shape) if module is lm.to_out else None
        )
    try:
        older.assert_close(ours.AutoregressiveWrapper(lm, ignore_index=-1)(x), torch.tensor(13.0).log())
    finally:
        if handle is not None:
            handle.remove()


def test_hooks_of_a_default_kernel_are_one_models() -> None:
    lm, other, seen = model(generalized_attention=True), model(), []
    lm.performer.net.layers[1][0].fn.fast_attention.kernel_fn.register_forward_hook(lambda *_: seen.append(1))
    lm(tokens())
    assert len(seen) == 4  # queries and keys of two layers, which share it
    assert other.altered() == ""
    assert ours.PerformerLM(**LM).altered() == ""


def test_a_hook_on_the_net_sees_logits() -> None:
    lm, seen = model(causal=True), []
    lm.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    ours.AutoregressiveWrapper(lm)(tokens())
    assert seen == [(B, T - 1, 13)]


def test_copies_pickles_and_dtypes() -> None:
    lm, x = model(**LOCAL, generalized_attention=True).eval(), tokens()
    wanted = lm(x)
    twin = copy.deepcopy(lm)
    buffer = io.BytesIO()
    torch.save(lm, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (twin, loaded):
        assert torch.equal(other(x), wanted)
        fast = other.performer.net.layers[0][0].fn.fast_attention
        fast.redraw_projection_matrix("cpu")
        assert not torch.equal(other(x), wanted)
        assert torch.equal(lm(x), wanted)
    older.assert_close(lm.double()(x).float(), wanted)
    assert (lm.to(torch.bfloat16)(x) - wanted).abs().max() < 0.05 * wanted.abs().max()
    assert lm.bfloat16()(x).dtype == torch.bfloat16


def test_features_and_kernels_are_replaced() -> None:
    fast, q = ours.FastAttention(D, generalized_attention=True), random(B, H, T, D)
    before = fast(q, q, q)
    fast.projection_matrix = 2 * fast.projection_matrix
    scaled = fast(q, q, q)
    assert not torch.allclose(scaled, before)
    fast.kernel_fn = nn.Sigmoid()
    twin = ours.FastAttention(D, generalized_attention=True, kernel_fn="sigmoid")
    twin.load_state_dict(fast.state_dict())
    assert torch.equal(fast(q, q, q), twin(q, q, q))
    # Any number of heads and any width of values.
    older.assert_close(fast(q[:, :1], q[:, :1], q[:, :1, :, :3]), twin(q, q, q)[:, :1, :, :3])


def test_more_features_than_the_model_was_built_with() -> None:
    lm = model(causal=True)
    for fast in inner.find_modules(lm, ours.FastAttention):
        fast.projection_matrix = inner.gaussian_orthogonal_random_matrix(9, D)
    with pytest.raises(ValueError, match=r"projection_matrix has the shape \(9, 4\) and not \(5, 4\)"):
        lm.to_longspan()
    with pytest.warns(UserWarning, match="recomputes all tokens before it"):
        assert ours.AutoregressiveWrapper(lm).generate(tokens(5), 3).shape == (B, 3)


def test_an_updater_redraws_for_the_layers_inside() -> None:
    layer = ours.SelfAttention(12, heads=H, feature_redraw_interval=0)
    ours.ProjectionUpdater(nn.ModuleList([layer]), None)
    before = layer.fast_attention.projection_matrix.clone()
    layer(random(B, T, 12))
    assert torch.equal(layer.fast_attention.projection_matrix, before)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_no_tokens_and_no_visible_tokens(options: dict) -> None:
    lm = model(**options)
    context = {"context": random(B, 5, 12)} if options.get("cross_attend") else {}
    assert lm(tokens(0), **context).shape == (B, 0, 13)
    out = lm(tokens(), mask=torch.zeros(B, T), **context)
    assert out.isfinite().all()
    out.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in lm.parameters())


def test_modules_are_found_by_their_type() -> None:
    lm = model(cross_attend=True, **LOCAL)
    assert len(inner.find_modules(lm, inner.FastAttention)) == 4
    assert sum(isinstance(m, ours.SelfAttention) for m in lm.modules()) == 2
    assert sum(isinstance(m, inner.Attention) for _, m in lm.named_modules()) == 4
    for module in lm.modules():
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
    assert torch.equal(lm(tokens(), context=random(B, 5, 12)), lm.to_out.bias.expand(B, T, 13))


def test_parameter_groups_by_name_and_the_originals_optimizer() -> None:
    theirs, mine = older.original("performer_pytorch").PerformerLM(**LM), model()

    def optimizer(lm: nn.Module) -> torch.optim.Optimizer:
        plain = [p for name, p in lm.named_parameters() if "norm" in name or name.endswith("bias")]
        decayed = [p for name, p in lm.named_parameters() if "norm" not in name and not name.endswith("bias")]
        return torch.optim.AdamW([{"params": plain, "weight_decay": 0}, {"params": decayed}], lr=0.01)

    def step(lm: nn.Module, update: torch.optim.Optimizer) -> None:
        update.zero_grad()
        lm(tokens()).square().mean().backward()
        update.step()

    first = optimizer(theirs)
    for _ in range(3):
        step(theirs, first)
    mine.load_state_dict(theirs.state_dict())
    second = optimizer(mine)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for lm, update in ((theirs, first), (mine, second)):
        step(lm, update)
    for name, p in theirs.named_parameters():
        older.assert_close(mine.get_parameter(name), p, name, tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, **LOCAL}, {"shift_tokens": True}, {"generalized_attention": True}], ids=str
)
def test_models_compile_whole(options: dict) -> None:
    lm, x = model(**options, feature_redraw_interval=2), tokens()
    compiled = torch.compile(lm, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), lm(x), rtol=1e-5, atol=1e-5)
    fast = inner.find_modules(lm, ours.FastAttention)[0]
    before = fast.projection_matrix.clone()
    assert lm.performer.proj_updater.calls_since_last_redraw == 2
    compiled(x)
    assert lm.performer.proj_updater.calls_since_last_redraw == 0
    assert not torch.equal(fast.projection_matrix, before)
    torch.testing.assert_close(compiled(x), lm(x), rtol=1e-5, atol=1e-5)


# Recomputation.


def steps(net: nn.Module, run, *, updates: int = 5) -> list[torch.Tensor]:
    """Outputs, and gradients by name, of some training steps; all draws come from one seed."""
    torch.manual_seed(2)
    found = []
    for _ in range(updates):
        net.zero_grad()
        out = run(net)
        out.pow(3).sum().backward()
        found += [out.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p -= 0.01 * p.grad.sign()
    return found


DROPOUT = {"emb_dropout": 0.1, "attn_dropout": 0.2, "ff_dropout": 0.2}
CASES = {
    "language model": (lambda: ours.PerformerLM(**LM, **DROPOUT, feature_redraw_interval=1), tokens()),
    "reversible": (lambda: ours.PerformerLM(**LM, reversible=True, feature_redraw_interval=1), tokens()),
    "performer": (lambda: ours.Performer(**BODY, attn_dropout=0.2, feature_redraw_interval=1), random(B, T, 12)),
    "layer": (lambda: ours.SelfAttention(12, heads=H, dropout=0.2, feature_redraw_interval=1), random(B, T, 12)),
    "causal": (lambda: ours.SelfAttention(12, heads=H, causal=True, feature_redraw_interval=0), random(B, T, 12)),
}


# A reentrant checkpoint needs an input with a gradient, which tokens are not.
@pytest.mark.parametrize(
    ("case", "reentrant"), [*((case, False) for case in CASES), ("performer", True), ("layer", True), ("causal", True)]
)
def test_recomputation_neither_counts_nor_redraws(case: str, reentrant: bool) -> None:
    build, x = CASES[case]
    x = x.clone().requires_grad_() if x.is_floating_point() else x
    results = []
    for run in (lambda net: net(x), lambda net: checkpoint(net, x, use_reentrant=reentrant)):
        torch.manual_seed(1)
        net = build()
        before = net.state_dict()
        first = {name: tensor.clone() for name, tensor in before.items()}
        results.append(steps(net, run))
        redrawn = [
            name for name in first if "projection" in name and not torch.equal(first[name], net.state_dict()[name])
        ]
        assert redrawn
        results[-1] += [tensor.float() for tensor in net.state_dict().values()]
    for mine, wanted in zip(*results, strict=True):
        older.assert_close(mine, wanted)


def test_recomputed_layers_inside_a_model() -> None:
    def run(net: ours.PerformerLM, apart: bool) -> torch.Tensor:
        net.performer.proj_updater.redraw_projections()
        x = net.token_emb(tokens())
        for f, g in net.performer.net.layers:
            x = x + (checkpoint(f, x, use_reentrant=False) if apart else f(x))
            x = x + (checkpoint(g, x, use_reentrant=False) if apart else g(x))
        return x

    nets = [model(feature_redraw_interval=1, **DROPOUT) for _ in range(2)]
    for mine, wanted in zip(
        *(steps(net, lambda net, i=i: run(net, bool(i))) for i, net in enumerate(nets)), strict=True
    ):
        older.assert_close(mine, wanted)


def test_each_redraw_differs_and_advances_nothing() -> None:
    net = nn.ModuleList([ours.FastAttention(D), ours.FastAttention(D)])
    updater, drawn = ours.ProjectionUpdater(net, 0), [x.projection_matrix.clone() for x in net]
    torch.manual_seed(0)
    state = torch.get_rng_state()
    for _ in range(3):
        updater.redraw_projections()
        drawn += [x.projection_matrix.clone() for x in net]
        assert torch.equal(torch.get_rng_state(), state)
    assert len({float(x.sum()) for x in drawn}) == len(drawn)
