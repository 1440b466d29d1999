"""Measuring on a GPU: the clock, and the peers that need one."""

from __future__ import annotations

import pytest
import torch

from longspan.bench import PEERS, Case, Effort, Ours, Subject, Theirs
from longspan.bench.worker import take

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # The compiler's and other packages' own.
]
# As long as what is checked, so that FlexAttention compiles for one length only.
CASE = Case(512, num_heads=2, dtype="bfloat16", device="cuda")


@pytest.mark.parametrize(
    "subject",
    [Ours("softmax", "softmax"), *(Theirs(name) for name, peer in PEERS.items() if peer.not_on_cpu)],
    ids=lambda subject: subject.name,
)
def test_checked_and_timed(subject: Subject) -> None:
    unfit = subject.unfit(CASE)
    if unfit is not None:
        pytest.skip(unfit[1])
    run = take(subject, CASE, Effort(repeats=5))
    assert run.status == "ok", run.message
    assert [len(samples) for samples in run.times.values()] == [5, 5]
    assert min(sample for samples in run.times.values() for sample in samples) > 0
    assert run.peak_mb is not None
    assert run.peak_mb > 0


def test_samples_are_fewer_where_time_is_short() -> None:
    run = take(Ours("softmax", "softmax"), CASE, Effort(repeats=5, seconds=1e-9))
    assert [len(samples) for samples in run.times.values()] == [1, 1]
