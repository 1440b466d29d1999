"""The command `longspan serve`: serve a model over HTTP."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import UseAppendAction

from longspan.cli.arguments import check_at_least, parse
from longspan.cli.generate import load_codec, load_model
from longspan.generation.tokenization import TOKENIZER, TextCodec
from longspan.models.checkpoint import find_checkpoint, read_committed
from longspan.models.transformer import LanguageModel
from longspan.serve.engine import Engine
from longspan.utils import choose_device, format_bytes, printable

if TYPE_CHECKING:
    from longspan.generation.chat_template import ChatTemplate
    from longspan.serve.api_server import APIServer
    from longspan.serve.serving_completion import ServedModel

KEY_VARIABLE = "LONGSPAN_API_KEY"
_SWITCH_SECONDS = 0.0002  # that the engine's thread waits for the interpreter while events are encoded
_MEASURED = 4096  # tokens that the loss is measured on
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}i": 2 ** (10 * i) for i, unit in enumerate("KMGT", 1)}


@dataclass(frozen=True)
class ServeFlags:
    """Serve a model over HTTP: OpenAI's API at /v1, metrics at /metrics, a playground page at /."""

    model: Path
    """Checkpoint folder, or the folder of a run."""
    name: str | None = None
    """Name of the model in the API; the folder's name by default."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all of them."""
    port: int = 8000
    """Port to listen on; 0 for any that is free."""
    api_key: UseAppendAction[tuple[str, ...]] = ()
    """Key that clients must send; may be repeated. Others on this machine can see it: prefer LONGSPAN_API_KEY."""
    api_key_file: Path | None = None
    """File with keys, one on each line."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names that clients may use, such as example.org; by default localhost, or any if --host is public."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses of reverse proxies whose X-Forwarded-For is believed."""
    slots: int = 8
    """Number of choices decoded together."""
    max_queue: int = 256
    """The most choices that wait for a slot; more are refused with 429."""
    max_length: int | None = None
    """The most tokens of a prompt and its continuation; the model's limit by default, 4096 with softmax layers."""
    max_prompt: int = 1 << 20
    """The most tokens of a prompt."""
    max_tokens: int = 4096
    """The most tokens to generate for each choice."""
    max_body: str = "8MiB"
    """The most bytes of a request."""
    max_streams: int = 64
    """The most requests of one client at a time."""
    max_connections: int = 1024
    """The most connections."""
    timeout: float | None = None
    """Seconds after which a request ends with what it has got."""
    read_timeout: float = 20.0
    """Seconds that a client may take to send its headers, or to take what is sent."""
    drain_timeout: float = 30.0
    """Seconds that requests get to finish after SIGTERM."""
    chunk: int | None = None
    """Tokens per chunk of a prompt and between cached states; 64 or 512, by the size of the model."""
    cache: str = "1GiB"
    """Memory of the prefix cache; 0 for none."""
    cache_dir: Path | None = None
    """Folder of a prefix cache on disk, which survives a restart."""
    cache_disk: str = "16GiB"
    """The most bytes of that folder."""
    state_dir: Path | None = None
    """Folder of saved states; by default a temporary one, removed at the end."""
    state_disk: str = "4GiB"
    """The most bytes of that folder."""
    state_dtype: Literal["exact", "bfloat16", "int8"] = "exact"
    """Type of cached states; the loss is measured and printed."""
    quantize: Literal["none", "int8"] = "none"
    """Type of the weights on a CPU; the loss is measured and printed."""
    quantize_text: Path | None = None
    """Text to measure the loss on; by default one that the model writes itself."""
    speculation: str | None = None
    """ngram to propose tokens from the text so far, or the folder of a small draft model."""
    chat_template: Path | None = None
    """Jinja file with another chat template than the tokenizer's."""
    threads: int | None = None
    """Number of PyTorch threads on a CPU."""
    log_prompts: bool = False
    """Whether prompts are logged."""
    device: str | None = None
    """cpu or cuda; cuda by default if there is a GPU."""

    def __post_init__(self) -> None:
        check_at_least(1, slots=self.slots, max_length=self.max_length, max_prompt=self.max_prompt, chunk=self.chunk)
        check_at_least(1, max_tokens=self.max_tokens, max_streams=self.max_streams, threads=self.threads)
        check_at_least(1, max_connections=self.max_connections)
        check_at_least(0, max_queue=self.max_queue, port=self.port)
        if self.port > 65535:
            raise ValueError(f"--port must be at most 65535, got {self.port}")
        for name in ("timeout", "read_timeout", "drain_timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1e6:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} must be above 0 and at most 1,000,000 seconds, got {value}")
        for name in ("max_body", "cache", "cache_disk", "state_disk"):
            parse_bytes(f"--{name.replace('_', '-')}", getattr(self, name))
        if self.quantize_text is not None and (self.quantize, self.state_dtype) == ("none", "exact"):
            raise ValueError("--quantize-text measures the loss of --quantize or --state-dtype: give one of them too")
        if "" in self.api_key:
            raise ValueError("--api-key is empty: give a key")


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    flags = parse(ServeFlags, argv, "serve")
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("longspan.serve").setLevel(logging.INFO)
    sys.setswitchinterval(_SWITCH_SECONDS)
    with build_server(flags) as server:
        gc.collect()
        gc.freeze()  # Collections stop all threads: exclude from them what exists before the first request.
        _announce(server, flags)
        try:
            server.run()
        except RuntimeError as error:
            _log(str(error))
            sys.exit(1)
        finally:
            gc.unfreeze()


