"""Replacement of nodes by the run's own nodes: rank 0's or, without a round, those that may seal one."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import ElasticError, UsageError, WorkspaceForbidden
from azureml_elastic.node.host.identity import NodeIdentity
from azureml_elastic.node.table import Table

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential

    from azureml_elastic.node.replacement.replacer import NodeReplacer

_LOG = logging.getLogger(__name__)

_AFTER_REFUSAL_S = 600.0  # after the workspace denied access; a role may be granted during the run
_FINISH_S = 20.0  # time limit for the cancellation of waiting jobs after the end of the run


class ReplacementThread:
    """Thread that replaces lost nodes of the run.

    Args:
        replacers: replacers of the run by identity, in the order of preference; the first with access is used.
        leads: function that returns whether this node is responsible.
    """

    def __init__(self, replacers: Mapping[str, NodeReplacer], interval_s: float, leads: Callable[[], bool]) -> None:
        self._replacers = dict(replacers)
        self._interval_s = interval_s
        self._leads = leads
        self._closing = threading.Event()
        self._turn = threading.Lock()
        self._warned: set[str] = set()
        self._thread = threading.Thread(target=self._watch, name="replacement", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop checking."""
        self._closing.set()

    def finish(self) -> None:
        """Cancel the waiting jobs of a run that this node has just closed."""
        self.close()
        # A daemon: the node must end even if the workspace does not answer.
        last = threading.Thread(target=self._check, name="last check for replacement", daemon=True)
        last.start()
        last.join(_FINISH_S)

    def _watch(self) -> None:
        pause = random.uniform(0.5, 1.0) * self._interval_s  # random, because nodes often start together
        while not self._closing.wait(pause):
            pause = self._interval_s
            if self._leads() and not self._check():
                pause = max(_AFTER_REFUSAL_S, self._interval_s)

    def _check(self) -> bool:
        """Check once; return whether the workspace grants access to one of the identities."""
        with self._turn:
            for name, replacer in list(self._replacers.items()):
                try:
                    for text in replacer.act().done:
                        _LOG.warning("Replacement of nodes: %s.", text)
                except WorkspaceForbidden as error:
                    self._warn_once(f"Lost nodes are not replaced by {name}: {error}")
                    continue
                except UsageError as error:
                    self._warn_once(f"Lost nodes are not replaced: {error}")
                    return False
                except ElasticError as error:
                    _LOG.info("Replacement of nodes: the jobs could not be read; the next check follows: %s", error)
                except Exception:  # noqa: BLE001 - training must not be disturbed
                    _LOG.exception("Replacement of nodes failed; the next check follows")
                return True
        return False

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _LOG.warning(text)


def start_replacement_thread(
    identity: NodeIdentity, table: Table, leads: Callable[[], bool], environment: NodeEnvironment
) -> ReplacementThread | None:
    """Start the replacement thread of this node.

    Args:
        leads: function that returns whether this node is responsible.

    Returns:
        The thread; ``None`` if the plan disables it or the node is not on Azure ML.
    """
    plan = identity.plan
    policy = plan.replacement
    placement = plan.resources.effective_placement
    own = environment.job if placement == "service" else environment.root_job  # a job may be below one of the user's
    first = environment.first_job or own
    if policy is None or not policy.by_nodes or placement == "gang" or not first:
        return None
    from azureml_elastic.node.azure.workspace import cloud_of
    from azureml_elastic.node.replacement.jobs import WorkspaceJobs, workspace_id
    from azureml_elastic.node.replacement.replacer import NodeReplacer

    try:
        workspace = workspace_id(environment)
        tokens = _tokens(identity, environment)
    except ElasticError as error:
        _LOG.info("Lost nodes are not replaced by this node: %s", error)
        return None
    replacers = {
        name: NodeReplacer(
            WorkspaceJobs(workspace, token, cloud_of(environment).arm_url), table, first, identity.run_id
        )
        for name, token in tokens.items()
    }
    return ReplacementThread(replacers, policy.interval.total_seconds(), leads) if replacers else None


def _tokens(identity: NodeIdentity, environment: NodeEnvironment) -> dict[str, TokenCredential]:
    """Return the available token credentials by name: the submitting user before the node's managed identity."""
    from azureml_elastic.node.azure.credentials import NodeTokenCredential

    found = []
    if environment.obo_endpoint:
        found.append(NodeTokenCredential.on_behalf_of(environment))
    if environment.msi_endpoint:
        found.append(NodeTokenCredential.managed(environment, identity.plan.rendezvous.client_id))
    return {tokens.name: tokens for tokens in found}
