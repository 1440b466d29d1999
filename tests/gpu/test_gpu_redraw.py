"""Random features redrawn by a compiled model on a GPU, with CUDA graphs and without."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from longspan import AttentionConfig, LanguageModel, ModelConfig
from longspan.mechanisms.performer import random_feature_mechanisms


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores", "ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_redraws_without_compiling_again(mode: str) -> None:
    torch._dynamo.reset()
    mechanism = {"mechanism": "performer", "num_features": 32, "redraw_interval": 3}
    attention = AttentionConfig(num_heads=2, mechanism=mechanism)
    model = LanguageModel(ModelConfig(dim=64, depth=2, causal=True, vocab_size=11, attention=attention)).cuda()
    first = random_feature_mechanisms(model)[0]
    compiled, x = torch.compile(model.loss, fullgraph=True, mode=mode), torch.randint(11, (2, 128), device="cuda")
    counts, draws = [], []
    for step in range(9):
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            compiled(x).backward()
        model.zero_grad()  # The next replay of a CUDA graph overwrites the gradients of this one.
        counts.append([m.counts.tolist() for m in random_feature_mechanisms(model)])
        draws.append(first.feature_map.projection.clone())
    assert counts == [[[n // 3, n % 3]] * 2 for n in range(1, 10)]
    assert [torch.equal(a, b) for a, b in pairwise(draws)] == [n % 3 != 0 for n in range(2, 10)]
    assert first.draw == 3
