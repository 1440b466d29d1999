"""linformer-pytorch where it is wrong for everyone: its answer, and ours; and its documents and scripts."""

from __future__ import annotations

import warnings

import older
import pytest
import torch

from longspan.compat import import_hook
from longspan.compat import linformer_pytorch as ours
from longspan.compat.convert import convert_weights

SMALL = {"input_size": 11, "channels": 12, "dim_k": 4, "dim_ff": 10, "nhead": 3, "depth": 2}
STILL = {"dropout": 0.0, "dropout_ff": 0.0}


def both(name: str, **arguments):
    pair = getattr(older.original("linformer_pytorch"), name)(**arguments), getattr(ours, name)(**arguments)
    older.copy_weights(*pair)
    return pair


def moved(module, x: torch.Tensor, **how) -> torch.Tensor:
    """How far each token's output moves when the last two tokens change."""
    other = x.clone()
    other[:, -2:] = (other[:, -2:] + 3) % 13 if x.dtype == torch.int64 else other[:, -2:] * 2
    with torch.no_grad():
        return (module(x, **how) - module(other, **how)).abs().amax(-1)


@pytest.mark.parametrize("method", ["learnable", "convolution"])
def test_causal_does_not_look_ahead(method: str) -> None:
    # Eleven tokens in five stretches: the original has as many rows as its mask expects.
    theirs, mine = both("Linformer", **SMALL | {"depth": 1, "dim_k": 5}, **STILL, causal=True, method=method)
    x = torch.randn(2, 11, 12)
    assert moved(theirs, x)[:, :-2].max() > 0.01, "the original's projection mixes all positions first"
    assert moved(mine, x)[:, :-2].max() == 0
    if method == "learnable":  # Its mask hides rows, not tokens; the last token sees all rows and all tokens.
        older.assert_close(mine(x)[:, -1], theirs(x)[:, -1])
    causal = ours.MHAttention(
        11, 4, 12, 4, 3, 0.0, "C0", "kv", None, None, False, ours.linformer_pytorch.gen_causal_mask(11, 4)
    )
    assert moved(causal, x)[:, :-2].max() == 0


def test_a_decoder_masks_itself_and_not_its_embeddings() -> None:
    theirs, mine = both(
        "LinformerLM",
        num_tokens=13,
        **SMALL | {"depth": 1},
        **STILL,
        dropout_tokens=0.0,
        causal=True,
        decoder_mode=True,
    )
    tokens, embeddings = torch.randint(13, (2, 11)), torch.randn(2, 11, 12)
    assert moved(theirs, tokens, embeddings=embeddings)[:, :-2].max() > 0.001
    assert moved(mine, tokens, embeddings=embeddings)[:, :-2].max() == 0
    # Its last token sees all of both, as here.
    older.assert_close(mine(tokens, embeddings=embeddings)[:, -1], theirs(tokens, embeddings=embeddings)[:, -1])
    free = ours.LinformerLM(num_tokens=13, **SMALL | {"depth": 1}, **STILL, dropout_tokens=0.0, decoder_mode=True)
    free.load_state_dict(mine.state_dict())
    assert torch.allclose(
        free(tokens, embeddings=embeddings)[:, -1], mine(tokens, embeddings=embeddings)[:, -1], atol=1e-6
    )


def enc_dec(**more):
    sizes = {
        "num_tokens": 13,
        "input_size": 11,
        "channels": 12,
        "dim_k": 4,
        "dim_ff": 10,
        "nhead": 3,
        "depth": 1,
        **STILL,
    }
    return {f"{side}_{name}": value for side in ("enc", "dec") for name, value in sizes.items()} | more


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dec_parameter_sharing": "kv"},
        {"enc_channels": 15, "enc_emb_dim": 12, "enc_dim_d": 5},
        {"dec_full_attention": True, "enc_full_attention": True},
    ],
    ids=str,
)
def test_encoder_and_decoder(options: dict) -> None:
    theirs, mine = (module.eval() for module in both("LinformerEncDec", **enc_dec(**options)))
    x, y = torch.randint(13, (2, 11)), torch.randint(13, (2, 11))
    older.assert_close(mine.encoder(x), theirs.encoder(x))
    older.assert_close(mine(x, y)[:, -1], theirs(x, y)[:, -1])
    older.assert_close(mine(x)[:, -1], theirs(x)[:, -1])
    future = y.clone()
    future[:, -1] = (y[:, -1] + 3) % 13
    assert (theirs(x, y) - theirs(x, future))[:, :-1].abs().max() > 1e-3
    assert (mine(x, y) - mine(x, future))[:, :-1].abs().max() == 0


