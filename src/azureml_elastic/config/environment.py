"""The names of the environment variables that this library reads and sets."""

from __future__ import annotations

__all__ = [
    "CHANNEL",
    "FIRST_JOB",
    "HISTORY",
    "LOCAL_ADDRESS",
    "NODE_ID",
    "PLAN",
    "ROUND",
    "RUN_DIR",
    "RUN_ID",
    "SCHEDULED_EVENTS",
]

PLAN = "AZUREML_ELASTIC_PLAN"
"""The plan as JSON, set by the submission."""

RUN_ID = "AZUREML_ELASTIC_RUN_ID"
"""Names the run in the table; before ``AZUREML_ROOT_RUN_ID``."""

FIRST_JOB = "AZUREML_ELASTIC_FIRST_JOB"
"""The name of the job with which the run was submitted; set for the nodes that were asked for later."""

NODE_ID = "AZUREML_ELASTIC_NODE_ID"
"""Names this node; without it a name is made from the host name and a nonce."""

RUN_DIR = "AZUREML_ELASTIC_RUN_DIR"
"""The folder for events, logs and audit files; set for the workers."""

LOCAL_ADDRESS = "AZUREML_ELASTIC_LOCAL_ADDRESS"
"""Where the other nodes reach this one; without it the address on the way to the table."""

SCHEDULED_EVENTS = "AZUREML_ELASTIC_SCHEDULED_EVENTS"
"""The address of this node's metadata service, before the plan's; empty for none."""

CHANNEL = "AZUREML_ELASTIC_CHANNEL"
"""The path of the Unix socket on which the node's agent serves its workers."""

ROUND = "AZUREML_ELASTIC_ROUND"
"""The number of the round that the worker belongs to."""

HISTORY = "AZUREML_ELASTIC_HISTORY"
"""How often the run has lost a node or a worker, and for how many seconds it has trained before this round."""
