"""Start of the preload server, before the plan is validated and the table open."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from azureml_elastic.environment import names as variables
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.forks.client import PreloadServer
from azureml_elastic.program.command import Program


def start_early(
    program: Program, environment: NodeEnvironment, start: Callable[..., PreloadServer] = PreloadServer
) -> PreloadServer | None:
    """Start the preload server as far as the plan can be read without its models.

    Args:
        start: function that starts the preload server, with the arguments of :class:`PreloadServer`.

    Returns:
        The server, or ``None`` where the plan does without one or does not say; it is validated later.
    """
    try:
        plan = json.loads(environment.variables[variables.PLAN])
        distribution = plan["distribution"]
        wanted = distribution["preload_workers"] and distribution["framework"] == "pytorch"
        secret = plan["rendezvous"]["connection_string_variable"]
    except (KeyError, TypeError, ValueError):
        return None
    if not wanted:
        return None
    # The workers are forks and could read the server's first environment, so that has no secret in it. Whether they get
    # the variable is decided once the table is open.
    withheld = {secret, variables.AZURE_STORAGE_CONNECTION_STRING}
    return start(program, {name: value for name, value in environment.variables.items() if name not in withheld})


def begin_preload(
    early: PreloadServer | None,
    program: Program,
    environ: Mapping[str, str],
    start: Callable[..., PreloadServer] = PreloadServer,
) -> PreloadServer:
    """Give the preload server the workers' environment, in a new process where the early one does not suit.

    Args:
        start: function that starts the preload server, with the arguments of :class:`PreloadServer`.
    """
    server = early
    if early is not None and not early.suits(program, environ):
        early.close()
        server = None
    if server is None:
        server = start(program, environ)
    server.begin(environ)
    return server
