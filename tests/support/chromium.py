"""A headless Chromium, if the machine has one."""

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

__all__ = ["Elements", "chromium", "dom", "screenshot"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium():
    """The path of the browser; without one the test is skipped."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("Chromium is not installed (on Debian: apt-get install chromium)")
    return found


def _run(profile: Path, *arguments: str, timeout: float = 90) -> str:
    command = [
        chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-extensions", "--disable-background-networking", f"--user-data-dir={profile}", *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def dom(url, profile, *, milliseconds=2000, flags=()):
    """The page's elements after its scripts have run for a virtual time."""
    text = _run(profile, f"--virtual-time-budget={milliseconds}", "--dump-dom", *flags, str(url))
    return Elements.of(text)


def screenshot(url, path, profile, *, width=1200, height=2000, flags=()):
    """Write a picture of the page to a file."""
    _run(profile, "--hide-scrollbars", f"--window-size={width},{height}", f"--screenshot={path}", *flags, str(url))


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
