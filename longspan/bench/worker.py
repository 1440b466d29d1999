"""Entry point of the measuring process: a pickled (subject, case, config) on stdin, a `Measurement` as JSON on stdout.

It writes "ready" when everything is compiled and waits for a line on stdin before it times anything.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import warnings
from dataclasses import asdict

import torch

from longspan.bench.subjects.base import failure


def main() -> None:
    """Measure one subject. Output that a package prints is redirected to stderr."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")  # deprecations inside peers
    subject, case, config = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(config.threads)

    def wait() -> None:
        print("ready", file=answer, flush=True)
        if not sys.stdin.buffer.readline():
            sys.exit("the process that started this measurement has ended")

    try:
        result = subject.measure(case, config, wait)
    except Exception as error:
        result = failure(error)
    with answer:
        json.dump(asdict(result), answer)


if __name__ == "__main__":
    main()
