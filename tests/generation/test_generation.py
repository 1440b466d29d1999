"""Generation equals the parallel forward pass, one token at a time."""

import copy
import itertools

import numpy as np
import pytest
import safetensors.torch
import torch

from longspan.generation.generate import Generated, beam_search, generate, prefill, stream
from longspan.generation.sampling import Sampling
from longspan.generation.session import Session
from longspan.models.config import AttentionConfig, FeedForwardConfig, ModelConfig
from longspan.models.transformer import EncoderDecoder, LanguageModel

MECHANISMS = {
    "softmax": "softmax",
    "local": {"mechanism": "local", "window": 5},
    "linear": {"mechanism": "linear", "feature_map": "softmax"},
    "performer": "performer",
    "linformer": {"mechanism": "linformer", "rank": 7, "max_length": 64},
    "gated": ("decay", {"mechanism": "delta", "gate": "channel"}),
    "mixture": {"mechanism": "mixture", "memory": "delta", "window": 5},
    "hybrid": (
        {
            "mechanism": "split",
            "parts": [
                {"mechanism": "local", "num_heads": 2, "window": 5},
                {"mechanism": "linear", "num_heads": 2},
            ],
        },
        {"mechanism": "linear", "blind_spot": 3},
    ),
}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [3, 1, 3, 1, 3]]
GREEDY = Sampling(temperature=0)


def language_model(mechanism="linear", vocab_size=29, **fields):
    fields = {"token_shift": (0, 1), **fields}
    attention = AttentionConfig(num_heads=4, mechanism=mechanism, rotary="halves")
    config = ModelConfig(
        dim=32,
        depth=2,
        causal=True,
        vocab_size=vocab_size,
        attention=attention,
        feed_forward=FeedForwardConfig(mult=2),
        **fields,
    )
    model = LanguageModel(config).double().eval()
    with torch.no_grad():
        # Logits that differ enough for a choice to matter.
        model.to_logits.weight.mul_(4)
    return model


@pytest.fixture
def model():
    return language_model()


def recomputed(model, prompt, number, choose=lambda logits: int(logits.argmax())):
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(number):
            tokens.append(choose(model(torch.tensor([tokens]))[0, -1]))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", MECHANISMS)
def test_greedy_tokens_equal_recomputing_from_scratch(name):
    model = language_model(MECHANISMS[name])
    for prompt in PROMPTS:
        assert generate(model, prompt, 12, sampling=GREEDY).tokens == [recomputed(model, prompt, 12)]


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_batch_of_different_lengths_equals_one_by_one(name):
    model = language_model(MECHANISMS[name])
    together = generate(model, PROMPTS, 12, seed=5)
    apart = [generate(model, prompt, 12, seed=5 + i) for i, prompt in enumerate(PROMPTS)]
    assert together.tokens == [one.tokens[0] for one in apart]
    assert len({tuple(row) for row in together.tokens}) == 3


def test_a_seed_determines_the_tokens(model):
    first = generate(model, PROMPTS[0], 20, seed=3).tokens
    assert generate(model, PROMPTS[0], 20, seed=3).tokens == first
    assert generate(model, PROMPTS[0], 20, seed=4).tokens != first
    assert generate(model, [PROMPTS[0]] * 2, 20, seed=[3, 3]).tokens == first * 2


def test_log_probabilities_are_those_of_forward(model):
    found = generate(model, PROMPTS[0], 9, seed=2)
    tokens = torch.tensor([PROMPTS[0] + found.tokens[0]])
    logs = model(tokens).log_softmax(-1)[0, len(PROMPTS[0]) - 1 : -1]
    expected = logs.gather(1, tokens[0, len(PROMPTS[0]) :, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found.log_probabilities[0], dtype=torch.float64), expected)


def test_prefill_does_not_depend_on_the_chunk_size(model):
    whole = prefill(model, PROMPTS, chunk=100)
    for chunk in (1, 2, 3):
        pieces = prefill(model, PROMPTS, chunk=chunk)
        torch.testing.assert_close(pieces.logits, whole.logits)
        for name, x in pieces.state.tensors().items():
            torch.testing.assert_close(x, whole.state.tensors()[name])
    assert whole.state.length.tolist() == [3, 7, 5]


