"""The blocks of the older libraries' containers, beside the originals'."""

import copy

import older
import pytest
import torch
from torch import nn

from longspan.compat import containers

B, T, DIM = 2, 7, 5


class Noisy(nn.Module):
    """A layer with dropout and an argument."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(DIM, DIM), nn.Dropout(0.5)

    def forward(self, x, add=0.0):
        return self.dropout(self.linear(x).tanh() + add)


def original():
    return older.original("linear_attention_transformer.reversible")


def test_arguments_are_routed():
    router = {"mask": [(True, False), (True, True)], "context": [(False, False), (True, False)]}
    given = {"mask": 1, "context": 2, "unknown": 3}
    expected = original().route_args(router, given, 2)
    assert (
        containers.route_args(router, given, 2)
        == expected
        == [({"mask": 1}, {}), ({"mask": 1, "context": 2}, {"mask": 1})]
    )


@pytest.mark.parametrize("prob", [0.0, 0.5, 1.0])
def test_dropped_layers(prob):
    kept = []
    for package in (original(), containers):
        torch.manual_seed(1)
        kept.append(list(package.layer_drop(list("abcde"), prob)))
    assert kept[0] == kept[1]


def test_random_numbers_of_an_earlier_call():
    layer = containers.Deterministic(nn.Dropout(0.5))
    x = torch.ones(3, 11)
    with pytest.raises(ValueError, match="call the layer with record_rng=True first"):
        layer(x, set_rng=True)
    first = layer(x, record_rng=True)
    assert not torch.equal(layer(x), first)
    state = torch.get_rng_state()
    assert torch.equal(layer(x, set_rng=True), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_block_and_its_inverse():
    f, g = Noisy(), Noisy()
    theirs, mine = (package.ReversibleBlock(copy.deepcopy(f), copy.deepcopy(g)) for package in (original(), containers))
    x, dy = torch.randn(2, B, T, 2 * DIM)
    results = []
    for block in (theirs, mine):
        torch.manual_seed(2)
        y = block(x, f_args={"add": 0.5})
        back, dx = block.backward_pass(y.detach(), dy, f_args={"add": 0.5})
        results.append([y, back, dx, *(p.grad for p in block.parameters())])
    for one, other in zip(*results, strict=True):
        older.assert_close(other, one)
    older.assert_close(results[1][1], x)
    assert [name for name, _ in mine.named_modules()] == [name for name, _ in theirs.named_modules()]


def test_hooks_on_blocks_and_layers_fire():
    torch.manual_seed(3)
    net = containers.ReversibleSequence([(Noisy(), Noisy()), (Noisy(), Noisy())]).eval()
    x = torch.randn(B, T, DIM)
    plain = net(x)
    plain.square().sum().backward()
    gradients = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    called = []
    net.blocks[1].f.net.register_forward_hook(lambda *_: called.append("layer"))
    net(x)
    assert called == ["layer"]
    net.blocks[1].register_forward_hook(lambda _, args, out: called.append(tuple(out.shape)))
    out = net(x)
    assert called == ["layer", "layer", (B, T, 2 * DIM)]
    older.assert_close(out, plain)
    out.square().sum().backward()
    for p, gradient in zip(net.parameters(), gradients, strict=True):
        older.assert_close(p.grad, gradient)


def test_a_replaced_block_is_called():
    class Double(nn.Module):
        def forward(self, x, f_args, g_args):
            return 2 * x

    net = containers.ReversibleSequence([(Noisy(), Noisy())])
    net.blocks[0] = Double()
    x = torch.randn(B, T, DIM)
    torch.testing.assert_close(net(x), 2 * x)
