"""Names of this library's own environment variables; those of others are written where they are used."""

from __future__ import annotations

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

AZURE_STORAGE_CONNECTION_STRING = "AZURE_STORAGE_CONNECTION_STRING"
"""Azure's own variable, which holds the key of a storage account; workers get it only where they need it."""
