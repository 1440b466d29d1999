"""Benchmark subjects: mechanisms, layers, training, generation, and the peers of each."""