@contextmanager
def build_server(flags: ServeFlags) -> Iterator[APIServer]:
    """Yield the server that flags describe, which listens but does not answer yet.

    Raises:
        ValueError: If a flag does not fit the model, or the address cannot be listened on.
    """
    from longspan.serve.api_server import APIServer, HTTPProcess, ServerOptions

    options = ServerOptions(
        host=flags.host,
        port=flags.port,
        api_keys=_keys(flags),
        allowed_hosts=tuple(name.lower() for name in flags.allowed_hosts),
        trusted_proxies=flags.trusted_proxies,
        max_body=parse_bytes("--max-body", flags.max_body),
        max_streams=flags.max_streams,
        max_connections=flags.max_connections,
        read_timeout=flags.read_timeout,
        drain_timeout=flags.drain_timeout,
        log_prompts=flags.log_prompts,
    )
    device = choose_device(flags.device)
    with ExitStack() as stack:
        process = stack.enter_context(HTTPProcess(options))  # It starts while the model is loaded.
        _log(f"loading {flags.model}")
        model = load_model(flags.model, device)
        codec = load_codec(flags.model, model)
        if device.type == "cuda":
            _log(f"preparing {flags.slots} slots; the first start on a machine compiles kernels")
        engine = stack.enter_context(_engine(flags, model, codec))
        if flags.quantize != "none" or flags.state_dtype != "exact":
            _print_loss(flags, model, engine)
        folder = flags.state_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="longspan-states-")))
        yield APIServer(_served(flags, engine, folder), options, process)


