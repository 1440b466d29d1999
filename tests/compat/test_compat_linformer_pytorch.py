"""longspan.compat.linformer_pytorch beside linformer-pytorch 0.19.3: names, checkpoints, and the same answers."""

from __future__ import annotations

import warnings

import older
import pytest
import torch
from torch import nn

import longspan
from longspan.compat import linformer_pytorch as ours
from longspan.compat.convert import convert_weights

SIZES = {"input_size": 16, "channels": 32, "dim_k": 4, "dim_ff": 48, "nhead": 2, "depth": 2}
ENC_DEC = dict.fromkeys(("enc_num_tokens", "dec_num_tokens"), 20) | dict.fromkeys(("enc_channels", "dec_channels"), 32)
ENC_DEC |= dict.fromkeys(("enc_input_size", "dec_input_size"), 16) | dict.fromkeys(("enc_dim_k", "dec_dim_k"), 4)
ENC_DEC |= {"enc_depth": 1, "dec_depth": 1}
# The recorded models: class and arguments.
MODELS = {
    "Linformer[default]": ("Linformer", SIZES),
    "Linformer[headwise]": ("Linformer", SIZES | {"parameter_sharing": "headwise"}),
    "Linformer[kv]": ("Linformer", SIZES | {"parameter_sharing": "kv"}),
    "Linformer[none]": ("Linformer", SIZES | {"parameter_sharing": "none"}),
    "Linformer[convolution]": ("Linformer", SIZES | {"method": "convolution"}),
    "Linformer[no_params]": ("Linformer", SIZES | {"method": "no_params"}),
    "Linformer[full_attention]": ("Linformer", SIZES | {"full_attention": True}),
    "Linformer[w_o_intermediate]": ("Linformer", SIZES | {"w_o_intermediate_dim": 8}),
    "Linformer[ff_intermediate]": ("Linformer", SIZES | {"ff_intermediate": 24, "parameter_sharing": "none"}),
    "Linformer[no_ff]": ("Linformer", SIZES | {"include_ff": False}),
    "Linformer[decoder]": ("Linformer", SIZES | {"decoder_mode": True}),
    "Linformer[C1]": ("Linformer", SIZES | {"checkpoint_level": "C1"}),
    "LinformerLM": ("LinformerLM", SIZES | {"num_tokens": 20}),
    "LinformerLM[emb_dim]": ("LinformerLM", SIZES | {"num_tokens": 20, "emb_dim": 16}),
    "LinformerEncDec": ("LinformerEncDec", ENC_DEC),
}


# A convolution's bias is the same for every compressed key, and softmax does not see it.
SAME_FOR_ALL_KEYS = ("E.bias",)


def unseen(options: dict) -> tuple[str, ...]:
    apart = options.get("parameter_sharing") in ("headwise", "none")
    return SAME_FOR_ALL_KEYS if apart and options.get("method") == "convolution" else ()


def attention(library=ours, **options):
    given = {"input_size": 16, "dim": 8, "channels": 32, "dim_k": 4, "nhead": 2, "dropout": 0.0} | options
    given = {"checkpoint_level": "C0", "parameter_sharing": "layerwise", "full_attention": False} | given
    if "E_proj" not in given:
        shared = library.get_EF(given["input_size"], given["dim_k"], given.get("method", "learnable"), given["dim"])
        given |= {"E_proj": shared, "F_proj": shared}
    return library.MHAttention(**{"causal_mask": None} | given)


LAYERS = {
    "Padder": lambda: ours.Padder(ours.LinformerLM(**SIZES, num_tokens=20)),
    "MHAttention": attention,
    "FeedForward": lambda: ours.FeedForward(32, 32, 48, 0.1),
    "PositionalEmbedding": lambda: ours.PositionalEmbedding(32),
}


def test_every_recorded_variant_is_here() -> None:
    recorded = {name for name in older.recorded() if name.startswith("linformer_pytorch.")}
    assert recorded == {f"linformer_pytorch.{name}" for name in MODELS | LAYERS}


@pytest.mark.parametrize("variant", [*MODELS, *LAYERS])
def test_names(variant: str) -> None:
    if variant in LAYERS:
        module = LAYERS[variant]()
    else:
        name, arguments = MODELS[variant]
        module = getattr(ours, name)(**arguments)
    older.assert_names(module, f"linformer_pytorch.{variant}")