def test_a_prompt_is_read_once_and_continued_many_times(model):
    session = prefill(model, PROMPTS[1], max_tokens=10)
    kept = {name: x.clone() for name, x in session.state.tensors().items()}
    forked = generate(model, session.select([0, 0, 0]), 10, seed=8)
    assert forked.tokens == [generate(model, PROMPTS[1], 10, seed=8 + i).tokens[0] for i in range(3)]
    generate(model, session, 10)
    assert all(torch.equal(x, kept[name]) for name, x in session.state.tensors().items())


def test_a_sequence_ends_at_its_stop_token_and_the_others_continue(model):
    free = generate(model, PROMPTS, 15, seed=1)
    stop = free.tokens[0][4]
    found = generate(model, PROMPTS, 15, seed=1, stop=[stop])
    for row, without in zip(found.tokens, free.tokens, strict=True):
        assert row == list(itertools.takewhile(lambda token: token != stop, without))
    assert len({len(row) for row in found.tokens}) > 1


def test_stop_strings_end_a_sequence_of_bytes(model):
    free = generate(model, PROMPTS[0], 15, seed=1).tokens[0]
    ending = bytes(free[3:6])
    found = generate(model, PROMPTS[0], 15, seed=1, stop_strings=[ending])
    assert found.tokens[0] == free[: bytes(free).index(ending) + 3]
    assert len(found.log_probabilities[0]) == len(found.tokens[0])


def test_stream_yields_the_tokens_of_generate_and_restores_training_mode(model):
    model.train()
    steps = stream(model, PROMPTS[0], None, seed=6)
    first = [next(steps)[0][0] for _ in range(7)]
    assert model.training
    assert first == generate(model.eval(), PROMPTS[0], 7, seed=6).tokens[0]


def test_a_saved_session_continues(model, tmp_path):
    whole = generate(model, PROMPTS, 12, sampling=GREEDY).tokens
    steps = stream(model, PROMPTS, 5, sampling=GREEDY)
    first = [tokens for tokens, _ in steps]
    steps.session.save(tmp_path / "session.safetensors")
    resumed = Session.load(tmp_path / "session.safetensors", model)
    rest = generate(model, resumed, 7, sampling=GREEDY).tokens
    assert [[step[row] for step in first] + rest[row] for row in range(3)] == whole
    assert [path.name for path in tmp_path.iterdir()] == ["session.safetensors"]


def test_an_extended_session_equals_that_of_the_full_prompt(model):
    session = prefill(model, PROMPTS[1][:4])
    kept = session.logits.clone()
    grown, whole = session.extend(model, PROMPTS[1][4:]), prefill(model, PROMPTS[1])
    torch.testing.assert_close(grown.logits, whole.logits)
    assert torch.equal(grown.recent, whole.recent)
    assert generate(model, grown, 9).tokens == generate(model, whole, 9).tokens
    assert torch.equal(session.extend(model, PROMPTS[1][4:]).logits, grown.logits)
    assert torch.equal(session.logits, kept)


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_finished_stream_goes_on(name):
    model = language_model(MECHANISMS[name])
    expected = generate(model, PROMPTS, 11, sampling=GREEDY).tokens
    steps = stream(model, PROMPTS, 5, sampling=GREEDY)
    first = [list(row) for row in zip(*(tokens for tokens, _ in steps), strict=True)]
    session = steps.session
    more = generate(model, session, 6, sampling=GREEDY).tokens
    assert [a + b for a, b in zip(first, more, strict=True)] == expected
    endless = stream(model, session, sampling=GREEDY)
    assert [list(row) for row in zip(*endless.take(6)[0], strict=True)] == more
    one, token = session.select([0]), expected[0][5]
    assert generate(model, one.extend(model, [token]), 5, sampling=GREEDY).tokens == [expected[0][6:]]
    assert beam_search(model, one, 6, num_beams=1).tokens == [expected[0][5:]]


def test_a_session_is_extended_in_eval_mode():
    trained = language_model(embed_dropout=0.5)
    session = prefill(trained, PROMPTS)
    expected = session.extend(trained, [3]).logits
    trained.train()
    trained.transformer.stack.branches[0].eval()
    assert torch.equal(session.extend(trained, [3]).logits, expected)
    assert trained.training
    assert trained.dropout.training
    assert not trained.transformer.stack.branches[0].layer.training


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_s_session_can_be_saved(name, tmp_path):
    model = language_model(MECHANISMS[name])
    session = prefill(model, PROMPTS)
    session.save(tmp_path / "session.safetensors")
    loaded = Session.load(tmp_path / "session.safetensors", model)
    assert generate(model, loaded, 9).tokens == generate(model, session, 9).tokens


