"""Data folders, checkpoints, runs and reports that another person made: refused or read, within limits."""

from __future__ import annotations

import bz2
import errno
import gzip
import json
import lzma
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longspan import AttentionConfig, LanguageModel, ModelConfig, load, save
from longspan.models.checkpoint import CONFIG, TENSORS, digests
from longspan.train.data.readers import DocumentChunk, DocumentReader, ReadOptions, find_source
from longspan.train.evaluation import write_evaluation
from longspan.train.plots import plot_losses
from longspan.train.report import read_run, write_report
from longspan.utils import printable, read_json, write_atomically

FIXTURES = Path(__file__).parents[1] / "guards" / "fixtures"
SCRIPT = "<script>document.title='ran'</script>"


def read_documents(path: Path, **options: Any) -> Iterator[DocumentChunk]:
    """The documents of a file; an error if it is skipped."""
    reader = DocumentReader(ReadOptions(**options))
    yield from reader.read(path, None)
    if reader.skipped and not reader.kinds:
        raise ValueError(reader.skipped[0])


def read(path: Path, **options: Any) -> list[bytes]:
    """The documents of a file."""
    documents, parts = [], b""
    for chunk in read_documents(path, **options):
        parts += bytes(chunk.content)
        if chunk.last:
            documents.append(parts)
            parts = b""
    return documents


def test_links_that_lead_in_circles_are_followed_once(tmp_path: Path) -> None:
    (tmp_path / "data" / "real").mkdir(parents=True)
    (tmp_path / "data" / "a.txt").write_text("a")
    (tmp_path / "data" / "real" / "b.txt").write_text("b")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "c.txt").write_text("c")
    for name, target in {
        "l1": ".", "l2": ".", "aa": "real", "up": "..", "out": "../outside", "self": "self", "gone": "nowhere"
    }.items():  # fmt: skip
        os.symlink(target, tmp_path / "data" / name)
    start = time.perf_counter()
    files = find_source(str(tmp_path / "data"), ReadOptions()).files
    assert time.perf_counter() - start < 5
    assert [str(path.relative_to(tmp_path / "data")) for path in files] == ["a.txt", "out/c.txt", "real/b.txt"]


def test_pipes_devices_and_sockets_are_not_data(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "socket.txt"))
        with pytest.raises(ValueError, match="contains no files"):
            find_source(str(tmp_path), ReadOptions())
        for path in (tmp_path / "pipe.txt", tmp_path / "socket.txt", "/dev/zero"):
            with pytest.raises(ValueError, match="device, pipe or socket, not a file"):
                find_source(str(path), ReadOptions())
    for text in ("1e999=x", "9" * 400 + "=x"):
        with pytest.raises((ValueError, FileNotFoundError), match="--data"):
            find_source(text, ReadOptions())
    with pytest.raises(ValueError, match="not a path"):
        find_source("a\0b", ReadOptions())


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst", ".bz2"])
def test_a_decompression_bomb_is_refused_early(suffix: str, tmp_path: Path) -> None:
    def compress(content: bytes) -> bytes:
        if suffix == ".zst":
            return pytest.importorskip("zstandard").compress(content)
        return {".gz": gzip, ".xz": lzma, ".bz2": bz2}[suffix].compress(content)  # type: ignore[attr-defined]

    path = tmp_path / f"bomb.txt{suffix}"
    path.write_bytes(compress(bytes(17_000_003)))
    chunks = []
    with pytest.raises(ValueError, match=r"bomb.txt\S+ decompresses to more than 250 times its size"):
        chunks.extend(read_documents(path, format="bytes"))
    assert len(chunks) < 17
    text = os.urandom(70_000) + bytes(3_000_000)
    path.write_bytes(compress(text))
    assert read(path, format="bytes") == [text]
    path.write_bytes(compress(text)[:-9])
    with pytest.raises(ValueError, match=r"bomb.txt\S+ cannot be read"):
        read(path, format="bytes")
    path.write_bytes(b"\0nothing of the kind")
    with pytest.raises(ValueError, match=r"bomb.txt\S+ cannot be read"):
        read(path)
    path.write_bytes(compress(b"one ") + compress(b"two"))
    assert read(path) == [b"one two"]


