"""A node in which the start of one thread fails once, as at the limit of a container's processes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from azureml_elastic.forks.server import EarlierImports
from azureml_elastic.local.forked_node import become_node
from tests.support.leaving import leaving

THREADS = "TEST_FAILING_THREADS"
"""Numbers of the threads whose start fails, counted from 1 in the order of their starts."""


def become_failing_node(request: Mapping[str, Any], descriptors: list[int], made: EarlierImports) -> Callable[[], Any]:
    """Become a node; or its worker; see :func:`tests.support.leaving.become_node`."""
    run = become_node(request, descriptors, made)
    start, begun = threading.Thread.start, [0]
    failing = {int(number) for number in os.environ.get(THREADS, "").split()}

    def start_or_fail(thread: threading.Thread) -> None:
        begun[0] += sys.orig_argv[1:3] == ["-m", "azureml_elastic.node"]  # the process may be that of a worker
        if begun[0] in failing:
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = start_or_fail  # type: ignore[method-assign]
    return leaving(run)