def test_a_session_of_another_model_and_other_files_are_refused(model, tmp_path):
    path = tmp_path / "session.safetensors"
    prefill(model, PROMPTS).save(path)
    with pytest.raises(ValueError, match="this session is of another model"):
        Session.load(path, language_model({"mechanism": "local", "window": 5}))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="is not a saved session"):
        Session.load(path, model)
    performer = language_model("performer")
    prefill(performer, PROMPTS).save(path)
    performer.transformer.stack.branches[0].layer.mechanism.redraw()
    with pytest.raises(ValueError, match="draw 0 of the random features"):
        generate(performer, Session.load(path, performer), 3)


def probabilities(logits, recent=(), **options):
    recent = torch.tensor([list(recent) or [-1]])
    return Sampling(**options).probabilities(torch.tensor([logits], dtype=torch.float64), recent)[0]


def test_sampling_options_one_by_one():
    logits = [2.0, 1.0, 0.0, -1.0]
    plain = torch.tensor(logits, dtype=torch.float64).softmax(0)
    torch.testing.assert_close(probabilities(logits), plain)
    torch.testing.assert_close(
        probabilities(logits, temperature=0.5), (torch.tensor(logits, dtype=torch.float64) * 2).softmax(0)
    )
    assert probabilities(logits, temperature=0.0).tolist() == [1, 0, 0, 0]
    assert probabilities(logits, top_k=2).nonzero().flatten().tolist() == [0, 1]
    torch.testing.assert_close(probabilities(logits, top_k=99), plain)
    # 0.644 + 0.237 = 0.881: two tokens reach 0.7, one alone reaches 0.6.
    assert probabilities(logits, top_p=0.7).nonzero().flatten().tolist() == [0, 1]
    assert probabilities(logits, top_p=0.6).nonzero().flatten().tolist() == [0]
    assert probabilities(logits, top_p=1e-9).nonzero().flatten().tolist() == [0]
    assert probabilities(logits, min_p=0.3).nonzero().flatten().tolist() == [0, 1]
    assert probabilities(logits, min_p=0.3).sum() == pytest.approx(1)


def test_repetition_penalty_lowers_positive_and_negative_logits():
    logits = [2.0, 1.0, 0.5, -1.0]
    plain = probabilities(logits)
    for token in (0, 3):
        assert probabilities(logits, [token], repetition_penalty=2.0)[token] < plain[token]
    torch.testing.assert_close(probabilities(logits, [-1], repetition_penalty=2.0), plain)


def test_repetition_penalty_covers_its_window(model):
    inside = Sampling(temperature=0, repetition_penalty=1e9, repetition_window=4)
    found = generate(model, PROMPTS[0], 20, sampling=inside).tokens[0]
    history = PROMPTS[0] + found
    for i in range(3, len(history)):
        assert history[i] not in history[max(0, i - 4) : i]
    assert len(set(found)) < len(found)  # ... and no further.


def test_a_sample_follows_its_distribution(model):
    session = prefill(model, PROMPTS[0]).select([0] * 4000)
    first = torch.tensor(generate(model, session, 1, seed=0).tokens)[:, 0]
    counts = torch.bincount(first, minlength=29).double() / 4000
    expected = session.logits[0].softmax(0)
    assert (counts - expected).abs().max() < 4 * (expected * (1 - expected) / 4000).sqrt().max()


def test_one_beam_is_greedy_and_enough_beams_find_the_best():
    model = language_model(vocab_size=5)
    assert beam_search(model, [1, 2], 6, num_beams=1).tokens == generate(model, [1, 2], 6, sampling=GREEDY).tokens
    best = beam_search(model, [1, 2], 3, num_beams=25)
    totals = {}
    for tail in itertools.product(range(5), repeat=3):
        logs = model(torch.tensor([[1, 2, *tail]])).detach().log_softmax(-1)[0]
        totals[tail] = sum(float(logs[1 + i, token]) for i, token in enumerate(tail))
    assert tuple(best.tokens[0]) == max(totals, key=totals.get)
    assert sum(best.log_probabilities[0]) == pytest.approx(max(totals.values()))


