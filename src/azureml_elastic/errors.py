"""Every error that this library raises.

::

    ElasticError
    ├── UsageError                 the caller's input; exit code 2
    │   ├── CommandError           the command starts no Python program
    │   ├── PlanError              the plan is missing, torn or of an unknown version
    │   ├── ChaosError             a fault schedule that cannot be read
    │   ├── SubmitError            the job cannot be compiled or submitted
    │   ├── TableForbidden         the table's account refuses our identity
    │   ├── TableNotFound          the table's account does not answer or does not exist
    │   ├── KeyInvalid             a row key that no backend could store
    │   ├── JobRefused             the workspace does not take a job that was to bring a node
    │   ├── WorkspaceForbidden     the workspace refuses our identity, or does not exist
    │   └── MissingExtra           an optional package is not installed (also an ImportError)
    ├── TableError                 a call to the table
    │   ├── RowExists              insert found the row already there
    │   ├── RowChanged             replace or delete found another version, or none
    │   ├── ValueTooLarge          the row would not fit
    │   └── TableUnavailable       throttled, timed out or reset; the call may be repeated
    ├── WorkspaceUnavailable       the workspace does not answer; the call may be repeated
    ├── RunClosed                  the run has ended and takes no more nodes
    │   ├── RunSucceeded
    │   └── RunFailed
    ├── RoundBroken                a peer was lost in the middle of something; another round follows
    ├── Fenced                     a newer round has taken over; this one must not write
    └── CheckpointError
        └── CheckpointDamaged      a file is missing, short or has another checksum
"""

from __future__ import annotations

from azureml_elastic.masking import masked

__all__ = [
    "ChaosError",
    "CheckpointDamaged",
    "CheckpointError",
    "CommandError",
    "ElasticError",
    "Fenced",
    "JobRefused",
    "KeyInvalid",
    "MissingExtra",
    "PlanError",
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
]


class ElasticError(Exception):
    """The base of every error of this library."""


class UsageError(ElasticError):
    """The caller's input is wrong; the message says what to change. Commands exit with 2."""


class CommandError(UsageError):
    """The command starts no Python program, or one that does not exist; what looks like a secret in it is masked."""

    def __init__(self, message: str) -> None:
        super().__init__(masked(message))


class PlanError(UsageError):
    """The plan is missing, torn, or of a version that this release does not know."""


class ChaosError(UsageError):
    """A fault schedule that cannot be read."""


class SubmitError(UsageError):
    """The job cannot be compiled or submitted as it is; what looks like a secret in it is masked."""

    def __init__(self, message: str) -> None:
        super().__init__(masked(message))


class TableForbidden(UsageError):
    """The table's account refuses our identity; the message names the account and the missing role."""


class TableNotFound(UsageError):
    """The table's account does not exist or does not answer."""


class KeyInvalid(UsageError):
    """A row key that no backend could store."""


class JobRefused(UsageError):
    """The workspace does not take a job that was to bring a run another node; the message has its reason."""


class WorkspaceForbidden(UsageError):
    """The workspace refuses our identity, or there is no such workspace; the message names the missing role."""


class MissingExtra(UsageError, ImportError):
    """An optional package is not installed.

    Args:
        package: the distribution that could not be imported.
        extra: the extra of azureml-elastic that brings it.
    """

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"The package {package!r} is not installed. Install it with: pip install 'azureml-elastic[{extra}]'"
        )


class TableError(ElasticError):
    """A call to the table did not do what was asked."""


class RowExists(TableError):
    """Insert found the row already there."""


class RowChanged(TableError):
    """Replace or delete found another version of the row, or none: the update is lost, read again."""


class ValueTooLarge(TableError):
    """The row's value is larger than one row can hold."""


class TableUnavailable(TableError):
    """The table throttled, timed out or reset the connection. The call may be repeated."""


class WorkspaceUnavailable(ElasticError):
    """The workspace does not answer. The call may be repeated."""


class RunClosed(ElasticError):
    """The run has ended and takes no more nodes."""


class RunSucceeded(RunClosed):
    """The run ended well."""


class RunFailed(RunClosed):
    """The run failed; the message is the failure's.

    Args:
        message: what the failing node reported.
        exit_code: exit code of every node.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RoundBroken(ElasticError):
    """A node or a worker of the round was lost, and with it what was under way; another round follows."""


class Fenced(ElasticError):
    """A newer round has taken over the run; a node that gets this error must not write and should join again."""


class CheckpointError(ElasticError):
    """A checkpoint could not be saved or loaded."""


class CheckpointDamaged(CheckpointError):
    """A file of the checkpoint is missing, short, or has another checksum than its manifest says."""
