"""Import of a package in a fork of the preload server, which shows whether the server can import it too."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal

from azureml_elastic.node.preload.fork_safety import trial_fork
from azureml_elastic.node.preload.import_loader import watched

__all__ = ["Rehearsal"]

_PR_SET_PDEATHSIG = 1


class Rehearsal:
    """A process that imports a package and ends.

    Args:
        package: package

    Attributes:
        package: package
    """

    def __init__(self, package: str) -> None:
        self.package = package
        self._process = os.fork()
        if self._process == 0:
            succeeded = False
            try:
                succeeded = _import_safely(package)
            finally:
                os._exit(0 if succeeded else 1)

    def result(self) -> bool | None:
        """Return whether the import has succeeded and left this process fit for forks; ``None`` while it goes on."""
        process, status = os.waitpid(self._process, os.WNOHANG)
        return None if process == 0 else status == 0


def _import_safely(package: str) -> bool:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the server's handler waits for workers, which are not this one's
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    with watched(os.environ) as read:
        importlib.import_module(package)
    return not read and trial_fork() is None
