"""What holds for every test here. They need MindSpore, and no torch: `make test-mindspore` runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

# This folder itself would pass for a package of that name: the real one has a file.
_found = find_spec("mindspore")
if _found is None or _found.origin is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import mindspore as ms

    # Operations of tiny tensors one after the other: the queue between Python and them costs ten times as much.
    ms.runtime.launch_blocking()

    @pytest.fixture(autouse=True)
    def fixed_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ms.set_seed(20260731)
        monkeypatch.chdir(tmp_path)  # where MindSpore writes what it says of a graph that failed

    @pytest.fixture(params=["pynative", "graph"])
    def mode(request: pytest.FixtureRequest) -> Iterator[str]:
        """Each test with this runs in both of MindSpore's modes."""
        before = ms.get_context("mode")
        ms.set_context(mode=ms.GRAPH_MODE if request.param == "graph" else ms.PYNATIVE_MODE)
        yield request.param
        ms.set_context(mode=before)

    @pytest.fixture
    def parity() -> Path:
        """The folder PyTorch's half wrote its results to."""
        folder = os.environ.get("LONGSPAN_PARITY")
        if folder is None:
            pytest.skip("LONGSPAN_PARITY is not set: `make test-mindspore` sets it, and runs PyTorch's half first")
        return Path(folder)
