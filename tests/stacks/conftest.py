"""What the tests of all stacks share."""

from __future__ import annotations

import functools

import pytest

from tests.support.stacks import run_stock


@pytest.fixture(scope="module")
def run_script(request):
    """Return a function that runs the module's script on nodes that are forked from a server.

    A server has imported the stack for all tests of a process: what the script imports, or the module's ``IMPORTS``.
    """
    return functools.partial(run_stock, request.module.SCRIPT, imports=getattr(request.module, "IMPORTS", None))


@pytest.fixture(scope="module")
def undisturbed(request, run_script, tmp_path_factory):
    """A run of the module's script without pauses and faults, on the module's ``NODES`` if it has them."""
    nodes = getattr(request.module, "NODES", (1, 3))
    return run_script(tmp_path_factory.mktemp("undisturbed") / "run", "--pause", "0", nodes=nodes)
