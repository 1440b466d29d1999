"""linear-attention-transformer beside ours: outputs and gradients of the same weights, for every class and option."""

import warnings

import older
import pytest
import torch
from torch import nn

from longspan.compat import linear_attention_transformer as ours
from longspan.compat.linear_attention_transformer import linear_attention_transformer as inner

B, T, S, DIM, V = 2, 30, 7, 21, 17
SMALL = {"dim": DIM, "depth": 2, "max_seq_len": 45, "heads": 3, "local_attn_window_size": 5}
CAUSAL = {"causal": True, "blindspot_size": 3}
LOCAL = {"n_local_attn_heads": 2}

# Of both models.
SHARED = {
    "plain": {},
    "causal": {"causal": True},
    "no blind spot said as 0": {"causal": True, "blindspot_size": 0},
    "blind spot": CAUSAL,
    "local": LOCAL,
    "local causal": {**LOCAL, **CAUSAL},
    "local by layer": {"depth": 3, "n_local_attn_heads": (0, 2, 3), **CAUSAL},
    "local only": {"n_local_attn_heads": 3},
    "dim_head": {"dim_head": 11, "causal": True},
    "chunks": {"ff_chunks": 4},
    "reversible": {"reversible": True, **LOCAL, **CAUSAL},
    "axial": {"attend_axially": True},
    "axial causal": {"attend_axially": True, "dim_head": 11, **LOCAL, **CAUSAL},
    "pkm": {"pkm_layers": (2,)},
    "pkm of one layer": {"pkm_layers": 1, "causal": True},
    "context": {"receives_context": True, **CAUSAL},
    "context both ways": {"receives_context": True, "dim_head": 11},
    "linformer": {"linformer_settings": {"k": 5}, "dim_head": 11},
    "linformer reversible": {"linformer_settings": {"k": 5}, "reversible": True},
    "context linformer": {"receives_context": True, "context_linformer_settings": {"seq_len": 11, "k": 4}, **CAUSAL},
    "shift": {"shift_tokens": True},
    "shift causal": {"shift_tokens": True, **LOCAL, **CAUSAL},
    "all": {
        "attend_axially": True,
        "receives_context": True,
        "shift_tokens": True,
        "reversible": True,
        "pkm_layers": (1,),
        "ff_chunks": 2,
        **LOCAL,
        **CAUSAL,
    },
}
# Of the language model alone.
TOKENS = {
    "emb_dim": {"emb_dim": 13, "causal": True},
    "emb_dim as wide as dim": {"emb_dim": DIM},
    "rotary": {"use_rotary_emb": True, "dim_head": 10, "emb_dim": 12},
    "rotary causal": {"use_rotary_emb": True, "dim_head": 10, "emb_dim": 12, **LOCAL, **CAUSAL},
    "rotary context": {"use_rotary_emb": True, "dim_head": 10, "emb_dim": 12, "receives_context": True},
    "rotary linformer": {"use_rotary_emb": True, "dim_head": 10, "emb_dim": 12, "linformer_settings": {"k": 5}},
    "learned positions": {"use_axial_pos_emb": False},
    "embeddings": {"return_embeddings": True, **LOCAL},
}


def library():
    return older.original("linear_attention_transformer")


def both(kind, **options):
    """The original and ours, of one class and the same options."""
    made = []
    for package in (library(), ours):
        given = dict(options)
        for option, settings in (
            ("linformer_settings", package.LinformerSettings),
            ("context_linformer_settings", package.LinformerContextSettings),
        ):
            if option in given:
                given[option] = settings(**given[option])
        made.append(getattr(package, kind)(**given))
    return made


def caller(options, *, tokens, mask=None, context_mask=None):
    """What runs a model: on tokens or vectors, with a context where it takes one; hidden outputs do not count."""
    torch.manual_seed(3)
    x = torch.randint(0, V, (B, T)) if tokens else torch.randn(B, T, DIM)
    context = torch.randn(B, S, DIM)

    def call(module):
        inputs = {} if tokens else {"x": x.clone().requires_grad_()}
        given = {} if mask is None else {"input_mask": mask}
        if options.get("receives_context"):
            inputs["context"] = context.clone().requires_grad_()
            given["context"] = inputs["context"]
            if context_mask is not None:
                given["context_mask"] = context_mask
        out = module(inputs.get("x", x), **given)
        return out if mask is None else out * mask[..., None], inputs

    return call


@pytest.mark.parametrize("name", SHARED)
def test_vectors(name):
    options = SHARED[name]
    theirs, mine = both("LinearAttentionTransformer", **{**SMALL, **options})
    older.assert_parity(theirs, mine, caller(options, tokens=False))


