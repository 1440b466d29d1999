"""What options are checked with: a register of checks, small mechanisms and the formulas that several of them share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import assert_same
from torch import Tensor

from longspan import Mechanism, build_mechanism
from longspan.mechanisms import mechanism_options

B, T, S, H, D, E = 2, 17, 19, 3, 5, 7
Check = Callable[[], None]
CHECKS: dict[tuple[str, str], Check] = {}


def checks(name: str, option: str) -> Callable[[Check], Check]:
    """Register a check of an option; a file's `option_test` runs those that stand in it."""

    def register(check: Check) -> Check:
        assert (name, option) not in CHECKS
        assert option in mechanism_options(name), f"a check is left over: {name} has no option {option}"
        CHECKS[name, option] = check
        return check

    return register


def option_test(module: str) -> Callable[[str, str], None]:
    """The test of every option that a module checks."""
    found = [key for key, check in CHECKS.items() if check.__module__ == module]

    @pytest.mark.parametrize(("name", "option"), found)
    def test_option(name: str, option: str) -> None:
        CHECKS[name, option]()

    return test_option


def build(name: str, **options: object) -> Mechanism:
    heads, dim = options.pop("num_heads", H), options.pop("head_dim", D)
    return build_mechanism(name, heads, dim, **({"value_dim": E} | options)).eval().double()


def inputs(queries: int = T, keys: int | None = None, batch: int = B) -> tuple[Tensor, Tensor, Tensor]:
    keys = queries if keys is None else keys
    sizes = (queries, D), (keys, D), (keys, E)
    q, k, v = (torch.randn(batch, length, H, dim, dtype=torch.float64) for length, dim in sizes)
    return q, k, v


def differ(a: Tensor, b: Tensor) -> None:
    assert (a - b).abs().max() > 1e-3


def scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bthd,bshd->bhts", q, k)


def by_weights(weights: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhts,bshe->bthe", weights, v)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | bool = True, bias: Tensor | float = 0.0, scale: float = D**-0.5
) -> Tensor:
    """Softmax attention over the pairs in seen (T, S)."""
    hidden = ~torch.as_tensor(seen).expand(q.shape[1], k.shape[1])
    return by_weights((scores(q, k) * scale + bias).masked_fill(hidden, float("-inf")).softmax(-1), v)


def kernel_attention(fq: Tensor, fk: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Normalized attention by features."""
    weights = scores(fq, fk)
    weights = weights.tril() if causal else weights
    return by_weights(weights / weights.sum(-1, keepdim=True), v)


def positions(length: int = T) -> tuple[Tensor, Tensor]:
    return torch.arange(length)[:, None], torch.arange(length)


def check_dropout(name: str, **options: object) -> None:
    """Nothing in eval mode; in training the expectation is the answer without it."""
    p, repeats = 0.3, 2000
    torch.manual_seed(7)
    dropped = build(name, dropout=p, **options)
    torch.manual_seed(7)
    plain = build(name, **options)
    q, k, v = inputs(6, batch=1)
    for causal in (False, True):
        expected = plain(q, k, v, causal=causal)
        assert_same(dropped(q, k, v, causal=causal), expected)
        dropped.train()
        many = dropped(*(x.expand(repeats, -1, -1, -1) for x in (q, k, v)), causal=causal)
        assert many.std(0).min() > 1e-3, "every output is touched"
        assert ((many.mean(0) - expected[0]).abs() < 5 * many.std(0) / repeats**0.5).all()
        dropped.eval()
    state = dropped.write(
        dropped.new_state(repeats, dtype=torch.float64), *(x.expand(repeats, -1, -1, -1) for x in (k, v))
    )
    read = q[:, -1:].expand(repeats, -1, -1, -1)
    assert dropped.read(state, read).std(0).max() < 1e-9
    assert dropped.train().read(state, read).std(0).min() > 1e-3


def dropped_share(mechanism: Mechanism) -> float:
    """How many of the weights of a softmax are dropped in training, by values that are an identity."""
    q, k, _ = inputs(E, batch=500)
    weights = mechanism.train()(q, k, torch.eye(E, dtype=torch.float64)[None, :, None].expand(500, -1, H, -1))
    return (weights == 0).double().mean().item()
