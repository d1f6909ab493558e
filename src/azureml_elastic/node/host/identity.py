"""Who a node is: its name and those of its machine and its process, and the plan of its run."""

from __future__ import annotations

import hashlib
import socket
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from azureml_elastic.checkpoint.storage.locations import join_path
from azureml_elastic.config import Plan, PreemptionPolicy
from azureml_elastic.environment import names as variables
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import UsageError
from azureml_elastic.node.host.addresses import advertised_address, is_loopback

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ID_CHARACTERS = 8
_INCARNATION_CHARACTERS = 12


def new_incarnation() -> str:
    """Return a random identifier for a process of a node."""
    return uuid.uuid4().hex[:_INCARNATION_CHARACTERS]


@dataclass(frozen=True)
class NodeIdentity:
    """Identity of a node.

    Args:
        host: address at which the other nodes reach this one.
        host_id: name of the machine, see :func:`host_id`.
        interface: network interface of ``host``, if configured.
    """

    plan: Plan
    run_id: str
    node: str
    host: str
    folder: Path
    host_id: str = ""
    interface: str | None = None
    incarnation: str = field(default_factory=new_incarnation)

    @property
    def owner(self) -> str:
        """Name of this node that is unique across runs, for files that nodes of other runs may write, too."""
        return f"{self.node}-{hashlib.sha256(self.run_id.encode()).hexdigest()[:_ID_CHARACTERS]}"


def read_identity(environment: NodeEnvironment, *, checkpoint_dir: str | None = None) -> NodeIdentity:
    """Read the plan and this node's identity.

    Args:
        checkpoint_dir: folder for the checkpoints of all runs, from the command line; this run gets a folder in it.

    Raises:
        PlanError: there is no plan, or none that this release can read.
        UsageError: the run has no name, a variable is invalid, or this machine has not the configured interface.
    """
    plan = Plan.from_json(environment.require_plan())
    run_id = plan.run_id_of(environment.variables, job=environment.job, root=environment.root_job)
    if not run_id:
        raise UsageError(
            f"The run has no name: none of {variables.RUN_ID}, AZUREML_RUN_ID, AZUREML_ROOT_RUN_ID is set. "
            f"Outside Azure ML set {variables.RUN_ID} to the same new value on every node."
        )
    if checkpoint_dir is not None:
        plan = _with_checkpoint_dir(plan, checkpoint_dir, run_id)
    if (address := environment.scheduled_events) is not None:
        plan = _with_scheduled_events(plan, address or None)
    # Several nodes may run on one machine, or in containers that share its name.
    node = environment.node or f"{socket.gethostname()}-{uuid.uuid4().hex[:6]}"
    advertised = advertised_address(plan.rendezvous, environment)
    return NodeIdentity(
        plan=plan,
        run_id=run_id,
        node=node,
        host=advertised.host,
        folder=environment.run_dir,
        host_id=host_id(node, advertised.host),
        interface=advertised.interface,
    )


def _with_checkpoint_dir(plan: Plan, checkpoint_dir: str, run_id: str) -> Plan:
    changes: dict[str, object] = {
        "checkpoint": plan.checkpoint.model_copy(update={"path": join_path(checkpoint_dir, run_id)})
    }
    if plan.resume_from is not None:
        path = join_path(checkpoint_dir, plan.resume_from.name)
        changes["resume_from"] = plan.resume_from.model_copy(update={"path": path})
    return plan.model_copy(update=changes)


def _with_scheduled_events(plan: Plan, address: str | None) -> Plan:
    fields = {**plan.preemption.model_dump(), "scheduled_events": address}
    try:
        policy = PreemptionPolicy.model_validate(fields)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise UsageError(f"The environment variable {variables.SCHEDULED_EVENTS} is invalid: {problem}.") from error
    return plan.model_copy(update={"preemption": policy})


def host_id(node: str, host: str, boot_id: Path = _BOOT_ID) -> str:
    """Return the name of a node's machine, against which strikes are recorded.

    It consists of the address and the kernel's boot id: a new machine with the address of an evicted one has another
    name, a new container on the same machine has the same. Nodes at a loopback address each count as a machine.

    Args:
        host: address at which the other nodes reach it.
    """
    if is_loopback(host):
        return node
    try:
        return f"{host}-{boot_id.read_text().strip()[:_ID_CHARACTERS]}"
    except OSError:
        return host