def test_beams_end_at_a_stop_token():
    model = language_model(vocab_size=5)
    free = beam_search(model, [1, 2], 6, num_beams=3).tokens[0]
    found = beam_search(model, [1, 2], 6, num_beams=3, stop=[free[2]])
    assert free[2] not in found.tokens[0]


def test_an_encoder_decoder_generates_from_its_source():
    attention = AttentionConfig(num_heads=4, mechanism="linear")
    model = EncoderDecoder(
        ModelConfig(dim=32, depth=1, vocab_size=11, attention=attention),
        ModelConfig(dim=32, depth=2, vocab_size=13, causal=True, attention=attention, cross=attention),
    ).double()
    source = torch.tensor([[1, 2, 3, 4, 0, 0]])
    found = generate(model, [5], 8, sampling=GREEDY, source=source).tokens[0]
    model.eval()
    context, mask = model.encode(source)
    tokens = [5]
    for _ in range(8):
        logits = model.decoder(torch.tensor([tokens]), context=context, context_mask=mask)
        tokens.append(int(logits[0, -1].argmax()))
    assert found == tokens[1:]
    other = torch.tensor([[4, 3, 2, 1, 0, 0]])
    assert prefill(model, [5], source=other).logits.ne(prefill(model, [5], source=source).logits).any()


@pytest.mark.parametrize("name", ["softmax", "linear", "performer", "linformer"])
def test_a_source_with_holes_generates_as_it_trains(name):
    attention = AttentionConfig(num_heads=4, mechanism="linear")
    cross = AttentionConfig(num_heads=4, mechanism=MECHANISMS[name])
    encoder = ModelConfig(dim=32, depth=1, vocab_size=29, attention=attention)
    decoder = ModelConfig(dim=32, depth=1, vocab_size=29, attention=attention, causal=True, cross=cross)
    model = EncoderDecoder(encoder, decoder).double().eval()
    source = torch.randint(1, 29, (3, 11))
    source[0, 3:5] = source[1, :2] = source[1, 6] = source[2, 9:] = 0
    got = generate(model, [[1]] * 3, 7, sampling=GREEDY, source=source)
    tokens = torch.tensor([[1, *row] for row in got.tokens])
    context, mask = model.encode(source)
    logits = model.decoder(tokens[:, :-1], context=context, context_mask=mask)
    assert logits.argmax(2).tolist() == tokens[:, 1:].tolist()


@pytest.mark.parametrize("name", MECHANISMS)
def test_autocast_extends_and_generates(name):
    model = language_model(MECHANISMS[name]).float()
    tokens = torch.tensor([row[:3] for row in PROMPTS])
    with torch.autocast("cpu", torch.bfloat16):
        expected, state = model(tokens), model.new_state(3, max_length=9)
        first, state = model.extend(tokens[:, :1], state)
        rest, state = model.extend(tokens[:, 1:], state)
        got = generate(model, prefill(model, PROMPTS).select([0, 2]), 5, sampling=GREEDY)
        beams = beam_search(model, PROMPTS[0], 3, num_beams=2)
    # No further from the truth than twice what the forward pass is, and one unit in the last place.
    truth = model(tokens)
    error, allowed = ((x.float() - truth).abs().max() for x in (torch.cat([first, rest], 1), expected))
    assert error <= 2 * allowed + torch.finfo(torch.bfloat16).eps * truth.abs().max()
    assert [len(row) for row in got.tokens] == [5, 5]
    assert len(beams.tokens[0]) == 3


