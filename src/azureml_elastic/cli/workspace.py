"""``azureml-elastic workspace``: an Azure ML workspace on this machine, to which any client can submit."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from azureml_elastic.cli.failures import explained, require
from azureml_elastic.cli.workspaces import current_workspace
from azureml_elastic.config.exit_codes import FAILED
from azureml_elastic.environment.user import UserEnvironment
from azureml_elastic.errors import UsageError

if TYPE_CHECKING:
    from azureml_elastic.testing import LocalWorkspace

workspace = typer.Typer(help="An Azure ML workspace on this machine that runs what is submitted.", no_args_is_help=True)

PoolOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pool",
        help="A compute: spot=6, sure=2:dedicated, sure=2:dedicated:5s. By default cluster=8 and spot-cluster=8.",
    ),
]
EvictOption = Annotated[
    list[str] | None, typer.Option("--evict", help="Evict a node: 1@20s, 1@step:30, 1@step:30/0s (no notice).")
]

_CONFIG = Path("config.json")
_SOURCE = Path("workspace.sh")


@workspace.command(context_settings={"allow_interspersed_args": False})
@explained()
def start(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="A command to run in the workspace, which is open until its jobs end; else until Ctrl-C."),
    ] = None,
    pool: PoolOption = None,
    evict: EvictOption = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="A file of evictions: lines of seconds,node or seconds,node,notice.")
    ] = None,
    requeue: Annotated[
        bool, typer.Option("--requeue", help="Start preempted jobs again, as Azure documents, instead of failing them.")
    ] = False,
    folder: Annotated[Path | None, typer.Option("--folder", help="Keep all files here.")] = None,
    shell: Annotated[
        bool, typer.Option("--shell", help="Open a shell in the workspace, which closes with it.")
    ] = False,
) -> None:
    """Start a workspace, for one command and the jobs that it submits, or until Ctrl-C.

    While it is open, this folder has config.json, which names the workspace, and workspace.sh, with which another shell
    connects to it: '. ./workspace.sh'. A command, and the shell of --shell, are connected already.
    """
    require(("azure.ai.ml", "azure-ai-ml", "submit"), ("torch", "torch", "node"), ("psutil", "psutil", "node"))
    if shell and command:
        raise UsageError("--shell and a command cannot be combined. Give one of them.")
    if shell:
        command = [UserEnvironment.read().shell]
    taken = [path.absolute() for path in (_CONFIG, _SOURCE) if path.exists()]
    if taken and not command:
        raise UsageError(
            f"{taken[0]} exists already and would be overwritten. Move it away, or start the workspace in "
            "another folder."
        )

    from azureml_elastic.testing import LocalWorkspace
    from azureml_elastic.testing.jobs.machines import parse_eviction, parse_pool, read_trace

    evictions = [*map(parse_eviction, evict or ()), *(read_trace(trace) if trace is not None else ())]
    pools = dict(map(parse_pool, pool)) if pool else None
    with LocalWorkspace(pools=pools, evictions=evictions, requeue=requeue, folder=folder) as local, _files(local):
        code = _stay() if not command else _run(command, local)
        if command and not shell:
            code = finish(code, local, kept=folder is not None)
    sys.exit(code)


@workspace.command()
@explained()
def trigger(schedule: Annotated[str, typer.Argument(help="Name of an enabled schedule.", metavar="SCHEDULE")]) -> None:
    """Submit the job of a schedule once, now, and print its name.

    A workspace on this machine submits the jobs of its schedules in no other way.
    """
    require(("azure.ai.ml", "azure-ai-ml", "submit"))
    from azureml_elastic.submit.client import connect, readable_errors

    found = current_workspace()
    with readable_errors(f"trigger the schedule {schedule!r}"):
        triggered = connect(found.subscription, found.group, found.name).schedules.trigger(schedule)
    typer.echo(triggered.job_name)


@contextlib.contextmanager
def _files(local: LocalWorkspace) -> Iterator[None]:
    """Write the files by which other processes find the workspace, and remove them at the end.

    Existing ones are kept: the variables of a command take precedence for the command line of this library.
    """
    lines = [f"export {name}={shlex.quote(value)}" for name, value in local.variables.items()]
    texts = {_CONFIG: json.dumps(dict(local.config), indent=1), _SOURCE: "\n".join(lines)}
    written = [path for path in texts if not path.exists()]
    try:
        for path in written:
            path.write_text(f"{texts[path]}\n", encoding="utf-8")
        yield
    finally:
        for path in written:
            path.unlink(missing_ok=True)


def _run(command: list[str], local: LocalWorkspace) -> int:
    try:
        return subprocess.run(command, check=False, env=UserEnvironment.read().for_child(local.variables)).returncode
    except OSError as error:
        raise UsageError(f"{shlex.join(command)} cannot be started: {error}.") from error


def finish(code: int, local: LocalWorkspace, *, kept: bool) -> int:
    """Wait for the jobs that a command has submitted, and return the exit code of both.

    Jobs of a command that has failed are not waited for: nobody knows what it has left behind.
    """
    active = local.active
    if code:
        for name in active:
            typer.echo(f"azureml-elastic: {name} is cancelled, as the command has failed ({code}).", err=True)
        return code
    if active:
        typer.echo(
            f"azureml-elastic: waiting for {', '.join(active)}. Ctrl-C cancels and closes the workspace. To follow it "
            f"from another shell: cd {shlex.quote(str(Path.cwd()))} && . ./{_SOURCE} && "
            f"azureml-elastic status --watch {active[0]}",
            err=True,
        )
    ended: dict[str, str] = {}
    while active:  # a run's nodes submit further jobs, so the last one is known when none is left
        for name in active:
            ended[name] = local.wait(name)
            _tell(name, ended[name], kept=kept)
        active = local.active
    failed = local.failed
    for name in failed.keys() - ended.keys():  # of which the command itself has seen the end
        _tell(name, failed[name], kept=kept)
    return FAILED if failed else 0


def _tell(name: str, status: str, *, kept: bool) -> None:
    hint = "" if kept or status == "Completed" else ". Its logs go with the workspace; --folder keeps them"
    typer.echo(f"azureml-elastic: {name}: {status}{hint}", err=True)


def _stay() -> int:
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    typer.echo(f". {shlex.quote(str(_SOURCE.absolute()))}")
    typer.echo("# The workspace is open until Ctrl-C; another shell connects to it with this line.", err=True)
    with contextlib.suppress(KeyboardInterrupt):
        while not ended.wait(1):
            pass
    return 0
