"""linformer's own sequences of layers beside ours."""

import copy
import inspect

import pytest
import torch
from older import assert_close, assert_parity, original
from torch import nn

from longspan.compat.linformer import reversible


class Mixed(nn.Module):
    """A layer that sees other tokens, and takes an argument."""

    def __init__(self, dim, dropout=0.0):
        super().__init__()
        self.to_out, self.dropout = nn.Linear(dim, dim), nn.Dropout(dropout)

    def forward(self, x, scale=1.0):
        return self.dropout(self.to_out(x.cumsum(1)).tanh() * scale)


def pairs(depth=2, **options):
    return nn.ModuleList(nn.ModuleList([Mixed(7, **options), Mixed(7, **options)]) for _ in range(depth))


ROUTE = {"scale": ((True, False), (False, True))}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["SequentialSequence", "ReversibleSequence"])
def test_sequences(name, training):
    def build(module):
        return getattr(module, name)(pairs(), args_route=ROUTE).train(training)

    def run(module):
        x = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(2)).requires_grad_()
        if name == "ReversibleSequence" and not training:
            # In eval mode the original cannot go backwards: the forward pass alone.
            with torch.no_grad():
                return module(x, scale=3.0).requires_grad_(), {}
        return module(x, scale=3.0), {"x": x}

    assert_parity(build(original("linformer.reversible")), build(reversible), run)


def test_helpers_agree() -> None:
    theirs = original("linformer.reversible")
    assert reversible.route_args(ROUTE, {"scale": 3, "other": 4}, 2) == theirs.route_args(ROUTE, {"scale": 3}, 2)
    for probability in (0.0, 0.4, 1.0):
        torch.manual_seed(3)
        wanted = theirs.layer_drop(list("abcdefg"), probability)
        torch.manual_seed(3)
        assert reversible.layer_drop(list("abcdefg"), probability) == wanted
    parameters = [inspect.signature(module.Deterministic.forward).parameters for module in (theirs, reversible)]
    assert list(parameters[0]) == list(parameters[1])


def test_deterministic_repeats_its_draws() -> None:
    for module in (original("linformer.reversible"), reversible):
        net = module.Deterministic(nn.Dropout(0.5))
        x = torch.ones(3, 17)
        first = net(x, record_rng=True)
        after = torch.get_rng_state()
        assert torch.equal(net(x, set_rng=True), first)
        assert torch.equal(torch.get_rng_state(), after), "the random state of the caller"
        assert not torch.equal(net(x), first)
    with pytest.raises(ValueError, match="record_rng=True first"):
        reversible.Deterministic(nn.Dropout(0.5))(x, set_rng=True)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_blocks_agree(dropout: float) -> None:
    theirs = original("linformer.reversible").ReversibleBlock(Mixed(7, dropout), Mixed(7, dropout))
    mine = reversible.ReversibleBlock(Mixed(7, dropout), Mixed(7, dropout))
    mine.load_state_dict(theirs.state_dict())
    x, dy = torch.randn(2, 5, 14), torch.randn(2, 5, 14)
    results = []
    for block in (theirs, mine):
        torch.manual_seed(5)
        with torch.no_grad():
            y = block(x, {"scale": 2.0}, {"scale": 3.0})
        given, dx = block.backward_pass(y, dy, {"scale": 2.0}, {"scale": 3.0})
        assert_close(given, x)
        results.append([y, dx, *(p.grad for p in block.parameters())])
    for got, wanted in zip(results[1], results[0], strict=True):
        assert_close(got, wanted)


def test_the_function_agrees() -> None:
    outs = []
    for module in (original("linformer.reversible"), reversible):
        torch.manual_seed(7)
        blocks = [module.ReversibleBlock(Mixed(7), Mixed(7)) for _ in range(3)]
        x = torch.randn(2, 5, 14, requires_grad=True)
        args = [{"f_args": {}, "g_args": {"scale": 2.0}}] * 3
        out = module._ReversibleFunction.apply(x, blocks, args)
        (out * torch.linspace(0, 1, 14)).sum().backward()
        outs.append([out, x.grad])
    for got, wanted in zip(*outs, strict=True):
        assert_close(got, wanted)


