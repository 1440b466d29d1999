"""Benchmark subjects: mechanisms, layers, training, generation, quality, and the peers of each."""