def test_an_encoders_mask_reaches_the_decoder() -> None:
    theirs, mine = (module.eval() for module in both("LinformerEncDec", **enc_dec()))
    x, y = torch.randint(13, (2, 11)), torch.randint(13, (2, 11))
    mask = torch.arange(11).expand(2, -1) < 6
    other = x.masked_fill(~mask, 5)
    assert (theirs(x, y, input_mask=mask) - theirs(other, y, input_mask=mask)).abs().max() > 1e-3
    assert torch.equal(mine(x, y, input_mask=mask), mine(other, y, input_mask=mask))
    torch.testing.assert_close(mine(x, y, input_mask=mask), mine(x[:, :6], y))


def test_embeddings_mask_says_which_embeddings_are_real() -> None:
    theirs, mine = both("Linformer", **SMALL, **STILL, decoder_mode=True)
    x, embeddings = torch.randn(2, 11, 12), torch.randn(2, 11, 12)
    mask = torch.arange(11).expand(2, -1) < 6
    other = embeddings.clone()
    other[:, 6:] = 7
    given = {"embeddings_mask": mask}
    assert (theirs(x, embeddings=embeddings, **given) - theirs(x, embeddings=other, **given)).abs().max() > 0.01
    out = mine(x, embeddings=embeddings, **given)
    assert torch.equal(out, mine(x, embeddings=other, **given))
    torch.testing.assert_close(out, mine(x, embeddings=embeddings[:, :6]))


@pytest.mark.parametrize("options", [{"full_attention": True}, {"method": "convolution"}], ids=str)
def test_padding_changes_nothing(options: dict) -> None:
    theirs, mine = both("Linformer", **SMALL, **STILL, **options)
    x, mask = torch.randn(2, 11, 12), torch.arange(11).expand(2, -1) < 6
    alone = mine(x[:, :6])
    torch.testing.assert_close(mine(x, input_mask=mask)[:, :6], alone)
    # There padding stays in the softmax, with zeros for keys.
    assert (theirs(x, input_mask=mask)[:, :6] - alone).abs().max() > 0.01


@pytest.mark.parametrize("options", [{}, {"full_attention": True}, {"method": "convolution"}], ids=str)
def test_left_padding_takes_no_positions(options: dict) -> None:
    model = ours.LinformerLM(num_tokens=13, **SMALL, causal=True, **options).eval()
    tokens = torch.randint(13, (2, 7))
    padded, mask = torch.cat([tokens[:, :4], tokens], 1), torch.arange(11).expand(2, -1) >= 4
    torch.testing.assert_close(model(padded, input_mask=mask)[:, 4:], model(tokens))
    model.linformer.seq[0].fn.heads[0].register_forward_hook(lambda *_: None)
    torch.testing.assert_close(model(padded, input_mask=mask)[:, 4:], model(tokens), msg="heads apart")


def test_padder() -> None:
    for depth, agree in ((1, True), (2, False)):
        theirs, mine = both("Linformer", **SMALL | {"depth": depth}, **STILL)
        x = torch.randn(2, 7, 12)
        out, wanted = ours.Padder(mine)(x), older.original("linformer_pytorch").Padder(theirs)(x)
        assert out.shape == (2, 7, 12)
        # From the second layer on the original's padding is not zero any more, and attended to.
        assert ((out - wanted).abs().max() < 1e-5) == agree
        torch.testing.assert_close(
            out, mine(torch.cat([x, torch.randn(2, 4, 12)], 1), input_mask=torch.arange(11).expand(2, -1) < 7)[:, :7]
        )
    lm = ours.LinformerLM(num_tokens=13, **SMALL).eval()
    tokens = torch.randint(13, (2, 7))
    assert torch.equal(ours.Padder(lm)(tokens), lm(tokens))
    with pytest.raises(ValueError, match="Padder takes a Linformer or a LinformerLM, got a Linear"):
        ours.Padder(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="12 tokens are more than"):
        ours.Padder(lm)(torch.zeros(1, 12, dtype=torch.int64))


