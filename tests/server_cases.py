"""What tests of the HTTP server share."""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx

from longspan.serve import Engine
from longspan.serve.api_server import APIServer, ServerOptions
from longspan.serve.serving_completion import ServedModel
from longspan.serve.state_store import StateStore


@contextmanager
def serving(model, states: Path, *, template=None, ends=None, limits=None, budget=1 << 30, engine=None, **options):
    """Serve a model from a thread; yields the server, its engine, its address and a client."""
    made = Engine(model, **(engine or {}))
    served = ServedModel(made, "tiny", StateStore(states, made, budget), template=template, ends=ends, limits=limits)
    server = APIServer(served, ServerOptions(port=0, **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    url = f"http://127.0.0.1:{server.port}"
    try:
        with httpx.Client(base_url=url, timeout=60, verify=False) as client:
            while client.get("/health").status_code not in (200, 401):
                pass

            def active() -> int:
                """Return the number of requests for completions that are being answered."""
                return int(re.search(r"^longspan_num_requests_active (\d+)$", client.get("/metrics").text, re.M)[1])

            yield SimpleNamespace(
                server=server, served=served, engine=made, url=url, client=client, active=active, thread=thread
            )
    finally:
        server.stop(timeout=0)
        thread.join(30)
        assert not thread.is_alive()
