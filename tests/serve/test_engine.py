"""The engine: what it answers, whatever else runs; queues, deadlines, cancellation, text."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from serve_cases import MECHANISMS, answers, language_model

from longspan import Sampling, generate
from longspan.generation.generate import prefill
from longspan.generation.session import Session
from longspan.serve import Engine, EngineClosedError, QueueFullError, Request
from longspan.serve.slots import CapturedReader, PromptReader, StateLayout

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=1.3, top_k=11),
    Sampling(min_p=0.1, repetition_penalty=1.3, repetition_window=7),
    Sampling(temperature=0, repetition_penalty=1.1),
]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    return language_model(token_shift=(0, 1))


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, slots=4, chunk=7) as engine:
        yield engine


def random_request(rng, vocab_size=256):
    """A prompt, often one that begins as another does, and options."""
    start = bytes(range(rng.choice([0, 7, 14, 21, 23])))
    prompt = start + bytes(rng.randrange(vocab_size) for _ in range(rng.choice([1, 2, 6, 7, 8, 13, 29])))
    return Request(
        list(prompt),
        max_tokens=rng.randrange(1, 17),
        sampling=rng.choice(SAMPLINGS),
        seed=rng.randrange(1 << 32),
        n=rng.choice([1, 1, 1, 2]),
        logprobs=rng.choice([None, 0, 3]),
        stop=rng.choice([(), (5, 6)]),
    )


def check_invariance(model, number, seed, **options):
    """Requests answer the same bits together, some of them cancelled, as alone in an engine without a cache."""
    rng = random.Random(seed)
    requests = [random_request(rng, model.config.vocab_size) for _ in range(number)]
    cancelled = {i for i in range(number) if rng.random() < 0.2}
    with Engine(model, max_queue=2 * number, cache_bytes=100_000, **options) as engine:

        def run(i):
            generation = engine.submit(requests[i])
            if i in cancelled:
                time.sleep(rng.random() / 50)
                generation.cancel()
            return generation.result()

        with ThreadPoolExecutor(16) as pool:
            together = list(pool.map(run, range(number)))
        stats = engine.stats()
    assert stats.cache.hits > number // 20
    assert stats.cache.evictions > 0
    assert stats.waiting == stats.running == stats.reading == 0
    with Engine(model, cache_bytes=0, **options) as engine:
        for i, request in enumerate(requests):
            alone = answers(engine.submit(request).result())
            found = answers(together[i])
            for (tokens, logs, top, reason), (all_tokens, all_logs, all_top, _) in zip(found, alone, strict=True):
                if reason == "cancelled":
                    assert i in cancelled
                    size = len(tokens)
                    assert (tokens, logs, top) == (all_tokens[:size], all_logs[:size], all_top[:size])
            if i not in cancelled:
                assert found == alone


def test_batch_invariance(model):
    check_invariance(model, 100, 1, slots=5, chunk=7)


def test_batch_invariance_with_several_prompts_and_steps_at_a_time(model):
    check_invariance(model, 40, 4, slots=4, chunk=8, read_rows=3, steps_per_sync=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_batch_invariance_of_a_thousand_requests(name):
    check_invariance(language_model(MECHANISMS[name]), 1000, 2, slots=7, chunk=7, max_length=97)


@pytest.mark.parametrize("name", MECHANISMS)
def test_generates_as_generate_does(name):
    model = language_model(MECHANISMS[name], vocab_size=29, dtype=torch.float64)
    rng = random.Random(name)
    with Engine(model, slots=3, chunk=4, max_length=61, read_rows=2, steps_per_sync=2) as engine:
        for sampling in SAMPLINGS:
            prompts = [[rng.randrange(29) for _ in range(size)] for size in (1, 5, 6, 23)]
            given = [
                engine.submit(Request(prompt, 9, sampling=sampling, seed=i, stop=[3]))
                for i, prompt in enumerate(prompts)
            ]
            for i, (prompt, generation) in enumerate(zip(prompts, given, strict=True)):
                expected = generate(model, prompt, 9, sampling=sampling, seed=i, stop=[3])
                assert generation.result()[0].tokens == expected.tokens[0]


def test_log_probabilities_are_the_models(model, engine):
    prompt = list(b"a cat sat")
    (choice,) = engine.submit(Request(prompt, 7, sampling=Sampling(temperature=0.5), logprobs=3, echo=True)).result()
    assert choice.tokens[: len(prompt)] == prompt
    with torch.no_grad():
        logs = model(torch.tensor([choice.tokens]))[0].log_softmax(1)
    assert choice.log_probabilities[0] is None
    for i, (log, top) in enumerate(zip(choice.log_probabilities[1:], choice.top[1:], strict=True)):
        assert log == pytest.approx(float(logs[i, choice.tokens[i + 1]]), abs=1e-4)
        assert list(top) == logs[i].topk(3).indices.tolist()
    scored = engine.submit(Request(prompt, 0, logprobs=0, echo=True)).result()[0]
    assert scored.log_probabilities == choice.log_probabilities[: len(prompt)]
    assert (scored.tokens, scored.finish_reason) == (prompt, "length")


def test_choices_have_their_own_seeds(engine):
    several = engine.submit(Request(b"one prompt", 6, seed=11, n=7)).result()
    for i, choice in enumerate(several):
        assert answers([choice]) == answers(engine.submit(Request(b"one prompt", 6, seed=11 + i)).result())
    assert len({tuple(choice.tokens) for choice in several}) > 1


def test_stop_strings_are_not_part_of_the_text(engine):
    (free,) = engine.submit(Request(b"stop", 40, seed=5)).result()
    stop = free.text[10:13]
    deltas = list(engine.submit(Request(b"stop", 40, seed=5, stop_strings=["no such text", stop])))
    text = "".join(delta.text for delta in deltas)
    assert text == free.text[: free.text.index(stop)]
    assert deltas[-1].finish_reason == "stop"
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)


def test_text_that_may_begin_a_stop_string_is_held_back_and_given_at_the_end(engine):
    (free,) = engine.submit(Request(b"held", 23, seed=2)).result()
    end = free.text[-1]
    (choice,) = engine.submit(Request(b"held", 23, seed=2, stop_strings=[end + "\0 and more"])).result()
    assert choice.text == free.text


def test_stop_tokens_end_a_choice(engine):
    (free,) = engine.submit(Request(b"stop", 20, seed=5)).result()
    stop = free.tokens[7]
    (choice,) = engine.submit(Request(b"stop", 20, seed=5, stop=[stop])).result()
    assert choice.tokens == free.tokens[: free.tokens.index(stop)]
    assert choice.finish_reason == "stop"


def test_cancelling_frees_the_slots(engine):
    running = [engine.submit(Request(b"long", 100_000, seed=i)) for i in range(4)]
    waiting = engine.submit(Request(b"waits", 3))
    assert next(running[0]).tokens
    for generation in running:
        generation.cancel()
    assert [generation.result()[0].finish_reason for generation in running] == ["cancelled"] * 4
    assert waiting.result()[0].finish_reason == "length"
    running[0].cancel()  # It has ended: nothing happens.
    assert engine.submit(Request(b"next", 2)).result()[0].finish_reason == "length"


def test_cancelling_takes_one_step(engine):
    stream = engine.submit(Request(b"long", 100_000))
    for _ in range(7):
        next(stream)
    stream.cancel()
    before = engine.stats().steps
    stream.result()
    assert engine.stats().steps <= before + 1


def test_cancelling_while_the_prompt_is_read_or_waits(engine):
    reading = engine.submit(Request(b"x" * 200_000, 3))
    time.sleep(0.05)
    reading.cancel()
    (choice,) = reading.result()
    assert (choice.tokens, choice.finish_reason) == ([], "cancelled")


def test_timeout(engine):
    (choice,) = engine.submit(Request(b"slow", 1_000_000, timeout=0.2)).result()
    assert choice.finish_reason == "timeout"
    assert 0 < len(choice.tokens) < 1_000_000


def test_deadlines_of_requests_that_ended_are_not_stored(engine):
    for _ in range(5):
        engine.submit(Request(b"quick", 1, timeout=86_400)).result()
    assert len(engine._deadlines) <= 1


def test_a_long_prompt_does_not_stall_a_stream(model):
    with Engine(model, slots=2, chunk=8, cache_bytes=0) as engine:
        stream = engine.submit(Request(b"runs", 100_000))
        next(stream)
        before = engine.stats()
        reading = engine.submit(Request(b"y" * 401, 1))
        assert reading.result()[0].finish_reason == "length"
        after = engine.stats()
        stream.cancel()
    assert after.chunks - before.chunks == 50
    assert after.steps - before.steps >= 49  # A step follows each chunk.


def test_prompts_take_turns(model):
    with Engine(model, slots=2, chunk=8, cache_bytes=0) as engine:
        long, short = engine.submit(Request(b"y" * 100_000, 1)), engine.submit(Request(b"z" * 30, 1))
        assert short.result()[0].finish_reason == "length"
        assert engine.stats().reading == 1
        long.cancel()


def test_clients_take_turns(model):
    order: list[str] = []
    with Engine(model, slots=1) as engine:
        first = engine.submit(Request(b"first", 500))
        waiting = [(name, engine.submit(Request(b"w", 2, client=name))) for name in "aaaab"]

        def watch(name, generation):
            generation.result()
            order.append(name)

        threads = [threading.Thread(target=watch, args=pair) for pair in waiting]
        for thread in threads:
            thread.start()
        first.cancel()
        for thread in threads:
            thread.join()
    assert order.index("b") <= 2


def test_queue_limit(model):
    with Engine(model, slots=1, max_queue=2) as engine:
        running = engine.submit(Request(b"first", 100_000))
        next(running)
        waiting = [engine.submit(Request(b"w", 1)) for _ in range(2)]
        with pytest.raises(
            QueueFullError, match="2 requests are waiting, and the limit is 2: try again later"
        ) as error:
            engine.submit(Request(b"w", 1))
        assert error.value.retry_after >= 1
        running.cancel()
        for generation in waiting:
            generation.result()
        engine.submit(Request(b"w", 1, n=3)).result()


def test_closing_drains(model):
    engine = Engine(model, slots=2)
    running = [engine.submit(Request(b"d", 5, seed=i)) for i in range(7)]
    engine.close()
    assert all(len(generation.result()[0].tokens) == 5 for generation in running)
    with pytest.raises(EngineClosedError, match="takes no more requests"):
        engine.submit(Request(b"late"))
    engine = Engine(model, slots=2)
    running = [engine.submit(Request(b"d", 1_000_000, seed=i)) for i in range(3)]
    engine.close(timeout=0.1)
    assert [generation.result()[0].finish_reason for generation in running] == ["cancelled"] * 3


def test_asyncio(model, engine):
    async def consume(seed):
        return [token async for delta in engine.submit(Request(b"async", 9, seed=seed)) for token in delta.tokens]

    async def several():
        return await asyncio.gather(*(consume(seed) for seed in range(9)))

    for seed, tokens in enumerate(asyncio.run(several())):
        assert tokens == engine.submit(Request(b"async", 9, seed=seed)).result()[0].tokens


def test_prompts_are_read_together_ahead_of_free_slots(model):
    prompts = [bytes(range(i, i + 20 + i)) for i in range(8)]
    with Engine(model, slots=4, chunk=64, cache_bytes=0) as engine:
        expected = [answers(engine.submit(Request(prompt, 5, seed=3, logprobs=1)).result()) for prompt in prompts]
        streams = [engine.submit(Request(b"runs", 100_000)) for _ in range(4)]
        for stream in streams:
            next(stream)
        before = engine.stats().chunks
        with engine._wake:  # so that they come at once
            waiting = [engine.submit(Request(prompt, 5, seed=3, logprobs=1)) for prompt in prompts]
        while engine.stats().chunks < before + 8:
            time.sleep(0.01)
        assert engine.stats().waiting == 8
        for stream in streams:
            stream.cancel()
        assert [answers(stream.result()) for stream in waiting] == expected
        assert engine.stats().chunks == before + 8
        assert engine._reader._agree[8, (32, True)]


def test_warm_up_compares_every_shape_before_the_first_request(model):
    with Engine(model, slots=4, chunk=64) as engine:
        assert engine._reader._agree == {}
    shapes = [(16, True), (32, True), (48, True), (64, True), (64, False)]
    with Engine(model, slots=4, chunk=64, warm_up=True) as engine:
        assert engine._reader._agree == {(number, shape): True for shape in shapes for number in (2, 4, 8)}
        assert engine.stats().chunks == engine.stats().cache.states == 0


def test_streams_wake_an_event_loop_together(model):
    async def consume(engine, seed):
        async for _ in engine.submit(Request(b"async", 100_000, seed=seed)):
            pass

    async def due_together(engine):
        tasks = []
        for seed in range(4):
            tasks.append(asyncio.ensure_future(consume(engine, seed)))
            await asyncio.sleep(0.013)  # They begin at different times.
        found = False
        for _ in range(2000):
            running = [*engine._running.values()]
            found = len(running) == 4 and len({choice.due for choice in running}) == 1
            if found:
                break
            await asyncio.sleep(0.002)
        await asyncio.to_thread(engine.close, drain=False)
        await asyncio.gather(*tasks)
        return found

    assert asyncio.run(due_together(Engine(model, slots=4)))


def test_a_client_does_not_wait_for_prompts_that_were_read_ahead(model):
    with Engine(model, slots=4, chunk=64, cache_bytes=0) as engine:
        with engine._wake:
            many = [engine.submit(Request(bytes(range(i, 2 * i + 20)), 30, client="a")) for i in range(28)]
        next(many[0])
        engine.submit(Request(b"one", 1, client="b")).result()
        before = engine.stats().finished["length"]
        for stream in many:
            stream.cancel()
    assert before <= 13


def test_chunks_that_differ_together_are_read_alone(model):
    class Reader(PromptReader):
        calls = 0

        def _read(self, tokens, sizes, packed):
            hidden, after = super()._read(tokens, sizes, packed)
            self.calls += 1
            return hidden, after + (len(tokens) > 1)

    layout = StateLayout(model.new_state(1))
    reader = Reader(model, layout, 8, 64)
    chunks = [torch.arange(size) for size in (3, 16)]
    for calls in (3, 5):
        _, after = reader.read(chunks, [layout.empty.clone() for _ in chunks])
        for chunk, state in zip(chunks, after, strict=True):
            assert torch.equal(state, PromptReader(model, layout, 8, 64).read([chunk], [layout.empty.clone()])[1][0])
        assert reader.calls == calls
    assert [reader.rows(reader.shape(size)) for size in (1, 16, 17, 63, 64, 65)] == [8, 8, 8, 8, 8, 4]


class Call:
    """A call that is not captured."""

    def __init__(self, function, inputs):
        self.inputs, self._function = inputs, function

    def __call__(self):
        return self._function(*self.inputs)


@pytest.mark.parametrize(("alike", "numbers"), [(8, [2, 8]), (4, [2, 4]), (2, [4])])
def test_more_chunks_are_read_together_where_many_wait(model, monkeypatch, alike, numbers):
    class Reader(CapturedReader):
        def _read(self, tokens, sizes, packed):
            rows.append(len(tokens))
            packed += (tokens * (torch.arange(tokens.shape[1]) < sizes[:, None])).sum(1, keepdim=True)
            packed += len(tokens) > alike  # other bits
            return tokens[..., None].float(), packed

    monkeypatch.setattr("longspan.serve.slots.CapturedCall", Call)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    rows, layout = [], StateLayout(model.new_state(1))
    reader = Reader(model, layout, 2, 128, 64)
    assert [reader.rows(reader.shape(size)) for size in (128, 65, 64, 33, 1)] == [numbers[-1]] * 2 + [4, 4, 8]
    assert reader.most_tokens == 128 * numbers[-1]
    whole, half = reader.most_tokens, reader.most_tokens // 2
    assert [reader.cost(n, reader.shape(101)) for n in (1, 2, 3)] == [half if len(numbers) > 1 else whole] * 2 + [whole]
    assert reader.cost(4, reader.shape(63)) == half
    for number in (1, 2, 3):
        rows.clear()
        chunks = [torch.arange(i, i + 101) for i in range(number)]
        hidden, after = reader.read(chunks, [layout.empty.clone() for _ in chunks])
        assert rows == [min(n for n in numbers if n >= number)]
        for i, chunk in enumerate(chunks):
            assert torch.equal(hidden[i, :101, 0].long(), chunk)
            assert torch.equal(after[i], layout.empty + chunk.sum() + (rows[0] > alike))
    assert CapturedReader(model, layout, 2, 128, 64, grow=False).rows(reader.shape(128)) == 2


def test_first_and_last_tokens_wake_an_event_loop_at_once(model, monkeypatch):
    monkeypatch.setattr("longspan.serve.engine._PACE_SECONDS", (1e6, 1e6))

    async def follow(engine):
        stream = engine.submit(Request(b"abc", max_tokens=67))
        return [[len(delta.tokens) for delta in batch] async for batch in stream.batches()]

    with Engine(model, slots=2) as engine:
        first, *others = asyncio.run(asyncio.wait_for(follow(engine), 60))
    assert first[0] == 1
    assert sum(map(sum, [first, *others])) == 67
    assert len(others) <= 2


@pytest.mark.parametrize("kind", ["stop", "timeout", "logprobs", "stop_strings"])
def test_an_event_loop_gets_several_tokens_at_a_time(model, monkeypatch, kind):
    monkeypatch.setattr("longspan.serve.engine._PACE_SECONDS", (1e6, 1e6))

    async def follow(stream):
        return [delta async for delta in stream]

    with Engine(model, slots=2) as engine:
        request = Request(b"abc", max_tokens=67, seed=5)
        (known,) = engine.submit(request).result()
        last = next(i for i in range(11, 67) if known.tokens[i] not in known.tokens[:i])
        changes = {
            "stop": {"stop": [known.tokens[last]]},
            "timeout": {"timeout": 0.3, "max_tokens": 10**6},
            "logprobs": {"logprobs": 2},
            "stop_strings": {"stop_strings": [known.text[11:13]]},
        }
        stream, before = engine.submit(replace(request, **changes[kind])), engine.stats().steps
        deltas = asyncio.run(asyncio.wait_for(follow(stream), 60))
        steps = engine.stats().steps - before
    tokens, text = [token for delta in deltas for token in delta.tokens], "".join(delta.text for delta in deltas)
    assert stream.completion_tokens == len(tokens)
    if kind == "stop":
        assert (tokens, len(deltas)) == (known.tokens[:last], 2)  # the first token and the others
        assert steps == last + 1  # It ended at that token, not at the next event.
    elif kind == "timeout":
        assert tokens[:67] == known.tokens[: len(tokens)]
        assert (len(deltas), deltas[-1].finish_reason) == (3, "timeout")
    elif kind == "logprobs":
        assert (tokens, len(deltas)) == (known.tokens, 67)
    else:
        assert text == known.text[: known.text.index(known.text[11:13])]
        assert steps < 67


def test_failing_steps_end_all_streams(model, monkeypatch):
    engine = Engine(model, slots=2)
    monkeypatch.setattr(engine._loop, "step", lambda: 1 / 0)
    with pytest.raises(EngineClosedError, match="the engine failed: division by zero"):
        engine.submit(Request(b"x")).result()
    with pytest.raises(EngineClosedError):
        engine.submit(Request(b"x"))


def test_usage(engine):
    prompt = bytes(range(100, 130))
    engine.submit(Request(prompt, 1)).result()
    generation = engine.submit(Request(prompt, 5, n=2))
    generation.result()
    assert (generation.prompt_tokens, generation.cached_tokens, generation.completion_tokens) == (30, 29, 10)


def test_wrong_requests(engine):
    with pytest.raises(ValueError, match="at least one token"):
        Request(b"")
    with pytest.raises(ValueError, match="logprobs must be at most 20, got 21"):
        Request(b"x", logprobs=21)
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds, got 0"):
        Request(b"x", timeout=0)
    with pytest.raises(TypeError, match="prompt must be tokens, got text"):
        Request("text")
    with pytest.raises(ValueError, match="token 256, and this model has the tokens 0 to 255"):
        engine.submit(Request([256]))
    with pytest.raises(ValueError, match="repetition_window must be at most 256 here, got 257"):
        engine.submit(Request(b"x", sampling=Sampling(repetition_window=257)))


def test_lengths_are_limited():
    model = language_model(MECHANISMS["linformer"], positions="learned", max_length=61)
    with Engine(model, slots=2, chunk=7) as engine:
        assert engine.max_length == 61
        with pytest.raises(ValueError, match="50 tokens of prompt and 12 to generate are more than the 61 that fit"):
            engine.submit(Request(bytes(50), 12))
        assert len(engine.submit(Request(bytes(50), 11)).result()[0].tokens) == 11
    with Engine(model, slots=2, chunk=8, steps_per_sync=5) as engine:  # No step goes beyond the limit.
        short, long = engine.submit(Request(bytes(50), 11)), engine.submit(Request(bytes(3), 58))
        assert [len(generation.result()[0].tokens) for generation in (short, long)] == [11, 58]
    with pytest.raises(ValueError, match="max_length must be at most 61, the model's limit, got 62"):
        Engine(model, max_length=62)


def test_sessions_continue(model, engine, tmp_path):
    first = engine.submit(Request(b"a story that", 9, seed=1, keep_state=True)).result()[0]
    first.session.save(tmp_path / "state")
    session = Session.load(tmp_path / "state", model)
    read = prefill(model, b"a story that" + bytes(first.tokens))
    torch.testing.assert_close(session.logits, read.logits, atol=1e-4, rtol=1e-4)
    greedy = Sampling(temperature=0)
    for more in (b"", b"!", b" goes on and on"):
        given = engine.submit(Request(more, 8, sampling=greedy, previous_state=session)).result()[0]
        again = session.extend(model, more) if more else session
        assert given.tokens == generate(model, again, 8, sampling=greedy).tokens[0]
    with pytest.raises(ValueError, match="another model, whose weights differ"):
        Session.load(tmp_path / "state", language_model(token_shift=(0, 1)))
    with pytest.raises(ValueError, match="another model, whose weights differ"), Engine(language_model()) as other:
        other.submit(Request(b"x", previous_state=session))


@pytest.mark.parametrize("name", MECHANISMS)
def test_sessions_of_every_mechanism(name):
    model = language_model(MECHANISMS[name], vocab_size=29, dtype=torch.float64)
    greedy = Sampling(temperature=0)
    with Engine(model, slots=3, chunk=5, max_length=61, steps_per_sync=3) as engine:
        first = engine.submit(Request([1, 2, 3, 4, 5, 6, 7], 5, sampling=greedy, keep_state=True)).result()[0]
        for more in ([], [3], [1, 4, 1, 5, 9, 2]):
            given = Request(more, 6, sampling=greedy, previous_state=first.session)
            expected = generate(model, [1, 2, 3, 4, 5, 6, 7, *first.tokens, *more], 6, sampling=greedy)
            assert engine.submit(given).result()[0].tokens == expected.tokens[0]


@pytest.mark.parametrize("name", ["slots", "chunk", "max_length", "threads", "read_rows", "steps_per_sync"])
def test_counts_of_an_engine_are_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*, got 0"):
        Engine(language_model(), **{name: 0})


@pytest.mark.parametrize(("given", "small", "steps", "reads"), [
    (None, False, 2, 3), (None, True, 1, 1), (1, False, 1, 1), (3, False, 3, 3), (2, True, 2, 2),
])  # fmt: skip
def test_threads(model, monkeypatch, given, small, steps, reads):
    """Steps leave a core to the HTTP server, unless a number is given; small models have one thread."""
    monkeypatch.setattr("longspan.serve.engine.is_small", lambda *_: small)
    found = {}

    def noted(name, function):
        def call(*arguments):
            found.setdefault(name, set()).add(torch.get_num_threads())
            return function(*arguments)

        return call

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with Engine(model, slots=2, threads=given) as engine:
            monkeypatch.setattr(engine._loop, "step", noted("steps", engine._loop.step))
            monkeypatch.setattr(engine._reader, "read", noted("reads", engine._reader.read))
            engine.submit(Request(b"Once upon a time", 5)).result()
        assert found == {"steps": {steps}, "reads": {reads}}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
