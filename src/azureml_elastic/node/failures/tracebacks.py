"""Parser of the traceback that ended a Python program, from its standard error. Pure functions.

It handles the output of the ``traceback`` and ``faulthandler`` modules: chained tracebacks, exception groups, syntax
errors without a header, and stacks of crashed processes. The prefix ``[rank<n>]:`` of torch's exception hook is
removed.
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
"""Line before the traceback of an error that does not end the program."""
_AFTERWARDS = re.compile(
    r"^(?:\[rank\d+\]:\[|\[[EWIF]\d{4} |\[[WE] |Exception ignored |Exception in thread |--- Logging error ---"
    r"|Fatal Python error: |terminate called |\S+:\d+: \w*Warning: |\d{4}-\d\d-\d\d[ T]\d\d:|Exception raised from )"
)
"""Line after the end of an exception's message."""
_FOREIGN = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python\d[\d.]*[/\\]|^<frozen "
    r"|[/\\]azureml_elastic[/\\](?:train|checkpoint|ipc|config|distributed|ledger|node)[/\\]"
)
_MESSAGE_LINES = 40


@dataclass(frozen=True)
class Frame:
    """Stack frame."""

    file: str
    line: int
    function: str = ""

    @property
    def own(self) -> bool:
        """Whether it is code of the program, not of the interpreter, an installed package or this library."""
        return _FOREIGN.search(self.file) is None


@dataclass(frozen=True)
class ExceptionInfo:
    """Exception of a chain.

    Args:
        type: qualified name of the exception type, as printed in the traceback.
        message: text after the type; may have several lines.
        frames: stack frames, outermost first.
        caused: whether it was raised ``from`` the previous exception instead of while handling it.
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
        """The innermost frame of the program's own code, else the innermost frame."""
        own = [frame for frame in self.frames if frame.own]
        return next(reversed(own or self.frames), None)


@dataclass(frozen=True)
class ParsedError:
    """Error in a program's output.

    Args:
        text: complete chain of tracebacks.
        chain: exceptions of the chain; the last one ended the program.
        uncaught: whether torch's exception hook printed it, so that it certainly ended the program.
        harmless: whether it only ended a thread or a destructor.
    """

    text: str
    chain: tuple[ExceptionInfo, ...]
    uncaught: bool = False
    harmless: bool = False


def find_error(text: str) -> ParsedError | None:
    """Return the last error that may have ended the program, ``None`` without a complete traceback."""
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
            raised, at = _read_traceback(lines, at)
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
    return next(reversed([error for error in found if not error.harmless] or found), None)


def find_dump(text: str) -> ParsedError | None:
    """Return the last dump of a crashed process: that of ``faulthandler`` or the message of C++'s ``terminate``."""
    lines = [_PREFIX.sub("", line) for line in text.splitlines()]
    starts = [at for at, line in enumerate(lines) if line.startswith(("Fatal Python error: ", "terminate called "))]
    if not starts:
        return None
    block = lines[starts[-1] : starts[-1] + _MESSAGE_LINES]
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


def _read_traceback(lines: Sequence[str], start: int) -> tuple[ExceptionInfo | None, int]:
    """Return the exception of one traceback, ``None`` if incomplete, and the index of the line after it."""
    if lines[start].startswith("  + "):
        return _read_group(lines, start)
    frames = []
    headless = bool(_BARE_FRAME.match(lines[start]))
    at = start if headless else start + 1
    while at < len(lines) and (lines[at].startswith(" ") or not lines[at]):
        frame = _frame(lines[at])
        if frame is not None:
            frames.append(frame)
        at += 1
    match = _EXCEPTION.match(lines[at]) if at < len(lines) else None
    if match is None or (headless and not _SYNTAX.match(lines[at])):
        return None, start + 1
    message = [match["message"] or ""]
    end = at + 1
    while end < min(len(lines), at + _MESSAGE_LINES):
        line = lines[end]
        if _HEADER.match(line) or _AFTERWARDS.match(line) or line in (_CAUSE, _CONTEXT):
            break
        frame = _frame(line)  # of another process's traceback, which DataLoader includes in the message
        if frame is not None:
            frames.append(frame)
        message.append(line)
        end += 1
    while end > at + 1 and not lines[end - 1]:
        end -= 1
    return ExceptionInfo(match["type"], "\n".join(message).strip(), tuple(frames)), end


def _read_group(lines: Sequence[str], start: int) -> tuple[ExceptionInfo | None, int]:
    """Read an exception group as its first exception, with the frames of the group before its own."""
    end = start + 1
    while end < len(lines) and lines[end].startswith("  "):
        end += 1
    first = next((at for at in range(start, end) if _FIRST.match(lines[at])), end)
    inside = [_MARGIN.sub("", line) for line in lines[start + 1 : first]]
    outer, _ = _read_traceback([lines[start].removeprefix("  + Exception Group "), *inside], 0)
    second = next((at for at in range(first, end) if _SECOND.match(lines[at])), end)
    depth = len(lines[second]) - len(lines[second].lstrip()) if second < end else 0
    inner = find_error("\n".join(line[max(depth, 4) :].removeprefix("| ") for line in lines[first + 1 : second]))
    if inner is None:
        return outer, end
    leaf = inner.chain[-1]
    return replace(leaf, frames=(*(outer.frames if outer else ()), *leaf.frames)), end


def _link(lines: Sequence[str], at: int) -> tuple[str, int]:
    """Return the sentence between two tracebacks and the index of the second one's header, or an empty sentence."""
    rest = [(k, lines[k]) for k in range(at, min(len(lines), at + 5)) if lines[k]][:2]
    if len(rest) == 2 and rest[0][1] in (_CAUSE, _CONTEXT) and _HEADER.match(rest[1][1]):  # noqa: PLR2004
        return rest[0][1], rest[1][0]
    return "", at
