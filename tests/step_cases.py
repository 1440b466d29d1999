"""Mechanisms with a kernel for a decode step, and its comparison with write and read."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan import Mechanism, build_mechanism
from longspan.models.residual import _with_length
from longspan.ops.decode import CosSin
from longspan.ops.rotary import cos_sin

H, HKV, D, E = 4, 2, 6, 7

CASES: dict[str, tuple[str, dict]] = {
    "linear": ("linear", {}),
    "relu": ("linear", {"feature_map": "relu", "output_scale": 0.5}),
    "identity": ("linear", {"feature_map": "identity", "normalize": "none"}),
    "softmax-map": ("linear", {"feature_map": "softmax"}),
    "by-feature": ("linear", {"feature_map": "softmax", "normalize": "feature"}),
    "performer": ("performer", {"num_features": 19}),
    "performer-by-feature": ("performer", {"num_features": 5, "normalize": "feature"}),
    "local": ("local", {"window": 11}),
    "window-of-one": ("local", {"window": 1}),
    "blocks": ("local", {"window": 5, "look_back": 2, "scale": 0.3}),
    "shared": ("local", {"window": 5, "shared_qk": True}),
    "performer, column by column": ("performer", {"num_features": 251, "value_dim": 131}),
    "decay, fixed": ("decay", {"gate": "fixed"}),
    "decay": ("decay", {}),
    "decay by channel": ("decay", {"gate": "channel", "value_dim": 19}),
    "delta, no decay": ("delta", {"gate": "none", "negative_eigenvalues": True}),
    "delta": ("delta", {"value_dim": 17}),
    "delta by channel": ("delta", {"gate": "channel"}),
    "mixture": ("mixture", {"window": 11}),
    "mixture, window of one and sink": ("mixture", {"window": 1, "value_dim": 17, "sink": True}),
    "mixture, fixed features": ("mixture", {"window": 5, "memory": "linear", "scale": 0.3}),
    "mixture, delta": ("mixture", {"window": 5, "memory": "delta"}),
    "linformer": ("linformer", {"rank": 13, "max_length": 61}),
    "linformer-by-head": ("linformer", {"rank": 3, "max_length": 61, "per_head": True, "share_projection": True}),
    "linformer, biases by head": ("linformer", {"rank": 3, "max_length": 61, "per_head": True, "bias": True}),
    "linformer-for-ever": ("linformer", {"rank": 5, "max_length": 7, "periodic": True, "bias": True}),
}


# Without a kernel: float64 sums, which the kernels do not take; gated memories of mixtures.
EAGER = {"performer-by-feature", "mixture, delta"}


def mechanism(name: str, device: str = "cpu") -> Mechanism:
    kind, options = CASES[name]
    built = build_mechanism(kind, H, D, num_kv_heads=HKV, **{"value_dim": E, **options}).eval().to(device)
    for name, parameter in built.named_parameters():
        if name.endswith(("bias", "mix_weight", "sink_weight", "sink_value")):  # zeros would hide them
            torch.nn.init.normal_(parameter)
    return built


def inputs(name: str, B: int, T: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    shapes = [(B, T, H, D), (B, T, HKV, D), (B, T, HKV, CASES[name][1].get("value_dim", E))]
    return [torch.randn(shape).to(device, dtype) for shape in shapes]


def gates(built: Mechanism, B: int, T: int, dtype: torch.dtype, device: str) -> Tensor | None:
    """Return raw gates, some of which forget everything."""
    if not built.num_gates:
        return None
    built = getattr(built, "memory", built)
    found = 2 * torch.randn(B, T, HKV, built.num_gates)
    # The sum of log α would tell where float32 and float64 clamp it: without the delta rule α only comes close to 0.
    extreme = 1e4 if built.delta else -1500.0 if built.gate == "channel" else 3.0
    if built.gate != "none":
        found[..., -1] = torch.where(torch.rand(B, T, HKV) < 0.3, extreme, found[..., -1])
    return found.to(device, dtype)


def rotary(length: Tensor, kind: int) -> CosSin | None:
    """Return the rotary angles of the next token: 0 none, 1 in halves, 2 interleaved, 3 and 4 of some features only."""
    if kind == 0:
        return None
    return CosSin(*cos_sin(length[:, None], D if kind < 3 else D - 2, 100.0, torch.float32), kind % 2 == 0)


@torch.no_grad()
def compare(name: str, dtype: torch.dtype, device: str, steps: int) -> None:
    """Compare steps with eager ones in the same dtype and in float64, by the tolerance rule.

    The state is converted by `decode_state` for the steps, and back by `finish_decode` for the comparison.
    """
    built = mechanism(name, device)
    exact = mechanism(name).double()
    exact.load_state_dict({k: x.double().cpu() for k, x in built.state_dict().items()})
    B = 2
    states = [m.new_state(B, device=d, dtype=t) for m, d, t in ((built, device, dtype), (exact, "cpu", torch.float64))]
    for count, fewer in ((3, 2), (9, 1)):  # batch rows of 12 and 9 tokens
        x = inputs(name, B, count, dtype, device)
        mask = torch.arange(count) < torch.tensor([[count], [count - fewer]])
        raw = gates(built, B, count, dtype, device)
        states[0] = built.extend(states[0], *x, gates=raw, key_mask=mask.to(device))[1]
        *x, raw = (None if y is None else y.cpu().double() for y in (*x, raw))
        states[1] = exact.extend(states[1], *x, gates=raw, key_mask=mask)[1]
    ours, eager, truth = (state._map(lambda x: x.contiguous().clone()) for state in (states[0], *states))
    ours, eager, truth = (_with_length(state, state.length) for state in (ours, eager, truth))
    ours = built.decode_state(ours, dtype)
    assert CASES[name][0] in ("local", "decay", "delta", "mixture") or name in EAGER or ours.pending
    found: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for i in range(steps):
        q, k, v = inputs(name, B, 1, dtype, device)
        kind, raw = i % 5, gates(built, B, 1, dtype, device)
        pointers = {key: x.data_ptr() for key, x in ours.tensors().items()}
        out, ours = built.decode_step(ours, q, k, v, gates=raw, rotary=rotary(ours.length, kind))
        assert {key: x.data_ptr() for key, x in ours.tensors().items()} == pointers
        near, eager = Mechanism._decode_step(built, eager, q, k, v, raw, rotary(eager.length, kind), None)
        angles = rotary(truth.length, kind)
        wide = [None if x is None else x.cpu().double() for x in (q, k, v, raw)]
        best, truth = Mechanism._decode_step(exact, truth, *wide, angles, None)
        for state in (ours, eager, truth):
            state.length.add_(1)
        found.setdefault("out", []).append((out, near, best))
        held = [state.clone().tensors() for state in (built.finish_decode(ours.clone()), eager, truth)]
        if CASES[name][0] == "performer":  # The kernels scale sums by other factors: compare them at one.
            for tensors in held:
                factor = (tensors.pop("shift").double().cpu() - truth.shift).exp()[..., None]
                tensors["z"] = tensors["z"].double().cpu() * factor
                tensors["kv"] = tensors["kv"].double().cpu() * factor[..., None]
        for key in held[0].keys() - {"length"}:
            found.setdefault(key, []).append((held[0][key], held[1][key], held[2][key]))
    for key, triples in found.items():
        # Over all steps: the largest error of a single one is a matter of chance.
        x, y, z = (torch.stack(tensors).cpu() for tensors in zip(*triples, strict=True))
        assert x.dtype == y.dtype, key
        allowed = 2 * (y.double() - z).abs().max().item() + z.abs().max().item() * torch.finfo(dtype).eps
        error = (x.double() - z).abs().max().item()
        assert error <= allowed, f"{key}: {error:.3g} from the truth, {allowed:.3g} allowed"
