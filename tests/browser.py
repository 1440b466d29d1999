"""A headless Chromium, driven by the DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """A page: evaluates scripts and takes screenshots."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest, self._number, self.log = b"", 0, []
        self._session = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str, width: int = 1280, height: int = 800) -> None:
        """Load a page in a window of a size."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str):
        """Return the value of an expression."""
        found = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < deadline, f"{condition} has not become true; {self.log}"
            time.sleep(0.02)

    def screenshot(self, path: Path) -> None:
        """Write a picture of the page."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            parameters = answer.get("params", {})
            level = parameters.get("entry", {}).get("level")
            if answer.get("method") == "Runtime.exceptionThrown" or level in ("warning", "error"):
                self.log.append(parameters)

    def _receive(self):
        while b"\0" not in self._rest:
            chunk = os.read(self._from, 1 << 20)
            assert chunk, "the browser has ended"
            self._rest += chunk
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextmanager
def browser(folder: Path):
    """Yield a `Page` of a new browser, whose files are in `folder`."""
    assert CHROMIUM is not None
    read_by_it, to_browser = os.pipe()
    from_browser, written_by_it = os.pipe()
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={folder}",
    ]  # fmt: skip

    def redirect() -> None:
        # Chromium reads from 3 and writes to 4; the copies may have these numbers already.
        high = [os.dup(read_by_it), os.dup(written_by_it)]
        high = [fd if fd > 4 else os.dup(fd) for fd in high]
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, close_fds=False, preexec_fn=redirect)
    os.close(read_by_it)
    os.close(written_by_it)
    try:
        yield Page(to_browser, from_browser)
    finally:
        process.kill()
        process.wait()
        os.close(to_browser)
        os.close(from_browser)
