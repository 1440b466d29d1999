"""Operations on more rows than a grid has programs for, computed for some rows at a time, under the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from interpreter import interpreted
from torch import Tensor

from longspan.ops import compressed, features, gated, heads, merge, normalizer
from longspan.ops.common import batches, dispatch, plans
from longspan.ops.compressed import fused

B, T, H, D, R = 5, 13, 2, 16, 4


def half(*shape: int) -> Tensor:
    return torch.randn(shape).half()


def bfloat16(*shape: int) -> Tensor:
    return torch.rand(shape).bfloat16()


def tokens(*dims: int, make: Callable[..., Tensor] = bfloat16) -> list[Tensor]:
    return [make(B, T, H, dim) for dim in dims]


def feature_attention() -> tuple[Any, list[Tensor], list[Tensor]]:
    return features.feature_attention, [*tokens(D, D, R), torch.rand(B, H, D, R), torch.rand(B, H, D)], []


def normalized_features() -> tuple[Any, list[Tensor], list[Tensor]]:
    lengths = torch.tensor([13, 1, 7, 12, 5])

    def run(q: Tensor, k: Tensor, z: Tensor) -> Any:
        return normalizer.normalized_features(q, k, z, feature_map="elu", lengths=lengths)[:3]

    return run, [*tokens(D, D), torch.rand(B, H, D)], []


def merge_attention() -> tuple[Any, list[Tensor], list[Tensor]]:
    parts = [torch.randn(B, T, H, R), torch.randn(B, T, H), torch.randn(B, T, H, R), torch.randn(B, T, H)]
    return merge.merge_attention, [*parts, *tokens(D)], [torch.randn(2, H, D), torch.randn(2, H), torch.randn(H, R)]


def causal_linformer() -> tuple[Any, list[Tensor], list[Tensor]]:
    def run(q: Tensor, k: Tensor, v: Tensor, start_k: Tensor, start_v: Tensor, e: Tensor, f: Tensor) -> Any:
        return compressed.causal_linformer(q, k, v, e, f, start_k, start_v)

    starts = torch.randn(B, H, R, D), torch.randn(B, H, R, R)
    return run, [*tokens(D, D, R), *starts], [torch.rand(1, T, 1, R), torch.rand(1, T, 1, R)]


def causal_linformer_with_tables_by_row() -> tuple[Any, list[Tensor], list[Tensor]]:
    return compressed.causal_linformer, [*tokens(D, D, R), torch.rand(B, T, 1, R), torch.rand(B, T, 1, R)], []


def compressed_attention() -> tuple[Any, list[Tensor], list[Tensor]]:
    return compressed.compressed_attention, [*tokens(D, make=half), half(B, H, R, D), half(B, H, R, D)], []


def linformer_attention() -> tuple[Any, list[Tensor], list[Tensor]]:
    return compressed.linformer_attention, tokens(D, D, D, make=half), [torch.randn(1, T, R), torch.randn(1, T, R)]


def shared_linformer_attention() -> tuple[Any, list[Tensor], list[Tensor]]:
    def run(q: Tensor, k: Tensor, e: Tensor) -> Any:
        return compressed.linformer_attention(q, k, k, e, e)

    return run, tokens(D, D, make=half), [torch.randn(1, T, R)]


def linformer_layer() -> tuple[Any, list[Tensor], list[Tensor]]:
    problem, dim = compressed.CompressedProblem(H, H, D, D, R), H * D

    def run(x: Tensor, *weights: Tensor) -> Any:
        return compressed.linformer_layer(x, *weights, problem, torch.float16)

    shapes = (dim, dim), (2 * dim, dim), (1, T, R), (dim, dim), (dim,)
    return run, [half(B, T, dim)], [torch.randn(shape) / 4 for shape in shapes]


def decay() -> tuple[Any, list[Tensor], list[Tensor]]:
    def run(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> Any:
        return gated.gated_linear(q, k, v, log_decay=-log_decay, beta=beta, state=state)

    return run, [*tokens(D, D, R, 1, make=torch.rand), torch.rand(B, T, H), torch.rand(B, H, D, R)], []


def decay_without_states() -> tuple[Any, list[Tensor], list[Tensor]]:
    return gated.gated_linear_out, tokens(D, D, R, make=torch.rand), []


def divide_heads() -> tuple[Any, list[Tensor], list[Tensor]]:
    angles = torch.rand(T, D // 2)

    def run(x: Tensor, *weights: Any) -> Any:
        found = heads.divide_heads(x, weights, (1, 1), (True, False), (angles.cos(), angles.sin()), 1e-6)
        assert found is not None
        return tuple(y for part in found for y in part)

    return run, [torch.randn(B, T, 3 * H * D)], [torch.randn(D), torch.randn(D)]


# Operations, and a limit of grids with which two rows are computed at a time.
OPERATIONS: list[tuple[Any, int]] = [
    *((make, 2 * H) for make in (feature_attention, normalized_features, merge_attention, causal_linformer)),
    (causal_linformer_with_tables_by_row, 2 * H),
    *((make, 2 * H) for make in (compressed_attention, linformer_attention, shared_linformer_attention)),
    *[(linformer_layer, 2 * H), (decay, 2), (decay_without_states, 2), (divide_heads, 1)],
]


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """A function that lowers CUDA's limit of the second and third axis of a grid."""

    def lower(number: int) -> None:
        plans.clear()
        monkeypatch.setattr(dispatch, "LARGEST_AXIS", number)
        monkeypatch.setattr("longspan.ops.common.launch.LARGEST_AXIS", number)

    yield lower
    plans.clear()


