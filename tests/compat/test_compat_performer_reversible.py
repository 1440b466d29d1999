"""performer-pytorch's containers for pairs of layers, on layers of one's own."""

import copy

import pytest
import torch
from older import assert_close, original
from torch import nn

from longspan.compat.performer_pytorch import reversible as ours


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(5, 5), nn.Dropout(0.0)

    def forward(self, x, context=None, scale=1.0):
        out = self.dropout(self.linear(x).tanh()) * scale
        return out if context is None else out * context.mean(1, keepdim=True)


ROUTES = {"scale": ((True, False), (True, True)), "context": ((False, False), (True, False))}


def layers():
    return nn.ModuleList([nn.ModuleList([Layer(), Layer()]) for _ in range(2)])


@pytest.mark.parametrize("name", ["SequentialSequence", "ReversibleSequence"])
def test_outputs_and_gradients(name):
    theirs = original("performer_pytorch.reversible")
    pairs = layers()
    results = []
    for library in (theirs, ours):
        net = getattr(library, name)(copy.deepcopy(pairs), args_route=ROUTES)
        x, context = (torch.randn(2, n, 5, generator=torch.Generator().manual_seed(n)) for n in (7, 3))
        x.requires_grad_(), context.requires_grad_()
        out = net(x, scale=0.7, context=context)
        out.square().sum().backward()
        results.append([out, x.grad, context.grad, *(p.grad for p in net.parameters())])
        names = list(net.state_dict())
        assert names[0].startswith("layers.0.0." if name == "SequentialSequence" else "blocks.0.f.net.")
    for mine, wanted in zip(results[1], results[0], strict=True):
        assert_close(mine, wanted)


def test_weights_get_gradients_if_the_input_needs_none():
    theirs = original("performer_pytorch.reversible")
    x = torch.randn(2, 7, 5)
    assert not theirs.ReversibleSequence(layers())(x).requires_grad
    net = ours.ReversibleSequence(layers())
    net(x).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_arguments_without_a_route_are_refused():
    for cls in (ours.SequentialSequence, ours.ReversibleSequence):
        with pytest.raises(TypeError, match=r"has no entry for mask; it has \['scale'\]"):
            cls(layers(), {"scale": ROUTES["scale"]})(torch.randn(2, 7, 5), mask=None)
        with pytest.raises(ValueError, match=r"one entry for each of 2 pairs of layers, got \{'scale': 1\}"):
            cls(layers(), {"scale": ROUTES["scale"][:1]})
