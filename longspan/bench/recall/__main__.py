"""`python -m longspan.bench.recall '{"device": "cuda", "jobs": 6, "minutes": 8}'`: options as JSON, no CLI needed."""

from longspan.bench.arguments import json_argument
from longspan.bench.recall.runner import RecallOptions, run

if __name__ == "__main__":
    run(RecallOptions(**json_argument()))
