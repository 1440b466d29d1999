"""States of layers and models: those of consecutive pieces merge, with positions, token shift and axial folding."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same
from torch import Tensor

from longspan import AttentionConfig, LanguageModel, ModelConfig
from longspan.layout import TokenLayout
from longspan.models.layers import Attention
from longspan.models.residual import BranchState, ResidualBranch

B, T, DIM = 2, 17, 12
F64 = torch.float64
SPLIT = {
    "mechanism": "split",
    "parts": [
        {"mechanism": "local", "num_heads": 1, "window": 4, "look_back": 1},
        {"mechanism": "linear", "num_heads": 1, "blind_spot": 3},
        {"mechanism": "linformer", "num_heads": 1, "rank": 4, "max_length": 5, "periodic": True},
        {"mechanism": "softmax", "num_heads": 1},
    ],
}


@pytest.mark.parametrize("cuts", [(5,), (1, 2, 9), (0, 16)])
def test_states_of_a_model_merge(cuts: tuple[int, ...]) -> None:
    """One layer, whose keys and values do not depend on the tokens before; positions are those of the whole."""
    attention = AttentionConfig(num_heads=4, mechanism=SPLIT, rotary=("halves", "none", "none", "interleaved"))
    config = ModelConfig(dim=16, depth=1, causal=True, vocab_size=11, attention=attention, positions="sinusoidal")
    model, tokens = LanguageModel(config).double(), torch.randint(11, (B, T))
    whole, merged = model.new_state(B, dtype=F64), None
    whole = model.extend(tokens, whole)[1]
    for start, stop in zip((0, *cuts), (*cuts, T), strict=True):
        piece = model.extend(tokens[:, start:stop], model.new_state(B, start=start or None, dtype=F64))[1]
        merged = piece if merged is None else merged.merge(piece)
    assert merged.length.tolist() == [T] * B
    more = torch.randint(11, (B, 3))
    assert_same(model.extend(more, merged)[0], model.extend(more, whole)[0])


def branch(**options: object) -> ResidualBranch:
    torch.manual_seed(1)
    mechanism = {"mechanism": "local", "window": 4, "look_back": 1}
    layer = Attention(DIM, AttentionConfig(num_heads=2, mechanism=mechanism, rotary="halves"), causal=True)
    return ResidualBranch(layer, DIM, **options).double()


def run(built: ResidualBranch, x: Tensor, state: BranchState) -> tuple[Tensor, BranchState]:
    out, after = built.extend(x, TokenLayout.of(x, causal=True, start=state.end), state)
    length = state.length + x.shape[1]
    return out, BranchState(**{**vars(after), "length": length})


def new_state(built: ResidualBranch, start: int) -> BranchState:
    where = torch.full((B,), start) if start else None
    return built.new_state(B, max_length=None, start=where, device=None, dtype=F64)


@pytest.mark.parametrize("stride", [2, 3, 5])
@pytest.mark.parametrize("cut", [1, 4, 6, 16])
def test_states_along_every_stride_th_token_merge(stride: int, cut: int) -> None:
    built, x = branch(stride=stride), torch.randn(B, T, DIM, dtype=F64)
    _, whole = run(built, x, new_state(built, 0))
    _, first = run(built, x[:, :cut], new_state(built, 0))
    _, later = run(built, x[:, cut:], new_state(built, cut))
    merged = first.merge(later)
    more = torch.randn(B, 7, DIM, dtype=F64)
    assert_same(run(built, more, merged)[0], run(built, more, whole)[0])


@pytest.mark.parametrize("pieces", [(9, 8), (9, 1, 1, 6), (1, 1, 15), (14, 2, 1)])
def test_tokens_that_a_shift_still_needs_are_merged(pieces: tuple[int, ...]) -> None:
    built = ResidualBranch(torch.nn.Identity(), DIM, token_shift=(0, 1, 3)).double()
    x, start, merged = torch.randn(B, T, DIM, dtype=F64), 0, None
    _, whole = run(built, x, new_state(built, 0))
    for piece in x.split(pieces, 1):
        _, state = run(built, piece, new_state(built, start))
        start += piece.shape[1]
        merged = state if merged is None else merged.merge(state)
    assert torch.equal(merged.recent, whole.recent)


def test_a_context_is_not_merged() -> None:
    attention, cross = AttentionConfig(num_heads=2), AttentionConfig(num_heads=2, mechanism="linear")
    config = ModelConfig(dim=8, depth=1, causal=True, vocab_size=11, attention=attention, cross=cross)
    model, context = LanguageModel(config).double(), torch.randn(B, 5, 8, dtype=F64)
    states = [model.new_state(B, context=context, start=start, dtype=F64) for start in (None, 3)]
    tokens = torch.randint(11, (B, 9))
    states = [model.extend(piece, state)[1] for piece, state in zip(tokens.split([3, 6], 1), states, strict=True)]
    merged = states[0].merge(states[1])
    inner = [branch.inner[0].length.tolist() for branch in merged.branches if branch.inner]
    assert inner == [[9, 9], [5, 5]]
