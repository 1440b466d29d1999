"""A recomputed forward repeats what the first one did: random features are neither counted nor redrawn again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from model_cases import V, config
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspan.models.config import AttentionConfig
from longspan.models.transformer import EncoderDecoder, LanguageModel

T = 7
Run = Callable[[LanguageModel, Tensor, Tensor], Tensor]


def build(interval: int, **options: object) -> LanguageModel:
    mechanism = {"mechanism": "performer", "num_features": 5, "redraw_interval": interval}
    torch.manual_seed(2)
    # Dropout: what a forward draws after its features must be the same again.
    return LanguageModel(config(mechanism=mechanism, embed_dropout=0.3, **options)).train()


def plain(model: LanguageModel, x: Tensor, scale: Tensor) -> Tensor:
    return model(x) * scale


def whole(use_reentrant: bool) -> Run:
    def run(model: LanguageModel, x: Tensor, scale: Tensor) -> Tensor:
        return checkpoint(lambda x, scale: model(x) * scale, x, scale, use_reentrant=use_reentrant)

    return run


def layers(use_reentrant: bool) -> Run:
    def run(model: LanguageModel, x: Tensor, scale: Tensor) -> Tensor:
        for branch in model.transformer.stack.branches:
            forward = type(branch).forward.__get__(branch)
            branch.forward = lambda *args, f=forward: checkpoint(f, *args, use_reentrant=use_reentrant)
        return model(x) * scale

    return run


def training(model: LanguageModel, run: Run) -> list[Tensor]:
    """Outputs, gradients, features and counts of five steps."""
    torch.manual_seed(3)
    found, scale = [], torch.ones((), requires_grad=True)  # a reentrant checkpoint needs an input with gradients
    for _ in range(5):
        model.zero_grad()
        out = run(model, torch.randint(V, (2, T)), scale)
        out.pow(3).sum().backward()
        found += [out.detach(), *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]
    return found


def same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize("how", [whole, layers])
def test_a_checkpoint_changes_nothing(how: Callable[[bool], Run], use_reentrant: bool, interval: int) -> None:
    expected = training(build(interval), plain)
    assert same(training(build(interval), how(use_reentrant)), expected)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not-reentrant"])
@pytest.mark.parametrize(("residual", "execution"), [("single", "recompute"), ("double", "reverse")])
def test_a_checkpoint_around_recomputed_layers(residual: str, execution: str, use_reentrant: bool) -> None:
    options = {"residual": residual, "execution": execution}
    expected = training(build(2, **options), plain)
    assert same(training(build(2, **options), whole(use_reentrant)), expected)


def test_a_checkpoint_of_a_compiled_model() -> None:
    torch._dynamo.reset()
    model, expected = build(2), build(2)

    def compiled(model: LanguageModel, x: Tensor, scale: Tensor) -> Tensor:
        run = torch.compile(model, fullgraph=True, backend="eager")
        return checkpoint(lambda x, scale: run(x) * scale, x, scale, use_reentrant=False)

    assert same(training(model, compiled), training(expected, plain))


def test_a_checkpoint_around_encoder_and_decoder() -> None:
    def run(recomputed: bool) -> list[Tensor]:
        torch.manual_seed(2)
        attention = AttentionConfig(num_heads=3, mechanism={"mechanism": "performer", "redraw_interval": 2})
        decoder = config(cross=attention, mechanism=attention.mechanism)
        model = EncoderDecoder(config(causal=False, mechanism=attention.mechanism), decoder).train()
        for _ in range(3):
            source, target = torch.randint(1, V, (2, T)), torch.randint(1, V, (2, T))
            loss = checkpoint(model, source, target, use_reentrant=False) if recomputed else model(source, target)
            loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None] + list(model.buffers())

    assert same(run(True), run(False))
