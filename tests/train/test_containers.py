"""Containers: tables, archives, sequences, recordings and chats are read; other files are refused by their content."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import struct
import tarfile
import wave
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training import arguments, longspan, trained, write_corpus

from longspan.generation.chat_template import ChatTemplate
from longspan.ops.loss import IGNORE_INDEX
from longspan.train.data import token_store
from longspan.train.data.batches import BatchShape, ShuffledBatches
from longspan.train.data.readers import ReadOptions, find_source
from longspan.train.data.token_store import StoreSpec, TokenStore, open_store

TEXTS = [f"document {i}: {'läuft ' * (i + 3)}" for i in range(7)]


def store(folder: Path, data: Any, *, held_out: float = 0.0, tokenizer: Path | None = None, **how: Any) -> TokenStore:
    options = ReadOptions(**how)
    sources = (find_source(str(data), options),)
    return open_store(folder / "store", StoreSpec(sources, (), options, tokenizer, 31, held_out))


def texts(found: TokenStore) -> list[str]:
    pairs = zip(found.train.start, found.train.length, strict=True)
    return [found.tokens[a : a + n].astype(np.uint8).tobytes().decode() for a, n in pairs]


def write_csv(path: Path, rows: list[dict[str, Any]], delimiter: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        table.writeheader()
        table.writerows(rows)


def write_arrow(path: Path, rows: list[dict[str, Any]]) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=2)
    elif path.suffix == ".feather":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)


def write_json(path: Path, rows: list[Any]) -> None:
    lines = "\n".join(json.dumps(row) for row in rows)
    path.write_text(lines if path.suffix in (".jsonl", ".txt") else json.dumps(rows, indent=1))


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
    "x.jsonl": write_json,
    "x.json": write_json,
    "lines.txt": write_json,
    "x.csv": write_csv,
    "semicolons.csv": lambda path, rows: write_csv(path, rows, ";"),
    "x.tsv": lambda path, rows: write_csv(path, rows, "\t"),
    "x.parquet": write_arrow,
    "x.arrow": write_arrow,
    "x.feather": write_arrow,
}


@pytest.mark.parametrize("name", WRITERS)
def test_tables_are_read_by_their_column_of_text(name: str, tmp_path: Path) -> None:
    rows = [{"id": f"{i}", "remark": f"r{i}", "body": text} for i, text in enumerate(TEXTS)]
    WRITERS[name](tmp_path / name, rows)
    found = store(tmp_path, tmp_path / name)
    assert texts(found) == TEXTS
    (line,) = found.describe_sources()
    assert 'field "body" (guessed); 7 documents' in line
    assert f"{sum(len(text.encode()) for text in TEXTS)} bytes; first: {TEXTS[0]!r}" in line
    other = store(tmp_path, tmp_path / name, text_field="remark")
    assert texts(other) == [f"r{i}" for i in range(7)]
    assert 'field "remark"; 7 documents' in other.describe_sources()[0]
    with pytest.raises(ValueError, match=r"has no field 'bod'; it has id, remark, body \(did you mean 'body'\?\)"):
        store(tmp_path, tmp_path / name, text_field="bod")
    raw = store(tmp_path, tmp_path / name, format="bytes")
    assert raw.tokens[:].tobytes() == (tmp_path / name).read_bytes()


def test_json_of_other_shapes(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for value in (
        {"version": 1, "data": [{"text": text} for text in TEXTS]},
        TEXTS,
        [{"text": text} for text in TEXTS],
    ):
        path.write_text(json.dumps(value))
        assert texts(store(tmp_path, path)) == TEXTS
    settings = json.dumps({"name": "a package", "version": "1.0", "files": {"a": 1}})
    path.write_text(settings)
    assert texts(store(tmp_path, path)) == [settings]
    path.write_text('[{"text": "a"}, {"text": "b"')
    with pytest.raises(ValueError, match=r"x\.json is not JSON in line 1"):
        store(tmp_path, path)
    lines = tmp_path / "x.jsonl"
    lines.write_text('{"text": "a"}\n{"text": "b"}\n{"text": oops}\n' + '{"text": "c"}\n' * 9)
    with pytest.raises(ValueError, match=r"x\.jsonl is not JSON in line 3"):
        store(tmp_path, lines)
    lines.write_text('{"a": 1}\n{"a": 2}\n')
    with pytest.raises(ValueError, match=r"has no field of text, tokens or messages: name it with --text-field"):
        store(tmp_path, lines)


def test_json_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan.train.data import tables

    monkeypatch.setattr(tables, "CHUNK", 13)
    for name in ("x.jsonl", "x.json"):
        write_json(tmp_path / name, [{"text": text, "n": [1, {"a": None}]} for text in TEXTS])
        assert texts(store(tmp_path, tmp_path / name)) == TEXTS


def test_tokens_in_a_table(tmp_path: Path) -> None:
    rows = [{"input_ids": [i, 70_001, 5]} for i in range(5)]
    write_json(tmp_path / "x.jsonl", rows)
    found = store(tmp_path, tmp_path / "x.jsonl")
    assert found.vocab_size == 70_002
    assert found.tokens.tolist() == [x for row in rows for x in row["input_ids"]]
    assert found.bytes_per_token is None


def test_datasets_folders(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["short", "long"])}
    )
    rows = {"text": TEXTS, "label": [0, 0, 0, 1, 1, 1, 1]}
    train = datasets.Dataset.from_dict(rows, features)
    train.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": train, "test": train.select([2])}).save_to_disk(tmp_path / "splits")
    for name in ("one", "splits"):
        assert texts(store(tmp_path, tmp_path / name)) == TEXTS
    assert texts(store(tmp_path, tmp_path / "splits" / "test")) == TEXTS[2:3]
    assert store(tmp_path, tmp_path / "one", labeled=True).labels == ["short", "long"]


def pack_tar(mode: str) -> Callable[[Path, dict[str, bytes]], None]:
    def pack(path: Path, files: dict[str, bytes]) -> None:
        with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
            for name, content in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))

    return pack


def pack_zip(path: Path, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)


@pytest.mark.parametrize(
    ("name", "pack"),
    [("a.zip", pack_zip), ("a.tar", pack_tar("w")), ("a.tgz", pack_tar("w:gz")), ("a.tar.bz2", pack_tar("w:bz2"))],
)
def test_archives_are_opened(name: str, pack: Any, tmp_path: Path) -> None:
    inner = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:2])
    table = tmp_path / "x.parquet"
    write_arrow(table, [{"text": text} for text in TEXTS[2:4]])
    files = {
        "set/rows.jsonl": inner.encode(),
        "set/rows.parquet": table.read_bytes(),
        "set/a.txt.gz": gzip.compress(TEXTS[4].encode()),
        "set/b.txt": TEXTS[5].encode(),
        "__MACOSX/b.txt": b"not this",
        "set/paper.pdf": b"%PDF-1.7 \0",
    }
    pack(tmp_path / name, files)
    found = store(tmp_path, tmp_path / name)
    assert texts(found) == TEXTS[:6]
    (line,) = found.describe_sources()
    assert "1 files skipped" in line
    assert f"{name}!/set/paper.pdf is a PDF" in line
    only = store(tmp_path, tmp_path / name, extensions=("txt",))
    assert texts(only) == TEXTS[4:6]
    pack(tmp_path / name, {f"data/{'ab'[i % 2]}/{i}.txt": text.encode() for i, text in enumerate(TEXTS)})
    classes = store(tmp_path, tmp_path / name, labeled=True)
    assert classes.labels == ["a", "b"]
    assert classes.train.label.tolist() == [0, 1, 0, 1, 0, 1, 0]


def test_compression_is_recognized_by_content(tmp_path: Path) -> None:
    for name, compress in (("a.txt", gzip.compress), ("b", lzma.compress), ("c.bz2", bz2.compress)):
        (tmp_path / name).write_bytes(compress(TEXTS[3].encode()))
        assert texts(store(tmp_path, tmp_path / name)) == [TEXTS[3]]
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", b" " * 70_000_003)
    with pytest.raises(ValueError, match=r"bomb\.zip decompresses to more than 250 times its size"):
        store(tmp_path, tmp_path / "bomb.zip")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"%PDF-1.7\nabc", "is a PDF, which cannot be read: extract its text, as `pdftotext` does"),
        (b"SQLite format 3\0", "is an SQLite database"),
        (b"\x89HDF\r\n\x1a\n", "is an HDF5 file.*numpy.save"),
        (b"ID3\x04abc", "is an MP3 recording.*ffmpeg"),
        (b"\x7fELF\x02", "is a program"),
        (b"7z\xbc\xaf\x27\x1c", "is a 7z archive.*unpack it"),
        (b"text and \0 then", "is binary data in an unknown format"),
    ],
)
def test_what_cannot_be_read_is_refused_by_content(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(ValueError, match=rf"x\.txt {message}.*or train on its bytes with --format bytes"):
        store(tmp_path, tmp_path / "x.txt")
    assert store(tmp_path, tmp_path / "x.txt", format="bytes").tokens[:].tobytes() == content
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "x.txt").write_bytes(content)
    (folder / "y.txt").write_text(TEXTS[0])
    found = store(tmp_path, folder)
    assert texts(found) == TEXTS[:1]
    assert "1 files skipped" in found.describe_sources()[0]


def test_office_documents_and_models_are_refused(tmp_path: Path) -> None:
    for member, message in (
        ("[Content_Types].xml", "an Office document"),
        ("archive/data.pkl", "a file of torch.save"),
    ):
        pack_zip(tmp_path / "x.zip", {member: b"x"})
        with pytest.raises(ValueError, match=rf"x\.zip is {message}"):
            store(tmp_path, tmp_path / "x.zip")


def test_utf16_is_text(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(TEXTS[1].encode("utf-16"))
    assert texts(store(tmp_path, tmp_path / "x.txt")) == [TEXTS[1]]


def test_fastq(tmp_path: Path) -> None:
    (tmp_path / "x.fastq.gz").write_bytes(gzip.compress(b"@a\nACGT\n+\nIIII\n@b x\nTTG\n+b\n@@@\n"))
    found = store(tmp_path, tmp_path / "x.fastq.gz")
    assert texts(found) == ["ACGT", "TTG"]
    assert ": FASTQ; 2 documents, 7 bytes; first: 'ACGT'" in found.describe_sources()[0]
    (tmp_path / "y.fq").write_text("@a\nACGT\n+\nIII\n")
    with pytest.raises(ValueError, match=r"y\.fq is not FASTQ: record 1"):
        store(tmp_path, tmp_path / "y.fq")


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_recordings_are_read_as_samples(width: int, tmp_path: Path) -> None:
    levels = np.array([-1.0, -0.25, 0.0, 0.25, 0.999])
    stereo = np.stack([levels, levels], 1)
    with wave.open(str(tmp_path / "x.wav"), "wb") as file:
        file.setparams((2, width, 8000, 0, "NONE", ""))
        if width == 1:
            raw = np.round(stereo * 128 + 128).clip(0, 255).astype(np.uint8).tobytes()
        else:
            wide = np.round(stereo * 2.0**31).clip(-(2**31), 2**31 - 1).astype("<i4")
            raw = wide.view(np.uint8).reshape(5, 2, 4)[:, :, 4 - width :].tobytes()
        file.writeframes(raw)
    found = store(tmp_path, tmp_path / "x.wav").tokens
    expected = 127.5 * (1 + np.sign(levels) * np.log(1 + 255 * np.abs(levels)) / np.log(256))
    assert np.abs(found - expected).max() <= (1.1 if width == 1 else 0.51)
    raw = (tmp_path / "x.wav").read_bytes()
    (tmp_path / "y.wav").write_bytes(raw[:20] + bytes([7, 0]) + raw[22:])
    with pytest.raises(
        ValueError, match=rf"y\.wav is not a recording .*its format is 7, with {8 * width} bits.*ffmpeg"
    ):
        store(tmp_path, tmp_path / "y.wav")
    (tmp_path / "y.wav").write_bytes(raw[:30])
    with pytest.raises(ValueError, match=r"y\.wav is not a recording .*ffmpeg"):
        store(tmp_path, tmp_path / "y.wav")


@pytest.mark.parametrize("extensible", [False, True])
def test_recordings_of_floats(extensible: bool, tmp_path: Path) -> None:
    levels = np.array([-1.5, -0.25, 0.0, 0.25, 0.999], "<f4")
    form = struct.pack("<HHIIHH", 0xFFFE if extensible else 3, 1, 8000, 32000, 4, 32)
    form += struct.pack("<HHIH14s", 22, 32, 0, 3, bytes(14)) if extensible else b""
    parts = ((b"fmt ", form), (b"LIST", b"odd"), (b"data", levels.tobytes()))
    body = b"".join(name + struct.pack("<I", len(x)) + x + bytes(len(x) % 2) for name, x in parts)
    (tmp_path / "x.wav").write_bytes(b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body)
    expected = 127.5 * (1 + np.sign(levels) * np.log(1 + 255 * np.abs(levels.clip(-1, 1))) / np.log(256))
    assert np.abs(store(tmp_path, tmp_path / "x.wav").tokens - expected).max() <= 0.51


def test_tables_in_compressed_archives(tmp_path: Path) -> None:
    rows = [{"id": f"{i}", "body": text} for i, text in enumerate(TEXTS)]
    for name in ("x.csv", "x.jsonl", "x.parquet"):
        WRITERS[name](tmp_path / name, rows)
        with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
            archive.add(tmp_path / name, name)
        assert texts(store(tmp_path, tmp_path / "x.tar.gz")) == TEXTS


def test_rows_that_are_left_out_are_counted(tmp_path: Path) -> None:
    rows = [{"text": text, "label": "a" if i else ""} for i, text in enumerate(TEXTS)]
    write_csv(tmp_path / "x.csv", [*rows, {"text": "", "label": "b"}])
    (line,) = store(tmp_path, tmp_path / "x.csv", labeled=True).describe_sources()
    assert "6 documents" in line
    assert "; 2 rows without text or label left out; first: " in line
    write_csv(tmp_path / "x.csv", [{"text": "", "label": "b"}] * 3)
    with pytest.raises(ValueError, match="none of its 3 rows has both text and label"):
        store(tmp_path, tmp_path / "x.csv", labeled=True)


def test_what_an_instruction_is_about_belongs_to_the_prompt(tmp_path: Path) -> None:
    rows = [{"instruction": "add", "input": "1 2" if i else "", "output": f"{i}"} for i in range(2)]
    write_json(tmp_path / "x.json", rows)
    found = store(tmp_path, tmp_path / "x.json")
    assert 'fields "instruction", "input" and "output" (guessed), ChatML' in found.describe_sources()[0]
    prompts = [text.split("<|im_end|>")[0] for text in texts(found)]
    assert prompts == ["<|im_start|>user\nadd", "<|im_start|>user\nadd\n\n1 2"]
    write_json(tmp_path / "y.json", [{"prompt": "what?", "chosen": CHAT, "rejected": CHAT[:1]}] * 2)
    assert 'conversations in field "chosen" (guessed)' in store(tmp_path, tmp_path / "y.json").describe_sources()[0]


CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "who?"},
    {"role": "assistant", "content": "mé"},
    {"role": "user", "content": "where?"},
    {"role": "assistant", "content": "here"},
]


def answered(found: TokenStore) -> list[str]:
    """The text of the targets of each document."""
    assert found.targets is not None
    parts = []
    for start, length in zip(found.train.start, found.train.length, strict=True):
        targets = found.targets[start : start + length]
        parts.append(bytes(targets[targets != IGNORE_INDEX].tolist()).decode())
    return parts


@pytest.mark.parametrize("form", ["messages", "sharegpt", "pairs"])
def test_the_loss_of_chats_is_on_the_answers(form: str, tmp_path: Path) -> None:
    shapes: dict[str, Any] = {
        "messages": {"messages": CHAT},
        "sharegpt": {"conversations": [{"from": "human", "value": "who?"}, {"from": "gpt", "value": "mé"}]},
        "pairs": {"instruction": "who?", "output": "mé"},
    }
    write_json(tmp_path / "x.jsonl", [shapes[form]] * 2)
    found = store(tmp_path, tmp_path / "x.jsonl")
    answers = ["mé<|im_end|>\n" + "here<|im_end|>\n" * (form == "messages")] * 2
    assert answered(found) == answers
    assert "ChatML, loss on the answers" in found.describe_sources()[0]
    assert found.metadata["targets"] == found.metadata["bytes"] == len("".join(answers).encode())
    for packed in (True, False):
        (batch,) = ShuffledBatches(found, BatchShape(19, 3), packed=packed, seed=1).next_step()
        chosen = batch.targets != IGNORE_INDEX
        assert batch.num_targets == int(chosen.sum()) < batch.targets.numel()
        if not packed:
            assert torch.equal(batch.targets[:, :-1][chosen[:, :-1]], batch.tokens[:, 1:][chosen[:, :-1]])


def test_text_beside_chats_has_all_its_targets(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.txt").write_text("before")
    write_json(folder / "b.jsonl", [{"messages": CHAT}] * 2)
    (folder / "c.txt").write_text("after")
    found = store(tmp_path, folder)
    spoken = "mé<|im_end|>\nhere<|im_end|>\n"
    assert answered(found) == ["efore", spoken, spoken, "fter"]


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role[0] }}]"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content.split('>')[-1] if not loop.last else m.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


def test_the_template_of_a_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<s>", "</s>", "[s]", "[u]", "[a]", "be", "brief", "who?", "me", "why>me", "where?", "here", "[UNK]"]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(words[:5])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for content, expected in (
        ("me", [["me", "</s>", "here", "</s>"]]),
        ("why>me", [["why>me", "</s>"], ["here", "</s>"]]),  # The template drops the reasoning of earlier answers.
    ):
        chat = [*CHAT[:2], {"role": "assistant", "content": content}, *CHAT[3:]]
        write_json(tmp_path / "x.jsonl", [{"messages": chat}] * 2)
        found = store(tmp_path, tmp_path / "x.jsonl", tokenizer=tmp_path / "tokenizer.json")
        assert "the tokenizer's template, loss on the answers" in found.describe_sources()[0]
        targets = [
            [words[t] for t in found.targets[a : a + n] if t != IGNORE_INDEX]  # type: ignore[index]
            for a, n in zip(found.train.start, found.train.length, strict=True)
        ]
        assert targets == expected * 2
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no systems') }}")
    with pytest.raises(ValueError, match="the tokenizer's template refuses a conversation: no systems"):
        ChatTemplate(tmp_path / "tokenizer.json").render(CHAT)
    write_json(tmp_path / "x.jsonl", [{"messages": [{"content": "x"}]}])
    with pytest.raises(ValueError, match=r"x\.jsonl, row 1: a message needs role and content"):
        store(tmp_path, tmp_path / "x.jsonl")


@pytest.mark.parametrize("kind", ["text", "bin", "npy", "several"])
def test_large_files_are_read_in_place(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    rows = rng.integers(1, 200, (11, 97))
    source: Path = tmp_path / f"data.{kind}"
    if kind == "npy":
        np.save(source, rows)
    elif kind == "several":
        source.mkdir()
        for i, row in enumerate(rows):
            (source / f"{i:02}.txt").write_bytes(bytes(row.tolist()))
    else:
        rows.astype("uint16" if kind == "bin" else "uint8").tofile(source)
    copied = store(tmp_path / "copied", source, held_out=0.3)
    monkeypatch.setattr(token_store, "_IN_PLACE", 1)
    mapped = store(tmp_path / "mapped", source, held_out=0.3)
    assert not (tmp_path / "mapped" / "store" / "tokens.bin").exists()
    assert mapped.metadata["sha256"] == copied.metadata["sha256"]
    for side in ("train", "held_out"):
        one, two = getattr(mapped, side), getattr(copied, side)
        for a, b, n in zip(one.start, two.start, one.length, strict=True):
            assert mapped.tokens[a : a + n].tolist() == copied.tokens[b : b + n].tolist()
    again = store(tmp_path / "mapped", source, held_out=0.3)
    assert again.metadata == mapped.metadata
    if kind == "text":
        source.write_bytes(gzip.compress(source.read_bytes()))
        assert (tmp_path / "gz").mkdir() is None
        store(tmp_path / "gz", source)
        assert (tmp_path / "gz" / "store" / "tokens.bin").exists()


def test_short_files_are_packed(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "text", documents=40, words=(3, 9))
    longest = max(len(path.read_bytes()) for path in corpus.iterdir())
    records = trained(corpus, tmp_path / "run", context=2 * longest, steps=2)
    assert records[-1]["step"] == 2
    done = longspan(*arguments(corpus, tmp_path / "off", context=2 * longest, packing="off"), log=tmp_path / "log")
    assert done.status == 2
    assert "is longer than any document to train on" in done.stderr


def test_the_command_says_what_it_reads_and_resumes(tmp_path: Path) -> None:
    rows = [
        {"title": f"{i}", "story": path.read_text()} for i, path in enumerate(write_corpus(tmp_path / "t").iterdir())
    ]
    write_json(tmp_path / "x.jsonl", rows)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = longspan(*arguments(tmp_path / "x.jsonl", whole, text_field="story"), log=tmp_path / "log")
    assert done.status == 0, done.stderr
    assert f'x.jsonl: JSON lines, field "story"; {len(rows)} documents, ' in done.stderr
    trained(tmp_path / "x.jsonl", parts, text_field="story", steps=7)
    records = trained(tmp_path / "x.jsonl", parts, text_field="story", steps=12)
    first = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert records[-2]["step"] == first[-2]["step"] == 12
    done = longspan(*arguments(tmp_path / "x.jsonl", parts, text_field="title"), log=tmp_path / "log")
    assert "text_field 'story' → 'title'" in done.stderr
