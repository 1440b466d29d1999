"""Context parallelism on a GPU: the kernels behind `defer`, and NCCL's collectives in a group of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from longspan import AttentionConfig, LanguageModel, ModelConfig, Packing, build_mechanism
from longspan.distributed import context_parallel

MECHANISMS: list[dict[str, Any]] = [
    {"mechanism": "softmax"},
    {"mechanism": "local", "window": 65},
    {"mechanism": "linear"},
    {"mechanism": "linear", "feature_map": "softmax"},
    {"mechanism": "performer", "num_features": 128},
    {"mechanism": "linformer", "rank": 32, "max_length": 4096},
    {"mechanism": "decay"},
    {"mechanism": "delta"},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", MECHANISMS, ids=str)
def test_defer_is_forward_with_past(spec: dict[str, Any], dtype: torch.dtype) -> None:
    name, options = spec["mechanism"], {key: x for key, x in spec.items() if key != "mechanism"}
    mechanism = build_mechanism(name, 4, 64, num_kv_heads=2, **options).cuda()
    shapes = (4, 64), (2, 64), (2, 64), (2, mechanism.num_gates)
    q, k, v, gates = (torch.randn(2, 1031, *shape, device="cuda", dtype=dtype) for shape in shapes)
    gates = gates if mechanism.num_gates else None
    first, rest = slice(0, 517), slice(517, None)
    own = [None if gates is None else gates[:, part] for part in (first, rest)]
    past = mechanism.write(mechanism.new_state(2, device="cuda", dtype=dtype), k[:, first], v[:, first], gates=own[0])
    finish = mechanism.defer(q[:, rest], k[:, rest], v[:, rest], gates=own[1], start=past.end)
    expected = mechanism(q, k, v, gates=gates, causal=True)[:, rest]
    limit = 2e-2 if dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(finish(past), expected, rtol=limit, atol=limit)


@pytest.fixture(scope="module")
def nccl() -> Iterator[None]:
    """A process group of one rank, which needs no network."""
    device = torch.device("cuda", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_SOCKET_IFNAME", "lo")
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
        yield
        dist.destroy_process_group()


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spec", MECHANISMS, ids=str)
def test_one_rank_of_nccl(spec: dict[str, Any], causal: bool) -> None:
    """All collectives and their gradients, forward, loss and extend; the numbers of the model alone."""
    torch.manual_seed(0)
    tokens = torch.randint(97, (1, 131), device="cuda")
    attention = AttentionConfig(num_heads=4, mechanism=spec, conv_size=4)
    shift = (0, 1) if causal else (1, -1)
    config = ModelConfig(dim=64, depth=2, causal=causal, vocab_size=97, attention=attention, token_shift=shift)
    model = LanguageModel(config).cuda()
    divided = context_parallel(model, dist.group.WORLD)
    for given in ({}, {"packing": Packing.from_lengths([50, 81], device="cuda")}):
        torch.testing.assert_close(divided(tokens, **given), model(tokens, **given), rtol=1e-3, atol=1e-3)
        model.zero_grad()
        loss = divided.loss(tokens, **given)
        loss.backward()
        divided.reduce_gradients()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        expected = model.loss(tokens, **given)
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
        for gradient, p in zip(found, model.parameters(), strict=True):
            if p.grad is not None:
                torch.testing.assert_close(gradient, p.grad, rtol=1e-2, atol=1e-3)
    if causal:
        out, _ = divided.extend(tokens, model.new_state(1))
        torch.testing.assert_close(out, model.extend(tokens, model.new_state(1))[0], rtol=1e-3, atol=1e-3)
