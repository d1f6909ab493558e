"""Who this node is: its name, its address, its run, its folder. The only place that reads the environment on a node."""

from __future__ import annotations

import hashlib
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from azureml_elastic.checkpoint.storage.opening import join_path
from azureml_elastic.config import Plan, PreemptionPolicy
from azureml_elastic.config import environment as variables
from azureml_elastic.errors import PlanError, UsageError
from azureml_elastic.node.host.addresses import advertised_address, is_loopback

__all__ = ["NodeIdentity", "host_id", "read_identity"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_BOOT_CHARACTERS = 8
_OWNER_CHARACTERS = 8


@dataclass(frozen=True)
class NodeIdentity:
    """What the environment says about this node.

    Args:
        plan: plan of the run.
        run_id: names the run in the table.
        node: names this node within the run.
        host: where the other nodes reach this one.
        folder: folder for events and logs.
        host_id: names the machine that strikes are held against; see :func:`host_id`.
        interface: the network interface of ``host``, where the job or the environment asked for one.
    """

    plan: Plan
    run_id: str
    node: str
    host: str
    folder: Path
    host_id: str = ""
    interface: str | None = None

    @property
    def owner(self) -> str:
        """Names what this node writes where nodes of other runs may write, too, who often have the same names."""
        return f"{self.node}-{hashlib.sha256(self.run_id.encode()).hexdigest()[:_OWNER_CHARACTERS]}"


def read_identity(environ: Mapping[str, str], *, checkpoint_dir: str | None = None) -> NodeIdentity:
    """Read the plan and this node's place in the run.

    Args:
        environ: the process environment.
        checkpoint_dir: where the checkpoints of all runs go, from the command line; this run gets a folder in it.

    Raises:
        PlanError: there is no plan, or one that this release cannot read.
        UsageError: nothing names the run, a variable is wrong, or this machine has not the interface that the job
            wants.
    """
    text = environ.get(variables.PLAN)
    if not text:
        raise PlanError(
            f"The environment variable {variables.PLAN} is not set, so this node does not know what to do. Submit an "
            "ElasticCommandJob, or run `azureml-elastic local` on one machine."
        )
    plan = Plan.from_json(text)
    run_id = (
        plan.run_id
        or environ.get(variables.RUN_ID)
        or environ.get("AZUREML_ROOT_RUN_ID")
        or environ.get("AZUREML_RUN_ID")
    )
    if not run_id:
        raise UsageError(
            f"Nothing names the run: neither {variables.RUN_ID} nor AZUREML_ROOT_RUN_ID nor AZUREML_RUN_ID is set. "
            f"Outside Azure ML set {variables.RUN_ID} to the same new value on every node."
        )
    if checkpoint_dir is not None:
        path = join_path(checkpoint_dir, run_id)
        plan = plan.model_copy(update={"checkpoint": plan.checkpoint.model_copy(update={"path": path})})
    if (address := environ.get(variables.SCHEDULED_EVENTS)) is not None:
        plan = _with_scheduled_events(plan, address.strip() or None)
    node = environ.get(variables.NODE_ID) or f"{socket.gethostname()}-{uuid.uuid4().hex[:6]}"
    here = advertised_address(plan.distribution.rendezvous, environ)
    return NodeIdentity(
        plan=plan,
        run_id=run_id,
        node=node,
        host=here.host,
        folder=Path(environ.get(variables.RUN_DIR) or "outputs/azureml-elastic").absolute(),
        host_id=host_id(node, here.host),
        interface=here.interface,
    )


def _with_scheduled_events(plan: Plan, address: str | None) -> Plan:
    fields = {**plan.distribution.preemption.model_dump(), "scheduled_events": address}
    try:
        policy = PreemptionPolicy.model_validate(fields)
    except ValidationError as error:
        said = error.errors()[0]["msg"]
        raise UsageError(f"The environment variable {variables.SCHEDULED_EVENTS} is wrong: {said}.") from error
    return plan.model_copy(update={"distribution": plan.distribution.model_copy(update={"preemption": policy})})


def host_id(node: str, host: str, boot_id: Path = _BOOT_ID) -> str:
    """Name the machine that a node runs on, as strikes are held against it.

    A machine is its address and its kernel's boot id: a new one that was given the address of an evicted one has
    another boot id and a clean record, and a new container on the same machine has the same. Nodes that share one
    machine, with the loopback address, are machines of their own.

    Args:
        node: the node's name.
        host: where the other nodes reach it.
        boot_id: the file in which Linux names the boot.
    """
    if is_loopback(host):
        return node
    try:
        return f"{host}-{boot_id.read_text().strip()[:_BOOT_CHARACTERS]}"
    except OSError:
        return host
