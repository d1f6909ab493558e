"""Tracebacks in a program's output: that of the ``traceback`` and ``faulthandler`` modules, and of C++'s ``terminate``.

Chained tracebacks, syntax errors without a header, and stacks of crashed processes. The prefix ``[rank<n>]:`` of
torch's exception hook is removed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_HEADER = r"Traceback \(most recent call last\):$"
_FRAME = re.compile(r'^\s*File "(?P<file>.+?)", line (?P<line>\d+)(?:,? in (?P<function>.+))?$')
_LINE = r"(?: .*)?\n"
_TRACEBACK = re.compile(
    rf'^(?:(?P<header>{_HEADER})\n|(?=  File ".+", line \d+\n))'
    # The lookahead makes the group atomic: without it, a long output of such lines would be tried in all partitions.
    rf"(?=(?P<stack>(?(header)(?:{_LINE})*|(?:{_LINE}){{1,9}})))(?P=stack)"
    r"(?P<type>(?(header)[^\W\d][\w.<>]*|(?:SyntaxError|IndentationError|TabError)))(?::(?: (?P<message>.*))?)?$",
    re.MULTILINE,
)
"""A traceback with the first line of its exception's message; that of a script's syntax error has no header."""
_CAUSE = "The above exception was the direct cause of the following exception:"
_CONTEXT = "During handling of the above exception, another exception occurred:"
_LINK = re.compile(rf"\n+({_CAUSE}|{_CONTEXT})\n+(?={_HEADER})", re.MULTILINE)
_HARMLESS = re.compile(
    r"^(?:Exception ignored (?:in|while|on)|Exception in (?:thread|callback)|--- Logging error ---|Process \S+:$"
    r"|Task exception was never retrieved|future: |Traceback of \w+ thread)"
)
"""Line before the traceback of an error that does not end the program."""
_MESSAGE_LINES = 40
_AFTERWARDS = (
    r"\[rank\d+\]:\[|\[[EWIF]\d{4} |\[[WE] |Exception ignored |Exception in thread |--- Logging error ---"
    r"|Fatal Python error: |terminate called |\S+:\d+: \w*Warning: |\d{4}-\d\d-\d\d[ T]\d\d:|Exception raised from "
)
"""Beginning of a line after the end of an exception's message."""
_MESSAGE = re.compile(
    rf"(?:\n(?!{_HEADER}|{_CAUSE}$|{_CONTEXT}$|{_AFTERWARDS}).*){{0,{_MESSAGE_LINES - 1}}}", re.MULTILINE
)
_FOREIGN = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python\d[\d.]*[/\\]|^<frozen "
    r"|[/\\]azureml_elastic[/\\](?:train|checkpoint|ipc|config|distributed|ledger|node)[/\\]"
)


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
    """Error in a program's output or error file.

    Args:
        text: complete chain of tracebacks.
        chain: exceptions of the chain; the last one ended the program.
        uncaught: whether an exception hook has seen it, so that it certainly ended the program: the one of a worker or
            that of torch.
        harmless: whether it only ended a thread or a destructor.
    """

    text: str
    chain: tuple[ExceptionInfo, ...]
    uncaught: bool = False
    harmless: bool = False


def find_error(text: str) -> ParsedError | None:
    """Return the last error that may have ended the program, ``None`` without a complete traceback."""
    raw = text.splitlines()
    text = "\n".join(_PREFIX.sub("", line) for line in raw)
    found: list[ParsedError] = []
    end = 0
    while (first := _TRACEBACK.search(text, end)) is not None:
        chain: list[ExceptionInfo] = []
        match: re.Match[str] | None = first
        caused = False
        while match is not None:
            more = _MESSAGE.match(text, match.end())[0].rstrip("\n")  # type: ignore[index] # it matches nothing, too
            end = match.end() + len(more)
            # Frames of another process's traceback, too, which DataLoader includes in the message.
            frames = map(frame_in, f"{match['stack']}{more}".split("\n"))
            message = f"{match['message'] or ''}{more}".strip()
            chain.append(ExceptionInfo(match["type"], message, tuple(filter(None, frames)), caused))
            link = _LINK.match(text, end)
            caused = link is not None and link[1] == _CAUSE
            match = link and _TRACEBACK.match(text, link.end())
        at = text.count("\n", 0, first.start())
        before = next((line for line in (raw[at - 1], raw[at - 2]) if line), "") if at > 1 else raw[0] * at
        harmless = _HARMLESS.match(_PREFIX.sub("", before)) is not None
        error = text[first.start() : end].strip("\n")
        found.append(ParsedError(error, tuple(chain), uncaught=bool(_PREFIX.match(raw[at])), harmless=harmless))
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
        frame = frame_in(line)
        if frame is None:
            break
        frames.append(frame)
    message = f"{block[0]} {what}".strip()
    return ParsedError("\n".join(block).strip("\n"), (ExceptionInfo("", message, tuple(reversed(frames))),))


def frame_in(line: str) -> Frame | None:
    """Return the frame that a line of a traceback names, ``None`` if it is no such line."""
    match = _FRAME.match(line)
    return Frame(match["file"], int(match["line"]), match["function"] or "") if match else None
