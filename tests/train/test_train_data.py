"""Readers, the token store and batches."""

from __future__ import annotations

import gzip
import json
import lzma
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training import WORDS, write_corpus

from longspan.ops.loss import IGNORE_INDEX
from longspan.train.data.batches import (
    Batch,
    BatchShape,
    LabeledBatches,
    ShuffledBatches,
    StatefulBatches,
    evaluation_batches,
    permute_index,
)
from longspan.train.data.readers import ReadOptions, find_source
from longspan.train.data.token_store import StoreSpec, TokenStore, open_store, unigram_bits


def store(folder: Path, *data: Any, context: int = 31, held_out: float = 0.2, **how: Any) -> TokenStore:
    options = how.pop("options", ReadOptions())
    scored = tuple(find_source(str(text), options) for text in how.pop("eval_data", ()))
    sources = tuple(find_source(str(text), options) for text in data)
    plan = StoreSpec(sources, scored, options, how.pop("tokenizer", None), context, held_out)
    assert not how
    return open_store(folder, plan)


def contents(found: TokenStore, side: str = "train") -> list[bytes]:
    segments = getattr(found, side)
    pairs = zip(segments.start, segments.length, strict=True)
    return [found.tokens[start : start + length].astype(np.uint8).tobytes() for start, length in pairs]


def everything(found: TokenStore) -> list[bytes]:
    return sorted(contents(found) + contents(found, "held_out"))


TEXTS = [f"{word} ".encode() * (20 + i) for i, word in enumerate(WORDS[:11])]


def write_texts(folder: Path) -> Path:
    folder.mkdir()
    for i, text in enumerate(TEXTS):
        (folder / f"{i}.txt").write_bytes(text)
    return folder


def test_folders_globs_and_extensions(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "text")
    (folder / "deeper").mkdir()
    (folder / "deeper" / "note.md").write_bytes(b"a note " * 9)
    (folder / ".hidden").write_bytes(b"not this")
    every = store(tmp_path / "1", folder, held_out=0.0)
    assert everything(every) == sorted([*TEXTS, b"a note " * 9])
    only = store(tmp_path / "2", folder, options=ReadOptions(extensions=("txt",)), held_out=0.0)
    assert everything(only) == sorted(TEXTS)
    fewer = store(tmp_path / "5", folder, options=ReadOptions(exclude=("deep*", "[0-9].txt")), held_out=0.0)
    assert everything(fewer) == sorted(TEXTS[10:])
    assert everything(store(tmp_path / "3", folder / "[12].txt", held_out=0.0)) == sorted(TEXTS[1:3])
    two = store(tmp_path / "4", folder / "**" / "*.md", folder / "3.txt", held_out=0.0)
    assert everything(two) == sorted([b"a note " * 9, TEXTS[3]])


def test_compressed_files(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "0.txt.gz").write_bytes(gzip.compress(TEXTS[0]))
    (folder / "1.txt.xz").write_bytes(lzma.compress(TEXTS[1]))
    (folder / "2.txt.zst").write_bytes(zstandard.ZstdCompressor().compress(TEXTS[2]))
    (folder / "3.txt").write_bytes(TEXTS[3])
    assert everything(store(tmp_path / "store", folder, held_out=0.0)) == sorted(TEXTS[:4])
    # What a file is called inside decides, and a folder's extensions see through the compression.
    only = store(tmp_path / "other", folder, options=ReadOptions(extensions=(".txt",)), held_out=0.0)
    assert everything(only) == sorted(TEXTS[:4])
    (folder / "4.txt.gz").write_bytes(gzip.compress(TEXTS[4])[:-9])
    with pytest.raises(ValueError, match=r"4\.txt\.gz cannot be read"):
        store(tmp_path / "broken", folder)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int64"])
