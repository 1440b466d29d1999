"""Long runs: a million steps of a state, a hundred thousand generated tokens."""

import resource

import pytest
import torch

from longspan import AttentionConfig, LanguageModel, ModelConfig, Sampling, build_mechanism, stream
from longspan.generation.generate import prefill


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("linear", {}), ("linear", {"feature_map": "softmax"})])
def test_a_million_steps_stay_finite_and_equal_the_parallel_form(name, options):
    T, H, D = 1_000_000, 1, 4
    mechanism = build_mechanism(name, H, D, **options).eval()
    q, k, v = (torch.randn(1, T, H, D).to(torch.bfloat16) for _ in range(3))
    wanted = torch.cat([torch.arange(0, T, 99_991), torch.tensor([T - 1])])
    with torch.no_grad():
        truth = mechanism(q.double(), k.double(), v.double(), causal=True)[:, wanted]
        plain = mechanism(q, k, v, causal=True)[:, wanted].double()
        state, outputs = mechanism.new_state(1, dtype=torch.bfloat16), []
        keep = set(wanted.tolist())
        for t in range(T):
            out, state = mechanism.step(state, q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1])
            if t in keep:
                outputs.append(out)
        steps = torch.cat(outputs, 1).double()
    assert all(x.isfinite().all() for x in state.tensors().values() if x.is_floating_point())
    ulp = float(truth.abs().max()) * torch.finfo(torch.bfloat16).eps
    assert float((steps - truth).abs().max()) <= 2 * float((plain - truth).abs().max()) + ulp


@pytest.mark.slow
def test_a_hundred_thousand_tokens_do_not_grow_the_process():
    parts = [{"mechanism": "local", "num_heads": 1, "window": 64}, {"mechanism": "linear", "num_heads": 1}]
    attention = AttentionConfig(
        num_heads=2, mechanism={"mechanism": "split", "parts": parts}, rotary=("halves", "none")
    )
    model = LanguageModel(ModelConfig(dim=16, depth=1, causal=True, vocab_size=256, attention=attention)).eval()
    steps = stream(model, prefill(model, [1, 2, 3]), 100_000, sampling=Sampling(temperature=0.8))
    peaks = []
    for i, _ in enumerate(steps):
        if i in (5_000, 99_999):
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # KiB
    assert int(steps.session.state.length) == 100_003
    assert peaks[1] - peaks[0] < 4096
