"""Measurements on a GPU: CUDA events, CUDA graphs, kernel times, and the peers that need CUDA."""

from __future__ import annotations

import pytest

from longspan.bench.runner import SubjectResult, measure_rounds
from longspan.bench.subjects.base import Case, MeasurementConfig, Subject
from longspan.bench.subjects.generation import GenerateSubject
from longspan.bench.subjects.mechanisms import MechanismSubject, PeerSubject
from longspan.bench.subjects.models import TrainSubject
from longspan.bench.subjects.peers import MECHANISM_PEERS

pytestmark = pytest.mark.filterwarnings("ignore")  # The compiler's and other packages' own.
# The length of the accuracy check, so that FlexAttention compiles for one length only.
CASE = Case(512, num_heads=2, dtype="bfloat16", device="cuda")


@pytest.mark.parametrize(
    "subject",
    [
        MechanismSubject("softmax", "softmax"),
        *(PeerSubject(n) for n, peer in MECHANISM_PEERS.items() if peer.not_on_cpu),
    ],
    ids=lambda subject: subject.name,
)
def test_checked_and_timed(subject: Subject) -> None:
    unavailable = subject.unavailable(CASE)
    if unavailable is not None:
        pytest.skip(unavailable[1])
    run = subject.measure(CASE, MeasurementConfig(repeats=5))
    assert run.status == "ok", run.message
    assert list(run.times)[:2] == ["forward", "forward_backward"]
    assert {len(samples) for samples in run.times.values()} == {5}
    if subject.package == "longspan":
        assert list(run.times)[2:] == ["forward_graph", "forward_backward_graph"]
        assert run.kernels
    assert min(sample for samples in run.times.values() for sample in samples) > 0
    assert run.peak_mb is not None
    assert run.peak_mb > 0


def test_samples_are_fewer_where_time_is_short() -> None:
    run = MechanismSubject("softmax", "softmax").measure(CASE, MeasurementConfig(repeats=5, seconds=1e-9))
    assert {len(samples) for samples in run.times.values()} == {1}


def test_processes_on_one_gpu_are_measured_in_turn() -> None:
    case = Case(512, num_heads=2, dtype="bfloat16", device="cuda", depth=2)
    subjects: list[Subject] = [
        MechanismSubject("linear, softmax map", "linear"),
        GenerateSubject("linear"),
        TrainSubject("linear", "reduce-overhead"),
    ]
    results = [SubjectResult(subject, case) for subject in subjects]
    measure_rounds(results, MeasurementConfig(rounds=1, repeats=3))
    for result in results:
        assert result.failure is None, result.failure
    assert results[1].tokens_per_second("token")
    assert results[2].tokens_per_second("step")