def test_csv_fields_have_any_length(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text("\ufefftext,label\n" + "x" * 200_003 + ",1\nshort,2\n", encoding="utf-8")
    assert [len(x) for x in read(path, labeled=True)] == [200_003, 5]
    path.write_bytes(b"text,label\n\xff\xfe,1\n")
    with pytest.raises(ValueError, match=r"long.csv is not UTF-8 text"):
        read(path, labeled=True)


def test_long_lines_of_fasta_are_read_in_blocks(tmp_path: Path) -> None:
    path = tmp_path / "x.fa"
    sequence = b"ACGT" * 300_001
    path.write_bytes(b">" + b"h" * 1_500_007 + b"\n" + sequence + b"\n;" + b"c" * 1_100_003 + b"\nGG\n>b\nT")
    assert read(path) == [sequence + b"GG", b"T"]


def test_damaged_arrays_and_images_are_refused_with_their_name(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    array = tmp_path / "x.npy"
    for content in (b"", b"\x93NUMPY\x01\x00", b"\x93NUMPY\x01\x00\x10\x00{'descr': [[[[[[", bytes(100)):
        array.write_bytes(content)
        with pytest.raises(ValueError, match=r"x\.npy is not a \.npy file"):
            read(array)
    picture = tmp_path / "x.png"
    image.new("L", (64, 64)).save(picture)
    picture.write_bytes(picture.read_bytes()[:60])
    with pytest.raises(ValueError, match=r"x\.png is a damaged image"):
        read(picture)
    image.new("1", (20_011, 10_007)).save(picture)
    with pytest.raises(ValueError, match=r"x\.png is too large an image"):
        read(picture)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    attention = AttentionConfig(num_heads=2, mechanism="linear")
    save(LanguageModel(ModelConfig(dim=10, depth=2, causal=True, vocab_size=11, attention=attention)), tmp_path / "m")
    return tmp_path / "m"


def change(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    config.update({name: value for name, value in fields.items() if name in config})
    model = config["arguments"]["config"]
    model.update({name: value for name, value in fields.items() if name in model})
    (folder / CONFIG).write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": 20_000}, r"embedding.weight \(11, 10\) for \(11, 20000\)"),
        ({"dim": 2**62}, "cannot build the LanguageModel"),
        ({"vocab_size": 10**12}, r"\(11, 10\) for \(1000000000000, 10\)"),
        ({"depth": 10**9}, "1000000000 layers"),
        ({"sha256": {"../model.safetensors": "0"}}, r"'../model.safetensors', which is not a file beside it"),
        ({"sha256": {"/etc/hostname": "0"}}, "not a file beside it"),
        ({"sha256": {TENSORS: 3}}, "must be a text, got 3"),
        ({"ties": {"x": "y"}}, "unknown: x"),
        ({"attention": 3}, "cannot build the LanguageModel"),
    ],
)
def test_a_hostile_configuration_is_refused_before_it_takes_memory(
    checkpoint: Path, fields: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(checkpoint, **fields)

    def never(self: LanguageModel, *args: Any, **kwargs: Any) -> None:
        if torch.empty(0).device.type != "meta":
            raise AssertionError("built for real")
        build(self, *args, **kwargs)

    build = LanguageModel.__init__
    monkeypatch.setattr(LanguageModel, "__init__", never)
    with pytest.raises(ValueError, match=message):
        load(checkpoint)


def test_a_checkpoint_s_files_are_files_and_its_integers_integers(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / TENSORS)
    save_file({name: x.long() for name, x in tensors.items()}, checkpoint / TENSORS)
    change(checkpoint, sha256=digests(checkpoint))
    with pytest.raises(ValueError, match=r"of another kind: embedding.weight torch.int64 for torch.float32"):
        load(checkpoint)
    for name, error in ((TENSORS, FileNotFoundError), (CONFIG, ValueError)):
        (checkpoint / name).unlink()
        os.mkfifo(checkpoint / name)
        with pytest.raises(error, match=name):
            load(checkpoint)


def test_json_within_limits(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for content, message in (
        (b"[" * 200_000, "nested too deeply"),
        (b"\xff", "cannot be read as JSON"),
        (b"{", "cannot be read as JSON"),
        (b" " * (1 << 26) + b"1", "too large"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"x\.json .*{message}"):
            read_json(path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's logs, without a model."""
    folder = tmp_path / "run"
    folder.mkdir()
    data = {"unigram_bits_per_byte": 4.5, "sha256": "0" * 64}
    about = {"settings": {}, "data": data, "parameters": 7, "device": "cpu", "precision": "fp32"}
    (folder / "run.json").write_text(json.dumps(about))
    record = {"step": 1, "tokens": 64, "seconds": 0.5, "loss": 3.5, "eval_loss": 3.0, "memory": 1 << 20}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (folder / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": "a", "text": "b"}) + "\n")
    return folder


def test_no_text_of_a_run_becomes_markup(run: Path, tmp_path: Path) -> None:
    sample = dict.fromkeys(("prompt", "text"), SCRIPT)
    lines = [{"step": 1, **sample}, {"step": SCRIPT, **sample}, {"step": {"__html__": SCRIPT}}, {}, [SCRIPT], SCRIPT]
    (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    about = json.loads((run / "run.json").read_text())
    about["settings"] = {SCRIPT: SCRIPT}
    about["data"]["sha256"] = about["device"] = about["precision"] = about["parameters"] = SCRIPT
    (run / "run.json").write_text(json.dumps(about))
    records = [{"step": 1, "tokens": 64, "seconds": 1, "loss": 3.5}, {"step": SCRIPT, "tokens": SCRIPT, "loss": SCRIPT}]
    records.append({"step": 2, "tokens": 128, "seconds": 2, "loss": SCRIPT, "eval_loss": [1], "memory": None})
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + "nonsense\n")
    other = tmp_path / SCRIPT.replace("/", "")
    shutil.copytree(run, other)
    page, *_ = write_report([read_run(run), read_run(other)], tmp_path / "report.html")
    text = page.read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "Content-Security-Policy\" content=\"default-src 'none'; img-src data:;" in text


def test_any_name_of_a_run_can_be_drawn_and_shown(run: Path, tmp_path: Path) -> None:
    names = (r"$\frac{$", "$x$", "_hidden", "a\x1b[31mb", "\udcff", "line\nend", "{x}")
    for name in names:
        shutil.copytree(run, tmp_path / name)
    page, *images = write_report([read_run(tmp_path / name) for name in names], tmp_path / "report.html")
    assert "\x1b" not in page.read_text()
    for image in images:
        assert image.read_bytes()[:4] == b"\x89PNG"


def test_labels_are_text_and_in_the_legend() -> None:
    records = [{"tokens": 1, "loss": 2.0, "eval_loss": 2.0}, {"tokens": 3, "loss": 1.0, "eval_loss": 1.0}]
    drawn = {name: plot_losses({name: records}, "tokens", {}) for name in ("$a$", "a", "_a", r"\$a\$")}
    assert len(set(drawn.values())) == len(drawn)


def test_damaged_runs_are_refused_in_words(run: Path) -> None:
    for content, message in (("[]", "has no data and settings"), ("{", "cannot be read as JSON")):
        (run / "run.json").write_text(content)
        with pytest.raises(ValueError, match=rf"run\.json .*{message}"):
            read_run(run)
    shutil.rmtree(run)
    run.mkdir()
    (run / "run.json").write_text('{"data": {}, "settings": {}}')
    os.mkfifo(run / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"metrics\.jsonl is not a regular file"):
        read_run(run)


def no_space(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_report_is_written_whole_or_not_at_all(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "report.html"
    write_report([read_run(run)], out)
    before = out.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", no_space)
        with pytest.raises(OSError, match="No space left"):
            write_report([read_run(run)], out)
    assert out.read_bytes() == before
    result = {"model": "m", "positions": [{"from": 0, "to": 0, "loss": 1.0, "bits_per_byte": 1.0}]}
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", no_space)
        with pytest.raises(OSError, match="No space left"):
            write_evaluation(result, tmp_path / "scores.json")
    assert sorted(os.listdir(tmp_path)) == ["report-seconds.png", "report-tokens.png", "report.html", "run"]


def test_devices_are_written_to_and_links_kept(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    write_atomically(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"
    write_atomically(Path(os.devnull), "text")
    assert Path(os.devnull).is_char_device()


def test_printable_text_has_no_control_characters() -> None:
    text = "é\tß\n🙂\x1b[31m\r\x07\x9b\x7f\u202e\ud800"
    assert printable(text) == "é\tß\n🙂\\x1b[31m\\r\\x07\\x9b\\x7f\\u202e\\ud800"
