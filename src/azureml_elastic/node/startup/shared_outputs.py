"""Outputs of a step whose nodes are jobs of their own: all write into one folder, which the first node copies.

Azure ML gives each of these jobs an output folder of its own, and later steps read that of the first one. Any node may
be that of rank 0, and another one after each loss. The nodes therefore write into a folder beside the checkpoints, as
the nodes of one job write into one output.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import UsageError
from azureml_elastic.program.command import Program

_FOLDER = ".outputs"


class SharedOutputs:
    """The outputs of this node that are shared with the others.

    The program gets links in place of the outputs' paths: it is known before the run's name is, on which the shared
    folder depends.

    Args:
        outputs: outputs as ``NAME=PATH``.

    Raises:
        UsageError: an output has no path.
    """

    def __init__(self, outputs: Sequence[str]) -> None:
        self._outputs: dict[str, Path] = {}
        for text in outputs:
            name, _, path = text.partition("=")
            if not path:
                raise UsageError(f"--output {text} has no path. Give NAME=PATH.")
            self._outputs[name] = Path(path)
        self._links = Path(tempfile.mkdtemp(prefix="azureml-elastic-outputs-"))
        self._shared: dict[str, Path] = {}

    def redirected(self, program: Program) -> Program:
        """Return the program with the links in its arguments."""
        arguments = program.arguments
        for name, path in self._outputs.items():
            pattern = re.compile(rf"{re.escape(str(path))}(?![\w.-])")
            link = str(self._links / name).replace("\\", r"\\")  # a backslash would begin a reference to a group
            arguments = tuple(pattern.sub(link, word) for word in arguments)
        return dataclasses.replace(program, arguments=arguments)

    def open(self, checkpoint_dir: str, run_id: str) -> None:
        """Make the links lead to the folder of the run.

        Raises:
            UsageError: the folder cannot be made.
        """
        folder = Path(checkpoint_dir, _FOLDER, quote(run_id, safe=""))
        for name, path in self._outputs.items():
            self._shared[name] = shared = folder / name
            try:
                (shared if path.is_dir() else folder).mkdir(parents=True, exist_ok=True)
                (self._links / name).symlink_to(shared)
            except OSError as error:
                raise UsageError(
                    f"The folder {shared}, in which all nodes write the output {name!r}, cannot be made: {error}. "
                    "Give checkpoint.path a folder that the nodes can write."
                ) from error

    def publish(self, environment: NodeEnvironment) -> None:
        """Copy what the nodes have written to this node's own outputs, if this is the first node.

        Raises:
            UsageError: it cannot be copied.
        """
        if not environment.is_first_node:
            return
        # Another node may have written last, and a mount shows its files only after its cache has expired.
        time.sleep(2 * environment.mount_cache_seconds)
        for name, path in self._outputs.items():
            shared = self._shared[name]
            try:
                if shared.is_dir():
                    shutil.copytree(shared, path, dirs_exist_ok=True, copy_function=shutil.copyfile)
                elif shared.exists():
                    shutil.copyfile(shared, path)
            except OSError as error:
                raise UsageError(
                    f"The output {name!r} could not be copied from {shared} to {path}: {error}. The files are still "
                    "there; give the output a path of its own, which all nodes write to directly."
                ) from error

    def close(self) -> None:
        """Remove the links."""
        shutil.rmtree(self._links, ignore_errors=True)