def parse_bytes(name: str, text: str) -> int:
    """Return the number of bytes that a text such as 2GiB, 500MB or 4096 stands for.

    Raises:
        ValueError: If it is no such text.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) > 2**62:
        raise ValueError(f"{name} must be a number of bytes such as 2GiB or 500MB, got {text!r}")
    unit = (match[2] or "").upper().replace("I", "i")
    return int(float(match[1]) * _UNITS[unit])


def _keys(flags: ServeFlags) -> tuple[str, ...]:
    """Return the keys of all sources."""
    keys = list(flags.api_key)
    if flags.api_key_file is not None:
        try:
            lines = flags.api_key_file.read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--api-key-file {flags.api_key_file} cannot be read: {error}") from None
        if not lines:
            raise ValueError(f"--api-key-file {flags.api_key_file} is empty: write a key on each line")
        keys += lines
    if os.environ.get(KEY_VARIABLE):
        keys.append(os.environ[KEY_VARIABLE])
    return tuple(keys)


def _engine(flags: ServeFlags, model: LanguageModel, codec: TextCodec) -> Engine:
    if flags.quantize == "int8":
        from longspan.serve.quantize import quantize_weights

        model = quantize_weights(model)
    draft = flags.speculation
    return Engine(
        model,
        codec=codec,
        slots=flags.slots,
        max_queue=flags.max_queue,
        chunk=flags.chunk,
        max_length=flags.max_length,
        cache_bytes=parse_bytes("--cache", flags.cache),
        cache_dir=flags.cache_dir,
        disk_bytes=parse_bytes("--cache-disk", flags.cache_disk),
        state_dtype=flags.state_dtype,
        speculation=draft if draft in (None, "ngram") else load_model(Path(draft), choose_device(flags.device)),
        threads=flags.threads,
        warm_up=True,
    )


def _print_loss(flags: ServeFlags, original: LanguageModel, engine: Engine) -> None:
    """Print the bits per byte that fewer bits of weights and states cost."""
    import torch

    from longspan.generation.generate import generate
    from longspan.serve.quantize import bits_per_token

    codec, longest = engine.codec, _MEASURED if engine.max_length is None else min(_MEASURED, engine.max_length)
    assert codec is not None
    if flags.quantize_text is not None:
        try:
            found = codec.encode(flags.quantize_text.read_bytes()[: 16 * _MEASURED])[:longest]
        except OSError as error:
            raise ValueError(f"--quantize-text {flags.quantize_text} cannot be read: {error}") from None
        where = printable(flags.quantize_text.name)
    else:
        found = generate(original, codec.encode(b"\n"), longest - 1).tokens[0]
        where = "a text that the model wrote"
    if len(found) < 2:
        raise ValueError(f"--quantize-text {flags.quantize_text} must have at least two tokens")
    tokens, number = torch.tensor(found), len(found) - 1
    per_byte = 1.0 if codec.is_bytes else number / max(1, len(codec.decode(found[1:]).encode()))
    before = per_byte * bits_per_token(original, tokens)
    after = per_byte * bits_per_token(engine.model, tokens, state_dtype=flags.state_dtype)
    _log(
        f"{before:.4f} bits per byte on {where}; {after:.4f} with --quantize {flags.quantize} "
        f"--state-dtype {flags.state_dtype}: {100 * (after / before - 1):+.2f} %"
    )


def _served(flags: ServeFlags, engine: Engine, states: Path) -> ServedModel:
    from longspan.generation.chat_template import end_tokens
    from longspan.serve.serving_completion import Limits, ServedModel
    from longspan.serve.state_store import StateStore

    codec = engine.codec
    assert codec is not None
    template, ends = read_committed(
        find_checkpoint(flags.model), lambda folder: (_template(flags, folder), end_tokens(folder, codec))
    )
    return ServedModel(
        engine,
        flags.name or flags.model.resolve().name,
        StateStore(states, engine, parse_bytes("--state-disk", flags.state_disk)),
        template=template,
        ends=ends,
        limits=Limits(flags.max_prompt, flags.max_tokens, flags.timeout),
    )


def _template(flags: ServeFlags, folder: Path) -> ChatTemplate:
    from longspan.generation.chat_template import ChatTemplate

    tokenizer = folder / TOKENIZER
    try:
        return ChatTemplate(tokenizer if tokenizer.exists() else None, flags.chat_template)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the chat template cannot be read: {error}") from None


def _announce(server: APIServer, flags: ServeFlags) -> None:
    from longspan.serve.api_server import is_loopback

    engine, host = server.engine, f"[{flags.host}]" if ":" in flags.host else flags.host
    _log(
        f"serving {flags.model} at http://{host}:{server.port} with {engine.slots} slots on "
        f"{engine.device}; state of one sequence: {format_bytes(server.model.state_bytes)}"
    )
    if not server.options.api_keys and not is_loopback(flags.host):
        _log("every client that reaches this address can use the server: set --api-key-file")


def _log(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
