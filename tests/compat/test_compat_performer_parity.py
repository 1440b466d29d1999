"""performer-pytorch and ours, on the same weights: outputs and gradients, class by class and option by option."""

import pytest
import torch
import torch.nn.functional as F
from older import assert_close, assert_parity, original
from torch import nn

from longspan.compat import performer_pytorch as ours
from longspan.compat.performer_pytorch.performer_pytorch import FixedPositionalEmbedding

B, T, S, H, D = 2, 20, 7, 3, 10
LM = {"num_tokens": 13, "max_seq_len": 23, "dim": 18, "depth": 2, "heads": H, "dim_head": D}
BODY = {"dim": 18, "depth": 2, "heads": H, "dim_head": D}
LOCAL = {"local_attn_heads": 1, "local_window_size": 5}
OPTIONS = {
    "plain": {},
    "features": {"nb_features": 7},
    "local": LOCAL,
    "all local": {**LOCAL, "local_attn_heads": 3},
    "local in some layers": {**LOCAL, "local_attn_heads": (0, 2), "rotary_position_emb": False},
    "width": {"ff_mult": 3},
    "chunks": {"ff_chunks": 3},
    "glu": {"ff_glu": True},
    "scale norm": {"use_scalenorm": True},
    "rezero": {"use_rezero": True},
    "tied": {"tie_embed": True},
    "learned positions": {"rotary_position_emb": False},
    "axial positions": {
        "rotary_position_emb": False,
        "axial_position_emb": True,
        "axial_position_shape": (4, 7),
    },
    "axial positions, usual shape": {"rotary_position_emb": False, "axial_position_emb": True},
    "biases": {"qkv_bias": True, "attn_out_bias": True},
    "shift": {"shift_tokens": True},
    "cross": {"cross_attend": True},
    "cross, shift, local, glu": {"cross_attend": True, "shift_tokens": True, "ff_glu": True, **LOCAL},
    "reversible": {"reversible": True},
    "reversible, cross, rezero": {"reversible": True, "cross_attend": True, "use_rezero": True},
    "generalized": {"generalized_attention": True},
    "generalized, gelu": {"generalized_attention": True, "kernel_fn": nn.GELU()},
    "no projection": {"no_projection": True},
    "no projection, cross": {"no_projection": True, "cross_attend": True},
}


@pytest.fixture
def theirs():
    return original("performer_pytorch")


@pytest.fixture
def on_prefixes(theirs, monkeypatch):
    """The original without its leak: each causal query has keys stabilized by those before it alone."""
    forward = theirs.FastAttention.forward

    def causally(self, q, k, v):
        if not self.causal:
            return forward(self, q, k, v)
        rows = [forward(self, q[:, :, :t], k[:, :, :t], v[:, :, :t])[:, :, -1:] for t in range(1, q.shape[2] + 1)]
        return torch.cat(rows, 2)

    monkeypatch.setattr(theirs.FastAttention, "forward", causally)