class Crossed(Mixed):
    """A layer that reads a context, which gets a gradient."""

    def forward(self, x, context=None):
        return super().forward(x if context is None else x + context.mean(1, keepdim=True))


def streams(module, x, **arguments):
    """What a reversible sequence computes, with ordinary gradients."""
    first = second = x
    for block in module.blocks:
        first = first + block.f.net(second, **arguments)
        second = second + block.g.net(first)
    return first + second


@pytest.mark.parametrize("training", [True, False])
def test_gradients_without_stored_activations(training: bool) -> None:
    layers = [(Crossed(7), Mixed(7)) for _ in range(2)]
    net = reversible.ReversibleSequence(layers, args_route={"context": ((True, False),) * 2}).train(training)
    x, context = torch.randn(2, 5, 7), torch.randn(2, 3, 7, requires_grad=True)
    parameter = nn.Parameter(torch.randn(2, 3, 7))
    for given in (context * 1.0, parameter):
        wanted = torch.autograd.grad(streams(net, x, context=given).square().sum(), [given, *net.parameters()])
        got = torch.autograd.grad(net(x, context=given).square().sum(), [given, *net.parameters()])
        for mine, theirs in zip(got, wanted, strict=True):
            assert_close(mine, theirs)


def test_two_calls_before_the_backward_pass_have_their_own_draws() -> None:
    net, x = reversible.ReversibleSequence(pairs(dropout=0.5)), torch.randn(2, 5, 7)
    alone = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        alone.append(torch.autograd.grad(net(x).square().sum(), list(net.parameters())))
    total = 0.0
    for seed in (1, 2):
        torch.manual_seed(seed)
        total = total + net(x).square().sum()
    for both, first, second in zip(torch.autograd.grad(total, list(net.parameters())), *alone, strict=True):
        assert_close(both, first + second)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", ["SequentialSequence", "ReversibleSequence"])
def test_every_module_is_called(name: str, gradients: bool) -> None:
    net, called = getattr(reversible, name)(pairs()), set()
    for path, module in net.named_modules():
        module.register_forward_hook(lambda *_, path=path: called.add(path))
    with torch.set_grad_enabled(gradients):
        net(torch.randn(2, 5, 7))
    assert called == {path for path, module in net.named_modules() if not isinstance(module, nn.ModuleList)}


@pytest.mark.slow
def test_a_reversible_sequence_compiles() -> None:
    net, x = reversible.ReversibleSequence(pairs()), torch.randn(2, 5, 7, requires_grad=True)
    compiled = torch.compile(copy.deepcopy(net), backend="aot_eager", fullgraph=True)
    grads = [torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()]) for module in (net, compiled)]
    for got, wanted in zip(grads[1], grads[0], strict=True):
        assert_close(got, wanted)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one entry for each of 3 pairs of layers, got \{'scale': 2\}"):
        reversible.SequentialSequence(pairs(3), args_route=ROUTE)
    with pytest.raises(TypeError, match=r"args_route has no entry for mask; it has \['scale'\]"):
        reversible.ReversibleSequence(pairs(), args_route=ROUTE)(torch.randn(2, 5, 7), mask=None)


def test_a_hook_that_changes_a_blocks_output_trains_right() -> None:
    net, x = reversible.ReversibleSequence(pairs()), torch.randn(2, 5, 7)
    net.blocks[0].register_forward_hook(lambda module, args, out: out * 2)
    net(x).square().sum().backward()
    first = second = x
    first = first + net.blocks[0].f.net(second)
    first, second = first * 2, (second + net.blocks[0].g.net(first)) * 2
    first = first + net.blocks[1].f.net(second)
    second = second + net.blocks[1].g.net(first)
    wanted = torch.autograd.grad((first + second).square().sum(), list(net.parameters()))
    for parameter, gradient in zip(net.parameters(), wanted, strict=True):
        assert_close(parameter.grad, gradient)
