"""Parser of the error that ended a Python program, from its standard error. Pure functions.

The forms are those of the interpreter's ``traceback`` and ``faulthandler`` modules: a chain of tracebacks joined by two
well-known sentences, exception groups in a margin of bars, a syntax error without a header, and the stacks of a process
that crashed. torch's exception hook puts ``[rank<n>]:`` before each line, which is taken off.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["ExceptionInfo", "Frame", "ParsedError", "find_dump", "find_error"]

_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_HEADER = re.compile(r"^(?:  \+ Exception Group )?Traceback \(most recent call last\):$")
_FRAME = re.compile(r'^\s*File "(?P<file>.+?)", line (?P<line>\d+)(?:,? in (?P<function>.+))?$')
_BARE_FRAME = re.compile(r'^  File ".+", line \d+$')
_EXCEPTION = re.compile(r"^(?P<type>[^\W\d][\w.<>]*)(?::(?: (?P<message>.*))?)?$")
_SYNTAX = re.compile(r"^(?:SyntaxError|IndentationError|TabError)\b")
_CAUSE = "The above exception was the direct cause of the following exception:"
_CONTEXT = "During handling of the above exception, another exception occurred:"
_MARGIN = re.compile(r"^ *[|+] ?")
_SECOND = re.compile(r"^ *\+-+ 2 -+$")
_FIRST = re.compile(r"^ *\+-\+-+ 1 -+$")
_HARMLESS = re.compile(
    r"^(?:Exception ignored (?:in|while|on)|Exception in (?:thread|callback)|--- Logging error ---|Process \S+:$"
    r"|Task exception was never retrieved|future: |Traceback of \w+ thread)"
)
"""The line before the traceback of an error that does not end the program."""
_AFTERWARDS = re.compile(
    r"^(?:\[rank\d+\]:\[|\[[EWIF]\d{4} |\[[WE] |Exception ignored |Exception in thread |--- Logging error ---"
    r"|Fatal Python error: |terminate called |\S+:\d+: \w*Warning: |\d{4}-\d\d-\d\d[ T]\d\d:|Exception raised from )"
)
"""A line that is no part of the exception's message any more."""
_FOREIGN = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python\d[\d.]*[/\\]|^<frozen "
    r"|[/\\]azureml_elastic[/\\](?:train|checkpoint|ipc|config|distributed|ledger|node)[/\\]"
)
_MESSAGE_LINES = 40


@dataclass(frozen=True)
class Frame:
    """A line of code that was being run."""

    file: str
    line: int
    function: str = ""

    @property
    def own(self) -> bool:
        """Whether it is the program's own code: neither the interpreter's library, nor an installed package, nor us."""
        return _FOREIGN.search(self.file) is None


@dataclass(frozen=True)
class ExceptionInfo:
    """One exception of a chain.

    Args:
        type: qualified name of the exception type, as printed in the traceback.
        message: text after the type; may have several lines.
        frames: stack frames, outermost first.
        caused: whether it was raised ``from`` the one before; otherwise it was raised while that one was handled.
    """

    type: str
    message: str = ""
    frames: tuple[Frame, ...] = ()
    caused: bool = False

    @property
    def name(self) -> str:
        """The type without its module."""
        return self.type.rpartition(".")[2]

    @property
    def where(self) -> Frame | None:
        """The innermost frame in the program's own code, else the innermost one."""
        own = [frame for frame in self.frames if frame.own]
        best = own or self.frames
        return best[-1] if best else None


@dataclass(frozen=True)
class ParsedError:
    """An error as the program printed it.

    Args:
        text: the whole chain of tracebacks.
        chain: its exceptions; the last one is what ended the program.
        uncaught: whether torch's exception hook printed it, so that it surely ended the program.
        harmless: whether the interpreter says that it ended no more than a thread or a destructor.
    """

    text: str
    chain: tuple[ExceptionInfo, ...]
    uncaught: bool = False
    harmless: bool = False


def find_error(text: str) -> ParsedError | None:
    """Return the last error that may have ended the program, ``None`` where there is no whole traceback."""
    raw = text.splitlines()
    lines = [_PREFIX.sub("", line) for line in raw]
    found: list[ParsedError] = []
    at = 0
    while at < len(lines):
        if not (_HEADER.match(lines[at]) or _BARE_FRAME.match(lines[at])):
            at += 1
            continue
        start, chain, caused = at, [], False
        while True:
            raised, at = _one(lines, at)
            if raised is None:
                break
            chain.append(replace(raised, caused=caused))
            link, following = _link(lines, at)
            if not link:
                break
            caused, at = link == _CAUSE, following
        if chain:
            before = next((line for line in reversed(lines[max(0, start - 2) : start]) if line), "")
            error = "\n".join(lines[start:at]).strip("\n")
            uncaught = bool(_PREFIX.match(raw[start]))
            found.append(ParsedError(error, tuple(chain), uncaught=uncaught, harmless=bool(_HARMLESS.match(before))))
    fatal = [error for error in found if not error.harmless]
    best = fatal or found
    return best[-1] if best else None