def test_token_files(tmp_path: Path, dtype: str) -> None:
    rows = np.arange(5 * 97).reshape(5, 97) % 211
    np.save(tmp_path / "rows.npy", rows.astype(dtype))
    found = store(tmp_path / "1", tmp_path / "rows.npy")
    assert everything(found) == sorted(row.astype(np.uint8).tobytes() for row in rows)
    assert found.vocab_size == 211
    assert found.bytes_per_token is None
    rows.astype(dtype).tofile(tmp_path / "flat.bin")
    flat = store(tmp_path / "2", tmp_path / "flat.bin", options=ReadOptions(bin_dtype=dtype), held_out=0.0)
    assert contents(flat) == [rows.astype(np.uint8).tobytes()]
    (tmp_path / "odd.bin").write_bytes(b"12345")
    np.save(tmp_path / "real.npy", rows * 0.5)
    with pytest.raises(ValueError, match="not a multiple of 4 bytes"):
        store(tmp_path / "3", tmp_path / "odd.bin", options=ReadOptions(bin_dtype="int32"))
    with pytest.raises(ValueError, match="must be an integer array"):
        store(tmp_path / "4", tmp_path / "real.npy")
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(ValueError, match="are mixed"):
        store(tmp_path / "5", tmp_path / "rows.npy", tmp_path / "text.txt")


def test_fasta_records_are_documents(tmp_path: Path) -> None:
    (tmp_path / "x.fa").write_text(">one some text\nACGT\nACG\n\n>two\nTTTT TT\n;a remark\n>three\n")
    assert everything(store(tmp_path / "1", tmp_path / "x.fa")) == [b"ACGTACG", b"TTTTTT"]
    (tmp_path / "y.fasta.gz").write_bytes(gzip.compress(b">a\n" + b"ACGT\n" * 300_000))
    assert everything(store(tmp_path / "2", tmp_path / "y.fasta.gz", held_out=0.0)) == [b"ACGT" * 300_000]
    (tmp_path / "z.fa").write_text("ACGT\n")
    with pytest.raises(ValueError, match="is not FASTA"):
        store(tmp_path / "3", tmp_path / "z.fa")


