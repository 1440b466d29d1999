"""Synthetic tasks and the evaluation of mechanisms on them."""
