"""The fork server of a workspace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from azureml_elastic.local.fork_server.client import ForkServer, Imports, read_early
from azureml_elastic.local.fork_server.start import ForkStart
from azureml_elastic.testing.jobs.node_environment import inherited_variables

__all__ = ["open_fork_start"]

_IMPORTS = Imports(modules=("azureml_elastic.testing.forks.imports",))


@contextlib.contextmanager
def open_fork_start() -> Iterator[ForkStart]:
    """Yield what forks nodes from one server, which starts with the first of them.

    Nodes with other variables that are read early than those of the first one are refused.
    """
    servers: list[ForkServer] = []

    def server_for(environ: Mapping[str, str]) -> ForkServer:
        if not servers:
            # Forks show in /proc the environment that the server was started with: not what belongs to one job.
            servers.append(ForkServer(_IMPORTS, {**inherited_variables(), **read_early(environ)}))
        return servers[0]

    try:
        yield ForkStart(server_for)
    finally:
        for server in servers:
            server.close()
