"""Fixtures of tests of training."""

from __future__ import annotations

from pathlib import Path

import pytest
from training import write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small texts."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text")
