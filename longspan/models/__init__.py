"""Models over any mechanism: configuration, layers, residual streams, transformers, checkpoints."""
