"""The HTTP server: OpenAI's API, saved states, health, metrics and the playground page."""

from __future__ import annotations

import asyncio
import base64
import gc
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import resources
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import uvicorn
from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from longspan.generation.chat_template import ChatTemplate
from longspan.serve.engine import Engine
from longspan.serve.engine_service import EngineInfo, EngineService, RemoteEngine, RemoteStates
from longspan.serve.metrics import CONTENT_TYPE, Metrics
from longspan.serve.openai_protocol import APIError, ChatBody, CompletionBody, StateBody, parse_body
from longspan.serve.request import Request
from longspan.serve.serving_completion import Limits, ResponseWriter, ServedModel, draining
from longspan.serve.state_store import StateStore
from longspan.utils import printable

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
T = TypeVar("T")

logger = logging.getLogger("longspan.serve")

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_PUBLIC = ("/", "/health")  # paths that need no key
_MAX_HEADERS = 1 << 16  # bytes
_SLOWEST = 1 << 14  # bytes per second of a body
_INLINE, _INLINE_BYTES = 1 << 14, 1 << 17  # bytes of a body prepared on the event loop: with a tokenizer, and without
_CLOSED_REQUEST = 499  # as nginx names a client that went away
_END_SECONDS = 30.0  # within which a process that has closed its connection ends


@dataclass(frozen=True)
class ServerOptions:
    """Options of the HTTP server.

    Attributes:
        host: Address to listen on.
        port: Port; 0 for any that is free.
        api_keys: Keys that clients may authenticate with; none for no authentication.
        allowed_hosts: Host names that clients may call the server by; by default localhost if only this machine can
            reach it, otherwise any. It keeps web pages from reaching a local server through a name of their own.
        trusted_proxies: Addresses of reverse proxies whose X-Forwarded-For is believed.
        max_body: The most bytes of a request's body.
        max_streams: The most requests of one client at a time.
        max_connections: The most connections; at the limit, the oldest one without a request is closed for a new one.
        read_timeout: Seconds within which headers must arrive, and a client must take what was sent.
        drain_timeout: Seconds that running requests get to finish after SIGTERM.
        log_prompts: Whether prompts are logged.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    max_body: int = 1 << 23
    max_streams: int = 64
    max_connections: int = 1024
    read_timeout: float = 20.0
    drain_timeout: float = 30.0
    log_prompts: bool = False


class APIServer:
    """Serves a model over HTTP, from a process of its own.

    That process does all but decode: see `longspan.serve.engine_service`.

    Args:
        model: The model; its engine is in this process.
        options: Options.
        process: The process that listens, if it has been started already.

    Attributes:
        engine: The engine.
        address: What the server listens on: host and port first.
        port: The port.

    Raises:
        ValueError: If the address cannot be listened on.
    """

    def __init__(self, model: ServedModel, options: ServerOptions, process: HTTPProcess | None = None) -> None:
        assert isinstance(model.engine, Engine)
        assert isinstance(model.states, StateStore)
        self.model, self.options, self.engine = model, options, model.engine
        self._process = HTTPProcess(options) if process is None else process
        self.address = self._process.address
        self.port: int = self.address[1]
        self._service = EngineService(model.engine, model.states, self._process.connection)
        self._setup = _Setup(
            options,
            EngineInfo.of(model.engine, model.states),
            (model.name, model.template, model.ends, model.limits),
            logger.getEffectiveLevel(),
        )

    def run(self) -> None:
        """Serve until `stop`, SIGTERM or SIGINT, and until the requests that were accepted are answered.

        Raises:
            RuntimeError: If the process that listens ended by itself.
        """
        with self._process, _forwarding_signals(lambda: self._service.send("drain", self.options.drain_timeout)):
            self._service.send(self._setup)
            self._service.run()
            status = self._process.wait()
        self.engine.close(drain=False)
        if status:
            raise RuntimeError(f"the process that answers HTTP ended with status {status}")

    def stop(self, timeout: float | None = None) -> None:
        """Take no more requests, and end when those that were accepted are answered; callable from any thread.

        Args:
            timeout: Seconds after which those left are cancelled; `drain_timeout` by default.
        """
        self._service.send("drain", self.options.drain_timeout if timeout is None else timeout)


class HTTPProcess:
    """A process that listens on an address, and serves what an `APIServer` sends it.

    Args:
        options: Options.

    Attributes:
        address: What it listens on: host and port first.
        connection: To the process.

    Raises:
        ValueError: If the address cannot be listened on.
    """

    def __init__(self, options: ServerOptions) -> None:
        listening = _listen(options.host, options.port)
        own, other = socket.socketpair()
        with listening, other:
            self.address: tuple[Any, ...] = listening.getsockname()
            files = listening.fileno(), other.fileno()
            code = f"from longspan.serve.api_server import answer_http; answer_http{files}"
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
            # In a session of its own, a terminal sends it no signals.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=files, env=environment, start_new_session=True
            )
        self.connection: Connection = Connection(own.detach())

    def __enter__(self) -> HTTPProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()
        self._process.kill()
        self._process.wait()

    def wait(self) -> int:
        """Wait for its end, which is near; return its status."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._process.kill()
        return self._process.wait()


