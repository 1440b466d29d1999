"""Replace the attention of a pretrained transformers model by a mechanism with a state of constant size.

    python examples/swap_attention.py [--model FOLDER] [--window 128]

`FOLDER` holds a Llama, Mistral, Qwen2 or GPT-2 model saved by transformers. By default a small Llama is built.
A local window that covers the text leaves the logits unchanged, so the swap itself can be checked before training.
"""

import argparse
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from longspan.hf import load_swapped, swap_attention


def open_model(folder: str | None) -> torch.nn.Module:
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--window", type=int, default=128)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = open_model(options.model).eval()
    tokens = torch.randint(0, 256, (1, options.window))
    with torch.no_grad():
        before = model(tokens).logits
        # All layers but the last get a sliding window; the last keeps softmax attention over everything.
        layers = list(range(model.config.num_hidden_layers - 1))
        swap_attention(model, {"mechanism": "local", "window": options.window}, layers=layers)
        after = model(tokens).logits
    print(f"largest change of a logit inside the window: {(after - before).abs().max().item():.1e}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    long = torch.randint(0, 256, (1, 4 * options.window))
    loss = model(long, labels=long).loss  # longer than the window: here training adapts the model
    loss.backward()
    optimizer.step()
    print(f"one training step on {long.shape[1]} tokens: loss {loss.item():.3f}")

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        restored = load_swapped(folder).eval()
    out = restored.generate(tokens[:, :8], max_new_tokens=8, do_sample=False)
    print(f"generated {out.shape[1] - 8} tokens from a state of constant size in {len(layers)} layers")


if __name__ == "__main__":
    main()
