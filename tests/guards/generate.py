"""Writes the golden values: ``python tests/guards/generate.py``, with ``--fixtures`` the checkpoints and runs too.

Both are written from a commit that is known to be right, and then left alone.
"""

from __future__ import annotations

import sys
import time

import torch

if __name__ == "__main__":
    torch.set_num_threads(1)
    import artifacts
    import cases
    import golden

    begun = time.perf_counter()
    if "--fixtures" in sys.argv:
        artifacts.write()
    results = {case: cases.run(case) for case in cases.CASES}
    results |= {name: check() for name, check in artifacts.CHECKS.items()}
    golden.write(results)
    size = golden.VALUES.stat().st_size + golden.INDEX.stat().st_size
    print(f"{len(results)} cases, {size / 1e6:.2f} MB, {time.perf_counter() - begun:.1f} s")