# In eval mode the original cannot go backwards through reversible layers: its error is a test of its own.
@pytest.mark.parametrize("name", [name for name, options in SHARED.items() if "reversible" not in options])
def test_vectors_in_eval_mode(name):
    options = SHARED[name]
    theirs, mine = both("LinearAttentionTransformer", **{**SMALL, **options})
    older.assert_parity(theirs.eval(), mine.eval(), caller(options, tokens=False))


@pytest.mark.parametrize("name", ["plain", "axial causal", "all", *TOKENS])
def test_tokens(name):
    options = {**SHARED, **TOKENS}[name]
    theirs, mine = both("LinearAttentionTransformerLM", **{**SMALL, "num_tokens": V, "dim_head": None, **options})
    older.assert_parity(theirs, mine, caller(options, tokens=True))


RIGHT = torch.arange(T) < torch.tensor([[T], [19]])
HOLES = torch.rand(B, T, generator=torch.Generator().manual_seed(2)) < 0.6


@pytest.mark.parametrize("name", [n for n in SHARED if "shift" not in n and n != "all" and "linformer" not in n])
def test_masks(name):
    """Padding at the end for causal models; anything for those that look both ways."""
    options = SHARED[name]
    context_mask = torch.tensor([[True] * S, [True, False, True, True, False, False, False]])
    mask = RIGHT if options.get("causal") else HOLES
    theirs, mine = both("LinearAttentionTransformer", **{**SMALL, **options})
    older.assert_parity(theirs, mine, caller(options, tokens=False, mask=mask, context_mask=context_mask))


@pytest.mark.parametrize("name", ["rotary causal", "learned positions", "emb_dim"])
def test_masks_of_tokens(name):
    options = TOKENS[name]
    theirs, mine = both("LinearAttentionTransformerLM", **{**SMALL, "num_tokens": V, "dim_head": None, **options})
    mask = RIGHT if options.get("causal") else HOLES
    older.assert_parity(theirs, mine, caller(options, tokens=True, mask=mask))


@pytest.mark.parametrize("glu", [False, True])
def test_gates_beside_self_attention_and_not_after_it(glu):
    """With ff_glu the original gates only what follows axial and cross-attention; its checkpoints show that."""
    options = {"attend_axially": True, "receives_context": True, "ff_glu": glu, **CAUSAL}
    theirs, mine = both("LinearAttentionTransformer", **{**SMALL, **options})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore" if glu else "error", "this checkpoint was trained without ff_glu")
        older.assert_parity(theirs, mine, caller(options, tokens=False))


