"""`longspan.explain` on a GPU: the kernels that a call launches are those that are explained."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from longspan import Packing, build_mechanism, explain

# Names of kernels begin with the operation and the algorithm.
KERNELS = re.compile(
    r"(?:linear|gated)_(fused_chunk|tiled_chunk|favor_bidirectional|favor|chunk|bidirectional|decay|delta|channel)_"
    r"|(window|compressed|hedgehog|gates|l2_norm)_(?:features_)?(?:forward|backward)|(decode)_"
)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("linear", {}),
    ("linear", {"head_dim": 192}),
    ("linear", {"blind_spot": 64}),
    ("linear", {"blind_spot": 128}),
    ("linear", {"feature_map": "softmax", "normalize": "feature"}),
    ("linear", {"feature_map": "hedgehog"}),
    ("performer", {"num_features": 256}),
    ("performer", {"num_features": 266}),
    ("performer", {"num_features": 256, "head_dim": 128}),
    ("performer", {"num_features": 256, "epsilon": 1e-4}),
    ("local", {"window": 64}),
    ("local", {"window": 64, "xpos": 32.0}),
    ("local", {"window": 2, "xpos": 1.0}),
    ("local", {"window": 2, "bias": torch.zeros(2, 1, 3)}),
    ("linformer", {"rank": 64, "max_length": 517}),
    ("linformer", {"rank": 64, "max_length": 517, "head_dim": 128}),
    ("decay", {}),
    ("delta", {"gate": "channel"}),
    ("mixture", {"window": 31}),
    ("softmax", {}),
]


def launched(call: Any) -> set[str]:
    """The algorithms of the kernels that a call launches, without what only maps features or copies."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    found = [KERNELS.match(event.key) for event in profile.key_averages()]
    return {next(group for group in match.groups() if group) for match in found if match is not None}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_what_is_explained_is_launched(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    options = dict(options)
    head_dim = options.pop("head_dim", 64)
    mechanism = build_mechanism(name, 2, head_dim, **options).to("cuda", dtype).eval()
    q, k, v = (torch.randn(1, 517, 2, head_dim, device="cuda", dtype=dtype) for _ in range(3))
    gates = torch.randn(1, 517, 2, mechanism.num_gates, device="cuda", dtype=dtype) if mechanism.num_gates else None
    masked = torch.arange(517, device="cuda")[None] < 516
    packing = Packing.from_lengths([300, 217], device="cuda")
    for causal, layout, given in (
        (True, {}, {}),
        (False, {}, {}),
        (True, {"key_mask": masked}, {"padded": True}),
        (False, {"packing": packing}, {"packed": [300, 217]}),
    ):
        with torch.no_grad():
            seen = launched(lambda c=causal, o=layout: mechanism(q, k, v, gates=gates, causal=c, **o))
        found = explain(mechanism, 1, 517, causal=causal, dtype=dtype, **given)
        told = {decision.algorithm for decision in found.decisions} - {"torch", "sdpa"}
        assert seen == told, (causal, layout, str(found))


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_what_is_explained_of_a_decode_step_is_launched(name: str, options: dict[str, Any]) -> None:
    options = dict(options)
    head_dim = options.pop("head_dim", 64)
    mechanism = build_mechanism(name, 2, head_dim, **options).to("cuda", torch.bfloat16).eval()
    q, k, v = (torch.randn(1, 1, 2, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    gates = q.new_zeros(1, 1, 2, mechanism.num_gates) if mechanism.num_gates else None
    with torch.inference_mode():
        state = mechanism.new_state(1, device="cuda", dtype=q.dtype).reserve(7)
        state = mechanism.decode_state(state, q.dtype)
        seen = launched(lambda: mechanism.decode_step(state, q, k, v, gates=gates))
    told = {decision.algorithm for decision in explain(mechanism, decode=True, length=5).decisions}
    assert seen == told - {"torch", "sdpa"}
