"""Options of `mixture`, and what a window with a memory is where one of them sees nothing."""

from __future__ import annotations

import pytest
import torch
from option_cases import (
    B,
    D,
    E,
    H,
    T,
    assert_same,
    build,
    checks,
    differ,
    inputs,
    option_test,
    positions,
    softmax_attention,
)

from longspan import build_mechanism
from longspan.mechanisms.decay import DecayAttention
from longspan.mechanisms.mixture import MixtureAttention
from longspan.ops.window.torch import BLIND


@checks("mixture", "window")
def _() -> None:
    q, k, v = inputs()
    i, j = positions()
    small, large = build("mixture", window=5), build("mixture", window=T)
    assert_same(large(q, k, v, causal=True), softmax_attention(q, k, v, i >= j))
    assert_same(small(q, k, v, causal=True)[:, :5], softmax_attention(q, k, v, i >= j)[:, :5])
    differ(small(q, k, v, causal=True)[:, 5:], large(q, k, v, causal=True)[:, 5:])
    small.mix_bias.data.fill_(BLIND)
    assert_same(small(q, k, v, causal=True), softmax_attention(q, k, v, (i >= j) & (i - j < 5)))
    with pytest.raises(ValueError, match="window counts the query's own key and must be at least 1, got 0"):
        build("mixture", window=0)


@checks("mixture", "scale")
def _() -> None:
    q, k, v = inputs()
    i, j = positions()
    assert_same(build("mixture", scale=0.9)(q, k, v, causal=True), softmax_attention(q, k, v, i >= j, scale=0.9))


@checks("mixture", "memory")
def _() -> None:
    """A large mix_bias leaves the memory alone: that of the tokens before the window."""
    q, k, v = inputs()
    for memory in (
        "linear",
        {"mechanism": "linear", "feature_map": "hedgehog"},
        {"mechanism": "decay", "gate": "fixed"},
    ):
        mixture = build("mixture", window=3, memory=memory)
        mixture.mix_bias.data.fill_(1e4)
        alone = mixture.memory(q[:, 3:], k[:, :-3], v[:, :-3], causal=True)
        if isinstance(mixture.memory, DecayAttention):
            alone = alone / (alone.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        assert_same(mixture(q, k, v, causal=True)[:, 3:], alone)
    for wrong, says in (
        ("softmax", "the memory must be linear, decay or delta, got SoftmaxAttention"),
        ({"mechanism": "linear", "feature_map": "softmax"}, "a feature map without log scale or epsilon"),
        ({"mechanism": "linear", "blind_spot": 2}, "no output_scale, blind_spot or phantom"),
        ({"feature_map": "elu"}, "memory is a name or"),
    ):
        with pytest.raises(ValueError, match=says):
            build("mixture", memory=wrong)


@checks("mixture", "sink")
def _() -> None:
    """One more key and value of every head, for queries whose window has left the first token behind."""
    q, k, v = inputs()
    i, j = positions()
    mixture = build("mixture", window=5, sink=True)
    mixture.mix_bias.data.fill_(BLIND)
    torch.nn.init.normal_(mixture.sink_weight)
    torch.nn.init.normal_(mixture.sink_bias)
    torch.nn.init.normal_(mixture.sink_value)
    seen = (i >= j) & (i - j < 5)
    scores = (torch.einsum("bthd,bshd->bhts", q, k) * D**-0.5).masked_fill(~seen, float("-inf"))
    sink = torch.einsum("bthd,hd->bht", q, mixture.sink_weight) + mixture.sink_bias[:, None]
    sink[:, :, :5] = float("-inf")
    weights = torch.cat([scores, sink[..., None]], -1).softmax(-1)
    expected = torch.einsum("bhts,bshe->bthe", weights[..., :-1], v)
    expected += weights[..., -1].transpose(1, 2)[..., None] * mixture.sink_value
    assert_same(mixture(q, k, v, causal=True), expected)
    differ(mixture(q, k, v, causal=True)[:, 5:], build("mixture", window=5)(q, k, v, causal=True)[:, 5:])


test_option = option_test(__name__)


def test_scores_of_the_memory_are_learned() -> None:
    mixture = build_mechanism("mixture", H, D, value_dim=E, window=3, sink=True)
    assert isinstance(mixture, MixtureAttention)
    torch.nn.init.normal_(mixture.sink_value)
    mixture(*(x.float() for x in inputs()), causal=True).square().sum().backward()
    for name, parameter in mixture.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("memory", ["linear", "decay", "delta"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_sequence_within_the_window_gives_gradients_of_zero(memory: str, causal: bool) -> None:
    """DistributedDataParallel waits for the gradients of all parameters, FSDP for those that other ranks have."""
    mixture = build_mechanism("mixture", H, D, value_dim=E, window=T, memory=memory, sink=True)
    q, k, v = (x.float() for x in inputs())
    gates = torch.randn(*k.shape[:3], mixture.num_gates) if mixture.num_gates else None
    out = mixture(q, k, v, gates=gates, causal=causal)
    with torch.no_grad():
        assert torch.equal(mixture(q, k, v, gates=gates, causal=causal), out)
    grads = torch.autograd.grad(out.sum(), list(mixture.parameters()))
    assert not any(grad.any() for grad in grads)


def test_a_state_does_not_grow() -> None:
    mixture = build("mixture", window=5, memory="delta")
    state = mixture.new_state(B, dtype=torch.float64)
    size = {name: x.shape for name, x in state.tensors().items()}
    gates = torch.randn(B, T, H, mixture.num_gates, dtype=torch.float64)
    _, state = mixture.extend(state, *inputs(), gates=gates)
    assert {name: x.shape for name, x in state.tensors().items()} == size
