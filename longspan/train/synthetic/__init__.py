"""Synthetic tasks, and the comparison of mechanisms on them."""
