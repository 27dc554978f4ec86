"""Drive headless Chromium through two pipes, in its own protocol (DevTools): open pages, evaluate, take pictures."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import time
from base64 import b64decode
from contextlib import contextmanager

from .report.test_page_in_browser import FLAGS, browser

SECONDS = 240


class BrowserError(Exception):
    """What the browser answers to a command that failed, or nothing in time."""


class Page:
    """One tab; `console` has the warnings and errors of the page."""

    def __init__(self, reader, writer):
        self.reader, self.writer, self.number, self.buffer = reader, writer, 0, b""
        self.console, self.requests, self.session = [], [], None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method, **parameters):
        """Send a command, and wait for its answer; events that come first are noted."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self.number:
            self._note(answer)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        return answer["result"]

    def _read(self):
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.reader], [], [], max(0, deadline - time.monotonic()))
            received = os.read(self.reader, 1 << 16) if ready else b""
            if not received:
                raise BrowserError(f"the browser did not answer in {SECONDS} s, or has ended")
            self.buffer += received
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event):
        method, content = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.console.append(content["exceptionDetails"])
        elif method == "Log.entryAdded":
            self.console.append(content["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and content["type"] in ("error", "warning"):
            self.console.append(content["args"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(content["request"]["url"])

    def open(self, address, width=1280, height=1000, dark=False):
        """Open an address in a window of this size."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=address)

    def evaluate(self, expression):
        """The value of an expression, awaited if it is a promise."""
        found = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise BrowserError(f"{found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, condition):
        """Wait until an expression is true."""
        deadline = time.monotonic() + SECONDS
        while not self.evaluate(condition):
            if time.monotonic() > deadline:
                raise BrowserError(f"{condition} was not true within {SECONDS} s; console: {self.console}")
            time.sleep(0.05)

    def picture(self, path):
        """Write the whole page as a PNG file."""
        found = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(b64decode(found["data"]))


@contextmanager
def open_browser(folder):
    """Start a browser with a profile of its own; yield a page of it."""
    its_reader, our_writer = os.pipe()
    our_reader, its_writer = os.pipe()
    # Chromium reads from descriptor 3 and writes to 4. Both are copied out of the way first.
    given = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10) for descriptor in (its_reader, its_writer)]

    def place():
        os.dup2(given[0], 3)
        os.dup2(given[1], 4)

    command = [browser(), *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}"]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True, preexec_fn=place, close_fds=False
        )
        for descriptor in (*given, its_reader, its_writer):
            os.close(descriptor)
        try:
            yield Page(our_reader, our_writer)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(our_reader)
            os.close(our_writer)
