"""Padded rows and the tokens that are taken from them."""

import torch

from longspan.layout import PaddedSpan, take_tokens


def test_right_padded_rows_are_zero_filled_where_they_are():
    mask = torch.arange(7) < torch.tensor([[3], [7], [0]])
    span, x = PaddedSpan.of(mask), torch.randn(3, 7, 2, 5)
    assert span.right_padded
    x[0, 5] = torch.nan
    (rolled,) = span.roll(x)
    (moved,) = span._replace(right_padded=False).roll(x)
    assert torch.equal(rolled, moved)
    assert torch.equal(span.unroll(x), span._replace(right_padded=False).unroll(x))


def test_other_rows_are_moved():
    mask = torch.tensor([[True, True, False], [False, True, True]])
    span, x = PaddedSpan.of(mask), torch.arange(6.0).view(2, 3, 1, 1)
    assert not span.right_padded
    assert span.roll(x)[0].flatten().tolist() == [0, 1, 0, 4, 5, 0]
    assert span.unroll(span.roll(x)[0]).flatten().tolist() == [0, 1, 0, 0, 4, 5]


def test_take_tokens():
    x, index = torch.randn(3, 7, 2, 5), torch.randint(7, (3, 11))
    assert torch.equal(take_tokens(x, index), torch.take_along_dim(x, index[:, :, None, None], 1))
