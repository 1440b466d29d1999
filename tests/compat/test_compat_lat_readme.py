"""Every code block of linear-attention-transformer's README, as written."""

import ast

import older
import pytest

DOCUMENT = "linear-attention-transformer.md"


def last_value(block, namespace):
    """Runs a block; what its last line gives, if that is an expression."""
    tree = ast.parse(block)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, DOCUMENT, "exec"), namespace)
    return None if last is None else eval(compile(ast.Expression(last.value), DOCUMENT, "eval"), namespace)


def test_there_are_six_blocks():
    assert len(older.blocks(DOCUMENT)) == 6


@pytest.mark.slow  # 20,000 logits for each of 8,192 tokens
def test_language_model():
    with older.older_names() as namespace:
        # The comment there promises 512, the width of the model; logits are as wide as the vocabulary.
        assert last_value(older.blocks(DOCUMENT)[0], namespace).shape == (1, 8192, 20000)


def test_transformer():
    with older.older_names() as namespace:
        assert last_value(older.blocks(DOCUMENT)[1], namespace).shape == (1, 8192, 512)


@pytest.mark.slow  # twice six layers over 4,096 tokens
def test_encoder_and_decoder():
    with older.older_names() as namespace:
        last_value(older.blocks(DOCUMENT)[2], namespace)
        assert namespace["context"].shape == (1, 4096, 512)
        assert namespace["logits"].shape == (1, 4096, 20000)


def test_linformer():
    with older.older_names() as namespace:
        last_value(older.blocks(DOCUMENT)[3], namespace)
        layer = namespace["enc"].transformer.layers.layers[0][0].fn
        assert (layer.k, layer.seq_len) == (256, 4096)


def test_linformer_for_the_context():
    with older.older_names() as namespace:
        last_value(older.blocks(DOCUMENT)[4], namespace)
        layer = namespace["dec"].transformer.layers.layers[1][0].fn
        assert (layer.k, layer.seq_len) == (256, 2048)


def test_images():
    with older.older_names() as namespace:
        assert last_value(older.blocks(DOCUMENT)[5], namespace).shape == (1, 32, 256, 256)
