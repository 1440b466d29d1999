"""Training data: readers, the token store and batches."""
