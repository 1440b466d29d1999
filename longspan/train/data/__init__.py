"""Training data: file readers, the token store and batches."""
