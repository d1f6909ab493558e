"""A node that supervises its own run: the one of rank 0, and while there is no round, those that wait first in line."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from azureml_elastic.config import environment as variables
from azureml_elastic.errors import ElasticError, UsageError, WorkspaceForbidden
from azureml_elastic.node.azure.clouds import cloud_of
from azureml_elastic.node.host.identity import NodeIdentity
from azureml_elastic.node.table import Table

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential

    from azureml_elastic.node.replacement.replacer import NodeReplacer

__all__ = ["ReplacementThread", "start_replacement_thread"]

_LOG = logging.getLogger(__name__)

_AFTER_REFUSAL_S = 600.0
"""A role may be granted while the run is on."""

_LAST_LOOK_S = 20.0
"""For a run that has ended, to cancel what nobody needs any more."""


class ReplacementThread:
    """Looks after the run from a thread of its own, which nothing waits for.

    Args:
        supervisors: of the same run, by identity, the most promising first; the first that is let in does it.
        interval_s: between two looks.
        leads: whether it is this node's turn.
    """

    def __init__(self, supervisors: Mapping[str, NodeReplacer], interval_s: float, leads: Callable[[], bool]) -> None:
        self._supervisors = dict(supervisors)
        self._interval_s = interval_s
        self._leads = leads
        self._closing = threading.Event()
        self._turn = threading.Lock()
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._watch, name="supervision", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._closing.set()

    def finish(self) -> None:
        """Cancel what waits for a run that has just ended; called by the node that has closed it."""
        self.close()
        last = threading.Thread(target=self._look, name="supervision's last look", daemon=True)
        last.start()
        last.join(_LAST_LOOK_S)

    def _watch(self) -> None:
        # Nodes often start together.
        pause = random.uniform(0.5, 1.0) * self._interval_s
        while not self._closing.wait(pause):
            pause = self._interval_s
            if self._leads() and not self._look():
                pause = max(_AFTER_REFUSAL_S, self._interval_s)

    def _look(self) -> bool:
        """Look once; return whether the workspace lets one of the identities in."""
        with self._turn:
            for who, supervisor in list(self._supervisors.items()):
                try:
                    for text in supervisor.act().done:
                        _LOG.warning("Replacement of nodes: %s.", text)
                except WorkspaceForbidden as error:
                    self._say(f"The run is not supervised by {who}: {error}")
                    continue
                except UsageError as error:
                    self._say(f"The run is not supervised: {error}")
                    return False
                except ElasticError as error:
                    _LOG.info("Replacement of nodes: the jobs could not be read; the next check follows: %s", error)
                except Exception:  # noqa: BLE001 - supervision may fail, training may not
                    _LOG.exception("Replacement of nodes failed; the next check follows")
                return True
        return False

    def _say(self, text: str) -> None:
        """Log something once."""
        if text not in self._said:
            self._said.add(text)
            _LOG.warning(text)


def start_replacement_thread(
    identity: NodeIdentity, table: Table, leads: Callable[[], bool], environ: Mapping[str, str]
) -> ReplacementThread | None:
    """Begin to supervise the run from this node; ``None`` where the plan does not want it, or outside Azure ML.

    Args:
        identity: of the node, with the plan.
        table: opened for the run.
        leads: whether it is this node's turn.
        environ: of the node.
    """
    plan = identity.plan
    policy = plan.replacement
    first = environ.get(variables.FIRST_JOB) or environ.get("AZUREML_ROOT_RUN_ID")
    if policy is None or not policy.by_nodes or plan.resources.effective_placement != "fan_out" or not first:
        return None
    from azureml_elastic.node.replacement.jobs import WorkspaceJobs, workspace_id
    from azureml_elastic.node.replacement.replacer import NodeReplacer

    try:
        workspace = workspace_id(environ)
        tokens = _tokens(identity, environ)
    except ElasticError as error:
        _LOG.info("The run is not supervised from this node: %s", error)
        return None
    supervisors = {
        who: NodeReplacer(WorkspaceJobs(workspace, token, cloud_of(environ).arm_url), table, first, identity.run_id)
        for who, token in tokens.items()
    }
    return ReplacementThread(supervisors, policy.interval.total_seconds(), leads) if supervisors else None


def _tokens(identity: NodeIdentity, environ: Mapping[str, str]) -> dict[str, TokenCredential]:
    """Return who may do it: the user who submitted the job before the compute's own identity."""
    from azureml_elastic.node.azure.credentials import NodeTokenCredential

    found = []
    if environ.get("OBO_ENDPOINT"):
        found.append(NodeTokenCredential.on_behalf_of(environ))
    if environ.get("MSI_ENDPOINT"):
        found.append(NodeTokenCredential.managed(environ, identity.plan.distribution.rendezvous.client_id))
    return {tokens.name: tokens for tokens in found}
