"""Recall of mechanisms at equal state size: small models trained on synthetic tasks."""

from longspan.bench.recall.runner import RecallOptions, run

__all__ = ["RecallOptions", "run"]
