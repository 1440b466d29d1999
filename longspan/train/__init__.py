"""Training: data on disk, deterministic batches, the loop, checkpoints that lose nothing, and reports."""
