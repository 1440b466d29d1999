"""Read a long prompt once, save the state, and continue from it later in constant memory.

    python examples/stream_from_state.py [--model FOLDER] [--prompt-tokens 20000]

`FOLDER` is a checkpoint of `longspan train` or `longspan.save`. By default a small untrained model is used.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

import longspan
from longspan import AttentionConfig, LanguageModel, ModelConfig, stream
from longspan.generation.generate import prefill
from longspan.generation.session import Session


def build_model() -> LanguageModel:
    attention = AttentionConfig(num_heads=4, mechanism="linear")
    return LanguageModel(ModelConfig(dim=64, depth=2, causal=True, vocab_size=256, attention=attention))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompt-tokens", type=int, default=20_000)
    parser.add_argument("--max-tokens", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = build_model() if options.model is None else longspan.load(options.model)
    assert isinstance(model, LanguageModel)
    model.eval()
    prompt = (b"A long document, read in chunks. " * (options.prompt_tokens // 33 + 1))[: options.prompt_tokens]

    start = time.perf_counter()
    session = prefill(model, prompt, chunk=4096)
    print(f"read {len(prompt):,} tokens in {time.perf_counter() - start:.2f} s")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "session.safetensors"
        session.save(path)
        print(f"the saved session takes {path.stat().st_size:,} bytes, whatever the length of the prompt")
        restored = Session.load(path, model)

    # Two independent continuations of the same prompt, which is not read again.
    tokens = [step[0] for step in stream(model, restored.select([0, 0]), options.max_tokens, seed=[1, 2])]
    for row in zip(*tokens, strict=True):
        print(bytes(row))


if __name__ == "__main__":
    main()
