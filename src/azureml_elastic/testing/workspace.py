"""An Azure ML workspace on this machine, to which the real ``MLClient`` submits and which runs the submitted jobs."""

from __future__ import annotations

import contextlib
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from azureml_elastic.config.base import positive_duration
from azureml_elastic.environment.names import FIRST_JOB
from azureml_elastic.environment.process import changed
from azureml_elastic.environment.user import UserEnvironment
from azureml_elastic.errors import UsageError, needs_extra
from azureml_elastic.ledger.summary import Report
from azureml_elastic.local.cluster import prepare_run_dir
from azureml_elastic.local.faults.metadata_service import MetadataService
from azureml_elastic.local.fork_start import ForkStart
from azureml_elastic.local.node_start import StartMethod
from azureml_elastic.local.processes import NodeProcesses
from azureml_elastic.local.run_end import StopSignals
from azureml_elastic.local.view import UntilBroken, View
from azureml_elastic.testing.api.assets import Assets
from azureml_elastic.testing.api.gateway import Gateway, StaticCredential, answer_node, signed_in
from azureml_elastic.testing.api.history import API_HOST, History
from azureml_elastic.testing.api.resources import ARM_HOST, Resources
from azureml_elastic.testing.api.tracking import TRACKING_PATH, Logged, Tracking
from azureml_elastic.testing.forks.listener import NodeForks, open_fork_start
from azureml_elastic.testing.jobs.followed_run import FollowedRun
from azureml_elastic.testing.jobs.machines import Evicted, Eviction, Machines, Pool
from azureml_elastic.testing.jobs.nodes import Setting
from azureml_elastic.testing.jobs.runs import Runs
from azureml_elastic.testing.jobs.service import Service
from azureml_elastic.testing.storage import Mirror, StorageAccount

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

_SUBSCRIPTION = "00000000-0000-0000-0000-0000000000aa"
_GROUP = "local"
_NAME = "local"
_POLL_S = 0.1
_DEFAULT_POOLS = {"cluster": Pool(), "spot-cluster": Pool()}  # the second one is that of the starter job
_NAMES = {
    "AZUREML_ARM_SUBSCRIPTION": _SUBSCRIPTION,
    "AZUREML_ARM_RESOURCEGROUP": _GROUP,
    "AZUREML_ARM_WORKSPACE_NAME": _NAME,
}
_PREFIX = "azureml-elastic-workspace-"
_FOLDERS = ("logs", "mirror", "nodes")
_BUNDLES = ("CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")


