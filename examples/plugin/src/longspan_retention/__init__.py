"""Mechanisms for longspan with a decaying state: `Retention` and `GatedRetention`."""

from longspan_retention.gated import GatedRetention
from longspan_retention.retention import Retention

__all__ = ["GatedRetention", "Retention"]