def test_fixed_projections_survive_a_checkpoint() -> None:
    arguments = SMALL | {"method": "no_params"}
    theirs = [older.original("linformer_pytorch").Linformer(**arguments).eval() for _ in range(2)]
    mine = [ours.Linformer(**arguments).eval() for _ in range(2)]
    x = torch.randn(2, 11, 12)
    for first, second in (theirs, mine):
        second.load_state_dict(first.state_dict())
    assert not torch.allclose(theirs[0](x), theirs[1](x)), "the original draws anew and saves nothing"
    assert torch.equal(mine[0](x), mine[1](x))
    assert torch.equal(
        convert_weights(mine[0].state_dict(), "linformer-pytorch", {"class": "Linformer", **arguments}).eval()(x),
        mine[0](x),
    )
    # The draws are part of a trained model: they stay what they were.
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(mine[0].seq[0].fn.heads[1].F, torch.randn(1, 11, 4, generator=generator)[0] / 4)
    generator = torch.Generator().manual_seed(0)
    for layer in ours.Linformer(**arguments, parameter_sharing="none", include_ff=False).seq:
        for side in "EF":
            drawn = torch.randn(3, 11, 4, generator=generator) / 4
            assert torch.equal(torch.stack([getattr(head, side) for head in layer.fn.heads]), drawn)


def test_recomputing_gives_gradients_and_takes_masks() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, mine = both("Linformer", **SMALL, **STILL, checkpoint_level="C1")
        x, mask = torch.randn(2, 11, 12), torch.ones(2, 11, dtype=torch.bool)
        out = theirs(x)
        assert not out.requires_grad, "no gradient for any parameter where the input has none"
        with pytest.raises(AssertionError, match="Cannot run checkpointing"):
            theirs(x, input_mask=mask)
    mine(x, input_mask=mask).sum().backward()
    assert all(p.grad is not None for p in mine.parameters())


@pytest.mark.parametrize("options", [{"dropout": 0.0}, {"dropout": 0.1}, {"parameter_sharing": "none"}], ids=str)
@pytest.mark.parametrize("level", ["C1", "C2"])
def test_checkpoint_levels_store_less_and_compute_the_same(level: str, options: dict) -> None:
    x, mask = torch.randn(2, 11, 12), torch.arange(11).expand(2, -1) < 7
    heads = {"dropout": 0.1, "parameter_sharing": "kv"} | options

    def attention(level: str):
        given = {"E_proj": None, "F_proj": None, "full_attention": False, "causal_mask": None}
        return ours.MHAttention(11, 4, 12, 4, 3, checkpoint_level=level, **heads, **given)

    weight = torch.randn(2, 11, 12)
    for build in (lambda level: ours.Linformer(**SMALL, checkpoint_level=level, **options), attention):
        results = []
        plain, recomputed = build("C0"), build(level)
        recomputed.load_state_dict(plain.state_dict())
        for model in (plain, recomputed):
            stored: list[int] = []

            def count(x: torch.Tensor, stored: list[int] = stored) -> torch.Tensor:
                stored.append(x.numel())
                return x

            with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
                out = model(x, input_mask=mask)
            (out * weight).sum().backward()
            results.append((sum(stored), out, [p.grad for p in model.parameters()]))
        if build is not attention:
            assert results[1][0] < 0.7 * results[0][0]
        if options.get("dropout") == 0 and build is attention:
            for mine, wanted in zip((results[1][1], *results[1][2]), (results[0][1], *results[0][2]), strict=True):
                older.assert_close(mine, wanted)


