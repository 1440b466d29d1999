"""`python -m longspan.bench.recall '{"device": "cuda", "jobs": 6, "minutes": 8}'`: options as JSON, no CLI needed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from longspan.bench.recall.runner import RecallOptions, run


def main() -> None:
    """Run the benchmark that the first argument describes."""
    values = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    for name in ("out", "cache"):
        if name in values:
            values[name] = Path(values[name])
    run(RecallOptions(**values))


if __name__ == "__main__":
    main()
