"""Selection of the interactive services of each node.

With the placements ``service`` and ``gang`` Azure ML starts the services of the one job, on its first node or on all.
With ``fan_out`` each node is a separate job, so the selection is made here: shells and notebooks are useful on any
node, whereas one TensorBoard is enough.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

__all__ = ["kind_of_service", "services_of_node"]

_ONCE = frozenset({"tensor_board"})
"""Services that show the run rather than the node; they run on the first node unless ``nodes="all"``."""


def services_of_node(services: Mapping[str, Any] | None, node: int) -> dict[str, Any] | None:
    """Return copies of the services of one single-node job of ``fan_out``; ``None`` if there are none.

    JupyterLab, VS Code, SSH and services of unknown kinds run on every node, regardless of ``nodes``, because it is not
    known in advance which nodes get a machine. TensorBoard runs on node 0, and with ``nodes="all"`` on every node.

    Args:
        services: services of the elastic job by name: objects of azure-ai-ml or dictionaries of their fields.
        node: index of the node, from 0.
    """
    chosen = {
        name: _for_single_node(service)
        for name, service in (services or {}).items()
        if node == 0 or _field(service, "nodes") == "all" or kind_of_service(service) not in _ONCE
    }
    return chosen or None


def kind_of_service(service: Any) -> str:
    """Return the service's type as azure-ai-ml names it (``"tensor_board"``); empty if unknown."""
    return str(_field(service, "type") or _field(service, "job_service_type") or "")


def _for_single_node(service: Any) -> Any:
    """Return a copy without ``nodes``, which a single-node job must not have."""
    if isinstance(service, dict):
        return {name: copy.deepcopy(value) for name, value in service.items() if name != "nodes"}
    single = copy.deepcopy(service)
    if _field(single, "nodes") is not None:
        single.nodes = None
    return single


def _field(service: Any, name: str) -> Any:
    return service.get(name) if type(service) is dict else getattr(service, name, None)
