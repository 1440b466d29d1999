"""linformer's own sequences of layers beside ours."""

import pytest
import torch
from older import assert_parity, original
from torch import nn

from longspan.compat.linformer import reversible


class Mixed(nn.Module):
    """A layer that sees other tokens, and takes an argument."""

    def __init__(self, dim):
        super().__init__()
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, scale=1.0):
        return self.to_out(x.cumsum(1)).tanh() * scale


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["SequentialSequence", "ReversibleSequence"])
def test_sequences(name, training):
    def build(module):
        pairs = nn.ModuleList(nn.ModuleList([Mixed(7), Mixed(7)]) for _ in range(2))
        return getattr(module, name)(pairs, args_route={"scale": ((True, False), (False, True))}).train(training)

    def run(module):
        x = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(2)).requires_grad_()
        if name == "ReversibleSequence" and not training:
            # In eval mode the original cannot go backwards: the forward pass alone.
            with torch.no_grad():
                return module(x, scale=3.0).requires_grad_(), {}
        return module(x, scale=3.0), {"x": x}

    assert_parity(build(original("linformer.reversible")), build(reversible), run)
