"""Options of `decay` and `delta`, each against its recurrence written out here."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from option_cases import B, D, E, H, T, assert_same, build, checks, inputs, option_test
from torch import Tensor

from longspan import Mechanism, build_mechanism
from longspan.mechanisms import gated
from longspan.ops.gated import gated_linear_out
from longspan.testing import check_mechanism

Weights = tuple[Tensor, Tensor]  # α (B, T, Hkv, 1 or D) and the strength of the write (B, T, Hkv)


def fixed(m: Mechanism, gates: Tensor | None, k: Tensor) -> Weights:
    alpha = 1 - 0.5 ** (5 + torch.arange(k.shape[2], dtype=k.dtype))
    return alpha[:, None].expand(*k.shape[:3], 1), torch.ones_like(k[..., 0])


def mamba(m: Mechanism, gates: Tensor, k: Tensor) -> Weights:
    step = (1 + (gates[..., 0] + m.time_step.dt_bias[:, 0]).exp()).log()
    return (-m.time_step.A_log.exp() * step).exp()[..., None], step


def gla(m: Mechanism, gates: Tensor, k: Tensor) -> Weights:
    return (gates + m.gate_bias).sigmoid() ** (1 / 16), torch.ones_like(k[..., 0])


def delta_net(m: Mechanism, gates: Tensor, k: Tensor) -> Weights:
    return torch.ones_like(k[..., :1]), gates[..., 0].sigmoid() * (1 + m.negative_eigenvalues)


def gated_delta_net(m: Mechanism, gates: Tensor, k: Tensor) -> Weights:
    """Also Kimi Delta Attention, with D decays per head."""
    step = F.softplus(gates[..., 1:] + m.time_step.dt_bias)
    return (-m.time_step.A_log.exp()[:, None] * step).exp(), delta_net(m, gates, k)[1]


def recurrence(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, delta: bool) -> Tensor:
    group, outs = q.shape[2] // k.shape[2], []
    S = k.new_zeros(len(k), k.shape[2], k.shape[3], v.shape[3])
    for t in range(k.shape[1]):
        key, S = k[:, t, :, :, None], alpha[:, t, :, :, None] * S
        if delta:
            S = S - beta[:, t, :, None, None] * key @ (key.mT @ S)
        S = S + beta[:, t, :, None, None] * key * v[:, t, :, None]
        outs.append((q[:, t, :, None] @ S.repeat_interleave(group, 1))[:, :, 0])
    return torch.stack(outs, 1) * q.shape[3] ** -0.5


def definition(name: str, m: Mechanism, weights) -> object:
    """The mechanism's definition; bidirectional is both directions, in which `decay` counts a token itself once."""
    delta = name == "delta"

    def run(q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None = None, *, causal: bool) -> Tensor:
        alpha, beta = weights(m, gates, k)
        if delta:
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        out = recurrence(q, k, v, alpha, beta, delta)
        if causal:
            return out
        out = out + recurrence(*(x.flip(1) for x in (q, k, v, alpha, beta)), delta).flip(1)
        if delta:
            return out
        group = q.shape[2] // k.shape[2]
        own = (q * k.repeat_interleave(group, 2)).sum(-1) * beta.repeat_interleave(group, 2) * q.shape[3] ** -0.5
        return out - own[..., None] * v.repeat_interleave(group, 2)

    return run


DEFINITIONS = [
    ("decay", {"gate": "fixed"}, fixed),
    ("decay", {"gate": "head"}, mamba),
    ("decay", {"gate": "channel"}, gla),
    ("delta", {"gate": "none"}, delta_net),
    ("delta", {"gate": "none", "negative_eigenvalues": True}, delta_net),
    ("delta", {"gate": "head"}, gated_delta_net),
    ("delta", {"gate": "channel", "negative_eigenvalues": True}, gated_delta_net),
]


@pytest.mark.parametrize(
    ("name", "options", "weights"), DEFINITIONS, ids=lambda x: x.__name__ if callable(x) else str(x)
)
def test_every_gate_obeys_the_laws_and_its_definition(name: str, options: dict, weights) -> None:
    built: list[Mechanism] = []

    def factory() -> Mechanism:
        built.append(build(name, num_heads=6, num_kv_heads=2, **options))
        return built[-1]

    def reference(*args: Tensor, **options: object) -> Tensor:
        return definition(name, built[-1], weights)(*args, **options)

    check_mechanism(factory, reference=reference)