@interpreted
@pytest.mark.usefixtures("bfloat16", "on_kernels")
@pytest.mark.parametrize(("make", "number"), OPERATIONS, ids=lambda x: getattr(x, "__name__", ""))
def test_some_rows_at_a_time(make: Any, number: int, limit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients are those of one call; gradients of what rows share are sums in another order."""
    monkeypatch.setattr(fused, "_float32_product", lambda a, b: a.float() @ b.float())
    function, by_row, shared = make()
    grads: list[Tensor] = []

    def results() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (*by_row, *shared)]
        found = function(*leaves)
        outputs = [found] if isinstance(found, Tensor) else list(found)
        grads[:] = grads or [torch.randn_like(x) for x in outputs]
        return [*outputs, *torch.autograd.grad(outputs, leaves, grads)]

    expected = results()
    limit(number)
    found = results()
    same = len(expected) - len(shared)
    for ours, theirs in zip(found[:same], expected[:same], strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(found[same:], expected[same:], strict=True):
        assert (ours - theirs).abs().max() <= B * T * torch.finfo(torch.float32).eps * theirs.abs().max()


@interpreted
@pytest.mark.usefixtures("on_kernels")
def test_compiled_calls(limit: Any) -> None:
    function, (x,), weights = divide_heads()
    expected = function(x, *weights)
    limit(1)
    torch._dynamo.reset()
    found = torch.compile(function, fullgraph=True, backend="aot_eager")(x, *weights)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_calls_within_the_limit_are_not_split() -> None:
    seen: list[tuple[Any, ...]] = []

    def record(*tensors: Any) -> tuple[Tensor, ...]:
        seen.append(tensors)
        return (tensors[0],)

    x, one, mask = torch.arange(5.0)[:, None], torch.ones(1), torch.arange(5)
    assert batches.split_batch(record, 5, x, one, None, mask)[0] is x
    assert seen[0][0] is x
    assert seen[0][3] is mask
    seen.clear()
    assert torch.equal(batches.split_batch(record, 2, x, one, None, mask)[0], x)
    assert [len(row[0]) for row in seen] == [2, 2, 1]
    assert all(row[1] is one and row[2] is None and row[3].tolist() == row[0][:, 0].tolist() for row in seen)
