"""Selection and conversion of the interactive services of a job.

With the placements ``service`` and ``gang`` Azure ML starts the services of the one job, on its first node or on all.
With ``fan_out`` each node is a separate job, so the selection is made here: shells and notebooks are useful on any
node, whereas one TensorBoard is enough.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from azureml_elastic.errors import SubmitError, needs_extra
from azureml_elastic.submit.fields import field_of

with needs_extra("azure-ai-ml", "submit"):
    from azure.ai.ml.entities import JupyterLabJobService, SshJobService, TensorBoardJobService, VsCodeJobService

__all__ = ["compile_services"]

_SERVICES = {
    "jupyter_lab": JupyterLabJobService,
    "ssh": SshJobService,
    "tensor_board": TensorBoardJobService,
    "vs_code": VsCodeJobService,
}
_ONCE = frozenset({"tensor_board"})
"""Services that show the run rather than the node; they run on the first node unless ``nodes="all"``."""


def compile_services(services: Mapping[str, Any] | None, node: int | None = None) -> dict[str, Any] | None:
    """Return new service objects for a job; dictionaries are converted because azure-ai-ml drops their type.

    In a single-node job of ``fan_out``, JupyterLab, VS Code, SSH and services of unknown kinds run on every node,
    regardless of ``nodes``, because it is not known in advance which nodes get a machine. TensorBoard runs on node 0,
    and with ``nodes="all"`` on every node.

    Args:
        services: services of the elastic job by name: objects of azure-ai-ml or dictionaries of their fields.
        node: index of the node of a single-node job; ``None`` for the one job of all nodes.
    """
    compiled: dict[str, Any] = {}
    for name, service in (services or {}).items():
        kind = str(field_of(service, "type") or field_of(service, "job_service_type") or "")
        if node and kind in _ONCE and field_of(service, "nodes") != "all":
            continue
        if type(service) is not dict:
            compiled[name] = copy.deepcopy(service)
        elif kind in _SERVICES:
            fields = {key: value for key, value in service.items() if key not in {"type", "job_service_type"}}
            compiled[name] = _SERVICES[kind](**copy.deepcopy(fields))
        else:
            raise SubmitError(
                f"The service {name!r} has type={kind!r}. Give one of {sorted(_SERVICES)}, or an object of "
                "azure.ai.ml.entities."
            )
        if node is not None and field_of(compiled[name], "nodes") is not None:
            compiled[name].nodes = None  # a single-node job must not have it
    return compiled or None
