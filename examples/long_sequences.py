"""Train on one very long sequence in pieces: the memory of a piece, the gradients of the whole sequence.

    python examples/long_sequences.py --length 4096 --chunk-length 512
    python examples/long_sequences.py --model layer --length 16777216 --chunk-length 131072 --device cuda
    python examples/long_sequences.py --model lm --length 1048576 --chunk-length 65536 --device cuda

`layer` is tokens → embedding → linear attention of 16 heads of 64 → loss; `lm` is a language model of 6 layers and 19
million parameters. The sequence stays in the CPU's memory, and pieces of it are copied to the GPU. `--compare` also
trains on the whole sequence at once and prints the differences.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch

from longspan import AttentionConfig, FeedForwardConfig, LanguageModel, ModelConfig
from longspan.train.chunked import chunked_loss


def build(name: str) -> LanguageModel:
    """Return the model, with equal weights every time."""
    torch.manual_seed(0)
    mechanism = {"mechanism": "linear", "feature_map": "softmax"}
    if name == "layer":
        attention = AttentionConfig(num_heads=16, mechanism=mechanism)
        config = ModelConfig(
            dim=1024, depth=1, causal=True, vocab_size=256, attention=attention, feed_forward=None, norm="rms"
        )
    else:
        config = ModelConfig(
            dim=512,
            depth=6,
            causal=True,
            vocab_size=256,
            attention=AttentionConfig(num_heads=8, mechanism=mechanism),
            feed_forward=FeedForwardConfig(mult=4),
        )
    return LanguageModel(config)


def peak_bytes(device: str) -> int:
    """Return the most memory that was in use."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def gradients(model: LanguageModel, tokens: torch.Tensor, chunk_length: int | None, device: str) -> float:
    """Compute the loss and the gradients, in pieces or at once; return the loss and print time and memory."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        if chunk_length is None:
            loss = model.loss(tokens.to(device))
        else:
            loss, _ = chunked_loss(model, tokens, chunk_length=chunk_length)
    loss.backward()
    value = loss.item()
    seconds, how = time.perf_counter() - start, "at once" if chunk_length is None else f"in pieces of {chunk_length:,}"
    speed, memory = tokens.numel() / seconds, peak_bytes(device) / 2**30
    print(f"{tokens.numel():,} tokens {how}: loss {value:.6f}", end=", ")
    print(f"{seconds:.2f} s, {speed:,.0f} tokens/s, peak {memory:.2f} GiB", flush=True)
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("layer", "lm"), default="layer")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--chunk-length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args()
    model = build(options.model).to(options.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    # A periodic sequence, which the model can learn.
    tokens = torch.randint(256, (1, 64), generator=torch.Generator().manual_seed(1))
    tokens = tokens.repeat(1, -(-options.length // 64))[:, : options.length]
    if options.compare:
        whole = gradients(model, tokens, None, options.device)
        expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        value = gradients(model, tokens, options.chunk_length, options.device)
        pairs = [(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True) if p.grad is not None]
        worst = max(float((x - g).norm() / g.norm().clamp(min=1e-12)) for x, g in pairs if g is not None)
        print(f"differences: loss {abs(value - whole):.2e}, gradients {worst:.2e} of their norm")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(options.steps):
        gradients(model, tokens, options.chunk_length, options.device)
        optimizer.step()


if __name__ == "__main__":
    main()
