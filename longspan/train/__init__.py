"""Training: data, objectives, the trainer, resumable checkpoints, evaluation and reports."""