@pytest.mark.parametrize(
    ("name", "gate", "channels"), [("decay", "head", 1), ("delta", "head", 1), ("delta", "channel", D)]
)
def test_time_steps_begin_as_in_mamba(name: str, gate: str, channels: int) -> None:
    """A is uniform from 1 to 16, Δ without a gate log-uniform from 0.001 to 0.1."""
    m = build_mechanism(name, 4096, D, gate=gate)
    rate, step = m.time_step.A_log.exp(), F.softplus(m.time_step.dt_bias.double()).log10()
    assert rate.shape == (4096,)
    assert step.shape == (4096, channels)
    for x, low, high in ((rate, 1, 16), (step, -3, -1)):
        assert low - 1e-4 <= x.min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < x.max() <= high + 1e-4
        torch.testing.assert_close(x.double().mean().item(), (low + high) / 2, atol=0.03 * (high - low), rtol=0)


def test_channels_begin_with_the_bias_of_gla() -> None:
    """Without a gate α = σ(0)^(1/16)."""
    m = build_mechanism("decay", 3, D, gate="channel")
    decay = m._gates(torch.zeros(B, T, 3, D), torch.zeros(B, T, 3, D)).log_decay
    torch.testing.assert_close(decay.exp(), torch.full((B, T, 3, D), 0.5 ** (1 / 16)))


@pytest.mark.parametrize(("name", "gate"), [("decay", "channel"), ("delta", "head")])
def test_both_directions_take_bfloat16_where_kernels_run(name: str, gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """float16 has too little range for the parts of a sum, and eager PyTorch gains nothing."""
    taken = []

    def record(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        taken.append(v.dtype)
        return gated_linear_out(q, k, v, **options)

    m = build(name, gate=gate)
    x = {key: y.bfloat16() for key, y in gated_inputs(m).items()}
    truth = m(**{key: y.double() for key, y in x.items()})
    m.float()
    monkeypatch.setattr(gated, "gated_linear_out", record)
    eager = m(**x)
    monkeypatch.setattr(gated, "choose_algorithm", lambda *_: "channel")
    found = m(**x)
    m(**{key: y.half() for key, y in x.items()})
    assert taken == [torch.float32] * 2 + [torch.bfloat16] * 2 + [torch.float32] * 2
    assert found.dtype == torch.bfloat16
    allowed = 2 * (eager - truth).abs().max() + truth.abs().max() * torch.finfo(torch.bfloat16).eps
    assert (found - truth).abs().max() <= allowed


def gated_inputs(m: Mechanism) -> dict[str, Tensor]:
    q, k, v = inputs()
    return {"q": q, "k": k, "v": v, "gates": torch.randn(B, T, H, m.num_gates, dtype=q.dtype)}


def check(name: str, chosen: list[tuple[dict, object]]) -> None:
    for options, weights in chosen:
        m = build(name, **options)
        x = gated_inputs(m)
        x = x if m.num_gates else {key: y for key, y in x.items() if key != "gates"}
        assert_same(m(**x, causal=True), definition(name, m, weights)(**x, causal=True))
        assert m.num_gates == x.get("gates", x["v"][..., :0]).shape[-1]


@checks("decay", "gate")
def _() -> None:
    check("decay", [({"gate": "fixed"}, fixed), ({"gate": "head"}, mamba), ({"gate": "channel"}, gla), ({}, mamba)])


@checks("delta", "gate")
def _() -> None:
    others = [({"gate": gate}, gated_delta_net) for gate in ("head", "channel")]
    check("delta", [({"gate": "none"}, delta_net), *others, ({}, gated_delta_net)])


@checks("delta", "negative_eigenvalues")
def _() -> None:
    """The memory of a key can change its sign: with β near 2 and nothing to write, each token flips it."""
    torch.manual_seed(0)
    key, v = torch.randn(1, 5, 1, D, dtype=torch.float64)[:, :1].expand(1, 5, 1, D), torch.zeros(1, 5, 1, E)
    v = v.double()
    v[:, 0] = 1
    gates = torch.full((1, 5, 1, 1), 40.0, dtype=torch.float64)
    signs = {}
    for negative in (False, True):
        m = build("delta", num_heads=1, gate="none", negative_eigenvalues=negative)
        out = m(key, key, v, gates=gates, causal=True)[0, :, 0, 0]
        signs[negative] = [round(float(x / out[0].abs()), 3) + 0.0 for x in out]
    assert signs == {False: [1, 0, 0, 0, 0], True: [1, -1, 1, -1, 1]}


test_option = option_test(__name__)
