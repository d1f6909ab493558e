"""``azureml-elastic workspace``: an Azure ML workspace on this machine, to which any client can submit."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from azureml_elastic.cli.failures import explained, require
from azureml_elastic.errors import UsageError

if TYPE_CHECKING:
    from azureml_elastic.testing import LocalWorkspace

__all__ = ["workspace"]

workspace = typer.Typer(help="An Azure ML workspace on this machine that runs what is submitted.", no_args_is_help=True)

_CONFIG = Path("config.json")


@workspace.command(context_settings={"allow_interspersed_args": False})
@explained()
def start(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="A command to run in the workspace, which closes with it; else it is open until Ctrl-C."),
    ] = None,
    pool: Annotated[
        list[str] | None,
        typer.Option("--pool", help="A compute: spot=6, sure=2:dedicated, sure=2:dedicated:5s. By default cluster=8."),
    ] = None,
    evict: Annotated[
        list[str] | None, typer.Option("--evict", help="Evict a node: 1@20s, 1@step:30, 1@step:30/0s (no notice).")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="A file of evictions: lines of seconds,node or seconds,node,notice.")
    ] = None,
    requeue: Annotated[
        bool, typer.Option("--requeue", help="Start preempted jobs again, as Azure documents, instead of failing them.")
    ] = False,
    folder: Annotated[Path | None, typer.Option("--folder", help="Keep all files here.")] = None,
) -> None:
    """Start a workspace; write config.json and print the variables that connect a client to it."""
    require(("azure.ai.ml", "azure-ai-ml", "submit"), ("torch", "torch", "node"), ("psutil", "psutil", "node"))
    if command is None and _CONFIG.exists():
        raise UsageError(
            f"{_CONFIG.absolute()} exists already and would be overwritten. Move it away, or start the workspace "
            "in another folder."
        )

    from azureml_elastic.testing import LocalWorkspace
    from azureml_elastic.testing.jobs.evictions import parse_eviction, read_trace
    from azureml_elastic.testing.jobs.machines import parse_pool

    evictions = [*map(parse_eviction, evict or ()), *(read_trace(trace) if trace is not None else ())]
    pools = dict(map(parse_pool, pool)) if pool else None
    with LocalWorkspace(pools=pools, evictions=evictions, requeue=requeue, folder=folder) as local:
        code = _run(command) if command else _stay(local)
    sys.exit(code)


def _run(command: list[str]) -> int:
    """Run a command in this process's environment, which routes it to the open workspace."""
    try:
        return subprocess.run(command, check=False).returncode
    except OSError as error:
        raise UsageError(f"{shlex.join(command)} cannot be started: {error}.") from error


def _stay(local: LocalWorkspace) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        _CONFIG.write_text(json.dumps(dict(local.config), indent=1) + "\n", encoding="utf-8")
        for name, value in local.variables.items():
            typer.echo(f"export {name}={shlex.quote(value)}")
        typer.echo("# The workspace is open until Ctrl-C; another shell connects to it with these lines.", err=True)
        while not ended.wait(1):
            pass
    except KeyboardInterrupt:
        pass
    finally:
        _CONFIG.unlink(missing_ok=True)
    return 0
