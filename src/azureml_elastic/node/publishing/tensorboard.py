"""Writes TensorBoard's files: the only module that needs its package.

A step that is trained again is written again. TensorBoard then drops the values of the steps after the one at which
training began anew, as it does for any script that resumes with ``purge_step``.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from azureml_elastic.errors import MissingExtra
from azureml_elastic.node.publishing.translation import Update


class TensorBoardPublisher:
    """Writes values as scalars, to a new file whenever training begins anew.

    Args:
        node: name of this node, the end of its files' names.

    Raises:
        MissingExtra: TensorBoard or torch is not installed.
    """

    def __init__(self, folder: Path, node: str) -> None:
        for package, extra in (("tensorboard", "tensorboard"), ("torch", "node")):
            if find_spec(package) is None:
                raise MissingExtra(package, extra)
        self._folder = folder
        self._node = node
        self._writer: Any = None

    def publish(self, updates: Sequence[Update]) -> None:
        """See :class:`~azureml_elastic.node.publishing.translation.Publisher`."""
        for update in updates:
            if update.resumed is not None:
                self._open(update.resumed + 1)
            for each in update.values:
                if self._writer is None:
                    self._open(None)
                self._writer.add_scalar(each.name, each.value, each.step, walltime=each.time)
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        self._writer = SummaryWriter(str(self._folder), purge_step=purge_step, filename_suffix=f".{self._node}")
