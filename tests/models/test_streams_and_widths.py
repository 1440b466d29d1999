"""How streams end, how a changing width keeps its residual, how an encoder meets a decoder of another width."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from longspan import AttentionConfig, EncoderDecoder, LegacyConfig, ModelConfig, Transformer, load, save

SMALL = {"dim": 12, "depth": 3, "attention": AttentionConfig(num_heads=3)}


def shaken(model):
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("execution", ["keep", "recompute", "reverse"])
def test_sum_streams_is_twice_their_mean(execution: str) -> None:
    config = ModelConfig(**SMALL, residual="double", final_norm=False, execution=execution)
    mean = shaken(Transformer(config))
    total = Transformer(replace(config, legacy=LegacyConfig(sum_streams=True)))
    total.load_state_dict(mean.state_dict())
    x = torch.randn(2, 7, 12)
    torch.testing.assert_close(total(x), 2 * mean(x))
    (mean(x) * 2).sum().backward()
    total(x).sum().backward()
    for a, b in zip(mean.parameters(), total.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("norm_position", ["pre", "post", "rezero"])
def test_resample_keeps_the_residual_where_the_width_changes(norm_position: str) -> None:
    legacy = LegacyConfig(inner_dim=18, resample=True)
    config = ModelConfig(**SMALL, legacy=legacy, norm_position=norm_position, final_norm=False)
    model = shaken(Transformer(config))
    x = expected = torch.randn(2, 7, 12)
    resampled = 0
    for branch in model.stack.branches:
        inside = branch.norm(expected) if norm_position == "pre" else expected
        y = branch.layer(inside) * (branch.weight if norm_position == "rezero" else 1)
        if branch.resample is not None:
            resampled += 1
            assert branch.resample.weight.shape == (y.shape[2], expected.shape[2])
            expected = branch.resample(expected)
        expected = expected + y
        expected = branch.norm(expected) if norm_position == "post" else expected
    assert resampled == 2
    torch.testing.assert_close(model(x), expected)


def test_an_encoder_of_another_width_projects_to_the_decoders(tmp_path) -> None:
    encoder = ModelConfig(dim=18, depth=1, embed_dim=12, vocab_size=11, attention=AttentionConfig(num_heads=3))
    decoder = ModelConfig(**SMALL, vocab_size=13, causal=True, cross=AttentionConfig(num_heads=3), final_norm=False)
    model = shaken(EncoderDecoder(encoder, decoder, pad_token=-1))
    source, target = torch.randint(11, (2, 5)), torch.randint(13, (2, 7))
    context, mask = model.encode(source)
    assert context.shape == (2, 5, 12)
    torch.testing.assert_close(context, model.encoder.from_dim(model.encoder.hidden(source)))
    loss = model(source, target)
    loss.backward()
    assert all(p.grad is not None for p in model.encoder.from_dim.parameters())
    save(model, tmp_path / "m")
    torch.testing.assert_close(load(tmp_path / "m")(source, target), loss)
    assert EncoderDecoder(ModelConfig(**SMALL, embed_dim=6, vocab_size=11), decoder).encoder.from_dim is None


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("resample is for a width that changes: set inner_dim", {"resample": True}),
        ('sum_streams needs residual="double", got residual="single"', {"sum_streams": True}),
    ],
)
def test_options_that_would_do_nothing_are_refused(message: str, options: dict) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**SMALL, legacy=LegacyConfig(**options))


def test_masked_tokens_do_not_reach_the_others_through_resampling() -> None:
    legacy = LegacyConfig(inner_dim=18, resample=True)
    model = shaken(Transformer(ModelConfig(**SMALL, legacy=legacy, norm_position="post")))
    x: Tensor = torch.randn(2, 7, 12)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[:, 5:] = False
    x[:, 5:] = float("nan")
    out = model(x, key_mask=mask)
    torch.testing.assert_close(out[:, :5], model(x[:, :5]))
    out[:, :5].sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_convolution_with_more_stretches_than_asked_for_can_be_shared() -> None:
    spec = {"mechanism": "linformer", "projection": "convolution", "rank": 6, "max_length": 10}
    for whole, rows in ((False, 5), (True, 10)):
        attention = AttentionConfig(num_heads=3, share_projection=True, mechanism=spec | {"whole_stretches": whole})
        model = Transformer(ModelConfig(dim=12, depth=2, attention=attention))
        first, second = (model.stack.branches[i].layer.mechanism for i in (0, 2))
        assert first.keys is second.values
        assert first.rank == rows
        assert model(torch.randn(2, 7, 12)).shape == (2, 7, 12)
