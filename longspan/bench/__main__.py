"""`python -m longspan.bench '{"subject": "gpu", "device": "cuda", "minutes": 9}'`: options as JSON, no CLI needed."""

from __future__ import annotations

import sys

from longspan.bench import host, sweep
from longspan.bench.arguments import json_argument
from longspan.bench.options import BenchOptions
from longspan.bench.suite import failed, run


def main() -> None:
    """Run the benchmark that the first argument describes."""
    values = json_argument()
    subject = values.pop("subject", None)
    if subject == "host":
        host.run(host.HostOptions(**values))
    elif subject == "sweep":
        sweep.run(sweep.SweepOptions(**values))
    else:
        chosen = {} if subject is None else {"subject": subject}
        sys.exit(failed(run(BenchOptions(**chosen, **values))))


if __name__ == "__main__":
    main()