class _Setup(NamedTuple):
    """What `answer_http` needs."""

    options: ServerOptions
    info: EngineInfo
    model: tuple[str, ChatTemplate, dict[int, str], Limits]
    log_level: int


def answer_http(listening: int, connection: int) -> None:
    """Answer HTTP for an `APIServer`, until it or its process ends; what an `HTTPProcess` runs.

    Args:
        listening: File descriptor of the socket that clients connect to.
        connection: File descriptor of the connection to the server.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # The other process gets them too, and forwards them.
    to_engine = Connection(connection)
    try:
        (setup,) = to_engine.recv()
    except (EOFError, OSError):
        return
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stderr)
    logger.setLevel(setup.log_level)
    engine = RemoteEngine(to_engine, setup.info)
    name, template, ends, limits = setup.model
    states = RemoteStates(engine, setup.info)
    model = ServedModel(engine, name, states, template=template, ends=ends, limits=limits)
    server = HTTPServer(model, setup.options, socket.socket(fileno=listening))
    engine.listen(lambda _, timeout: server.drain(timeout), partial(os._exit, 1))
    gc.collect()
    gc.freeze()  # Exclude from collections what exists before the first request.
    server.run()
    os._exit(0)  # Modules of PyTorch take longer to end than a client waits for a port.


class HTTPServer:
    """Answers HTTP on a socket, in this process.

    Args:
        model: The model.
        options: Options.
        listening: The socket.
    """

    def __init__(self, model: ServedModel, options: ServerOptions, listening: socket.socket) -> None:
        app = create_app(model, options)
        limits = {
            "read_timeout": options.read_timeout,
            "max_connections": options.max_connections,
            "gate": app.state.gate,
        }
        connection = type("_LimitedConnection", (_Connection,), limits)
        config = uvicorn.Config(
            app,
            http=connection,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=5,
            timeout_keep_alive=int(max(1, options.read_timeout)),
            proxy_headers=bool(options.trusted_proxies),
            forwarded_allow_ips=list(options.trusted_proxies),
        )
        self._socket, self._server = listening, _DrainingServer(config, model, app.state.gate)

    def run(self) -> None:
        """Answer until `drain`, and until the requests that were accepted are answered."""
        with self._socket:
            self._server.run(sockets=[self._socket])

    def drain(self, timeout: float) -> None:
        """Take no more requests, and end when those that were accepted are answered; at once if called again.

        Args:
            timeout: Seconds after which those left are cancelled.
        """
        self._server.drain(timeout)


@contextmanager
def _forwarding_signals(call: Callable[[], None]) -> Iterator[None]:
    """Call a function at SIGTERM and SIGINT, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        threading.Thread(target=call).start()  # This one may be sending a message.

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def create_app(model: ServedModel, options: ServerOptions) -> FastAPI:
    """Return the ASGI application that serves a model.

    Args:
        model: The model.
        options: Options.
    """
    app = FastAPI(title="longspan", docs_url=None, redoc_url=None)
    app.state.gate = gate = _Gate(options.max_streams)
    app.add_middleware(_Guard, options=options, metrics=model.metrics, gate=gate)
    app.add_exception_handler(HTTPException, _http_error)
    _add_completions(app, model, options, gate)
    _add_states(app, model, options, gate)
    page, policy = _playground()

    @app.get("/v1/models")
    async def list_models() -> Any:
        return {"object": "list", "data": [model.card()]}

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Any:
        model.check_name(name)
        return model.card()

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Any:
        if gate.draining:
            raise draining()
        if not model.engine.is_alive:
            raise APIError(500, "the engine failed", kind="server_error", code="failed")
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        saved = await asyncio.to_thread(model.states.list)
        held = len(saved), sum(info.bytes for info in saved)
        stats = await asyncio.to_thread(model.engine.stats)
        return Response(model.metrics.render(stats, gate.active, held), media_type=CONTENT_TYPE)

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def playground() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers={"Content-Security-Policy": policy})

    return app