def test_k_reduce_by_layer_with_layerwise_sharing() -> None:
    arguments = SMALL | STILL | {"depth": 3, "k_reduce_by_layer": 2}
    model = ours.Linformer(**arguments)
    assert [model.seq[i].fn.heads[0].E.out_features for i in (0, 2, 4)] == [4, 2, 1]
    theirs = older.original("linformer_pytorch").Linformer(**arguments)
    x = torch.randn(2, 11, 12)
    with pytest.warns(UserWarning, match="trained without k_reduce_by_layer") as caught:
        model.load_state_dict(theirs.state_dict())
    assert len(caught) == 1
    older.assert_close(model(x), theirs(x))
    again = ours.Linformer(**arguments)
    again.load_state_dict(again.state_dict())
    assert again.seq[4].fn.heads[0].E.out_features == 1
    torch.testing.assert_close(model.to_longspan()(x), model(x))
    pair = (ours.LinformerEncDec(**enc_dec(dec_k_reduce_by_layer=2) | {"dec_depth": 3}).eval() for _ in range(2))
    first, second = pair
    second.load_state_dict(first.state_dict())
    tokens = torch.randint(13, (2, 11))
    assert torch.equal(first(tokens), second(tokens))
    old = older.original("linformer_pytorch").LinformerEncDec(**enc_dec(dec_k_reduce_by_layer=2) | {"dec_depth": 3})
    with pytest.warns(UserWarning, match="trained without k_reduce_by_layer"):
        second.load_state_dict(old.state_dict())


def test_positions_for_vectors() -> None:
    plain, mine = ours.Linformer(**SMALL).eval(), ours.Linformer(**SMALL, use_pos_emb=True).eval()
    mine.load_state_dict(plain.state_dict())
    x = torch.randn(2, 11, 12)
    torch.testing.assert_close(mine(x), plain(x + ours.PositionalEmbedding(12)(x)))
    with pytest.raises(TypeError, match="use_pos_emb"):
        older.original("linformer_pytorch").Linformer(**SMALL, use_pos_emb=True)
    with pytest.raises(ValueError, match="cannot convert this Linformer: use_pos_emb adds positions"):
        convert_weights(mine.state_dict(), "linformer-pytorch", {"class": "Linformer", "use_pos_emb": True, **SMALL})


def test_positions_do_not_collide_in_half_precision() -> None:
    theirs, mine = both("PositionalEmbedding", channels=64)
    x = torch.zeros(1, 2048, 64)
    distinct = [len(module.bfloat16()(x)[0].unique(dim=0)) for module in (theirs, mine)]
    assert distinct[0] < 1000
    assert distinct[1] == 2048


def test_every_dropout_is_where_it_was() -> None:
    model = ours.LinformerLM(num_tokens=13, **SMALL, dropout=0.1, dropout_ff=0.2, dropout_tokens=0.3, decoder_mode=True)
    assert model.dropout_tokens.p == 0.3
    for layer in model.linformer.seq:
        if isinstance(layer.fn, ours.MHAttention):
            assert {head.dropout.p for head in layer.fn.heads} == {layer.fn.mh_dropout.p} == {0.1}
        else:
            assert isinstance(layer.fn, ours.FeedForward)
            assert (layer.fn.dropout.p, layer.fn.dropout2.p) == (0.2, 0.2)
    both_ways = ours.LinformerEncDec(**enc_dec(enc_dropout=0.1, dec_dropout_ff=0.2))
    assert both_ways.encoder.linformer.seq[0].fn.heads[0].dropout.p == 0.1
    assert both_ways.decoder.linformer.seq[1].fn.dropout.p == 0.2
    assert both_ways.encoder.dropout_tokens.p == 0.1
    x = torch.randint(13, (2, 11)), torch.randn(2, 11, 12)
    assert not torch.equal(*(model(x[0], embeddings=x[1]) for _ in range(2)))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    assert torch.equal(*(model(x[0], embeddings=x[1]) for _ in range(2)))


