"""Checkpoints of performer-pytorch: all recorded variants load, go out as they came in, and convert."""

import inspect
import json

import pytest
import torch
from older import assert_names, copy_weights, original, recorded

import longspan
from longspan.compat import performer_pytorch as ours
from longspan.compat.convert import convert_weights

BODY = {"dim": 32, "depth": 2, "heads": 4, "dim_head": 8, "nb_features": 12}
LM = {"num_tokens": 20, "max_seq_len": 64, **BODY}
SIDES = {
    f"{side}_{name}": value
    for side in ("enc", "dec")
    for name, value in {"num_tokens": 20, "max_seq_len": 64, "depth": 1, "heads": 4, "dim_head": 8}.items()
}
MODELS = {
    "Performer": ("Performer", BODY),
    "Performer[reversible]": ("Performer", {**BODY, "reversible": True}),
    "PerformerLM": ("PerformerLM", LM),
    "PerformerLM[causal]": ("PerformerLM", {**LM, "causal": True}),
    "PerformerLM[local]": ("PerformerLM", {**LM, "local_attn_heads": 2, "local_window_size": 16}),
    "PerformerLM[glu]": ("PerformerLM", {**LM, "ff_glu": True}),
    "PerformerLM[scalenorm]": ("PerformerLM", {**LM, "use_scalenorm": True}),
    "PerformerLM[rezero]": ("PerformerLM", {**LM, "use_rezero": True}),
    "PerformerLM[tie]": ("PerformerLM", {**LM, "tie_embed": True}),
    "PerformerLM[axial]": (
        "PerformerLM",
        {**LM, "rotary_position_emb": False, "axial_position_emb": True, "axial_position_shape": [4, 16]},
    ),
    "PerformerLM[abs_pos]": ("PerformerLM", {**LM, "rotary_position_emb": False}),
    "PerformerLM[cross]": ("PerformerLM", {**LM, "cross_attend": True}),
    "PerformerLM[qkv_bias]": ("PerformerLM", {**LM, "qkv_bias": True, "attn_out_bias": True}),
    "PerformerLM[shift]": ("PerformerLM", {**LM, "shift_tokens": True}),
    "PerformerLM[reversible]": ("PerformerLM", {**LM, "reversible": True}),
    "PerformerLM[no_projection]": ("PerformerLM", {**LM, "no_projection": True}),
    "PerformerEncDec": ("PerformerEncDec", {"dim": 32, **SIDES}),
    "PerformerEncDec[tie_token_embeds]": ("PerformerEncDec", {"dim": 32, "tie_token_embeds": True, **SIDES}),
}
LAYERS = {
    "FastAttention": lambda: ours.FastAttention(8, nb_features=12),
    "SelfAttention": lambda: ours.SelfAttention(32, heads=4, dim_head=8, nb_features=12),
    "CrossAttention": lambda: ours.CrossAttention(32, heads=4, dim_head=8, nb_features=12),
    "AutoregressiveWrapper": lambda: ours.AutoregressiveWrapper(ours.PerformerLM(**LM, causal=True)),
}


def build(variant: str, library=ours):
    name, arguments = MODELS[variant]
    return getattr(library, name)(**arguments)


def test_every_recorded_variant_is_here():
    names = {name.removeprefix("performer.") for name in recorded() if name.startswith("performer.")}
    assert names == {*MODELS, *LAYERS}


@pytest.mark.parametrize("variant", [*MODELS, *LAYERS])
def test_names(variant):
    module = build(variant) if variant in MODELS else LAYERS[variant]()
    assert_names(module, f"performer.{variant}")


def test_arguments_and_their_defaults():
    """Ours take all of theirs; what has another default is that a required one became optional."""
    theirs = original("performer_pytorch")
    for name in ours.__all__:
        for method in ("__init__", "forward", "generate", "redraw_projection_matrix"):
            there, here = getattr(getattr(theirs, name), method, None), getattr(getattr(ours, name), method, None)
            if there is None:
                continue
            taken = inspect.signature(here).parameters
            for parameter in inspect.signature(there).parameters.values():
                if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                    continue
                if parameter.name == "kernel_fn":
                    assert isinstance(taken["kernel_fn"].default, torch.nn.ReLU)
                elif parameter.default is not parameter.empty and parameter.name != "filter_logits_fn":
                    assert taken[parameter.name].default == parameter.default, (name, method, parameter.name)
                kind = taken[parameter.name].kind
                assert kind in (parameter.kind, parameter.POSITIONAL_OR_KEYWORD), (name, method, parameter.name)


def run(model, variant):
    """Logits, or vectors, of a model of ours or theirs on one input."""
    generator = torch.Generator().manual_seed(3)
    tokens, context = torch.randint(1, 20, (2, 32), generator=generator), torch.randn(2, 7, 32, generator=generator)
    vectors = torch.randn(2, 32, 32, generator=generator)
    name, arguments = MODELS[variant]
    about = {"context": context} if arguments.get("cross_attend") else {}
    if isinstance(model, longspan.EncoderDecoder):
        encodings, _ = model.encode(tokens, torch.ones_like(tokens, dtype=torch.bool))
        return model.decoder(tokens, context=encodings)
    if name == "PerformerEncDec":
        encodings = model.enc(tokens, return_encodings=True)
        return model.dec.net(tokens, context=encodings)
    return model(vectors if name == "Performer" else tokens, **about)


