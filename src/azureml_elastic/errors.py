"""All errors of this library.

::

    ElasticError
    ├── UsageError                 exit code 2
    │   ├── CommandError
    │   ├── PlanError
    │   ├── ChaosError
    │   ├── SubmitError
    │   ├── TableForbidden
    │   ├── TableNotFound
    │   ├── KeyInvalid
    │   ├── JobRefused
    │   ├── WorkspaceForbidden
    │   └── MissingExtra           also an ImportError
    ├── TableError
    │   ├── RowExists
    │   ├── RowChanged
    │   ├── ValueTooLarge
    │   └── TableUnavailable       may be retried
    ├── WorkspaceUnavailable       may be retried
    ├── RunClosed
    │   ├── RunSucceeded
    │   └── RunFailed
    ├── NonFiniteError
    ├── RollbackRequired
    ├── RoundBroken
    ├── EngineError
    ├── Fenced
    └── CheckpointError
        └── CheckpointDamaged

    NodeLeaving                    no error: what a node waits for ends, because it must leave
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from azureml_elastic.masking import masked

__all__ = [
    "ChaosError",
    "CheckpointDamaged",
    "CheckpointError",
    "CommandError",
    "ElasticError",
    "EngineError",
    "Fenced",
    "JobRefused",
    "KeyInvalid",
    "MissingExtra",
    "NodeLeaving",
    "NonFiniteError",
    "PlanError",
    "RollbackRequired",
    "RoundBroken",
    "RowChanged",
    "RowExists",
    "RunClosed",
    "RunFailed",
    "RunSucceeded",
    "SubmitError",
    "TableError",
    "TableForbidden",
    "TableNotFound",
    "TableUnavailable",
    "UsageError",
    "ValueTooLarge",
    "WorkspaceForbidden",
    "WorkspaceUnavailable",
    "needs_extra",
]


class ElasticError(Exception):
    """Base class of all errors of this library."""


class UsageError(ElasticError):
    """The input is invalid; the message describes the correction. Commands exit with 2."""


class _MaskedError(UsageError):
    def __init__(self, message: str) -> None:
        super().__init__(masked(message))


class CommandError(_MaskedError):
    """The command starts no Python program, or a missing one; apparent secrets in the message are masked."""


class PlanError(UsageError):
    """The plan is missing, damaged, or of an unknown version."""


class ChaosError(UsageError):
    """The fault schedule cannot be parsed."""


class SubmitError(_MaskedError):
    """The job cannot be compiled or submitted; apparent secrets in the message are masked."""


class TableForbidden(UsageError):
    """The storage account denies access to the identity; the message names the account and the missing role."""


class TableNotFound(UsageError):
    """The storage account does not exist or does not respond."""


class KeyInvalid(UsageError):
    """The row key is not valid in all backends."""


class JobRefused(UsageError):
    """The workspace permanently rejects a replacement job; the message contains its reason."""


class WorkspaceForbidden(UsageError):
    """The workspace does not exist or denies access to the identity; the message names the missing role."""


class MissingExtra(UsageError, ImportError):
    """An optional package is not installed, which an extra of azureml-elastic installs."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"The package {package!r} is not installed. Install it with: pip install 'azureml-elastic[{extra}]'"
        )


class TableError(ElasticError):
    """An operation on the table failed."""


class RowExists(TableError):
    """The row to insert exists."""


class RowChanged(TableError):
    """The row to replace or delete has another version or does not exist; read it again."""


class ValueTooLarge(TableError):
    """The value does not fit into a row."""


class TableUnavailable(TableError):
    """The table throttled, timed out or reset the connection. The operation may be retried."""


class WorkspaceUnavailable(ElasticError):
    """The workspace does not respond. The operation may be retried."""


class RunClosed(ElasticError):
    """The run has ended; nodes cannot join."""


class RunSucceeded(RunClosed):
    """The run ended successfully."""


class RunFailed(RunClosed):
    """The run failed: the message is that of the node that closed it, the exit code that of all nodes."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class NonFiniteError(ElasticError):
    """The loss or the weights are NaN or infinite, and the checkpoint policy ends the run then; it is not restarted."""


class RollbackRequired(ElasticError):
    """The weights are NaN or infinite, and the checkpoint policy restarts the run from its last checkpoint then."""


class RoundBroken(ElasticError):
    """A node or a worker of the round was lost during an operation; another round follows."""


class EngineError(ElasticError):
    """The head of an engine's cluster, such as Dask's scheduler, has not started or has ended."""


class Fenced(ElasticError):
    """A newer round exists; the node must not write and should join again."""


class CheckpointError(ElasticError):
    """A checkpoint could not be saved or loaded."""


class CheckpointDamaged(CheckpointError):
    """A file of the checkpoint is missing, truncated, or differs from the checksum in the manifest."""


class NodeLeaving(Exception):
    """This node must leave the run, so what it waits for ends.

    A cancellation, like asyncio's: no handler of :class:`ElasticError` or ``OSError`` takes it for a failed call.
    """


@contextlib.contextmanager
def needs_extra(package: str, extra: str) -> Iterator[None]:
    """Convert the failed import of an optional package to :class:`MissingExtra`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtra(package, extra) from error
