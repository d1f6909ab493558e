"""Examines whether a machine can take part in runs: account, role, endpoints, address and ports."""

from azureml_elastic.node.diagnostics.doctor.examination import NODE_COMMAND, examine, failed, text_of

__all__ = ["NODE_COMMAND", "examine", "failed", "text_of"]
