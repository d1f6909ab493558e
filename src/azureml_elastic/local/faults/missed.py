"""Why a fault of a schedule was not injected. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping

from azureml_elastic.ledger.summary import NodeEnding
from azureml_elastic.local.faults.model import Add, AtStep, Fault, TableTrouble
from azureml_elastic.local.faults.schedule import ChaosState, reached

__all__ = ["reason_missed"]


def reason_missed(fault: Fault, state: ChaosState, endings: Mapping[str, NodeEnding]) -> str:
    """Return why a fault had not been injected when the run ended.

    Args:
        fault: the fault.
        state: state at the end of the run.
        endings: started nodes, in the order of their starts, and how they ended.
    """
    if not reached(fault.when, state):
        return _too_early(fault, state)
    if isinstance(fault, (Add, TableTrouble)):
        return "the run was already ending when its time came"
    if fault.target.startswith("node-") and fault.target not in endings:
        names = list(endings)
        started = " to ".join(dict.fromkeys((names[0], names[-1])))
        return f"there was no {fault.target}; started were {started}"
    if endings.get(fault.target) == "frozen":
        return f"{fault.target} was frozen"
    return "the run was already ending, or had no such node left, when its time came"


def _too_early(fault: Fault, state: ChaosState) -> str:
    if isinstance(fault.when, AtStep):
        if state.step == 0:
            return "the run reported no step; a script without a session needs times in seconds, such as @20s"
        return f"the run ended at step {state.step}"
    if state.seconds is None:
        return "the run ended before it trained"
    return f"the run ended after {state.seconds:.1f} s of training"
