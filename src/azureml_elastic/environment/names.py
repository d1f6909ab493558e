"""Names of the environment variables that this library reads and sets: its own, then those of others."""

from __future__ import annotations

__all__ = [
    "ACCELERATE_USE_DEEPSPEED",
    "AZUREML_ARM_RESOURCEGROUP",
    "AZUREML_ARM_SUBSCRIPTION",
    "AZUREML_ARM_WORKSPACE_NAME",
    "AZUREML_CURRENT_CLOUD",
    "AZUREML_ROOT_RUN_ID",
    "AZUREML_RUN_ID",
    "AZUREML_SERVICE_ENDPOINT",
    "AZURE_CONFIG_DIR",
    "AZURE_DEFAULTS_GROUP",
    "AZURE_DEFAULTS_WORKSPACE",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_SAS_TOKEN",
    "CHANNEL",
    "CUDA_VISIBLE_DEVICES",
    "CURL_CA_BUNDLE",
    "DATASET_MOUNT_ATTRIBUTE_CACHE_TTL",
    "DEFAULT_IDENTITY_CLIENT_ID",
    "ENGINE_KEY",
    "FIRST_JOB",
    "FIRST_NODE",
    "GLOO_DEVICE_TRANSPORT",
    "GLOO_SOCKET_IFNAME",
    "GROUP_RANK",
    "HISTORY",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "HOROVOD_LOCAL_RANK",
    "INTEGRATIONS",
    "IN_PROCESS_ON_GPU",
    "LOCALAPPDATA",
    "LOCAL_ADDRESS",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MLFLOW_EXPERIMENT_ID",
    "MLFLOW_EXPERIMENT_NAME",
    "MLFLOW_RUN_ID",
    "MLFLOW_TRACKING_URI",
    "MSI_ENDPOINT",
    "MSI_SECRET",
    "NCCL_SOCKET_IFNAME",
    "NODE_ID",
    "OBO_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_SERVICE_NAME",
    "OWN",
    "PATH",
    "PLAN",
    "RANK",
    "REQUESTS_CA_BUNDLE",
    "ROUND",
    "RUN_DIR",
    "RUN_ID",
    "SCHEDULED_EVENTS",
    "SHELL",
    "STEP",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCH_EXTENSIONS_DIR",
    "WORKER",
    "WORLD_SIZE",
    "XDG_CACHE_HOME",
]

PLAN = "AZUREML_ELASTIC_PLAN"
"""The plan as JSON; set at submission."""

RUN_ID = "AZUREML_ELASTIC_RUN_ID"
"""Identifier of the run in the table; takes precedence over Azure ML's run ids."""

STEP = "AZUREML_ELASTIC_STEP"
"""Name of an elastic step whose nodes are steps of the user's pipeline; the run id is that of the pipeline and this."""

FIRST_JOB = "AZUREML_ELASTIC_FIRST_JOB"
"""Name of the job with which the run was submitted; set for replacement nodes."""

FIRST_NODE = "AZUREML_ELASTIC_FIRST_NODE"
"""Set for the node whose outputs are those of its step, where the nodes are jobs of their own."""

NODE_ID = "AZUREML_ELASTIC_NODE_ID"
"""Identifier of this node; derived from the host name and a nonce when unset."""

RUN_DIR = "AZUREML_ELASTIC_RUN_DIR"
"""Folder for events, logs and audit files; set for the workers."""

LOCAL_ADDRESS = "AZUREML_ELASTIC_LOCAL_ADDRESS"
"""Address that other nodes use to reach this one; the source address of the route to the table when unset. Set for the
workers."""

SCHEDULED_EVENTS = "AZUREML_ELASTIC_SCHEDULED_EVENTS"
"""Address of this node's metadata service; overrides the plan's, and disables the service when empty."""

CHANNEL = "AZUREML_ELASTIC_CHANNEL"
"""Path of the Unix socket on which the node's agent serves its workers."""

ENGINE_KEY = "AZUREML_ELASTIC_ENGINE_KEY"
"""Key, in hexadecimal digits, that only the run's nodes have; set for the process of an engine, not for the program."""

ROUND = "AZUREML_ELASTIC_ROUND"
"""Number of the round that the worker belongs to."""

INTEGRATIONS = "AZUREML_ELASTIC_INTEGRATIONS"
"""``off`` leaves scripts without a session to themselves: training stacks such as transformers, and ranks and addresses
of their own."""

