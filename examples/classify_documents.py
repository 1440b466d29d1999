"""Classify long documents of different lengths with a bidirectional model.

    python examples/classify_documents.py [--steps 150] [--length 2048]

The documents are synthetic, so that the script needs no download: noise with a marker somewhere, and the byte after the
marker gives the class. A batch is padded, `key_mask` tells real tokens from padding, and padding changes nothing.
"""

import argparse

import torch
import torch.nn.functional as F

from longspan import AttentionConfig, Classifier, ModelConfig

CLASSES, MARKER, PAD = 4, 255, 0


def batch(size: int, length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens (B, T), the mask of real tokens (B, T) and labels (B,)."""
    lengths = torch.randint(length // 2, length + 1, (size,), generator=generator)
    tokens = torch.randint(1, 200, (size, length), generator=generator)
    labels = torch.randint(0, CLASSES, (size,), generator=generator)
    for row, (n, label) in enumerate(zip(lengths.tolist(), labels.tolist(), strict=True)):
        place = int(torch.randint(0, n - 1, (1,), generator=generator))
        tokens[row, place], tokens[row, place + 1] = MARKER, 200 + label
    key_mask = torch.arange(length) < lengths[:, None]
    return tokens.masked_fill(~key_mask, PAD), key_mask, labels


def build_model() -> Classifier:
    """Linear attention reads the whole document in linear time; token shift lets a token see its neighbor."""
    attention = AttentionConfig(num_heads=4, mechanism="linear")
    config = ModelConfig(dim=64, depth=2, vocab_size=256, num_classes=CLASSES, attention=attention, token_shift=(0, 1))
    return Classifier(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=16)
    options = parser.parse_args()
    torch.manual_seed(0)
    generator, model = torch.Generator().manual_seed(1), build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, options.steps + 1):
        tokens, key_mask, labels = batch(options.batch_size, options.length, generator)
        loss = F.cross_entropy(model(tokens, key_mask=key_mask), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    model.eval()
    with torch.no_grad():
        tokens, key_mask, labels = batch(64, options.length, torch.Generator().manual_seed(2))
        accuracy = (model(tokens, key_mask=key_mask).argmax(1) == labels).float().mean().item()
    print(f"accuracy on 64 unseen documents: {accuracy:.2f} (chance {1 / CLASSES:.2f})")


if __name__ == "__main__":
    main()
