"""Small models learn the synthetic tasks that their mechanism can solve, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rich.console import Console

from longspan import list_mechanisms
from longspan.train.synthetic.evaluation import NUM_SCORED, TrialConfig, TrialProgress, model_for, run_trial
from longspan.train.synthetic.tasks import DEPTHS, Copy, ListOps, Needle, Recall, SyntheticTask

LINEAR = {"mechanism": "linear"}


def trial(task: SyntheticTask, mechanism: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train and evaluate a small model of two layers."""
    effort, show = TrialConfig(steps=steps), TrialProgress(1, steps, Console(quiet=True))
    return run_trial(task, model_for(task, mechanism), effort, torch.device("cpu"), show)


def hybrid(window: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {"mechanism": "split", "parts": [{**window, "num_heads": 2}, {**other, "num_heads": 2}]}


# Options that suffice: rank 2n for linformer, a window that reaches n tokens back for local.
LENGTH = 6
WINDOW = {"mechanism": "local", "window": LENGTH + 2}
COPY: dict[str, dict[str, Any]] = {
    "local": WINDOW,
    "linear": LINEAR,
    "performer": {"mechanism": "performer", "num_features": 32},
    "linformer": {"mechanism": "linformer", "rank": 2 * LENGTH, "max_length": 2 * LENGTH},
    "split": hybrid(WINDOW, LINEAR),
}


@pytest.mark.parametrize("name", list_mechanisms())
def test_copy_is_learned(name: str) -> None:
    found = trial(Copy(2 * LENGTH), COPY.get(name, {"mechanism": name}), steps=300)
    assert found["accuracy"] >= 0.99
    assert found["steps"] < 300, "training stops when the task is solved"
    assert found["answers"] == LENGTH * NUM_SCORED


def test_copy_beyond_the_window_is_not_learned() -> None:
    """Two windows of 2 and four token shifts reach six tokens back, one too few."""
    found = trial(Copy(14), {"mechanism": "local", "window": 2}, steps=150)
    assert found["accuracy"] < 2 * found["guess"]


def test_local_attention_finds_near_needles_and_a_hybrid_all() -> None:
    """Two windows of 7 and four token shifts reach 16 tokens back, so that the first half of 31 is out of reach."""
    window = {"mechanism": "local", "window": 7}
    local = trial(Needle(31), window, steps=150)["depths"]
    both = trial(Needle(31), hybrid(window, {**LINEAR, "feature_map": "softmax"}), steps=150)["depths"]
    assert all(part["accuracy"] > 0.95 for part in both)
    assert local[-1]["accuracy"] > 0.95
    # Chance is 1/16; a part has about 64 sequences.
    assert all(part["accuracy"] < 0.25 for part in local[: DEPTHS // 2])


@pytest.mark.slow
def test_recall_is_learned_by_a_hybrid_and_not_by_local_attention() -> None:
    window = {"mechanism": "local", "window": 3}
    local, both = (trial(Recall(48), mechanism, steps=400) for mechanism in (window, hybrid(window, LINEAR)))
    assert local["guess"] == pytest.approx(1 / 3)
    assert local["accuracy"] < 0.5
    assert both["accuracy"] > 0.9


def test_the_root_of_a_list_is_learned_first() -> None:
    """A third of the values follows from it, the first token, which the mean of all tokens would hide."""
    found = trial(ListOps(128), LINEAR, 60)
    assert found["accuracy"] > found["guess"] + 0.05
