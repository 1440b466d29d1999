"""What small models learn of the tasks that `longspan eval --task` makes, and what they cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rich.console import Console

from longspan.train.synthetic.evaluation import DEPTHS, NUM_SCORED, TrialConfig, TrialProgress, model_for, run_trial
from longspan.train.synthetic.tasks import Copy, Needle, Recall, Task

LINEAR = {"mechanism": "linear"}


def trial(task: Task, mechanism: dict[str, Any], steps: int) -> dict[str, Any]:
    """The figures of a small model of two layers."""
    effort, show = TrialConfig(steps=steps), TrialProgress(1, steps, Console(quiet=True))
    return run_trial(task, model_for(task, mechanism), effort, torch.device("cpu"), show)


def hybrid(window: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {"mechanism": "split", "parts": [{**window, "num_heads": 2}, {**other, "num_heads": 2}]}


# Each with a length it can reach: all 2n tokens within R for linformer, the source n tokens back within W for local.
LENGTH = 6
WINDOW = {"mechanism": "local", "window": LENGTH + 2}
COPY: dict[str, dict[str, Any]] = {"local": WINDOW, "split": hybrid(WINDOW, LINEAR)}


@pytest.mark.parametrize("name", COPY)
def test_a_copy_is_learnt(name: str) -> None:
    found = trial(Copy(2 * LENGTH), COPY[name], steps=300)
    assert found["accuracy"] >= 0.99
    assert found["steps"] < 300, "done when solved"
    assert found["answers"] == LENGTH * NUM_SCORED


def test_a_copy_out_of_reach_is_not() -> None:
    """Two windows of 2 and four shifts by one reach six tokens back, too few by one."""
    found = trial(Copy(14), {"mechanism": "local", "window": 2}, steps=150)
    assert found["accuracy"] < 2 * found["guess"]


def test_a_window_finds_needles_within_its_reach_and_a_hybrid_everywhere() -> None:
    """Two windows of 7 and four shifts by one reach 16 tokens back, one window 6: of 31, the first half is beyond."""
    window = {"mechanism": "local", "window": 7}
    local = trial(Needle(31), window, steps=150)["depths"]
    both = trial(Needle(31), hybrid(window, {**LINEAR, "feature_map": "softmax"}), steps=150)["depths"]
    assert all(part["accuracy"] > 0.95 for part in both)
    assert local[-1]["accuracy"] > 0.95
    # Guesses are right once in sixteen times; a part has about 64 rows.
    assert all(part["accuracy"] < 0.25 for part in local[: DEPTHS // 2])


@pytest.mark.slow
def test_recall_is_beyond_local_attention_and_within_a_hybrid() -> None:
    window = {"mechanism": "local", "window": 3}
    local, both = (trial(Recall(48), mechanism, steps=400) for mechanism in (window, hybrid(window, LINEAR)))
    # A guess among the values that were shown is right once in three times.
    assert local["guess"] == pytest.approx(1 / 3)
    assert local["accuracy"] < 0.5
    assert both["accuracy"] > 0.9