@pytest.mark.parametrize("options", [{}, {"full_attention": True}, {"method": "no_params"}], ids=str)
def test_causal_models_convert(options: dict) -> None:
    arguments = {"num_tokens": 13, **SMALL, **options, "causal": True}
    model, tokens = ours.LinformerLM(**arguments).eval(), torch.randint(13, (2, 11))
    converted = convert_weights(model.state_dict(), "linformer-pytorch", arguments).eval()
    torch.testing.assert_close(converted(tokens), model(tokens))
    with pytest.raises(
        ValueError, match=r"faithful=True keeps what no longspan model does.*load it with longspan\.compat"
    ):
        convert_weights(model.state_dict(), "linformer-pytorch", {**arguments, "faithful": True})


def test_loading_does_not_hide_what_was_replaced() -> None:
    model = ours.LinformerEncDec(**enc_dec())
    model.decoder.to_logits = torch.nn.Identity()
    model.load_state_dict(model.state_dict())
    assert model.altered() == "decoder.to_logits was replaced"


def test_what_is_refused() -> None:
    model, x = ours.Linformer(**SMALL), torch.randn(2, 11, 12)
    with pytest.raises(TypeError, match="mask"):
        model(x, mask=None)
    with pytest.raises(ValueError, match="embeddings are for a decoder: build it with decoder_mode=True"):
        model(x, embeddings=x)
    with pytest.raises(ValueError, match="a decoder attends to embeddings: pass embeddings="):
        ours.Linformer(**SMALL, decoder_mode=True)(x)
    with pytest.raises(ValueError, match=r"causal_mask must be None or gen_causal_mask.*got another mask of shape"):
        ours.MHAttention(11, 4, 12, 4, 3, 0.0, "C0", "kv", None, None, False, torch.rand(11, 4) > 0.5)
    with pytest.raises(ValueError, match="F_proj must be a layer or a tensor, as from get_EF, got a NoneType"):
        ours.MHAttention(11, 4, 12, 4, 3, 0.0, "C0", "layerwise", torch.nn.Linear(11, 4), None, False, None)
    projections = torch.nn.Linear(11, 4), torch.nn.Linear(11, 5)
    with pytest.raises(ValueError, match="E_proj and F_proj must have the same output length, got 4 and 5"):
        ours.MHAttention(11, 4, 12, 4, 3, 0.0, "C0", "layerwise", *projections, False, None)
    with pytest.raises(ValueError, match=r"12 tokens are more than input_size \(11\): build the model with a larger"):
        model(torch.randn(2, 12, 12))
    with pytest.raises(ValueError, match=r"tensor must be \(B, n, channels=12\), got \(2, 11, 13\)"):
        model(torch.randn(2, 11, 13))
    with pytest.raises(ValueError, match="a head takes the mask of its keys as input_mask"):
        model.seq[0].fn.heads[0](*torch.randn(3, 2, 11, 4), embeddings_mask=torch.ones(2, 11, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"this layer takes no embeddings \(decoder_mode=False\)"):
        ours.MHAttention(11, 4, 12, 4, 3, 0.0, "C0", "kv", None, None, False, None)(x, embeddings=x)
    with pytest.raises(ValueError, match="ff_intermediate needs parameter_sharing other than layerwise"):
        ours.Linformer(**SMALL, ff_intermediate=9)
    for name, value in (
        ("activation", "tanh"),
        ("checkpoint_level", "C3"),
        ("parameter_sharing", "all"),
        ("method", "x"),
    ):
        with pytest.raises(ValueError, match=f"{name}.*{value}"):
            ours.Linformer(**SMALL, **{name: value})
    with pytest.raises(ValueError, match=r"channels \(12\) must be a multiple of nhead \(5\), or give dim_d"):
        ours.Linformer(**SMALL | {"nhead": 5})


@pytest.mark.parametrize(
    "options", [{}, {"full_attention": True}, {"parameter_sharing": "none", "k_reduce_by_layer": 2}], ids=str
)
def test_visualizer_shows_what_the_original_shows(options: dict, tmp_path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    theirs, mine = both("Linformer", **SMALL, **STILL, **options)
    x = torch.randn(2, 11, 12)
    with pytest.raises(ValueError, match="call the net with visualize=True"):
        ours.Visualizer(mine).plot_all_heads(show=False)
    theirs(x, visualize=True)
    mine(x, visualize=True)
    for i, heads in enumerate(ours.Visualizer(mine).maps()):
        for h, weights in enumerate(heads):
            older.assert_close(weights, theirs.seq[2 * i].fn.heads[h].P_bar[0], f"layer {i}, head {h}")
    assert mine.training
    path = tmp_path / "heads.png"
    ours.Visualizer(mine).plot_all_heads(title="Heads", show=False, save_file=path, figsize=(5, 4), n_limit=7)
    assert path.read_bytes().startswith(b"\x89PNG")
    figure, axes = matplotlib.pyplot.subplots(2, 3)
    image = ours.Visualizer(mine).get_head_visualization(1, 1, 2, 7, axes)
    assert image.get_array().shape[0] == 7
    assert axes[1, 2].get_xlabel() == "Head 3"
    matplotlib.pyplot.close(figure)
    theirs, mine = both("Linformer", **SMALL, **STILL, **options, decoder_mode=True)
    for net in (theirs, mine):
        net(x, embeddings=x.flip(0), visualize=True)
    for i, heads in enumerate(ours.Visualizer(mine).maps()):
        for h, weights in enumerate(heads):
            older.assert_close(weights, theirs.seq[2 * i].fn.heads[h].P_bar[0], f"decoder, layer {i}, head {h}")
    assert i == 3
    layer = ours.MHAttention(11, 4, 12, 4, 3, 0.0, "C0", "kv", None, None, False, None, decoder_mode=True)
    layer(x, embeddings=torch.randn(2, 7, 12), visualize=True)
    assert [m.shape for m in ours.Visualizer(layer).maps()] == [(3, 11, 4)]
    causal = ours.Linformer(**SMALL, **STILL, **options, causal=True)
    causal(x, visualize=True)
    last = causal.seq[0].fn.heads[0].P_bar[:, -1]
    free = ours.Linformer(**SMALL, **STILL, **options)
    free.load_state_dict(causal.state_dict())
    free(x, visualize=True)
    older.assert_close(last, free.seq[0].fn.heads[0].P_bar[:, -1], "the last token sees all")
    lm = ours.LinformerLM(num_tokens=13, **SMALL)
    lm(torch.randint(13, (2, 11)), visualize=True)
    assert [m.shape for m in ours.Visualizer(lm).maps()] == [(3, 11, 4)] * 2


@pytest.mark.parametrize("block", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_readme(block: int) -> None:
    blocks = older.blocks("linformer-pytorch.md")
    shapes = [(1, 262144, 64), (1, 500, 16)]
    assert len(blocks) == len(shapes)
    assert f"# {shapes[block]}" in blocks[block]
    with older.older_names() as names:
        exec(blocks[block], names)
    assert names["y"].shape == shapes[block]


SCRIPT = """
import torch
import torch.nn.functional as F
from linformer_pytorch import LinformerLM, Padder

torch.manual_seed(0)
model = LinformerLM(num_tokens=16, input_size=64, channels=32, dim_k=16, dim_ff=64, nhead=4, depth=2, causal=True)
model = model.cuda()
padded = Padder(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []
for step in range(STEPS):
    start = torch.randint(0, 16, (8, 1))
    tokens = (start + torch.arange(65)) % 16  # Each token is the one before plus one.
    logits = model(tokens[:, :-1].cuda())
    loss = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:].cuda())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
model.eval()
with torch.no_grad():
    tokens = torch.tensor([[3]])
    for _ in range(10):
        tokens = torch.cat([tokens, padded(tokens)[:, -1:].argmax(-1)], 1)
print(losses[0], losses[-1], *tokens[0].tolist())
"""


def test_a_training_script_runs(tmp_path, capsys) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("STEPS", "30"))
    import_hook.run(path, [], device="cpu")
    first, last, *tokens = capsys.readouterr().out.split()
    assert float(last) < float(first) / 2
    assert [int(token) for token in tokens] == [(3 + i) % 16 for i in range(11)]
