"""Train a byte-level language model with a plain PyTorch loop, then sample from it.

    python examples/train_bytes.py [TEXT_FILE] [--steps 300]

Without a file it trains on the source of Python's standard library. `longspan train` does the same with checkpoints,
evaluation and a report; this is the loop to start from when you need your own.
"""

import argparse
import sysconfig
from pathlib import Path

import torch

from longspan import AttentionConfig, LanguageModel, ModelConfig, Sampling, generate


def read_text(path: Path | None) -> torch.Tensor:
    """Return the bytes of a file, or of the standard library's modules, as a (length,) tensor of tokens."""
    if path is not None:
        text = path.read_bytes()
    else:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"\n".join(file.read_bytes() for file in files)[:4_000_000]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def build_model() -> LanguageModel:
    """Half of the heads attend locally, the other half through linear attention over everything before."""
    parts = [
        {"mechanism": "local", "num_heads": 2, "window": 64},
        {"mechanism": "linear", "num_heads": 2, "feature_map": "softmax"},
    ]
    attention = AttentionConfig(
        num_heads=4, mechanism={"mechanism": "split", "parts": parts}, rotary=("halves", "none")
    )
    return LanguageModel(ModelConfig(dim=128, depth=2, causal=True, vocab_size=256, attention=attention))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="?", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(0)
    tokens, model = read_text(options.text), build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=options.steps + 1)
    for step in range(1, options.steps + 1):
        starts = torch.randint(0, len(tokens) - options.context, (options.batch_size,))
        loss = model.loss(torch.stack([tokens[start : start + options.context] for start in starts]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == options.steps:
            print(f"step {step}: {loss.item() / 0.6931:.3f} bits per byte", flush=True)
    out = generate(model.eval(), b"def ", 200, sampling=Sampling(temperature=0.8, top_p=0.95))
    print((b"def " + bytes(out.tokens[0])).decode(errors="replace"))


if __name__ == "__main__":
    main()