def _add_completions(app: FastAPI, model: ServedModel, options: ServerOptions, gate: _Gate) -> None:
    inline = _INLINE_BYTES if model.codec.is_bytes else _INLINE

    async def answer(request: HTTPRequest, cls: type[CompletionBody] | type[ChatBody]) -> Response:
        async with gate.pass_through(request) as ticket:
            content = await _read_body(request, options)
            client = request.client.host if request.client is not None else ""
            if len(content) > inline or b"previous_state" in content:
                body, requests = await asyncio.to_thread(_prepare, model, cls, content, client)
            else:
                body, requests = _prepare(model, cls, content, client)
            writer = ResponseWriter(model, body, requests, await model.submit(requests))
            _note(request, writer, content if options.log_prompts else None)
            if body.stream:
                return EventStream(writer, ticket.keep())
            try:
                return _json(await _until_disconnect(request.receive, writer.result()))
            finally:
                writer.cancel()

    async def create_completion(request: HTTPRequest) -> Response:
        return await answer(request, CompletionBody)

    async def create_chat_completion(request: HTTPRequest) -> Response:
        return await answer(request, ChatBody)

    routes = (
        ("/v1/completions", create_completion, CompletionBody),
        ("/v1/chat/completions", create_chat_completion, ChatBody),
    )
    for path, endpoint, cls in routes:
        schema = {"requestBody": {"content": {"application/json": {"schema": cls.model_json_schema()}}}}
        app.add_api_route(path, endpoint, methods=["POST"], openapi_extra=schema, response_model=None)


def _add_states(app: FastAPI, model: ServedModel, options: ServerOptions, gate: _Gate) -> None:
    states = model.states

    @app.post("/v1/states")
    async def create_state(request: HTTPRequest) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/octet-stream":
            body = parse_body(StateBody, await _read_body(request, options))
            if body.source is None:
                raise APIError(400, "source is missing: the id of a state, which keep_state returns", param="source")
            return _json((await asyncio.to_thread(states.copy, body.source, body.name)).body())
        async with gate.pass_through(request):
            with states.new_file() as path:
                content = await _read_body(request, options, states.max_bytes, "application/octet-stream")
                await asyncio.to_thread(path.write_bytes, content)
                return _json((await asyncio.to_thread(states.add, path, request.query_params.get("name"))).body())

    @app.get("/v1/states")
    async def list_states() -> Any:
        found = await asyncio.to_thread(states.list)
        return {"object": "list", "data": [info.body() for info in reversed(found)]}

    @app.get("/v1/states/{name}")
    async def get_state(name: str) -> Any:
        return states.info(name).body()

    @app.get("/v1/states/{name}/content")
    async def download_state(name: str) -> Response:
        return FileResponse(states.path(name), media_type="application/octet-stream", filename=f"{name}.safetensors")

    @app.post("/v1/states/{name}/fork")
    async def fork_state(name: str, request: HTTPRequest) -> Response:
        content = await _read_body(request, options)
        body = parse_body(StateBody, content or b"{}")
        if body.source is not None:
            raise APIError(400, "source is the state in the path: leave it out", param="source")
        return _json((await asyncio.to_thread(states.copy, name, body.name)).body())

    @app.delete("/v1/states/{name}")
    async def delete_state(name: str) -> Any:
        states.delete(name)
        return {"id": name, "object": "state", "deleted": True}


def _prepare(
    model: ServedModel, cls: type[CompletionBody] | type[ChatBody], content: bytes, client: str
) -> tuple[CompletionBody | ChatBody, list[Request]]:
    body = parse_body(cls, content)
    return body, model.prepare(body, client)


