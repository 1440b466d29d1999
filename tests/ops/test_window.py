"""Windowed attention in eager PyTorch against the definition."""

from __future__ import annotations

import pytest
import torch
from local_cases import Case, by_pair, visible

from longspan.ops.window import window_attention
from longspan.ops.window.torch import Window, tiled_window_attention_with_lse

WINDOW = Window(block_size=0, back=16, ahead=0, causal=True, shared_qk=False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("back", "block"), [(17, 17), (15, 16), (2, 5), (17, 1)])
def test_a_bias_whose_blocks_do_not_divide_the_tiles(back: int, block: int, causal: bool) -> None:
    """So many tokens that most tiles lie inside the sequence."""
    case = Case(T=131, B=2, H=2, Hkv=1, back=back, ahead=back, bias=block, causal=causal)
    columns = (sum(case.window.blocks(block)) + 1) * block
    q, k, v, table = (
        torch.randn(*shape, dtype=torch.float64)
        for shape in ((2, 131, 2, 5), (2, 131, 1, 5), (2, 131, 1, 7), (2, block, columns))
    )
    scores = torch.einsum("bthd,bsd->bhts", q, k[:, :, 0]) * 5**-0.5 + by_pair(case, table)
    weights = scores.masked_fill(~visible(case, None), -torch.inf).softmax(-1)
    expected = torch.einsum("bhts,bse->bthe", weights, v[:, :, 0])
    torch.testing.assert_close(window_attention(q, k, v, case.window, bias=table), expected, rtol=1e-9, atol=1e-9)


def test_a_hidden_score_that_overflows_stays_hidden() -> None:
    """That of a later key, in outputs and their log-sum-exp."""
    q, k, v = torch.randn(3, 1, 70, 2, 8)
    k[:, 40] = 0
    expected = tiled_window_attention_with_lse(q.abs(), k, v, WINDOW, key_mask=None, scale=1.0)
    k[:, 40] = 3e38
    found = tiled_window_attention_with_lse(q.abs(), k, v, WINDOW, key_mask=None, scale=1.0)
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got[:, :40], wanted[:, :40])
