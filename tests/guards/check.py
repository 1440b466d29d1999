"""Recomputes every case and names those that are not bit-identical to the golden values: exit status 1 if any.

Bits depend on the machine and on PyTorch's build: compare on the machine that wrote the golden values, with
``OMP_NUM_THREADS=1``. Arguments restrict the check to cases whose name contains one of them.
"""

from __future__ import annotations

import sys
import time
import traceback

import torch


def main(words: list[str]) -> int:
    torch.set_num_threads(1)
    import artifacts
    import cases
    import golden

    begun, (_, index) = time.perf_counter(), golden.read()
    every = {case: lambda case=case: cases.run(case) for case in cases.CASES} | artifacts.CHECKS
    wanted = [name for name in {**index, **every} if not words or any(word in name for word in words)]
    failed = 0
    for name in wanted:
        if name not in every or name not in index:
            problem = "missing from the golden values" if name in every else "no longer a case"
        else:
            try:
                wrong = golden.changed_bits(every[name](), index[name])
            except Exception:
                problem = traceback.format_exc(limit=-3)
            else:
                problem = f"{len(wrong)} changed: {', '.join(wrong[:6])}" if wrong else ""
        if problem:
            failed += 1
            print(f"NOT BIT-IDENTICAL {name}: {problem}")
    print(f"{len(wanted) - failed} of {len(wanted)} cases bit-identical, {time.perf_counter() - begun:.1f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