class EventStream(Response):
    """A response of server-sent events that ends its requests when the client goes away.

    Args:
        writer: Formats the events.
        release: Called at the end.
    """

    media_type = "text/event-stream"

    def __init__(self, writer: ResponseWriter, release: Callable[[], None]) -> None:
        super().__init__(None, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._writer, self._release = writer, release

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await _until_disconnect(receive, self._send_events(send))
        finally:
            self._writer.cancel()
            self._release()

    async def _send_events(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for events in self._writer.events():
            await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _DisconnectedError(Exception):
    """The client closed the connection before the response."""


async def _until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of an awaitable, which is cancelled when the client goes away."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, listening = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _DisconnectedError
        return working.result()
    finally:
        working.cancel()
        listening.cancel()


class _Gate:
    """Counts requests that are being answered, in all and of each client.

    Attributes:
        draining: Whether no more are taken.
        crowded: Whether there are more connections than the server takes.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.draining, self.crowded = limit, False, False
        self._clients: Counter[str] = Counter()

    @property
    def active(self) -> int:
        """Requests that are being answered."""
        return self._clients.total()

    @asynccontextmanager
    async def pass_through(self, request: HTTPRequest) -> AsyncIterator[_Ticket]:
        """Count a request while the block runs, or until its ticket is given back, if that is stored.

        Raises:
            APIError: If the server ends, or the client has too many requests.
        """
        client = request.client.host if request.client is not None else ""
        if self.draining:
            raise draining()
        if self._clients[client] >= self.limit:
            raise APIError(
                429,
                f"{self.limit} requests of this client are being answered, which is the limit: try again later",
                kind="rate_limit_error",
                code="too_many_requests",
                headers={"Retry-After": "1"},
            )
        self._clients[client] += 1
        ticket = _Ticket(self._clients, client)
        try:
            yield ticket
        finally:
            if not ticket.kept:
                ticket.release()


class _Ticket:
    """A place in a `_Gate`."""

    def __init__(self, clients: Counter[str], client: str) -> None:
        self._clients, self._client, self.kept = clients, client, False

    def keep(self) -> Callable[[], None]:
        """Keep the place until the returned function is called."""
        self.kept = True
        return self.release

    def release(self) -> None:
        """Give the place back."""
        self._clients[self._client] -= 1
        if not self._clients[self._client]:
            del self._clients[self._client]


class _Guard:
    """ASGI middleware around everything: hosts, keys, errors in OpenAI's shape, headers, counters and the log."""

    def __init__(self, app: Any, options: ServerOptions, metrics: Metrics, gate: _Gate) -> None:
        self.app, self._metrics, self._gate = app, metrics, gate
        self._keys = [hashlib.sha256(key.encode()).digest() for key in options.api_keys]
        self._hosts = options.allowed_hosts or (_LOOPBACK if is_loopback(options.host) else ())

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status = time.monotonic(), 0

        async def sender(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], *_HEADERS]}
            await send(message)

        try:
            headers = _headers(scope)
            self._check(scope["path"], headers)
            await self.app(scope, receive, sender)
        except _DisconnectedError:
            status = _CLOSED_REQUEST
        except Exception as error:
            if not isinstance(error, APIError):
                _log_failure(error)
                error = APIError(500, "the server failed; its log says where", kind="server_error", code="failed")
            if status:  # The response has begun: closing the connection signals that it is incomplete.
                raise _IncompleteError from None
            await _error_response(error)(scope, receive, sender)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.count_response(route, status)
            _log_request(scope, status, time.monotonic() - begun)

    def _check(self, path: str, headers: Mapping[str, str]) -> None:
        """Raise APIError unless a client may call a path."""
        if self._gate.crowded:
            text = "the server has as many connections as it takes: try again later"
            raise APIError(503, text, kind="server_error", code="too_many_connections", headers={"Retry-After": "1"})
        host = headers.get("host", "")
        name = host.lower() if host.endswith("]") else re.sub(r":\d*$", "", host.lower())
        if self._hosts and name not in self._hosts:
            raise APIError(
                421, f"the host {host[:80]!r} is not one of this server's: start it with --allowed-hosts to add it"
            )
        if self._keys and path not in _PUBLIC:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            given = hashlib.sha256(key.strip().encode("latin-1")).digest()
            matches = [hmac.compare_digest(given, own) for own in self._keys]
            if scheme.lower() != "bearer" or not any(matches):
                raise APIError(
                    401,
                    "the API key is missing or wrong: send it in the header Authorization: Bearer KEY",
                    kind="authentication_error",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )


class _IncompleteError(Exception):
    """A response broke off after it had begun."""


_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


