"""Functions of tensors, without modules: what the mechanisms compute. `reference` holds the quadratic definitions."""