@pytest.mark.parametrize("variant", MODELS)
def test_models_convert_and_answer_as_before(variant, tmp_path):
    name, arguments = MODELS[variant]
    older = build(variant).eval()
    library = original("performer_pytorch")
    theirs = getattr(library, name)(**arguments)
    model = convert_weights(
        theirs.state_dict(), "performer-pytorch", {"class": name, **json.loads(json.dumps(arguments))}
    )
    longspan.save(model, tmp_path / "model")
    model = longspan.load(tmp_path / "model").eval()
    copy_weights(theirs, older)
    with torch.no_grad():
        wanted, got = run(older, variant), run(model, variant)
        # Here the two kinds of heads are rotated apart from each other, which changes last bits.
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6 if "local" in variant else 0)
        causal = "causal" in arguments or name == "PerformerEncDec"
        if not causal:  # Causal FAVOR+ is corrected: the original's answers leak.
            torch.testing.assert_close(
                got, run(theirs.eval(), variant), rtol=1e-5, atol=1e-5 * float(wanted.abs().max())
            )


def test_layers_held_once_and_names_of_other_releases():
    axial = build("PerformerLM[axial]")
    held = axial.state_dict()
    again = {
        name.replace("pos_emb.weights.", "pos_emb.weights_").replace(
            "performer.proj_updater.calls", "performer.calls"
        ): tensor
        for name, tensor in held.items()
        if "proj_updater.instance" not in name
    }
    assert "performer.calls_since_last_redraw" in again
    assert "pos_emb.weights_0" in again
    other = build("PerformerLM[axial]")
    other.load_state_dict(again)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, held[name]), name
    copies = {name: tensor for name, tensor in held.items() if ".net.layers" not in name}
    build("PerformerLM[axial]").load_state_dict(copies)
    body = build("Performer").state_dict()
    body["calls_since_last_redraw"] = body.pop("proj_updater.calls_since_last_redraw") + 5
    performer = build("Performer")
    performer.load_state_dict(body)
    assert performer.proj_updater.calls_since_last_redraw == 5


def test_what_is_missing_or_too_much_is_listed():
    model = build("PerformerLM")
    held = model.state_dict()
    for name in [name for name in held if name.endswith("layers.1.0.fn.to_k.weight")]:
        del held[name]
    held["token_emb.bias"] = torch.zeros(1)
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(held)
    assert 'Missing key(s) in state_dict: "performer.net.layers.1.0.fn.to_k.weight"' in str(error.value)
    assert 'Unexpected key(s) in state_dict: "token_emb.bias"' in str(error.value)


@pytest.mark.parametrize("local", [(2, 0), (4, 1), (4, 4)])
def test_layers_that_differ_in_their_heads(local):
    theirs = original("performer_pytorch").PerformerLM(**LM, local_attn_heads=local, local_window_size=16)
    model = ours.PerformerLM(**LM, local_attn_heads=local, local_window_size=16)
    model.load_state_dict(theirs.state_dict())
    assert {name: x.shape for name, x in model.state_dict().items()} == {
        name: x.shape for name, x in theirs.state_dict().items()
    }
    for name, tensor in theirs.state_dict().items():
        # Angles are made in more than float32 here, and go out as sines and cosines.
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=1e-5)


def test_axial_positions_beside_rotary_ones_and_the_checkpoint_that_had_none():
    options = {**LM, "axial_position_emb": True, "axial_position_shape": (4, 16)}
    theirs = original("performer_pytorch").PerformerLM(**options)
    model = ours.PerformerLM(**options)
    assert "pos_emb.weights.1" in model.state_dict()  # honored here
    assert "pos_emb.weights.1" not in theirs.state_dict()  # ignored there
    with pytest.warns(UserWarning, match="trained without axial_position_emb") as caught:
        model.load_state_dict(theirs.state_dict())
    assert len(caught) == 1
    tokens = torch.randint(0, 20, (2, 23))
    torch.testing.assert_close(model.eval()(tokens), theirs.eval()(tokens), rtol=1e-4, atol=1e-4)
    model.fix_projection_matrices_()
    converted = model.to_longspan()
    assert converted.config.positions == "sinusoidal"
    torch.testing.assert_close(converted(tokens), model(tokens), rtol=0, atol=1e-6)
    fresh = ours.PerformerLM(**options)
    fresh.load_state_dict(ours.PerformerLM(**options).state_dict())  # no warning: this one has its tables


def test_a_wrapper_and_a_module_of_ones_own_around_it():
    class Mine(torch.nn.Module):
        def __init__(self, library):
            super().__init__()
            self.attention = library.SelfAttention(32, heads=4, dim_head=8, qkv_bias=True)
            self.fast = library.FastAttention(8, generalized_attention=True, kernel_fn=torch.nn.PReLU())
            self.updater = library.ProjectionUpdater(self.attention, 3)

    theirs, mine = Mine(original("performer_pytorch")), Mine(ours)
    mine.load_state_dict(theirs.state_dict())
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(mine.state_dict()[name], tensor), name
