"""Forks of the tests' servers that end without the interpreter's own teardown.

To free each object of torch's modules copies all memory that a fork shares with its server: 0.37 s of CPU, 40 times
what the fork has cost. What a program can notice of its end stays: threads are waited for, exit handlers run and
streams are flushed. The tests of the preload server and of the fork server, whose subject the end is, use neither of
these forks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from azureml_elastic.forks import script_runner
from azureml_elastic.forks.server import EarlierImports
from azureml_elastic.local import forked_node


def become_node(request: Mapping[str, Any], descriptors: list[int], made: EarlierImports) -> Callable[[], Any]:
    """Become a node or, later, one of its workers; see :func:`azureml_elastic.local.forked_node.become_node`."""
    return leaving(forked_node.become_node(request, descriptors, made))


def leaving(run: Callable[[], Any]) -> Callable[[], Any]:
    """Return a call that ends the process after another one, unless that one raises."""
    return functools.partial(_run_and_leave, run)


def _run_and_leave(run: Callable[[], Any]) -> None:
    try:
        run()
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise  # the interpreter prints the text
        code = end.code or 0
    else:
        code = 0
        script_runner.on_end()
    # In the order of Py_FinalizeEx.
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code & 0xFF)