def shaken(module):
    """Weights away from where they start, so that each of them shows."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return module


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).requires_grad_()


def on_tokens(length=T, dtype=torch.float32, **more):
    def call(module):
        tokens = torch.randint(0, 13, (B, length), generator=torch.Generator().manual_seed(1))
        context = {"context": random(B, S, 18, dtype=dtype)} if module_attends(module) else {}
        return module(tokens, **context, **more), context

    return call


def module_attends(module):
    if hasattr(module, "options"):
        return module.options.cross_attend
    return any(isinstance(part, original("performer_pytorch").CrossAttention) for part in module.modules())


def precision(name):
    """Float32, but for sums that cancel: those of a kernel of both signs, and of the gradient of one number."""
    return torch.float64 if any(word in name for word in ("gelu", "scale norm", "rezero")) else torch.float32


@pytest.mark.parametrize("name", OPTIONS)
def test_language_model(theirs, name):
    options = {**LM, **OPTIONS[name]}
    dtype = precision(name)
    model = shaken(theirs.PerformerLM(**options)).to(dtype)
    assert_parity(model, ours.PerformerLM(**options).to(dtype), on_tokens(dtype=dtype))
    mine = ours.PerformerLM(**options).to(dtype).eval()
    mine.load_state_dict(model.eval().state_dict())
    with torch.no_grad():
        assert_close(on_tokens(dtype=dtype)(mine)[0], on_tokens(dtype=dtype)(model)[0])
        encoded = on_tokens(dtype=dtype, return_encodings=True)
        assert_close(encoded(mine)[0], encoded(model)[0])


@pytest.mark.parametrize("name", [name for name in OPTIONS if "position" not in name or "learned" in name])
def test_causal_language_model(theirs, on_prefixes, name):
    options = {**LM, **OPTIONS[name], "causal": True}
    dtype = precision(name)
    model = shaken(theirs.PerformerLM(**options)).to(dtype)
    assert_parity(model, ours.PerformerLM(**options).to(dtype), on_tokens(17, dtype))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"reversible": True}, {"cross_attend": True}, LOCAL, {**LOCAL, "local_attn_heads": (3, 1), "qkv_bias": False}],
)
@pytest.mark.parametrize("turned", [False, True])
def test_performer(theirs, on_prefixes, options, causal, turned):
    def call(module):
        inputs = {"x": random(B, T, 18)}
        if "cross_attend" in options:
            inputs["context"] = random(B, S, 18)
        pos_emb = {"pos_emb": FixedPositionalEmbedding(D, 31)(inputs["x"])} if turned else {}
        return module(**inputs, **pos_emb), inputs

    model = shaken(theirs.Performer(**BODY, causal=causal, **options))
    mine = ours.Performer(**BODY, causal=causal, **options)
    assert_parity(model, mine, call)


KERNELS = {
    "relu": nn.ReLU(inplace=True),
    "elu": nn.ELU(),
    "elu, another alpha": nn.ELU(0.5),
    "gelu": nn.GELU(),
    "gelu, tanh": nn.GELU("tanh"),
    "silu": nn.SiLU(),
    "sigmoid": nn.Sigmoid(),
    "softplus": F.softplus,
    "exp": torch.exp,
    "own": lambda x: x.square(),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels(theirs, kernel, causal):
    options = {"generalized_attention": True, "kernel_fn": KERNELS[kernel], "causal": causal}
    check_fast(theirs.FastAttention(D, **options), ours.FastAttention(D, **options), dtype=torch.float64)


@pytest.mark.parametrize("causal", [False, True])
def test_a_kernel_with_weights(theirs, causal):
    options = {"dim_heads": D, "generalized_attention": True, "causal": causal}
    model = theirs.FastAttention(**options, kernel_fn=nn.PReLU(init=0.4))
    mine = ours.FastAttention(**options, kernel_fn=nn.PReLU())
    check_fast(model, mine, dtype=torch.float64)


def check_fast(model, mine, keys=T, width=D, dtype=torch.float32):
    """dtype: a kernel of both signs divides by sums near zero, which float32 does not know to five places."""

    def call(module):
        shapes = {"q": (T, D), "k": (keys, D), "v": (keys, width)}
        inputs = {name: random(B, H, *shape, dtype=dtype) for name, shape in shapes.items()}
        return module(*inputs.values()), inputs

    assert_parity(model.to(dtype), mine.to(dtype), call)


@pytest.mark.parametrize(
    "options",
    [{}, {"nb_features": 7}, {"ortho_scaling": 1}, {"no_projection": True}, {"generalized_attention": True}],
)
@pytest.mark.parametrize("causal", [False, True])
def test_fast_attention(theirs, on_prefixes, options, causal):
    model, mine = (library.FastAttention(D, causal=causal, **options) for library in (theirs, ours))
    check_fast(model, mine)
    check_fast(model, mine, keys=T if causal else S, width=6)


def test_the_usual_number_of_features_and_their_norms():
    fast = ours.FastAttention(64)
    assert fast.projection_matrix.shape == (266, 64)
    rows = ours.FastAttention(8, nb_features=5, ortho_scaling=1).projection_matrix
    torch.testing.assert_close(rows @ rows.T, 8 * torch.eye(5), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="ortho_scaling must be 0"):
        ours.FastAttention(8, ortho_scaling=2)


LAYERS = {
    "plain": {},
    "usual head size": {"dim_head": None},
    "features": {"nb_features": 7},
    "local": {"local_heads": 2, "local_window_size": 5},
    "all local": {"local_heads": 3, "local_window_size": 5},
    "biases": {"qkv_bias": True, "attn_out_bias": False},
    "generalized": {"generalized_attention": True, "kernel_fn": nn.Softplus()},
    "no projection": {"no_projection": True},
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_self_attention(theirs, on_prefixes, name, causal, turned):
    options = {"dim": 18, "heads": H, "dim_head": D, "causal": causal, **LAYERS[name]}

    def call(module):
        inputs = {"x": random(B, T, 18)}
        width = 6 if options["dim_head"] is None else D
        pos_emb = {"pos_emb": FixedPositionalEmbedding(width, 31)(inputs["x"])} if turned else {}
        return module(**inputs, **pos_emb), inputs

    assert_parity(theirs.SelfAttention(**options), ours.SelfAttention(**options), call)


@pytest.mark.parametrize("name", [name for name in LAYERS if "local" not in name])
def test_cross_attention(theirs, name):
    options = {"dim": 18, "heads": H, "dim_head": D, **LAYERS[name]}

    def call(module):
        inputs = {"x": random(B, T, 18), "context": random(B, S, 18)}
        return module(**inputs), inputs

    assert_parity(theirs.CrossAttention(**options), ours.CrossAttention(**options), call)


SIDES = {
    "plain": {},
    "tied": {"tie_token_embeds": True},
    "no projection": {"no_projection": True},
    "others": {
        "enc_reversible": True,
        "dec_reversible": True,
        "dec_tie_embed": True,
        "enc_depth": 1,
        "ignore_index": 2,
    },
}


@pytest.mark.parametrize("name", SIDES)
def test_encoder_and_decoder(theirs, on_prefixes, name):
    side = {"num_tokens": 13, "max_seq_len": 23, "depth": 2, "heads": H, "dim_head": D}
    options = {f"{which}_{key}": value for which in ("enc", "dec") for key, value in side.items()}
    options = {"dim": 18, **options, **SIDES[name]}

    def call(module):
        generator = torch.Generator().manual_seed(2)
        source, target = (torch.randint(0, 13, (B, length), generator=generator) for length in (T, 17))
        return module(source, target), {}

    model = shaken(theirs.PerformerEncDec(**options))
    assert_parity(model, ours.PerformerEncDec(**options), call)


def test_dropout_is_where_it_was():
    options = {"emb_dropout": 0.3, "ff_dropout": 0.2, "attn_dropout": 0.1, **LOCAL}
    model = ours.PerformerLM(**LM, **options)
    assert model.dropout.p == 0.3
    attention, feed_forward = (layer.fn for layer in model.performer.net.layers[0])
    assert attention.dropout.p == attention.local_attn.dropout.p == 0.1
    assert feed_forward.fn.dropout.p == 0.2
    tokens = torch.randint(0, 13, (B, T))
    for name in ("emb_dropout", "ff_dropout", "attn_dropout"):
        model = ours.PerformerLM(**LM, **{name: 0.5})
        torch.manual_seed(1)
        first = model(tokens)
        assert not torch.equal(first, model(tokens)), name
        assert torch.equal(model.eval()(tokens), model(tokens)), name


def test_weights_start_as_they_did(theirs):
    for options in ({}, {"use_scalenorm": True}, {"use_rezero": True, "rotary_position_emb": False}):
        wanted = theirs.PerformerLM(**{**LM, "dim": 96, "num_tokens": 200}, **options).state_dict()
        held = ours.PerformerLM(**{**LM, "dim": 96, "num_tokens": 200}, **options).state_dict()
        for name, tensor in held.items():
            if tensor.numel() > 1000:
                assert 0.9 < float(tensor.std() / wanted[name].std()) < 1.1, name
            elif tensor.numel() == 1:
                assert torch.equal(tensor, wanted[name]), name