def test_invalid_calls_are_refused_before_the_first_token(model):
    table = language_model(positions="learned", max_length=16)
    with pytest.raises(ValueError, match="20 tokens are more than the 16 positions"):
        next(stream(table, [1, 2, 3, 4, 5], 15))
    short = language_model({"mechanism": "linformer", "rank": 4, "max_length": 16})
    with pytest.raises(ValueError, match="max_length of 16"):
        generate(short, [1, 2, 3, 4, 5], 15)
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, [[1], []], 3)
    with pytest.raises(ValueError, match="one for each of 3 sequences, got 2"):
        generate(model, PROMPTS, 3, seed=[1, 2])
    with pytest.raises(ValueError, match="source is for an EncoderDecoder"):
        generate(model, [1], 3, source=torch.ones(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="only a causal model can generate"):
        generate(LanguageModel(ModelConfig(dim=32, depth=1, vocab_size=9)), [1], 3)
    with pytest.raises(ValueError, match="one prompt at a time, got 3"):
        beam_search(model, PROMPTS, 3)
    for prompt in (PROMPTS, prefill(model, PROMPTS)):
        assert generate(model, prompt, 0) == Generated([[], [], []], [[], [], []])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature must be 0"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
        ({"min_p": 1.5}, r"min_p must be in \(0, 1\], got 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty must be positive"),
        ({"repetition_window": 0}, "repetition_window must be at least 1, got 0"),
    ],
)
def test_sampling_options_are_validated(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


NAN = float("nan")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": NAN}, ValueError, "temperature must be 0 .*, got nan"),
        ({"temperature": 1e-45}, ValueError, "at least 1e-06, got 1e-45"),
        ({"temperature": "1"}, TypeError, "temperature must be a number, got '1'"),
        ({"top_p": NAN}, ValueError, "top_p must be in"),
        ({"top_k": 2.5}, TypeError, "top_k must be an integer, got 2.5"),
        ({"repetition_penalty": NAN}, ValueError, "repetition_penalty must be positive"),
        ({"repetition_penalty": None}, TypeError, "repetition_penalty must be a number"),
        ({"repetition_window": 1.0}, TypeError, "repetition_window must be an integer"),
    ],
)
def test_sampling_options_are_finite_numbers(options, error, message):
    with pytest.raises(error, match=message):
        Sampling(**options)


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("text", TypeError, r"prompt must be tokens, got text: encode it, .* list\(text.encode\(\)\)"),
        (["two", "texts"], TypeError, "prompt must be tokens, got text"),
        (torch.tensor([1.0, 2.0]), TypeError, "prompt must be integers, got torch.float32"),
        ([1.5, 2], TypeError, "prompt must be integers"),
        ([[1, 2], [1.5]], TypeError, "prompt must be integers"),
        (torch.tensor([True]), TypeError, "prompt must be integers, got torch.bool"),
        (torch.ones(1, 2, 3, dtype=torch.int64), ValueError, r"one sequence of tokens \(T,\), got \(2, 3\)"),
        ([], ValueError, "at least one token"),
        (torch.empty(2, 0, dtype=torch.int64), ValueError, "at least one token"),
        (None, TypeError, "prompt must be integers"),
        (5, ValueError, "one sequence of tokens"),
        ([10**30], TypeError, "prompt must be integers"),
        ([1, -1], ValueError, "prompt has the token -1, and this model has the tokens 0 to"),
        ([[1], [999]], ValueError, "prompt has the token 999"),
    ],
)
def test_prompts_are_tokens_of_the_model(model, prompt, error, message):
    for call in (lambda: generate(model, prompt, 3), lambda: prefill(model, prompt), lambda: stream(model, prompt)):
        with pytest.raises(error, match=message):
            call()


def test_prompts_of_every_kind_agree(model):
    kinds = (
        [3, 1, 4],
        (3, 1, 4),
        b"\3\1\4",
        bytearray(b"\3\1\4"),
        torch.tensor([3, 1, 4]),
        np.array([3, 1, 4], np.uint16),
    )
    kinds += (
        torch.tensor([3, 1, 4], dtype=torch.uint8),
        [[3, 1, 4]],
        [b"\3\1\4"],
        np.array([[3, 1, 4]]),
        [np.array([3, 1, 4])],
    )
    assert len({tuple(generate(model, prompt, 5).tokens[0]) for prompt in kinds}) == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_tokens": -1}, ValueError, "max_tokens must be at least 0, got -1"),
        ({"max_tokens": 2.0}, TypeError, "max_tokens must be an integer, got 2.0"),
        ({"stop": 5}, ValueError, "stop must be one sequence"),
        ({"stop": "x"}, TypeError, "stop must be tokens, got text"),
        ({"stop": [1.5]}, TypeError, "stop must be integers"),
        ({"stop": [-100]}, ValueError, "stop has the token -100"),
        ({"stop_strings": "ab"}, TypeError, "stop_strings must be a sequence of strings"),
        ({"stop_strings": [""]}, ValueError, "stop_strings has an empty string"),
        ({"stop_strings": [b"a", b""]}, ValueError, "stop_strings has an empty string"),
        ({"stop_strings": [97]}, TypeError, "stop_strings must be a sequence of strings"),
        ({"seed": 1.5}, TypeError, "seed must be an integer"),
        ({"seed": 2**64}, ValueError, "seeds must be from"),
        ({"seed": [2**64]}, ValueError, "seeds must be from"),
        ({"sampling": 0.5}, TypeError, "sampling must be a Sampling, got 0.5"),
    ],
)
def test_arguments_of_generate_are_checked(model, options, error, message):
    with pytest.raises(error, match=message):
        generate(model, [1, 2], **{"max_tokens": 3, **options})


