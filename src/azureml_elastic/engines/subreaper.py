"""The parent of a program that ends when nothing is left of it: ``python -I -S subreaper.py STARTER COMMAND ...``.

Process groups do not hold all that a program has started: Ray's raylet gives each of its workers one of its own. Nor do
parent ids find it once a parent has ended. This process is therefore a *subreaper*: orphans below it become its
children, so that nothing is left when it has none.

SIGTERM is passed on to the program. Everything is killed when SIGUSR1 comes, or when the process STARTER ends, which
has started this one. The exit code is that of the program; 128 and more for a signal that ended it, as in a shell.

It is run by its path, isolated and without site packages: it imports nothing of this package, and starts in 20 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_SIGNALS = frozenset({signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1})

_REST_SECONDS = 3.0
"""Time that others have when the program has ended by itself: some remove shared memory then, as that of torch's
``file_system`` strategy, which looks every 2 s."""

_NOT_STARTED = 127
"""Exit code of a program that cannot be started, as in a shell."""

_libc = ctypes.CDLL(None)


def main() -> int:
    """Run the program, and return its exit code when nothing is left of it."""
    starter, command = int(sys.argv[1]), sys.argv[2:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # were it ignored, the kernel would not keep exit codes
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # The kernel sends it at the end of the thread that has forked, not of its process: the main thread starts children.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)
    if os.getppid() != starter:  # it has ended before that
        return 128 + signal.SIGKILL
    children = _Children(command)
    children.wait()
    children.kill()
    code = -signal.SIGKILL if children.code is None else children.code
    return 128 - code if code < 0 else code


class _Children:
    """The program, and orphans. One that has ended keeps its id until it is waited for: no other gets its signal."""

    def __init__(self, command: list[str]) -> None:
        self.code: int | None = None
        """The program's exit code once it has ended, negative for a signal."""
        self._program = os.fork()
        if self._program == 0:
            _become(command)

    def wait(self) -> None:
        """Return when what is left is to be killed."""
        while self.code is None:
            received = signal.sigwait(_SIGNALS)
            if received == signal.SIGUSR1:
                return
            if received == signal.SIGTERM:
                os.kill(self._program, signal.SIGTERM)
            else:
                self._reap()
        until = time.monotonic() + (_REST_SECONDS if self.code == 0 else 0.0)
        while self._reap() and (left := until - time.monotonic()) > 0:
            received_then = signal.sigtimedwait(_SIGNALS, left)
            if received_then is not None and received_then.si_signo != signal.SIGCHLD:
                return

    def kill(self) -> None:
        """Kill until no child is left. The children of one that has ended are those of this process from then on."""
        while self._reap():
            killed = refused = 0
            for pid in _find():
                try:
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
                except PermissionError:  # of another user, as by sudo
                    refused += 1
            if killed:
                self._reap(options=0)
            elif refused:
                return

    def _reap(self, options: int = os.WNOHANG) -> bool:
        """Collect the children that have ended, and return whether there are others."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, options))[0] > 0:
                options = os.WNOHANG
                if ended[0] == self._program:
                    self.code = os.waitstatus_to_exitcode(ended[1])
            return True
        return False


def _find() -> Iterator[int]:
    """Find the children of this process. Each is given at once, as one that forks and ends lives a moment only."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - names, not paths
        with contextlib.suppress(OSError):
            if name.isdigit() and _parent_of(name) == os.getpid():
                yield int(name)


def _parent_of(pid: str) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - the import of pathlib takes longer than all others
        return int(file.read().rpartition(b")")[2].split()[1])


def _become(command: list[str]) -> NoReturn:
    """Run the program in this process, in a session of its own: a signal to its group does not reach its parent."""
    try:
        os.setsid()
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # Python ignores SIGPIPE and SIGXFSZ, and what has started this process may ignore SIGTERM.
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.execvp(command[0], command)  # noqa: S606 - it is the user's own, as the words of a command
    except OSError as error:
        print(f"error: {command[0]} cannot be started: {error}", file=sys.stderr, flush=True)
    os._exit(_NOT_STARTED)


if __name__ == "__main__":
    sys.exit(main())
