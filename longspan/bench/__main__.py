"""`python -m longspan.bench '{"subject": "gpu", "device": "cuda", "minutes": 9}'`: options as JSON, no CLI needed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from longspan.bench import host, sweep
from longspan.bench.options import BenchOptions
from longspan.bench.suite import failed, run


def main() -> None:
    """Run the benchmark that the first argument describes."""
    values = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    if "out" in values:
        values["out"] = Path(values["out"])
    subject = values.get("subject")
    if subject in ("host", "sweep"):
        del values["subject"]
        if subject == "host":
            host.run(host.HostOptions(**values))
        else:
            sweep.run(sweep.SweepOptions(**values))
        return
    sys.exit(failed(run(BenchOptions(**values))))


if __name__ == "__main__":
    main()