@pytest.mark.parametrize("variant", MODELS)
def test_models_convert(variant: str, tmp_path) -> None:
    name, arguments = MODELS[variant]
    model = getattr(ours, name)(**arguments).eval()
    new = convert_weights(model.state_dict(), "linformer-pytorch", {"class": name, **arguments})
    longspan.save(new, tmp_path / "model")
    loaded = longspan.load(tmp_path / "model").eval()
    x, context = torch.randn(2, 13, 32), torch.randn(2, 11, 32)
    tokens, source = torch.randint(20, (2, 13)), torch.randint(20, (2, 11))
    if name == "LinformerEncDec":
        out, wanted = loaded.decoder(tokens, context=loaded.encode(source)[0]), model(source, tokens)
    elif name == "LinformerLM":
        out, wanted = loaded(tokens), model(tokens)
    elif arguments.get("decoder_mode"):
        out, wanted = loaded(x, context=context), model(x, embeddings=context)
    else:
        out, wanted = loaded(x), model(x)
    torch.testing.assert_close(out, wanted, rtol=0, atol=0)


SMALL = {"input_size": 11, "channels": 12, "dim_k": 4, "dim_ff": 10, "nhead": 3, "depth": 2}
SMALL |= {"dropout": 0.0, "dropout_ff": 0.0}
OPTIONS = [
    *({"parameter_sharing": name} for name in ("layerwise", "kv", "headwise", "none")),
    *({"parameter_sharing": name, "method": "convolution"} for name in ("layerwise", "kv", "headwise", "none")),
    {"method": "convolution", "dim_k": 8},  # eleven stretches of one token
    {"method": "convolution", "dim_k": 3},  # stretches of three, and two tokens left over
    *({"parameter_sharing": name, "k_reduce_by_layer": 3} for name in ("kv", "headwise", "none")),
    {"parameter_sharing": "kv", "k_reduce_by_layer": 2, "method": "convolution", "depth": 3},
    {"dim_d": 5},
    {"nhead": 1, "parameter_sharing": "none", "method": "convolution"},
    {"nhead": 1, "parameter_sharing": "none"},
    {"full_attention": True},
    {"full_attention": True, "causal": True},
    {"full_attention": True, "parameter_sharing": "none", "decoder_mode": True},
    {"w_o_intermediate_dim": 7},
    {"ff_intermediate": 9, "parameter_sharing": "kv", "depth": 3},
    {"ff_intermediate": 9, "parameter_sharing": "none", "depth": 1},
    {"include_ff": False},
    {"activation": "relu"},
    {"decoder_mode": True},
    {"decoder_mode": True, "parameter_sharing": "headwise", "include_ff": False},
    {"checkpoint_level": "C1"},
    {"checkpoint_level": "C2"},
    {"checkpoint_level": "C2", "parameter_sharing": "none"},
]


@pytest.fixture(autouse=True)
def quiet_originals():
    with warnings.catch_warnings():
        # Its checkpoints leave a choice to torch, which says so.
        warnings.filterwarnings("ignore", message=".*use_reentrant")
        warnings.filterwarnings("ignore", message=".*requires_grad=True")
        yield


def both(name: str, **arguments) -> tuple[nn.Module, nn.Module]:
    return getattr(older.original("linformer_pytorch"), name)(**arguments), getattr(ours, name)(**arguments)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_linformer_agrees(options: dict, training: bool) -> None:
    theirs, mine = both("Linformer", **SMALL | options)
    inputs = {"tensor": torch.randn(2, 11, 12)}
    if options.get("decoder_mode"):
        inputs["embeddings"] = torch.randn(2, 11, 12)

    def call(module):
        given = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        return module.train(training)(**given), given

    older.assert_parity(theirs, mine, call, unseen(options))


@pytest.mark.parametrize("sharing", ["layerwise", "none"])
def test_input_masks_agree_where_tokens_are_real(sharing: str) -> None:
    theirs, mine = both("Linformer", **SMALL, parameter_sharing=sharing)
    mask = torch.rand(2, 11) > 0.4
    x = torch.randn(2, 11, 12)

    def call(module):
        given = x.clone().requires_grad_()
        return module(given, input_mask=mask)[mask], {"tensor": given}

    older.assert_parity(theirs, mine, call)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"emb_dim": 8},
        {"return_emb": True},
        {"return_emb": True, "emb_dim": 8},
        {"full_attention": True, "causal": True},
        {"decoder_mode": True, "emb_dim": 8},
        {"ff_intermediate": 9, "parameter_sharing": "headwise", "method": "convolution"},
        {"checkpoint_level": "C1"},
    ],
    ids=str,
)
def test_language_models_agree(options: dict) -> None:
    theirs, mine = both("LinformerLM", num_tokens=13, dropout_tokens=0.0, **SMALL | options)
    tokens, more = torch.randint(13, (2, 11)), {}
    if options.get("decoder_mode"):
        more["embeddings"] = torch.randn(2, 11, 12)
    for training in (True, False):

        def call(module, training=training):
            return module.train(training)(tokens, **more), {}

        older.assert_parity(theirs, mine, call, unseen(options))