def find_dump(text: str) -> ParsedError | None:
    """Return the last output of a process ended by a signal: ``faulthandler``'s dump or C++'s ``terminate`` message."""
    lines = [_PREFIX.sub("", line) for line in text.splitlines()]
    for at in range(len(lines) - 1, -1, -1):
        if lines[at].startswith(("Fatal Python error: ", "terminate called ")):
            block = lines[at : at + _MESSAGE_LINES]
            break
    else:
        return None
    what = next((line.strip().removeprefix("what():").strip() for line in block if "what():" in line), "")
    current = next((k for k, line in enumerate(block) if line.startswith(("Current thread ", "Thread "))), len(block))
    frames = []
    for line in block[current + 1 :]:
        frame = _frame(line)
        if frame is None:
            break
        frames.append(frame)
    message = f"{block[0]} {what}".strip()
    return ParsedError("\n".join(block).strip("\n"), (ExceptionInfo("", message, tuple(reversed(frames))),))


def _frame(line: str) -> Frame | None:
    match = _FRAME.match(line)
    return Frame(match["file"], int(match["line"]), match["function"] or "") if match else None


def _one(lines: Sequence[str], start: int) -> tuple[ExceptionInfo | None, int]:
    """Read one traceback; return its exception, if it is whole, and the index of the line after it."""
    if lines[start].startswith("  + "):
        return _group(lines, start)
    frames = []
    at = start if _BARE_FRAME.match(lines[start]) else start + 1
    while at < len(lines) and (lines[at].startswith(" ") or not lines[at]):
        frame = _frame(lines[at])
        if frame is not None:
            frames.append(frame)
        at += 1
    match = _EXCEPTION.match(lines[at]) if at < len(lines) else None
    headless = bool(_BARE_FRAME.match(lines[start]))
    if match is None or (headless and not _SYNTAX.match(lines[at])):
        return None, start + 1
    message = [match["message"] or ""]
    end = at + 1
    while end < min(len(lines), at + _MESSAGE_LINES):
        line = lines[end]
        if _HEADER.match(line) or _AFTERWARDS.match(line) or line in (_CAUSE, _CONTEXT):
            break
        frame = _frame(line)  # the traceback of another process, as DataLoader passes it on
        if frame is not None:
            frames.append(frame)
        message.append(line)
        end += 1
    while end > at + 1 and not lines[end - 1]:
        end -= 1
    return ExceptionInfo(match["type"], "\n".join(message).strip(), tuple(frames)), end


def _group(lines: Sequence[str], start: int) -> tuple[ExceptionInfo | None, int]:
    """Read an exception group: its own frames, and the first of its exceptions, which stands for all."""
    end = start + 1
    while end < len(lines) and lines[end].startswith("  "):
        end += 1
    first = next((at for at in range(start, end) if _FIRST.match(lines[at])), end)
    outer, _ = _one([lines[start].removeprefix("  + Exception Group "), *_inside(lines[start + 1 : first])], 0)
    second = next((at for at in range(first, end) if _SECOND.match(lines[at])), end)
    depth = len(lines[second]) - len(lines[second].lstrip()) if second < end else 0
    inner = find_error("\n".join(line[max(depth, 4) :].removeprefix("| ") for line in lines[first + 1 : second]))
    if inner is None:
        return outer, end
    leaf = inner.chain[-1]
    return replace(leaf, frames=(*(outer.frames if outer else ()), *leaf.frames)), end


def _inside(lines: Sequence[str]) -> list[str]:
    return [_MARGIN.sub("", line) for line in lines]


def _link(lines: Sequence[str], at: int) -> tuple[str, int]:
    """Return the sentence that joins two tracebacks and the index of the second one's header, or nothing."""
    rest = [(k, lines[k]) for k in range(at, min(len(lines), at + 5)) if lines[k]][:2]
    if len(rest) == 2 and rest[0][1] in (_CAUSE, _CONTEXT) and _HEADER.match(rest[1][1]):  # noqa: PLR2004
        return rest[0][1], rest[1][0]
    return "", at