@pytest.mark.parametrize("pad_left", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tokens", [False, True])
def test_autopadder(tokens, masked, pad_left):
    original = older.original("linear_attention_transformer.autopadder")
    from longspan.compat.linear_attention_transformer.autopadder import Autopadder

    kind = "LinearAttentionTransformerLM" if tokens else "LinearAttentionTransformer"
    extra = {"num_tokens": V, "dim_head": None} if tokens else {}
    theirs, mine = both(kind, **{**SMALL, **LOCAL, **extra})
    theirs, mine = original.Autopadder(theirs, pad_left=pad_left), Autopadder(mine, pad_left=pad_left)
    x = torch.randint(0, V, (B, 13)) if tokens else torch.randn(B, 13, DIM)
    mask = HOLES[:, :13]

    def call(module):
        if not masked:
            return module(x), {}
        return module(x, input_mask=mask) * mask[..., None], {}

    older.assert_parity(theirs, mine, call)
    if not masked:
        other = Autopadder(mine.net, pad_left=not pad_left)
        assert (other(x) - mine(x)).abs().max() > 1e-3, "the side of the padding must tell"


def test_autopadder_for_causal_models():
    """Windows and buckets that the length does not fill, which the original needs padding for."""
    original = older.original("linear_attention_transformer.autopadder")
    theirs, mine = both("LinearAttentionTransformer", **{**SMALL, **LOCAL, **CAUSAL})
    x = torch.randn(B, 13, DIM)
    mine.load_state_dict(theirs.state_dict())
    older.assert_close(mine(x), original.Autopadder(theirs)(x))
    with pytest.raises(AssertionError, match="must be divisible"):
        theirs(x)


@pytest.mark.parametrize("options", [{}, {"norm_queries": False}, {"kernel_size": 3, "padding": 1}, {"chan_out": 11}])
@pytest.mark.parametrize("with_context", [False, True])
def test_images(options, with_context):
    theirs, mine = both("ImageLinearAttention", chan=5, heads=3, key_dim=7, value_dim=7, **options)
    x, context = torch.randn(B, 5, 4, 3), torch.randn(B, 5, 11)

    def call(module):
        dtype = module.state_dict()["to_q.weight"].dtype
        inputs = {"x": x.to(dtype, copy=True).requires_grad_()}
        if with_context:
            inputs["context"] = context.to(dtype, copy=True).requires_grad_()
        return module(*inputs.values()), inputs

    # In float64, because a bias of all keys changes nothing: its gradient is 0, and in float32 only noise.
    older.assert_parity(theirs.double(), mine.double(), call)
    older.assert_close(call(mine.float())[0], call(theirs.float())[0])


def test_images_of_values_of_another_width():
    theirs, mine = both("ImageLinearAttention", chan=5, heads=3, key_dim=7, value_dim=2)
    x = torch.randn(B, 5, 4, 3).double()
    older.assert_parity(theirs.double(), mine.double(), lambda module: (module(x), {}))
    assert mine(x, torch.randn(B, 5, 11).double()).shape == x.shape
    with pytest.raises(RuntimeError):
        theirs(x, torch.randn(B, 5, 11).double())


ATTENTION = {
    "plain": {},
    "causal": {"causal": True, "blindspot_size": 3, "n_local_attn_heads": 1, "local_attn_window_size": 5},
    "dim_head": {"dim_head": 11, "causal": True},
    "context": {"receives_context": True},
}


@pytest.mark.parametrize("name", ATTENTION)
def test_self_attention(name):
    options = ATTENTION[name]
    original = older.original("linear_attention_transformer.linear_attention_transformer")
    theirs, mine = (module.SelfAttention(DIM, 3, **options) for module in (original, inner))
    older.assert_parity(theirs, mine, caller(options, tokens=False, mask=RIGHT))


@pytest.mark.parametrize("options", [{}, {"mult": 2, "glu": True}, {"activation": nn.ReLU}])
def test_feed_forward(options):
    original = older.original("linear_attention_transformer.linear_attention_transformer")
    theirs, mine = (module.FeedForward(DIM, **options) for module in (original, inner))
    older.assert_parity(theirs, mine, caller({}, tokens=False))


@pytest.mark.parametrize("bucket_size", [None, 1, 5])
def test_functions(bucket_size):
    original = older.original("linear_attention_transformer.linear_attention_transformer")
    q, k, v = torch.randn(3, B, 3, 64, 7)
    mask = torch.arange(64) < torch.tensor([[64], [41]])
    q, k, v, mask = (x[..., :60, :] if bucket_size == 5 and x.ndim > 2 else x for x in (q, k, v, mask))
    mask = mask[:, : q.shape[2]]
    theirs = original.causal_linear_attn(q, k.clone(), v.clone(), kv_mask=mask, bucket_size=bucket_size)
    seen = mask[:, None, :, None]
    older.assert_close(inner.causal_linear_attn(q, k, v, mask, bucket_size) * seen, theirs * seen)
    older.assert_close(inner.linear_attn(q, k, v, mask), original.linear_attn(q, k.clone(), v.clone(), mask))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dropped", [False, True])
def test_sequences_of_layers_of_ones_own(reverse, dropped):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x, context=None):
            return self.linear(x) if context is None else self.linear(x + context)

    original = older.original("linear_attention_transformer.reversible")
    from longspan.compat.linear_attention_transformer import reversible

    name = "ReversibleSequence" if reverse else "SequentialSequence"
    route = {"context": ((True, False), (False, True), (True, True))}

    def make(package):
        pairs = nn.ModuleList(nn.ModuleList([Layer(), Layer()]) for _ in range(3))
        return getattr(package, name)(pairs, args_route=route, layer_dropout=0.5 if dropped else 0.0)

    def call(module):
        torch.manual_seed(0)
        inputs = {"x": torch.randn(B, 5, DIM).requires_grad_()}
        context = torch.randn(B, 1, DIM)
        torch.manual_seed(4)
        return module(inputs["x"], context=context), inputs

    older.assert_parity(make(original), make(reversible), call)
    with pytest.raises(TypeError, match="args_route has no entry for mask"):
        make(reversible)(torch.randn(B, 5, DIM), mask=None)
    with pytest.raises(ValueError, match="one entry for each of 1 pairs"):
        getattr(reversible, name)(nn.ModuleList([nn.ModuleList([Layer(), Layer()])]), args_route=route)
