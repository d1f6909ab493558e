"""How the workers' output gets to the console."""

from __future__ import annotations

import contextlib
import errno
import io
import time

import pytest

from azureml_elastic.node.agent.worker_output import OutputCopier


def copied(tmp_path, *writes: bytes, console=None) -> str:
    """Return what is on the console after these writes of one worker."""
    path = tmp_path / "stdout.log"
    console = io.StringIO() if console is None else console
    with path.open("wb", buffering=0) as file:
        copier = OutputCopier([(path, "[0]: ", console)])
        for data in writes:
            file.write(data)
        copier.close()
    return console.getvalue()


@pytest.mark.parametrize(
    ("writes", "expected"),
    [
        ((), ""),
        ((b"one\ntwo\n",), "[0]: one\n[0]: two\n"),
        ((b"without an end",), "[0]: without an end\n"),
        ((b"in two ", b"parts\n"), "[0]: in two parts\n"),
        ((b"\r 10%\r 20%\r100%\n",), "[0]: \n[0]:  10%\n[0]:  20%\n[0]: 100%\n"),
        ((b"dos\r", b"\nline\r\n"), "[0]: dos\n[0]: line\n"),
        (("h\u00e9".encode()[:2], "h\u00e9".encode()[2:] + b"\n"), "[0]: h\u00e9\n"),
        ((b"bad \xff byte\n",), "[0]: bad \ufffd byte\n"),
        ((b"\n\n",), "[0]: \n[0]: \n"),
        pytest.param((b"x" * 3_000_000 + b"\nend",), f"[0]: {'x' * 3_000_000}\n[0]: end\n", id="a long line"),
    ],
)
def test_lines_get_their_prefix(tmp_path, writes, expected):
    assert copied(tmp_path, *writes) == expected


def test_a_prompt_is_shown_while_its_worker_waits(tmp_path):
    path = tmp_path / "stdout.log"
    console = io.StringIO()
    path.write_text("continue? ")
    copier = OutputCopier([(path, "[0]: ", console)])
    until = time.monotonic() + 60
    while not console.getvalue():
        assert time.monotonic() < until
        time.sleep(0.01)
    assert console.getvalue() == "[0]: continue? \n"
    copier.close()


def test_lines_of_several_workers_stay_whole(tmp_path):
    console = io.StringIO()
    paths = [tmp_path / str(number) for number in range(4)]
    for path in paths:
        path.touch()
    copier = OutputCopier([(path, f"[{path.name}]: ", console) for path in paths])
    files = [path.open("ab", buffering=0) for path in paths]
    for number in range(100):
        for file in files:
            file.write(b"line ")
            file.write(b"%d\n" % number)
    copier.close()
    for file in files:
        file.close()
    lines = console.getvalue().splitlines()
    for path in paths:
        assert [line for line in lines if line.startswith(f"[{path.name}]")] == [
            f"[{path.name}]: line {number}" for number in range(100)
        ]
    assert len(lines) == 400


def test_a_console_that_lacks_a_character_gets_its_escape(tmp_path):
    raw = io.BytesIO()

    class Console(io.TextIOWrapper):
        def getvalue(self):
            return raw.getvalue().decode("ascii")

    assert copied(tmp_path, "h\u00e9\n".encode(), console=Console(raw, "ascii")) == "[0]: h\\xe9\n"


def test_a_closed_console_does_not_end_the_copying_of_others(tmp_path):
    closed, other = io.StringIO(), io.StringIO()
    closed.close()
    paths = [tmp_path / "out", tmp_path / "err"]
    for path in paths:
        path.write_text("text\n")
    OutputCopier([(paths[0], "", closed), (paths[1], "", other)]).close()
    assert other.getvalue() == "text\n"


class Stream(io.StringIO):
    """A console that takes what its encoding allows, like a stream of Python's, and may be out of order at first."""

    def __init__(self, encoding, *errors):
        super().__init__()
        self._name, self._errors = encoding, list(errors)

    @property
    def encoding(self):
        return self._name

    def write(self, text):
        if self._errors:
            raise self._errors.pop(0)
        with contextlib.suppress(LookupError):
            text.encode(self._name)
        return super().write(text)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1", "utf-16", "hex", "no such encoding"])
def test_no_encoding_of_the_console_ends_the_copying(tmp_path, encoding):
    console = Stream(encoding)
    text = "caf\u00e9 \u4f60 \U0001f600 \x00\n" * 2
    assert copied(tmp_path, text.encode(), console=console).count("[0]: caf") == 2


def test_a_console_on_a_full_disk_gets_the_lines_that_come_after(tmp_path):
    console = Stream("utf-8", OSError(errno.ENOSPC, "No space left on device"))
    path = tmp_path / "stdout.log"
    path.write_bytes(b"lost\n")
    copier = OutputCopier([(path, "", console)])
    until = time.monotonic() + 60
    while console._errors:
        assert time.monotonic() < until
        time.sleep(0.01)
    with path.open("ab") as file:
        file.write(b"later\n")
    copier.close()
    assert console.getvalue() == "later\n"