class LocalWorkspace:
    """A context manager that runs an Azure ML workspace on this machine.

    While it is open, the environment of this process routes HTTPS through the workspace, which responds for
    ``management.azure.com``, its own data plane and its storage account; all other hosts are reached as before. A
    process can have one open workspace at a time.

    Args:
        pools: computes by name; ``None`` for ``cluster`` and ``spot-cluster``. ``serverless`` always exists.
        evictions: planned evictions of machines.
        requeue: whether the service restarts a preempted job from the beginning, as Azure's documentation says,
            instead of failing it, as users report.
        grows: whether the service starts further nodes of a command job up to its ``max_instance_count``, a preview.
        folder: folder for all files, which is kept, and which has none of another workspace's; ``None`` for a temporary
            one.
        start: how the nodes of elastic jobs are started: ``command`` by the command of the job, as on a machine of its
            own; ``fork`` by forks of one process that has imported torch once, where that is possible (see
            docs/how-to/local.md). Or what else forks them.

    Raises:
        MissingExtra: azure-ai-ml is not installed.
        UsageError: Azurite and Node.js are not installed, or the folder cannot be used (on entering).
    """

    def __init__(
        self,
        *,
        pools: Mapping[str, Pool] | None = None,
        evictions: Sequence[Eviction] = (),
        requeue: bool = False,
        grows: bool = True,
        folder: str | Path | None = None,
        start: StartMethod | ForkStart = "command",
    ) -> None:
        self._pools = {"serverless": Pool(), **(_DEFAULT_POOLS if pools is None else pools)}
        self._evictions = tuple(evictions)
        self._requeue = requeue
        self._grows = grows
        self._folder = None if folder is None else Path(folder).absolute()
        self._start = start
        self._runs = Runs()
        self._tracking = Tracking(self._runs)
        self._stack = contextlib.ExitStack()
        self._storage = StorageAccount()
        self._machines = Machines(self._pools)
        self._service: Service | None = None
        self._client: MLClient | None = None
        self._variables: Mapping[str, str] = {}

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            folder = self._folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=_PREFIX)))
            folder = _claimed(folder, stack)
            storage = stack.enter_context(self._storage)
            root = (
                f"/subscriptions/{_SUBSCRIPTION}/resourceGroups/{_GROUP}"
                f"/providers/Microsoft.MachineLearningServices/workspaces/{_NAME}"
            )
            assets = Assets(root, storage)
            variables: dict[str, str] = {}
            setting = Setting(
                variables,
                self._machines,
                stack.enter_context(NodeProcesses(folder / "logs")),
                Mirror(storage, folder / "mirror"),
                stack.enter_context(MetadataService()),
                folder / "nodes",
                self._requeue,
                self._open_wrappers(stack, folder / "bin"),
                self._grows,
            )
            tracking = self._tracking
            service = Service(
                setting, self._runs, assets.properties, lambda name: tracking.logged(name).metrics, self._evictions
            )
            resources = Resources(root, storage, self._runs, self._pools, assets, service)
            # As on Azure, discovery is public, and the addresses of logs are passed on to those who may read them.
            history = History(self._runs, self._tracking)
            data_plane = signed_in(history.answer, ("/discovery", "/logs/"))
            hosts = {ARM_HOST: signed_in(resources.answer), API_HOST: data_plane, **storage.hosts}
            gateway = stack.enter_context(Gateway(hosts, answer_node))
            bundle = gateway.write_bundle(folder / "certificates.pem", UserEnvironment.read().certificates)
            trust = {
                **dict.fromkeys(("HTTPS_PROXY", "https_proxy"), gateway.address),
                **dict.fromkeys(_BUNDLES, str(bundle)),
            }
            token_url = f"{gateway.address}/token"
            variables |= {
                **trust,
                **_NAMES,
                "AZUREML_SERVICE_ENDPOINT": f"https://{API_HOST}",
                # The service's address has the scheme azureml, for which scripts need azureml-mlflow.
                "MLFLOW_TRACKING_URI": f"https://{API_HOST}{TRACKING_PATH}{root}",
                "MSI_ENDPOINT": token_url,
                "OBO_ENDPOINT": token_url,
            }
            # Before the start: whatever fails from here on, the threads of jobs end before what they use is closed.
            stack.callback(service.close)
            service.start()
            # azure-identity's default credential then logs in to this workspace.
            self._variables = {**trust, "MSI_ENDPOINT": token_url}
            stack.enter_context(changed({**self._variables, **dict.fromkeys(("MSI_SECRET", "NO_PROXY", "no_proxy"))}))
            self._service = service
            self._client = _client()
            stack.callback(setattr, self, "_client", None)  # it would call the real Azure once the workspace is closed
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def ml_client(self) -> MLClient:
        """The real azure-ai-ml client, connected to this workspace."""
        if self._client is None:
            raise UsageError(
                "The local workspace is not open. Use it as a context manager: with LocalWorkspace() as ws."
            )
        return self._client

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables that connect another process to this workspace: its addresses, login and name."""
        return {**_NAMES, **self._variables}

    @property
    def config(self) -> Mapping[str, str]:
        """Content of ``config.json`` for ``MLClient.from_config()`` and for the command line."""
        return {"subscription_id": _SUBSCRIPTION, "resource_group": _GROUP, "workspace_name": _NAME}

    @property
    def table_endpoint(self) -> str:
        """URL of the workspace's tables, for a rendezvous with an explicit endpoint."""
        return self._storage.table_endpoint

    @property
    def evicted(self) -> tuple[Evicted, ...]:
        """Evictions that have happened, in order."""
        return () if self._service is None else self._service.evicted

    def evict(self, eviction: Eviction) -> None:
        """Plan another eviction.

        Raises:
            UsageError: the workspace is not open.
        """
        if self._service is None:
            raise UsageError("The local workspace is not open. Pass evictions= to its constructor.")
        self._service.evict(eviction)

    def refill(self, pool: str) -> None:
        """Replace all machines that evictions have taken from a pool.

        Raises:
            UsageError: there is no such pool.
        """
        if pool not in self._pools:
            raise UsageError(f"The local workspace has no pool {pool!r}. It has {', '.join(sorted(self._pools))}.")
        self._machines.refill(pool)

    def run(self, job: Any, run_dir: Path, view: View | None = None) -> Report:
        """Submit a job, show it until all its jobs have ended, and write its files and report to a folder.

        SIGINT, SIGTERM and SIGHUP cancel the run; the report is written first, then ``KeyboardInterrupt`` or
        ``SystemExit`` is raised. Nothing else may be submitted to the workspace meanwhile.

        Args:
            run_dir: new folder for events, samples, logs, outputs, checkpoints and ``report.json``.
            view: view that shows the run; by default none.

        Raises:
            UsageError: the workspace is not open, the folder is already used, or the job is a sweep.
        """
        client = self.ml_client
        assert self._service is not None
        if getattr(job, "type", None) == "sweep":
            raise UsageError(
                "A sweep is several runs, and run() reports one. Submit it by ml_client.jobs.create_or_update(sweep), "
                "and wait for it by wait(name)."
            )
        paths = prepare_run_dir(run_dir)
        with StopSignals() as signals:
            submitted = client.jobs.create_or_update(job)
            signals.hold()
            with UntilBroken(view or View()) as shown:
                followed = FollowedRun(self._service.setting, self._runs, str(submitted.name), paths, shown)
                # The jobs end by themselves once they are cancelled; a second signal does not wait for that.
                while not followed.over and not signals.hurried:
                    if signals.first is not None:
                        for run in self._runs.all():
                            self._runs.cancel(run)
                    followed.update(self.evicted)
                    time.sleep(_POLL_S)
                followed.update(self.evicted)
            report = followed.save(self.evicted, interrupted=signals.first is not None)
            signals.raise_received()
        return report

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the submitted jobs that have not ended, in the order of their submission."""
        return tuple(run.name for run in self._runs.all() if not run.over.is_set())

    @property
    def failed(self) -> Mapping[str, str]:
        """States, by name, of the submitted jobs that have ended and not completed.

        Jobs that replaced lost nodes of a job that has completed may have been lost themselves, and are not among them.
        """
        ended = {run.name: run for run in self._runs.all() if run.over.is_set()}
        states = {name: self._runs.status(run) for name, run in ended.items()}
        first = {name: (run.body.get("environmentVariables") or {}).get(FIRST_JOB) for name, run in ended.items()}
        return {
            name: state for name, state in states.items() if "Completed" not in (state, states.get(str(first[name])))
        }

    def wait(self, name: str, timeout: timedelta | float | str | None = None) -> str:
        """Wait for the end of a job and return its state, seconds before ``jobs.stream`` would.

        Args:
            timeout: longest time to wait; ``None`` for no limit.

        Raises:
            UsageError: there is no such job.
            TimeoutError: the job has not ended in time.
        """
        run = self._runs.find(name)
        seconds = None if timeout is None else positive_duration("timeout", timeout).total_seconds()
        if not run.over.wait(seconds):
            raise TimeoutError(f"The job {name!r} is {self._runs.status(run)} after {seconds:g} s.")
        return self._runs.status(run)

    def log(self, name: str) -> str:
        """Return the output of a job's processes so far, one process after the other.

        Raises:
            UsageError: there is no such job.
        """
        run = self._runs.find(name)
        return "".join(run.log(log).decode(errors="replace") for log in sorted(run.logs))

    def logged(self, name: str) -> Logged:
        """Return the parameters, tags and metrics that scripts have logged to a job or step with MLflow so far.

        Raises:
            UsageError: there is no such job.
        """
        return self._tracking.logged(self._runs.find(name).name)

    def _open_wrappers(self, stack: contextlib.ExitStack, folder: Path) -> Path | None:
        if self._start == "command":
            return None
        starting = stack.enter_context(open_fork_start()) if self._start == "fork" else self._start
        return stack.enter_context(NodeForks(folder.absolute(), starting)).folder


def _claimed(folder: Path, stack: contextlib.ExitStack) -> Path:
    """Create a folder, or take one without files of a workspace, with which this one's would mix.

    Returns:
        Path of it that is one word of a shell, as those on Azure are: the commands of jobs do not quote them.
    """
    try:
        used = [name for name in _FOLDERS if any((folder / name).glob("*"))]
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"The folder {folder} cannot be created: {error}. Give another one.") from error
    if used:
        raise UsageError(
            f"The folder {folder} has the {used[0]} of an earlier workspace, whose jobs cannot be gone on with. Give "
            "another folder, or delete this one first."
        )
    if shlex.quote(str(folder)) == str(folder):
        return folder
    link = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=_PREFIX)), "files")
    link.symlink_to(folder)
    return link


def _client() -> MLClient:
    with needs_extra("azure-ai-ml", "submit"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing azure-ai-ml uses deprecated parts of marshmallow
        from azure.ai.ml import MLClient
    progress = sys.stderr.isatty()  # the bars of uploads have the escape codes of a terminal
    return MLClient(StaticCredential(), _SUBSCRIPTION, _GROUP, _NAME, enable_telemetry=False, show_progress=progress)