def test_images_are_read_as_pixels(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
    image.fromarray(pixels).save(tmp_path / "a.png")
    image.fromarray(pixels[:, :, 0]).save(tmp_path / "b.png")
    assert everything(store(tmp_path / "1", tmp_path / "*.png")) == sorted(
        [pixels.tobytes(), pixels[:, :, 0].tobytes()]
    )
    sized = store(tmp_path / "2", tmp_path / "*.png", options=ReadOptions(image_size=4))
    assert sorted(len(x) for x in everything(sized)) == [16, 48]
    (tmp_path / "c.png").write_text("no image")
    with pytest.raises(ValueError, match=r"c\.png is not an image"):
        store(tmp_path / "3", tmp_path / "*.png")


def test_tokenizer_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([text.decode() for text in TEXTS], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    folder = write_texts(tmp_path / "text")
    (folder / "ü.txt").write_text("grün\n" * 300_000)  # longer than a piece, which ends inside a letter
    found = store(tmp_path / "store", folder, tokenizer=tmp_path / "tokenizer.json", held_out=0.0)
    assert found.vocab_size == tokenizer.get_vocab_size()
    pairs = zip(found.train.start, found.train.length, strict=True)
    said = sorted(tokenizer.decode(found.tokens[start : start + length].tolist()) for start, length in pairs)
    assert said == sorted([text.decode() for text in TEXTS] + ["grün\n" * 300_000])
    assert found.bytes_per_token == pytest.approx((sum(map(len, TEXTS)) + 1_800_000) / len(found.tokens))
    (folder / "bad.txt").write_bytes(b"fine \xff not")
    with pytest.raises(ValueError, match=r"bad\.txt is not UTF-8 text at byte 5 \(0xff\)"):
        store(tmp_path / "2", folder, tokenizer=tmp_path / "tokenizer.json")
    (tmp_path / "wrong.json").write_text("{}")
    with pytest.raises(ValueError, match=r"wrong\.json is not a Hugging Face tokenizer file"):
        store(tmp_path / "3", folder, tokenizer=tmp_path / "wrong.json")


def test_held_out_content_is_never_trained_on(tmp_path: Path) -> None:
    """Content stays held out under another name, compressed, repeated, and with other data."""
    folder = write_corpus(tmp_path / "text", documents=40)
    for i in range(0, 40, 3):
        text = (folder / f"{i:03}.txt").read_bytes()
        (folder / f"copy-{i}.txt").write_bytes(text)
        (folder / f"again-{i}.txt.gz").write_bytes(gzip.compress(text))
    found = store(tmp_path / "1", folder)
    held, train = set(contents(found, "held_out")), set(contents(found))
    assert held
    assert train
    assert not held & train
    more = write_corpus(tmp_path / "more", documents=30, seed=11)
    joined = store(tmp_path / "2", folder, more)
    assert not held & set(contents(joined))
    assert 0.05 < joined.held_out.total / len(joined.tokens) < 0.45


def test_a_long_file_is_split_by_blocks(tmp_path: Path) -> None:
    draw = random.Random(2)
    text = " ".join(str(draw.randrange(10**6)) for _ in range(30_000)).encode()
    (tmp_path / "long.txt").write_bytes(text)
    found = store(tmp_path / "store", tmp_path / "long.txt", held_out=0.1)
    owner = np.zeros(len(text), int)
    for side, segments in ((1, found.train), (2, found.held_out)):
        for start, length in zip(segments.start, segments.length, strict=True):
            assert not owner[start : start + length].any()
            owner[start : start + length] = side
    assert owner.all()
    assert len(found.held_out) >= 2
    assert len(found.train) <= len(found.held_out) + 1  # neighbors on one side are one document
    seen = np.zeros(len(text), bool)
    rows = ShuffledBatches(found, BatchShape(31, 4), packed=False, seed=0)
    for _ in range(rows.samplers[0].count // 4 * 3):
        before = [rows.samplers[0].sequence(*divmod(rows.drawn[0] + i, rows.samplers[0].count)) for i in range(4)]
        rows.next_step()
        for (span,) in before:
            seen[span.start : span.start + span.length + 1] = True
    assert not (seen & (owner == 2)).any()
    assert seen[owner == 1].mean() > 0.95


def test_evaluation_data_is_removed_from_training_data(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "text")
    found = store(tmp_path / "store", folder, eval_data=[folder / "[34].txt"])
    assert sorted(contents(found, "held_out")) == sorted(TEXTS[3:5])
    assert sorted(contents(found)) == sorted(TEXTS[:3] + TEXTS[5:])


def test_a_store_is_rebuilt_when_its_data_changes(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "text")
    first = store(tmp_path / "store", folder)
    stamp = (tmp_path / "store" / "tokens.bin").stat().st_mtime_ns
    again = store(tmp_path / "store", folder)
    assert (tmp_path / "store" / "tokens.bin").stat().st_mtime_ns == stamp
    assert again.metadata == first.metadata
    assert isinstance(again.tokens, np.memmap)
    (folder / "0.txt").write_bytes(b"something else " * 9)
    assert store(tmp_path / "store", folder).metadata["sha256"] != first.metadata["sha256"]
    (tmp_path / "store" / "store.json").write_text("{")  # as a kill might leave it
    assert everything(store(tmp_path / "store", folder))


def spans_of(batch: Batch) -> list[tuple[bytes, list[int]]]:
    """Each packed sequence and its targets."""
    offsets = [0, batch.tokens.shape[1]] if batch.offsets is None else batch.offsets.tolist()
    found = []
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        for start, end in pairwise(offsets):
            found.append((bytes(tokens[start:end]), targets[start:end]))
    return found


@pytest.mark.parametrize("packed", [True, False])
def test_targets_are_the_next_token_of_the_same_document(tmp_path: Path, packed: bool) -> None:
    found = store(tmp_path / "store", write_corpus(tmp_path / "text"))
    documents = contents(found)
    rows = ShuffledBatches(found, BatchShape(31, 5), packed=packed, seed=3)
    ends = 0
    for _ in range(40):
        (batch,) = rows.next_step()
        assert batch.num_targets == int((batch.targets != IGNORE_INDEX).sum())
        assert batch.tokens.numel() == 5 * 31
        for text, targets in spans_of(batch):
            known = bytes(t for t in targets if t != IGNORE_INDEX)
            assert text[1:] == known[: len(text) - 1]
            if targets[-1] == IGNORE_INDEX:
                assert any(document.endswith(text) for document in documents)
                ends += 1
            else:
                assert any(text + known[-1:] in document for document in documents)
    assert (ends > 0) == packed


def test_an_epoch_of_packed_sequences_reads_every_token_once(tmp_path: Path) -> None:
    found = store(tmp_path / "store", write_corpus(tmp_path / "text"))
    rows = ShuffledBatches(found, BatchShape(31, 1), packed=True, seed=3)
    for epoch in range(2):
        seen: Counter[int] = Counter()
        for _ in range(rows.samplers[0].count):
            spans = rows.samplers[0].sequence(*divmod(rows.drawn[0], rows.samplers[0].count))
            seen.update(i for start, length, _ in spans for i in range(start, start + length))
            assert epoch <= rows.epochs < epoch + 1
            rows.next_step()
        assert set(seen.values()) == {1}
        assert len(seen) > found.train.total - 31, epoch
        assert rows.epochs == epoch + 1


@pytest.mark.parametrize("kind", ["windows", "packed", "stateful"])
def test_the_order_depends_on_the_seed_and_is_restored(tmp_path: Path, kind: str) -> None:
    found = store(tmp_path / "store", write_corpus(tmp_path / "text"))

    def made(seed: int, batch_size: int = 3) -> Any:
        shape = BatchShape(31, batch_size, accumulate=2)
        return (
            StatefulBatches(found, shape, seed=seed)
            if kind == "stateful"
            else ShuffledBatches(found, shape, packed=kind == "packed", seed=seed)
        )

    def drawn(batches: Any, number: int = 5) -> list[Any]:
        return [[(b.tokens.tolist(), b.targets.tolist()) for b in batches.next_step()] for _ in range(number)]

    one, two, other = made(1), made(1), made(2)
    first = drawn(one)
    assert drawn(two) == first
    assert drawn(other) != first
    position = one.state_dict()
    rest = drawn(one)
    fresh = made(1)
    fresh.load_state_dict(position)
    assert drawn(fresh) == rest


@pytest.mark.parametrize("kind", ["windows", "packed", "stateful"])
def test_two_processes_read_what_one_with_twice_the_batch_reads(tmp_path: Path, kind: str) -> None:
    found = store(tmp_path / "store", write_corpus(tmp_path / "text"))

    def made(shape: BatchShape) -> Any:
        return (
            StatefulBatches(found, shape, seed=5)
            if kind == "stateful"
            else ShuffledBatches(found, shape, packed=kind == "packed", seed=5)
        )

    whole = made(BatchShape(31, 6, accumulate=2))
    parts = [made(BatchShape(31, 3, accumulate=2, processes=2, process=i)) for i in range(2)]
    for _ in range(7):
        together = whole.next_step()
        apart = zip(*(part.next_step() for part in parts), strict=True)
        for one, pair in zip(together, apart, strict=True):
            dim = 1 if kind == "packed" else 0
            assert torch.equal(torch.cat([p.tokens for p in pair], dim), one.tokens)
            assert torch.equal(torch.cat([p.targets for p in pair], dim), one.targets)
            assert sum(p.num_targets for p in pair) == one.num_targets


def test_stateful_batches_read_documents_in_order(tmp_path: Path) -> None:
    found = store(tmp_path / "store", write_corpus(tmp_path / "text", documents=7))
    lanes = StatefulBatches(found, BatchShape(31, 2), seed=1)
    texts = [bytearray(), bytearray()]
    done: list[bytes] = []
    while len(done) < 2 * len(found.train):
        (batch,) = lanes.next_step()
        assert batch.new_document is not None
        for row in range(2):
            if batch.new_document[row] and texts[row]:
                done.append(bytes(texts[row]))
                texts[row] = bytearray()
            mask = torch.ones(31, dtype=torch.bool) if batch.key_mask is None else batch.key_mask[row]
            tokens, targets = batch.tokens[row][mask].tolist(), batch.targets[row][mask].tolist()
            assert targets[:-1] == tokens[1:]
            assert (batch.targets[row][~mask] == IGNORE_INDEX).all()
            texts[row] += bytes(tokens)
    expected = {text[:-1] for text in contents(found)}  # The last token is a target only.
    assert set(done) == expected


def test_source_weights(tmp_path: Path) -> None:
    small, large = tmp_path / "small.txt", tmp_path / "large.txt"
    small.write_bytes(b"a" * 5_000)
    large.write_bytes(b"b" * 50_000)

    def share(*data: str) -> float:
        found = store(tmp_path / "store", *data, held_out=0.0)
        rows = ShuffledBatches(found, BatchShape(31, 10), packed=False, seed=0)
        letters = torch.cat([rows.next_step()[0].tokens.flatten() for _ in range(20)])
        return float((letters == ord("a")).double().mean())

    assert share(str(small), str(large)) == pytest.approx(5 / 55, abs=0.02)
    assert share(f"3={small}", f"1={large}") == pytest.approx(0.75, abs=0.02)
    with pytest.raises(ValueError, match="has no weight, but another source has"):
        share(f"3={small}", str(large))
    with pytest.raises(ValueError, match="must be above 0"):
        share(f"0={small}", str(large))


def test_weights_of_labeled_sources(tmp_path: Path) -> None:
    """Without them every document is read once in an epoch, and the order is that of one source."""
    for source, rows in (("small", 12), ("large", 60)):
        lines = "".join(json.dumps({"text": source[0] * 9, "label": i % 2}) + "\n" for i in range(rows))
        (tmp_path / f"{source}.jsonl").write_text(lines)
    small, large = (str(tmp_path / f"{source}.jsonl") for source in ("small", "large"))

    def read(*data: str) -> tuple[LabeledBatches, float]:
        found = store(tmp_path / "store", *data, held_out=0.0, options=ReadOptions(labeled=True))
        batches = LabeledBatches(found, BatchShape(31, 6), seed=0)
        letters = torch.cat([batches.next_step()[0].tokens[:, 0] for _ in range(12)])
        return batches, float((letters == ord("s")).double().mean())

    assert read(small, large)[1] == pytest.approx(12 / 72)
    batches, share = read(f"3={small}", f"1={large}")
    assert share == pytest.approx(0.75)
    assert batches.state_dict() == {"drawn": [54, 18]}
    assert batches.repetition == pytest.approx(0.75 * 54 / 12)
    again = LabeledBatches(batches.store, batches.shape, seed=0)
    again.load_state_dict(batches.state_dict())
    assert torch.equal(again.next_step()[0].tokens, batches.next_step()[0].tokens)
    earlier = LabeledBatches(batches.store, batches.shape, seed=0)
    earlier.load_state_dict({"drawn": 72})  # Versions before read all sources as one.
    assert (earlier.epochs, earlier.next_step()[0].tokens.shape) == (1, (6, 9))


@pytest.mark.parametrize("kind", ["windows", "stateful"])
def test_a_small_source_is_repeated_beside_a_large_one(tmp_path: Path, kind: str) -> None:
    """A token counts as often as its source was read; tokens of a source that is not repeated count 0."""
    small, large, one = (tmp_path / f"{name}.txt" for name in ("small", "large", "one"))
    small.write_bytes(b"a" * 311)
    large.write_bytes(b"b" * 50_000)
    one.write_bytes(b"c")  # a document without a target
    found = store(tmp_path / "store", f"1={small}", f"3={large}", f"9={one}", held_out=0.0)
    shape = BatchShape(31, 4)
    batches: Any = (
        StatefulBatches(found, shape, seed=0)
        if kind == "stateful"
        else ShuffledBatches(found, shape, packed=False, seed=0)
    )
    assert batches.repetition == 0
    read = [0.0, 0.0]
    for _ in range(60):
        for batch in batches.next_step():
            letters = batch.tokens if batch.key_mask is None else batch.tokens[batch.key_mask]
            read = [n + float((letters == ord(letter)).sum()) for n, letter in zip(read, "ab", strict=True)]
        expected = read[0] / sum(read) * read[0] / 311 if read[0] > 320 else 0.0
        if not 280 < read[0] <= 320:
            assert batches.repetition == pytest.approx(expected, rel=0.15)
    assert read[0] > 1000
    assert read[1] < 50_000
    assert batches.epochs < 1


def test_an_evaluation_scores_every_token_once(tmp_path: Path) -> None:
    found = store(tmp_path / "store", write_corpus(tmp_path / "text"))
    batches = [
        b for i in range(2) for b in evaluation_batches(found, found.held_out, BatchShape(31, 3, 1, 2, i), 10**9)
    ]
    expected = sorted(token for text in contents(found, "held_out") for token in text[1:])
    scored = sorted(t for batch in batches for t in batch.targets.flatten().tolist() if t != IGNORE_INDEX)
    assert scored == expected
    fewer = list(evaluation_batches(found, found.held_out, BatchShape(31, 3), 300))
    assert 150 < sum(batch.num_targets for batch in fewer) < 450


def test_unigram_baseline(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("".join(random.Random(1).choices("abcd", k=100_000)))
    found = store(tmp_path / "store", tmp_path / "x.txt")
    assert unigram_bits(found) == pytest.approx(2.0, abs=0.05)
    assert unigram_bits(replace(found, held_out=found.held_out.take(np.array([], int)))) is None


@given(st.integers(1, 300), st.integers(0, 2**62))
def test_permute_index_is_a_permutation(count: int, seed: int) -> None:
    assert sorted(permute_index(i, count, seed) for i in range(count)) == list(range(count))
