"""A node that writes down which modules of its agent are entered, and when; the rest is the real one."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import azureml_elastic
from azureml_elastic.environment import names as variables
from azureml_elastic.forks.server import EarlierImports
from azureml_elastic.local.forked_node import become_node
from tests.support.leaving import leaving

FOLDER = "TEST_ENTERED_FOLDER"

_ROOT = str(Path(azureml_elastic.__file__).parent)
_PACKAGES = tuple(f"{_ROOT}/{package}/" for package in ("node", "ipc"))


def become_watched_node(request: Mapping[str, Any], descriptors: list[int], made: EarlierImports) -> Callable[[], Any]:
    """Become a node; or its worker; see :func:`tests.support.leaving.become_node`."""
    run = become_node(request, descriptors, made)
    entered: list[tuple[float, str]] = []

    def on_call(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_PACKAGES):
            entered.append((time.time(), frame.f_code.co_filename))

    def watched() -> Any:
        threading.setprofile(on_call)
        sys.setprofile(on_call)
        try:
            return run()
        finally:
            sys.setprofile(None)
            path = Path(os.environ[FOLDER]) / f"{os.environ[variables.NODE_ID]}.json"
            path.write_text(json.dumps([(when, name.removeprefix(f"{_ROOT}/")) for when, name in list(entered)]))

    return leaving(watched)
