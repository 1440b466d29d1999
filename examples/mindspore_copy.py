"""Trains a small MindSpore model to repeat what it read: `python examples/mindspore_copy.py`.

A row is a start token, random digits, and the same digits again. The second half is the first half as far back as the
digits are many, which is inside the window: a model that attends there is right every time. Takes about two minutes on
two CPU cores, most of it compiling; MindSpore 2.10 and numpy < 2, no torch.
"""

from __future__ import annotations

import argparse

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from longspan.mindspore import LocalTransformer

DIGITS, LENGTH = 16, 13  # token 0 starts a row, 1 to 16 are digits


def rows(random: np.random.Generator, number: int) -> Tensor:
    """(number, 1 + 2 · LENGTH) token ids."""
    digits = random.integers(1, DIGITS + 1, (number, LENGTH))
    return Tensor(np.concatenate([np.zeros((number, 1), digits.dtype), digits, digits], 1))


def copied(model: LocalTransformer, x: Tensor) -> float:
    """The share of the second half that the model generates right from the first."""
    out = model.generate(x[:, : LENGTH + 1], LENGTH, temperature=0.0)
    return float((out == x[:, LENGTH + 1 :]).astype(ms.float32).mean())


def train(steps: int, batch: int = 32, seed: int = 0) -> float:
    """Trains for so many steps, and returns the accuracy on rows never seen, measured by generation."""
    ms.set_seed(seed)
    random = np.random.default_rng(seed)
    model = LocalTransformer(
        num_tokens=DIGITS + 1,
        dim=64,
        depth=2,
        max_seq_len=2 * LENGTH + 1,
        local_attn_window_size=16,
        dim_head=32,
        heads=2,
        num_residual_streams=1,
    )
    optimizer = nn.AdamWeightDecay(model.trainable_params(), learning_rate=2e-3, weight_decay=0.01)

    def loss(x: Tensor) -> Tensor:
        return model(x, return_loss=True)

    gradients = ms.value_and_grad(loss, None, optimizer.parameters)

    @ms.jit
    def step(x: Tensor) -> Tensor:
        value, found = gradients(x)
        optimizer(found)
        return value

    model.set_train(True)
    for number in range(1, steps + 1):
        value = step(rows(random, batch))
        if number % 100 == 0:
            print(f"step {number}: loss {float(value):.3f}", flush=True)
    model.set_train(False)
    return copied(model, rows(np.random.default_rng(seed + 1), 64))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    print(f"copied right: {train(parser.parse_args().steps):.2%}")
