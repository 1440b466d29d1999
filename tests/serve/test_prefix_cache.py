"""The prefix cache: bits, bytes, eviction, files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from serve_cases import MECHANISMS, answers, language_model

from longspan.serve import Engine, Request
from longspan.serve.disk_store import DiskStore
from longspan.serve.prefix_cache import PrefixCache
from longspan.serve.slots import StateLayout
from longspan.serve.state_codec import StateCodec

PROMPT = [(7 * i * i + i) % 29 for i in range(23)]
KINDS = ["exact", "bfloat16", "int8"]
STORES_TOKENS = ("softmax", "hybrid")


def ask(engine, prompt):
    generation = engine.submit(Request(prompt, 5, seed=3, logprobs=2))
    return answers(generation.result()), generation.cached_tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_hits_give_the_same_bits(name, kind, tmp_path):
    model = language_model(MECHANISMS[name], vocab_size=29)
    options = {"slots": 2, "chunk": 5, "max_length": 61, "state_dtype": kind}
    other = [*PROMPT[:13], 3, *PROMPT[13:]]
    with Engine(model, cache_bytes=0, **options) as engine:
        expected = [ask(engine, prompt) for prompt in (PROMPT, other)]
    assert [found for _, found in expected] == [0, 0]
    with Engine(model, cache_dir=tmp_path, **options) as engine:
        assert ask(engine, PROMPT) == (expected[0][0], 0)
        # Where states have a constant size and are exact, the end of a prompt is kept too.
        ends = (22, 23) if kind == "exact" and name not in STORES_TOKENS else (20, 20)
        assert ask(engine, PROMPT) == (expected[0][0], ends[0])
        assert ask(engine, other) == (expected[1][0], 10)
        assert ask(engine, other) == (expected[1][0], ends[1])
        stats = engine.stats().cache
    assert (stats.queries, stats.hits, stats.hit_tokens, stats.disk_hits) == (4, 3, 10 + sum(ends), 0)
    with Engine(model, cache_dir=tmp_path, **options) as engine:
        assert ask(engine, other) == (expected[1][0], ends[1])
        assert ask(engine, PROMPT) == (expected[0][0], ends[0])
        assert engine.stats().cache.disk_hits > 0


def test_states_of_another_model_are_not_hit(tmp_path):
    for _ in range(2):
        with Engine(language_model(), slots=2, chunk=5, cache_dir=tmp_path) as engine:
            assert ask(engine, PROMPT)[1] == 0


def test_rounded_states_take_fewer_bytes():
    model, bytes_of = language_model("linear"), {}
    for kind in KINDS:
        with Engine(model, slots=1, chunk=5, state_dtype=kind) as engine:
            ask(engine, PROMPT)
            bytes_of[kind] = engine.stats().cache.bytes
    assert bytes_of["bfloat16"] < 0.6 * bytes_of["exact"]
    assert bytes_of["int8"] < 0.5 * bytes_of["exact"]
    with pytest.raises(ValueError, match="unknown state dtype 'int4'; there is exact, bfloat16, int8"):
        StateCodec("int4")


def states_of(model, cache, prompt):
    """Read a prompt as the engine does."""
    keys, own = cache.keys(torch.tensor(prompt)), []
    state = model.new_state(1, max_length=1000)
    with torch.no_grad():
        for depth in range(1, len(keys) + 1):
            piece = torch.tensor([prompt[(depth - 1) * 5 : depth * 5]])
            state = model.extend_hidden(piece, state)[1]
            cache.insert(keys, depth, cache._layout.pack(state)[0], own)
    return keys


def test_keys_and_values_are_stored_once():
    model = language_model("softmax")
    cache = PrefixCache(StateLayout(model.new_state(1, max_length=1000)), 5, 1 << 30)
    states_of(model, cache, [1, 2, 3, 4, 5] * 20)
    # 100 tokens, 2 layers, keys and values of 32 numbers; lengths beside them.
    tokens = 100 * 2 * 2 * 32 * 4
    assert tokens < cache.stats.bytes < 1.5 * tokens
    before = cache.stats.bytes
    states_of(model, cache, [1, 2, 3, 4, 5] * 10 + [7] * 50)  # half of it is there
    assert cache.stats.bytes - before == pytest.approx(before / 2, rel=0.01)


def test_eviction_drops_the_least_recently_used():
    model = language_model("linear")
    size = StateLayout(model.new_state(1)).bytes
    cache = PrefixCache(StateLayout(model.new_state(1)), 5, 8 * size)
    first = states_of(model, cache, [1] * 10)
    second = states_of(model, cache, [2] * 10)
    assert cache.find(first)[0] == 2  # now used more recently than the second prompt
    for token in range(3, 9):
        states_of(model, cache, [token] * 5)
    assert cache.find(first)[0] == 2
    assert not cache.has(second[0])
    assert cache.stats.evictions > 0
    assert cache.stats.bytes <= 8 * size


def test_a_long_prompt_does_not_evict_the_others():
    model = language_model("linear")
    size = StateLayout(model.new_state(1)).bytes
    cache = PrefixCache(StateLayout(model.new_state(1)), 5, 40 * size)
    short = states_of(model, cache, [1] * 10)
    long = states_of(model, cache, [2, 3] * 500)
    assert cache.find(short)[0] == 2
    assert cache.find(long)[0] == 200  # its end is kept, and boundaries before it at growing distances
    depths = [depth for depth in range(1, 201) if cache.has(long[depth - 1])]
    assert 3 < len(depths) <= 11


def test_budget_below_one_state():
    model = language_model("softmax")
    cache = PrefixCache(StateLayout(model.new_state(1, max_length=1000)), 5, 1)
    keys = states_of(model, cache, [1] * 20)
    assert cache.find(keys) == (0, None)
    assert (cache.stats.bytes, cache.stats.states) == (0, 0)


def test_damaged_files_are_ignored(tmp_path, caplog):
    model = language_model(vocab_size=29)
    with Engine(model, slots=2, chunk=5, cache_dir=tmp_path) as engine:
        expected, _ = ask(engine, PROMPT)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    for damaged in (b"", content[:-7], content[:-1] + bytes([content[-1] ^ 1]), os.urandom(100)):
        path.write_bytes(damaged)
        with Engine(model, slots=2, chunk=5, cache_dir=tmp_path) as engine:
            assert ask(engine, PROMPT) == (expected, 0)
        assert "is removed from the prefix cache" in caplog.text
        caplog.clear()
    other = tmp_path / ("0" * 64 + ".safetensors")
    path.rename(other)  # an intact file under another name
    store = DiskStore(tmp_path, 1 << 20)
    assert store.read(bytes(32), torch.device("cpu")) is None
    assert not other.exists()
    store.close()


def test_disk_budget(tmp_path):
    store = DiskStore(tmp_path, 3000)
    for i in range(7):
        store.write(bytes([i]) * 32, {"x": torch.full((200,), float(i))})
    store.close()
    assert store.size() == sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3000
    again = DiskStore(tmp_path, 3000)
    assert again.size() == store.size() > 0
    assert torch.equal(again.read(bytes([6]) * 32, torch.device("cpu"))["x"], torch.full((200,), 6.0))
    again.close()


def test_the_oldest_file_is_looked_up_under_the_lock(tmp_path):
    """A reader moves files to the end meanwhile, which an unlocked iteration does not survive."""
    store = DiskStore(tmp_path, 0)

    class Sizes(OrderedDict):
        def __iter__(self):
            assert store._lock.locked()
            return super().__iter__()

    store._sizes = Sizes()
    store.write(bytes(32), {"x": torch.zeros(5)})
    store.close()
    assert store.size() == 0


def test_a_full_disk_ends_writing(tmp_path, monkeypatch, caplog):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("longspan.serve.disk_store.write_atomically", full)
    with Engine(language_model(), slots=2, chunk=5, cache_dir=tmp_path) as engine:
        ask(engine, PROMPT)
        assert ask(engine, PROMPT)[1] == 22
    assert "the prefix cache is not written to disk any more" in caplog.text


KILLED = """
import sys, torch
from pathlib import Path
from longspan.serve.disk_store import DiskStore
store = DiskStore(Path(sys.argv[1]), 1 << 40)
print("started", flush=True)
i = 0
while True:
    store.write(i.to_bytes(32, "big"), {"x": torch.full((100_000,), float(i))})
    i += 1
    while store._queue.qsize() > 3:
        pass
"""


def test_killed_while_writing(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    process.stdout.readline()
    while sum(1 for path in tmp_path.iterdir() if path.suffix == ".safetensors") < 5:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    left = tmp_path / f".{'0' * 64}.safetensors.{process.pid}.partial"
    left.write_bytes(b"half")
    store = DiskStore(tmp_path, 1 << 40)
    assert not left.exists()
    for path in Path(tmp_path).glob("*.safetensors"):
        key = bytes.fromhex(path.stem)
        assert float(store.read(key, torch.device("cpu"))["x"][0]) == int.from_bytes(key, "big")
    store.close()