@pytest.mark.parametrize("method", ["learnable", "convolution"])
@pytest.mark.parametrize("sharing", ["layerwise", "kv", "headwise", "none"])
@pytest.mark.parametrize("decoder", [False, True])
def test_attention_agrees(sharing: str, method: str, decoder: bool) -> None:
    options = {"parameter_sharing": sharing, "method": method, "decoder_mode": decoder, "w_o_intermediate_dim": 5}
    pair = attention(older.original("linformer_pytorch"), **options), attention(**options)
    x, context = torch.randn(2, 16, 32), {"embeddings": torch.randn(2, 16, 32)} if decoder else {}

    def call(module):
        given = x.clone().requires_grad_()
        return module(given, **context), {"tensor": given}

    older.assert_parity(*pair, call, unseen(options))


@pytest.mark.parametrize("decoder", [False, True])
def test_full_causal_attention_agrees(decoder: bool) -> None:
    mask = torch.ones(16, 16).tril() == 1
    options = {"full_attention": True, "causal_mask": mask, "decoder_mode": decoder}
    pair = attention(older.original("linformer_pytorch"), **options), attention(**options)
    x, context = torch.randn(2, 16, 32), {"embeddings": torch.randn(2, 16, 32)} if decoder else {}
    older.assert_parity(*pair, lambda module: (module(x, **context), {}))


@pytest.mark.parametrize("method", ["learnable", "convolution", "no_params"])
@pytest.mark.parametrize("full", [False, True])
def test_heads_and_projections_agree(method: str, full: bool) -> None:
    theirs = older.original("linformer_pytorch")
    pairs = [(theirs.get_EF(11, 4, method, 5), ours.get_EF(11, 4, method, 5)) for _ in range(2)]
    assert isinstance(pairs[0][1], torch.Tensor) == (method == "no_params")
    if method == "no_params":
        pairs = [(table, table.clone()) for table, _ in pairs]
    else:
        x = torch.randn(2, 5, 11)
        for pair in pairs:
            older.assert_parity(*pair, lambda module: (module(x), {}))
    heads = [theirs.LinearAttentionHead(5, 0.0, *(pair[0] for pair in pairs), None, full)]
    heads += [ours.LinearAttentionHead(5, 0.0, *(pair[1] for pair in pairs), None, full)]
    inputs = {name: torch.randn(2, 11, 5) for name in "QKV"}
    mask = None if full else torch.rand(2, 11) > 0.4

    def call(module):
        given = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        # The original fills what it is given in place.
        return module(*(x * 1 for x in given.values()), **({} if full else {"input_mask": mask})), given

    if method == "convolution":
        mask = None if full else torch.ones(2, 11, dtype=torch.bool)
    older.assert_parity(*heads, call, SAME_FOR_ALL_KEYS if method == "convolution" and not full else ())


def test_projections_without_a_bias_and_layers_that_share_one() -> None:
    theirs = older.original("linformer_pytorch")
    shared = [library.get_EF(16, 4, bias=False) for library in (theirs, ours)]
    shared[1].load_state_dict(shared[0].state_dict())
    stacks = [
        nn.ModuleList(attention(library, E_proj=E, F_proj=E) for _ in range(2))
        for library, E in zip((theirs, ours), shared, strict=True)
    ]
    x = torch.randn(2, 16, 32)
    older.assert_parity(*stacks, lambda layers: (layers[1](layers[0](x)), {}))
    assert all(head.E is shared[1] and head.F is shared[1] for layer in stacks[1] for head in layer.heads)
    assert "heads.0.E.bias" not in stacks[1][0].state_dict()
    assert len(list(shared[1].parameters())) == 1


@pytest.mark.parametrize("activation", ["gelu", "relu", None])
def test_feed_forward_and_positions_agree(activation: str | None) -> None:
    theirs, mine = both(
        "FeedForward", input_channels=6, output_channels=5, ff_dim=7, dropout=0.0, activation=activation
    )
    x = torch.randn(2, 11, 6)
    older.assert_parity(theirs, mine, lambda module: (module(x), {}))
    theirs, mine = both("PositionalEmbedding", channels=6)
    older.assert_close(mine(x), theirs(x))
    assert mine(x).shape == (1, 11, 6)
    with pytest.raises(ValueError, match=r"activation.*tanh"):
        ours.FeedForward(6, 5, 7, 0.0, "tanh")
