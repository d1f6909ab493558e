"""Which node has which interactive service.

With ``service`` and ``gang`` Azure ML itself starts the services of one job: on the first node, or on all. With
``fan_out`` each node is a job of its own, so the choice is made here: whoever wants to look into a node wants to look
into *any* of them, whereas one TensorBoard is enough.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

__all__ = ["kind_of_service", "services_of_node"]

_ONCE = frozenset({"tensor_board"})
"""Services that show the run, not the node: on the first node unless ``nodes="all"``."""


def services_of_node(services: Mapping[str, Any] | None, node: int) -> dict[str, Any] | None:
    """Return new services for one single-node job of ``fan_out``; ``None`` where it has none.

    JupyterLab, VS Code, SSH and services of unknown kinds are on every node, whatever ``nodes`` says: nobody knows
    which nodes will get a machine. TensorBoard is on node 0, and with ``nodes="all"`` on every node.

    Args:
        services: of the elastic job, by name: objects of azure-ai-ml or their fields.
        node: the node's index, from 0.
    """
    chosen = {
        name: _alone(service)
        for name, service in (services or {}).items()
        if node == 0 or _field(service, "nodes") == "all" or kind_of_service(service) not in _ONCE
    }
    return chosen or None


def kind_of_service(service: Any) -> str:
    """Return the service's kind as azure-ai-ml names it (``"tensor_board"``); empty where it has none.

    Args:
        service: an object of azure-ai-ml, or its fields.
    """
    return str(_field(service, "type") or _field(service, "job_service_type") or "")


def _alone(service: Any) -> Any:
    """Return a copy for a job of a single node, in which ``nodes`` has nothing to choose."""
    if isinstance(service, dict):
        return {name: copy.deepcopy(value) for name, value in service.items() if name != "nodes"}
    alone = copy.deepcopy(service)
    if _field(alone, "nodes") is not None:
        alone.nodes = None
    return alone


def _field(service: Any, name: str) -> Any:
    return service.get(name) if type(service) is dict else getattr(service, name, None)
