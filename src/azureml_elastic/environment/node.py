"""The environment of a node: what Azure ML and the job set for the agent, and what its workers inherit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from azureml_elastic.environment import names
from azureml_elastic.environment.process import Environment, Variable
from azureml_elastic.errors import PlanError, UsageError

WORKSPACE = ("AZUREML_ARM_SUBSCRIPTION", "AZUREML_ARM_RESOURCEGROUP", "AZUREML_ARM_WORKSPACE_NAME")
"""Names of the variables that identify the workspace of a job."""


@dataclass(frozen=True)
class NodeEnvironment(Environment):
    """The environment of a node, or of a tool that acts for one."""

    plan = Variable(names.PLAN)
    """The plan as JSON, ``None`` without one."""

    def require_plan(self) -> str:
        """Return the plan as JSON.

        Raises:
            PlanError: there is none.
        """
        if self.plan is None:
            raise PlanError(
                f"The environment variable {names.PLAN} is not set, so this node has no plan. Submit an "
                "ElasticCommandJob, or run `azureml-elastic local` on one machine."
            )
        return self.plan

    node = Variable(names.NODE_ID)
    """Identifier of the node where the environment gives one."""

    @property
    def run_dir(self) -> Path:
        """Folder for events, logs and audit files."""
        return Path(self.get(names.RUN_DIR) or "outputs/azureml-elastic").absolute()

    address = Variable(names.LOCAL_ADDRESS)
    """Address, interface or range at which other nodes reach this one, ``None`` where it is to be found out."""

    @property
    def scheduled_events(self) -> str | None:
        """Address of the node's metadata service: empty where there is none, ``None`` for that of the plan."""
        address = self.get(names.SCHEDULED_EVENTS)
        return None if address is None else address.strip()

    job = Variable("AZUREML_RUN_ID")
    """Name of the job that this process belongs to, ``None`` outside Azure ML."""

    root_job = Variable("AZUREML_ROOT_RUN_ID")
    """Name of the job that the user has submitted, ``None`` outside Azure ML."""

    first_job = Variable(names.FIRST_JOB)
    """Name of the run's first job, on nodes that replace others."""

    @property
    def is_first_node(self) -> bool:
        """Whether this node's outputs are those of its step, where the nodes are jobs of their own."""
        return bool(self.get(names.FIRST_NODE))

    @property
    def mount_cache_seconds(self) -> float:
        """How long a mount shows a file as it was, 0 without a cache.

        Raises:
            UsageError: the value is not a number.
        """
        text = self.get("DATASET_MOUNT_ATTRIBUTE_CACHE_TTL") or "0"
        try:
            return float(text)
        except ValueError as error:
            name = "DATASET_MOUNT_ATTRIBUTE_CACHE_TTL"
            raise UsageError(f"{name}={text!r} is not a number of seconds. Correct or unset the variable.") from error

    @property
    def workspace(self) -> tuple[str, str, str] | None:
        """Subscription, resource group and name of the job's workspace, ``None`` where one of them is not set."""
        values = [self.get(name) for name in WORKSPACE]
        return None if self.missing_workspace else (str(values[0]), str(values[1]), str(values[2]))

    @property
    def missing_workspace(self) -> list[str]:
        """Names of the variables that identify the workspace and are not set."""
        return [name for name in WORKSPACE if not self.get(name)]

    cloud = Variable("AZUREML_CURRENT_CLOUD")
    """Name of the cloud where it is given."""

    @property
    def service_endpoint(self) -> str:
        """URL of Azure ML's services, from which the cloud follows; empty outside Azure ML."""
        return self.get("AZUREML_SERVICE_ENDPOINT") or ""

    msi_endpoint = Variable("MSI_ENDPOINT")
    """Address that issues tokens of the node's managed identity."""

    msi_secret = Variable("MSI_SECRET")
    """Secret for that address where it wants one."""

    default_client_id = Variable("DEFAULT_IDENTITY_CLIENT_ID")
    """Client id of the managed identity to use by default."""

    obo_endpoint = Variable("OBO_ENDPOINT")
    """Address that issues tokens of the user who has submitted the job."""

    mlflow_uri = Variable("MLFLOW_TRACKING_URI")
    """Address of the MLflow server."""

    mlflow_run = Variable("MLFLOW_RUN_ID")
    """The MLflow run to log to."""

    mlflow_experiment_id = Variable("MLFLOW_EXPERIMENT_ID")
    """Id of the MLflow experiment."""

    mlflow_experiment = Variable("MLFLOW_EXPERIMENT_NAME")
    """Name of the MLflow experiment."""

    @property
    def exports_opentelemetry(self) -> bool:
        """Whether the address of an OTLP receiver is set, which switches the export on, and it is not disabled."""
        return bool(self.get("OTEL_EXPORTER_OTLP_ENDPOINT")) and (self.get("OTEL_SDK_DISABLED") or "").lower() != "true"

    @property
    def names_opentelemetry_service(self) -> bool:
        """Whether the user gives the exported data a service's name."""
        return bool(self.get("OTEL_SERVICE_NAME"))

    @property
    def certificates(self) -> Path | None:
        """File or folder of trusted certificates, as Azure's clients take it."""
        path = self.get("REQUESTS_CA_BUNDLE") or self.get("CURL_CA_BUNDLE")
        return Path(path) if path else None

    @property
    def torch_extensions(self) -> Path | None:
        """Folder in which torch compiles extensions, ``None`` for the one in the user's cache."""
        path = self.get("TORCH_EXTENSIONS_DIR")
        return Path(path) if path else None

    @property
    def cache(self) -> Path:
        """The user's cache folder."""
        return Path(self.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())


def visible_devices(environment: Environment) -> int | None:
    """Return the number of GPUs that are made visible to the process, ``None`` where all are."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
