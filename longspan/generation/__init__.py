"""Generation: prompts, the decode loop, sampling, sessions and tokenization."""