def _headers(scope: Mapping[str, Any]) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _json(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse(body, status, {"Cache-Control": "no-store", **(headers or {})})


def _error_response(error: APIError) -> Response:
    # A client may still be sending what is not going to be read.
    closing = {"Connection": "close"} if error.status in (408, 413, 415, 503) else {}
    return _json(error.body(), error.status, {**error.headers, **closing})


async def _http_error(request: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    texts = {404: "there is nothing at this path", 405: f"{request.method} is not allowed at this path"}
    text = texts.get(error.status_code, str(error.detail))
    return _error_response(APIError(error.status_code, text, kind=kind, headers=dict(error.headers or {})))


async def _read_body(
    request: HTTPRequest, options: ServerOptions, limit: int | None = None, kind: str = "application/json"
) -> bytes:
    """Return the body of a request.

    Raises:
        APIError: If it is too large, too slow or of another type.
    """
    limit = options.max_body if limit is None else limit
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    length = request.headers.get("content-length", "")
    if given != kind and (given or length not in ("", "0")):
        text = f"the body must be {kind}, got {given[:80] or 'no Content-Type'}: send the header Content-Type: {kind}"
        raise APIError(415, text)
    if "content-encoding" in request.headers:
        raise APIError(415, "compressed bodies are not supported: send it as it is")
    too_large = APIError(413, f"the body has more than {limit} bytes, which is the limit", code="body_too_large")
    if length.isdigit() and int(length) > limit:
        raise too_large
    body, begun, more = bytearray(), time.monotonic(), True
    while more:
        left = begun + options.read_timeout + len(body) / _SLOWEST - time.monotonic()
        try:
            message = await asyncio.wait_for(request.receive(), max(0.0, left))
        except asyncio.TimeoutError:
            raise APIError(408, "the body did not arrive in time", code="timeout") from None
        if message["type"] == "http.disconnect":
            raise _DisconnectedError
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limit:
            raise too_large
    return bytes(body)


def _note(request: HTTPRequest, writer: ResponseWriter, content: bytes | None) -> None:
    """Store what is logged of a request at its end."""
    request.scope["longspan.writer"] = writer
    if content is not None:
        logger.info("%s %s", writer.head["id"], printable(content.decode()))


def _log_request(scope: Mapping[str, Any], status: int, seconds: float) -> None:
    client = (scope.get("client") or ("?",))[0]
    writer = scope.get("longspan.writer")
    tokens = ""
    if writer is not None:
        usage = writer.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        tokens = f", {usage['prompt_tokens']} tokens read ({cached} cached), {usage['completion_tokens']} written"
    path = printable(scope["path"][:200])
    logger.info("%s %s %s %d in %.3f s%s", client, scope["method"], path, status, seconds, tokens)


def _log_failure(error: BaseException) -> None:
    """Log where an error was raised, without its text, which may hold a prompt."""
    where = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s in a request:\n%s", type(error).__name__, where)


def _playground() -> tuple[str, str]:
    """Return the page and its Content-Security-Policy, which names its style and script by their digests."""
    page = resources.files("longspan.serve").joinpath("playground.html").read_text(encoding="utf-8")
    digests = {}
    for tag in ("style", "script"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests[tag] = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digests['style']}'; script-src 'sha256-{digests['script']}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy


class _Connection(HttpToolsProtocol):
    """A connection that is closed when its client sends headers, or takes what is sent, too slowly."""

    read_timeout: float
    max_connections: int
    gate: _Gate

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self.max_connections:
            idle = [other for other in self.connections if isinstance(other, _Connection) and other._is_idle]
            for other in sorted(idle, key=lambda other: other._since)[:1]:
                other.transport.abort()
                self.connections.discard(other)
        super().connection_made(transport)
        self.gate.crowded = len(self.connections) > self.max_connections
        self._since = self.loop.time()
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(self.read_timeout, transport.abort)
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self.gate.crowded = len(self.connections) > self.max_connections

    def data_received(self, data: bytes) -> None:
        if self._is_idle:
            self._head_bytes += len(data)
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(self.read_timeout, self.transport.abort)
        super().data_received(data)
        if self._is_idle and self._head_bytes > _MAX_HEADERS and not self.transport.is_closing():
            self.send_400_response("The headers are too large.")

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, in OpenAI's shape."""
        body = bytes(_json(APIError(400, msg).body()).body)
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.read_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete


class _DrainingServer(uvicorn.Server):
    """A server that answers what it has accepted before it ends, and refuses what comes meanwhile with 503."""

    def __init__(self, config: uvicorn.Config, model: ServedModel, gate: _Gate) -> None:
        super().__init__(config)
        self._model, self._gate, self._deadline = model, gate, 0.0

    def drain(self, timeout: float) -> None:
        """Begin to end, and cancel what has not ended after `timeout` seconds; at once if called again."""
        if not self._gate.draining:
            logger.info("draining: %d requests are being answered", self._gate.active)
        self._deadline = time.monotonic() + (0 if self._gate.draining else timeout)
        self._gate.draining = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process of the engine."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end."""
        if self._gate.draining and self._gate.active and time.monotonic() > self._deadline:
            logger.warning("%d requests are cancelled", self._gate.active)
            await asyncio.to_thread(self._model.engine.close, drain=False)
            self.should_exit = True
        if self._gate.draining and not self._gate.active:
            self.should_exit = True
        return await super().on_tick(counter)


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(1024)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot listen on {host}:{port}: {why}; choose another --host or --port") from None
    return listening