def test_arguments_of_prefill_sessions_and_beams_are_checked(model):
    for options, error, message in (
        ({"chunk": -1}, ValueError, "chunk must be at least 1, got -1"),
        ({"chunk": 0}, ValueError, "chunk must be at least 1, got 0"),
        ({"window": 0}, ValueError, "window must be at least 1"),
        ({"max_tokens": 1.5}, TypeError, "max_tokens must be an integer"),
    ):
        with pytest.raises(error, match=message):
            prefill(model, [1, 2], **options)
    session = prefill(model, [1, 2])
    for tokens, error, message in (
        ([], ValueError, "one token"),
        ([1.5], TypeError, "integers"),
        ([999], ValueError, "999"),
    ):
        with pytest.raises(error, match=message):
            session.extend(model, tokens)
    for index in ([1], [-2], [0.5], 0, [[0]]):
        with pytest.raises(ValueError, match="index must be"):
            session.select(index)
    assert len(session.select([]).logits) == 0
    with pytest.raises(ValueError, match="num_beams must be at least 1"):
        beam_search(model, [1], 3, num_beams=0)
    with pytest.raises(TypeError, match="model must be a LanguageModel or an EncoderDecoder, got a Linear"):
        generate(torch.nn.Linear(2, 2), [1], 3)


def test_a_session_continues_with_its_own_model_only(model, tmp_path):
    torch.manual_seed(5)
    other, twin = LanguageModel(model.config).to(next(model.parameters()).dtype).eval(), copy.deepcopy(model)
    session = prefill(model, PROMPTS)
    session.save(tmp_path / "session")
    for call in (
        lambda: generate(other, session, 3),
        lambda: generate(other, stream(model, session).session, 3),
        lambda: beam_search(other, session.select([0]), 3),
        lambda: session.select([0]).extend(other, [1]),
        lambda: Session.load(tmp_path / "session", other),
    ):
        with pytest.raises(ValueError, match="this session is of another model, whose weights differ"):
            call()
    assert generate(twin, session, 3) == generate(model, Session.load(tmp_path / "session", twin), 3)
    unknown = Session(session.state, session.logits, session.recent)
    unknown.save(tmp_path / "unknown")
    assert generate(model, Session.load(tmp_path / "unknown", model), 3) == generate(model, unknown, 3)


def test_a_damaged_session_is_refused(model, tmp_path):
    path = tmp_path / "session"
    session = prefill(model, PROMPTS)
    session.save(path)
    tensors = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    length = next(name for name in tensors if name.endswith("length"))
    for name, tensor, message in (
        (length, tensors[length] - 100, "negative number"),
        (length, tensors[length].float(), "another model"),
        ("recent", tensors["recent"] + 10**6, "recent has the token"),
        ("recent", tensors["recent"][:1], "recent must be"),
        ("logits", tensors["logits"][:, 1:], "logits must have the shape"),
        ("logits", tensors["logits"].long(), "logits must have the shape"),
    ):
        safetensors.torch.save_file({**tensors, name: tensor.contiguous()}, path, metadata)
        with pytest.raises(ValueError, match=message):
            Session.load(path, model)
    safetensors.torch.save_file(tensors, path, {**metadata, "state.draw": "[" * 100_000})
    with pytest.raises(ValueError, match="damaged"):
        Session.load(path, model)


@pytest.mark.slow
def test_generating_many_tokens_does_not_grow_the_process():
    import resource

    model = language_model().float()
    steps = stream(model, PROMPTS[0], None)
    for _ in range(2000):
        next(steps)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(100_000):
        next(steps)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 * 1024  # kilobytes
