"""Functions of tensors, without modules: what the mechanisms compute. `reference` holds the quadratic definitions."""

from longspan.utils import check_torch

check_torch()
