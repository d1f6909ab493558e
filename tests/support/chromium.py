"""A headless Chromium, if the machine has one."""

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
)


def chromium():
    """The path of the browser; without one the test is skipped."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("Chromium is not installed (on Debian: apt-get install chromium)")
    return found


def _run(profile: Path, *arguments: str, timeout: float = 90) -> str:
    command = [chromium(), *FLAGS, f"--user-data-dir={profile}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def dom(url, profile, *, milliseconds=2000, flags=()):
    """The page's elements after its scripts have run for a virtual time."""
    text = _run(profile, f"--virtual-time-budget={milliseconds}", "--dump-dom", *flags, str(url))
    return Elements.of(text)


class Elements(HTMLParser):
    """The elements of a page: their names, attributes and texts, in order."""

    def __init__(self):
        super().__init__()
        self.found = []
        self.source = ""

    @classmethod
    def of(cls, text):
        made = cls()
        made.source = text
        made.feed(text)
        return made

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs), []))

    def handle_data(self, data):
        if self.found:
            self.found[-1][2].append(data)

    def all(self, tag, **attributes):
        """The attributes of the elements of a name that have these values; underscores stand for hyphens."""
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        return [own for name, own, _ in self.found if name == tag and wanted.items() <= own.items()]

    def text(self, tag, **attributes):
        """The text directly after the start of the first of these elements."""
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        return next("".join(data) for name, own, data in self.found if name == tag and wanted.items() <= own.items())


def _pipe():
    """A pipe whose descriptors are none of those that a shell redirects."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved


class Browser:
    """A browser that is driven by messages over two pipes, as its developers' protocol describes them.

    Args:
        profile: new folder for its files.
    """

    def __init__(self, profile):
        self._profile = profile
        self._count = 0
        self._buffer = b""
        self.events = []

    def __enter__(self):
        path = chromium()
        there, self._write = _pipe()
        self._read, back = _pipe()
        # The browser reads from descriptor 3 and writes to 4.
        shell = ["bash", "-c", f'exec "$0" "$@" 3<&{there} 4>&{back}', path]
        self._process = subprocess.Popen(
            [*shell, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={self._profile}", "about:blank"],
            pass_fds=(there, back), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(there)
        os.close(back)
        targets = self._send("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self._send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError, AssertionError):
            self._send("Browser.close")
        self._process.kill()
        self._process.wait(timeout=30)
        os.close(self._read)
        os.close(self._write)

    def send(self, method, **parameters):
        """Send a command to the page and return its result."""
        return self._send(method, session=self._session, **parameters)

    def open(self, url):
        """Open a page and wait until it is loaded."""
        self.events.clear()
        self.send("Page.navigate", url=str(url))
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def value(self, expression):
        """The value of an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, *keys):
        """Press keys one after the other."""
        for key in keys:
            code = {"Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "End": 35, "Home": 36, "Escape": 27, "Enter": 13}[key]
            common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
            text = {"text": "\r"} if key == "Enter" else {}
            self.send("Input.dispatchKeyEvent", type="keyDown", **common, **text)
            self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    @property
    def cpu_seconds(self):
        """Processor time of all processes of the browser so far."""
        processes = self._send("SystemInfo.getProcessInfo")["processInfo"]
        return sum(each["cpuTime"] for each in processes)

    @property
    def complaints(self):
        """Errors, warnings and refused resources of the page."""
        found = [event["params"] for event in self.events]
        return [each for each in found if "exceptionDetails" in each or each.get("entry", {}).get("level") == "error"]

    def _send(self, method, *, session=None, **parameters):
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _receive(self, timeout=60):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], timeout)
            assert ready, "the browser does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)
