"""The command ``python`` of a workspace that forks its nodes: it forks a node, and executes the interpreter otherwise.

It runs in each process that a job's shell starts by that name, without any package, so it imports nothing but the
standard library, and little of that before it is known that a node is to be started. The wrapper of a node waits for
the fork and behaves as it does: it passes its signals on, ends with its exit code or signal, and its own end by SIGKILL
ends the fork.

The wrapper and the listener of the workspace exchange these messages on a ``SOCK_SEQPACKET`` socket::

    wrapper:  -              with descriptors: standard input, output and error
    listener: forked         or the reason why the command must be executed
    wrapper:  15             a signal for the fork
    listener: 143            the exit code, negative for a signal
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

FORKED = "forked"
"""Answer to the wrapper of a node that was forked."""

_ARCHIVE = "azureml_elastic_runtime.pyz"
_MODULE = ["-m", "azureml_elastic.node"]
_MOST_BYTES = 1 << 12


def main(home: str, folder: str, address: str) -> None:
    """Fork a node and wait for it, or execute the interpreter.

    Args:
        home: folder of the interpreters.
        folder: folder of the wrappers, each of which has the name of its interpreter.
        address: address of the listener, in the abstract namespace of UNIX sockets.
    """
    interpreter, words = os.path.join(home, os.path.basename(sys.argv[0])), sys.argv[1:]  # noqa: PTH118, PTH119
    if arguments_of_node(words) is not None:
        _run_forked(address)
    import signal

    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the interpreter would inherit that
        signal.signal(number, signal.SIG_DFL)
    without_wrapper(os.environ, interpreter, folder)  # no package is imported here, each command would wait for it
    os.execv(interpreter, [interpreter, *words])  # noqa: S606


def arguments_of_node(words: list[str]) -> list[str] | None:
    """Return the arguments of the node that the interpreter would start with these words, ``None`` if it is none."""
    if words[:2] == _MODULE:
        return words[2:]
    return words[1:] if words and words[0].endswith(f"/{_ARCHIVE}") else None


def without_wrapper(environ: MutableMapping[str, str], interpreter: str, folder: str) -> None:
    """Change the environment of a wrapper to that of the interpreter."""
    if "PATH" in environ:
        environ["PATH"] = os.pathsep.join(part for part in environ["PATH"].split(os.pathsep) if part != folder)
    if environ.get("_", "").startswith(f"{folder}/"):  # bash sets it to the path of the command
        environ["_"] = interpreter


def _run_forked(address: str) -> None:
    """Have the listener fork this node and end as it ends; return if it must not be forked."""
    import signal
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        try:
            link.connect(f"\0{address}")
            socket.send_fds(link, [b"-"], [0, 1, 2])
            answer = link.recv(_MOST_BYTES).decode()
        except OSError as error:
            answer = f"the workspace cannot be reached: {error.strerror}"
        if answer != FORKED:
            reason = answer or "the workspace is closed"
            os.write(2, f"This node is not forked, its command is started: {reason}.\n".encode())
            return

        def forward(number: int, _frame: object) -> None:
            try:
                link.send(str(number).encode())
            except OSError:  # the fork or the workspace has ended, which is received below
                return

        names = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2")
        for number in map(signal.Signals.__getitem__, names):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, forward)
        try:
            code = int(link.recv(_MOST_BYTES) or -signal.SIGKILL)
        except OSError:
            code = -signal.SIGKILL
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