IN_PROCESS_ON_GPU = "AZUREML_ELASTIC_IN_PROCESS_ON_GPU"
"""``1`` lets ``recovery="in_process"`` keep processes with a GPU, which has not been seen on hardware yet."""

WORKER = "AZUREML_ELASTIC_WORKER"
"""Rank and world size of a worker, and host and port of its round's store, as the agent has assigned them."""

HISTORY = "AZUREML_ELASTIC_HISTORY"
"""Number of node and worker losses of the run, and seconds of training before this round."""

OWN = frozenset(
    value for value in tuple(globals().values()) if isinstance(value, str) and value.startswith("AZUREML_ELASTIC_")
)
"""The variables of this library alone, which are those above."""

# --- torch, which torchrun and the agent set for workers ---

GROUP_RANK = "GROUP_RANK"
LOCAL_RANK = "LOCAL_RANK"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
RANK = "RANK"
TORCHELASTIC_USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
WORLD_SIZE = "WORLD_SIZE"

# --- torch's backends ---

GLOO_DEVICE_TRANSPORT = "GLOO_DEVICE_TRANSPORT"
GLOO_SOCKET_IFNAME = "GLOO_SOCKET_IFNAME"
NCCL_SOCKET_IFNAME = "NCCL_SOCKET_IFNAME"

# --- training stacks ---

ACCELERATE_USE_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
HOROVOD_GLOO_RENDEZVOUS_ADDR = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
HOROVOD_GLOO_RENDEZVOUS_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
HOROVOD_LOCAL_RANK = "HOROVOD_LOCAL_RANK"

# --- Azure's packages for storage ---

AZURE_STORAGE_ACCOUNT_KEY = "AZURE_STORAGE_ACCOUNT_KEY"
AZURE_STORAGE_CONNECTION_STRING = "AZURE_STORAGE_CONNECTION_STRING"
AZURE_STORAGE_SAS_TOKEN = "AZURE_STORAGE_SAS_TOKEN"  # noqa: S105 - a name

# --- Azure ML and its tools ---

AZUREML_ARM_RESOURCEGROUP = "AZUREML_ARM_RESOURCEGROUP"
AZUREML_ARM_SUBSCRIPTION = "AZUREML_ARM_SUBSCRIPTION"
AZUREML_ARM_WORKSPACE_NAME = "AZUREML_ARM_WORKSPACE_NAME"
AZURE_CONFIG_DIR = "AZURE_CONFIG_DIR"
AZURE_DEFAULTS_GROUP = "AZURE_DEFAULTS_GROUP"
AZURE_DEFAULTS_WORKSPACE = "AZURE_DEFAULTS_WORKSPACE"

# --- the operating system and its tools ---

LOCALAPPDATA = "LOCALAPPDATA"
PATH = "PATH"
REQUESTS_CA_BUNDLE = "REQUESTS_CA_BUNDLE"
SHELL = "SHELL"
XDG_CACHE_HOME = "XDG_CACHE_HOME"

# --- Azure ML and its tools, on nodes ---

AZUREML_CURRENT_CLOUD = "AZUREML_CURRENT_CLOUD"
AZUREML_ROOT_RUN_ID = "AZUREML_ROOT_RUN_ID"
AZUREML_RUN_ID = "AZUREML_RUN_ID"
AZUREML_SERVICE_ENDPOINT = "AZUREML_SERVICE_ENDPOINT"
DATASET_MOUNT_ATTRIBUTE_CACHE_TTL = "DATASET_MOUNT_ATTRIBUTE_CACHE_TTL"
DEFAULT_IDENTITY_CLIENT_ID = "DEFAULT_IDENTITY_CLIENT_ID"
MSI_ENDPOINT = "MSI_ENDPOINT"
MSI_SECRET = "MSI_SECRET"  # noqa: S105 - a name
OBO_ENDPOINT = "OBO_ENDPOINT"

# --- MLflow and OpenTelemetry ---

MLFLOW_EXPERIMENT_ID = "MLFLOW_EXPERIMENT_ID"
MLFLOW_EXPERIMENT_NAME = "MLFLOW_EXPERIMENT_NAME"
MLFLOW_RUN_ID = "MLFLOW_RUN_ID"
MLFLOW_TRACKING_URI = "MLFLOW_TRACKING_URI"
OTEL_EXPORTER_OTLP_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
OTEL_SERVICE_NAME = "OTEL_SERVICE_NAME"

# --- CUDA, torch and certificates ---

CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
CURL_CA_BUNDLE = "CURL_CA_BUNDLE"
TORCH_EXTENSIONS_DIR = "TORCH_EXTENSIONS_DIR"
