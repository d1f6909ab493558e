"""Conversion of a fork of a fork server into ``python script.py`` or ``python -m module``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from azureml_elastic.forks import import_loader, script_runner
from azureml_elastic.forks.server import EarlierImports
from tests.support.leaving import leaving


def become_script(request: Mapping[str, Any], descriptors: list[int], made: EarlierImports) -> Callable[[], Any]:
    """Become a script, and return the call that runs it."""
    stdin, stdout, stderr = descriptors
    if request["session"]:
        os.setsid()
    os.chdir(request["folder"])
    script_runner.adopt_descriptors(stdin, stdout, stderr)
    if "torch" in sys.modules:
        script_runner.reset_process_state()
    interpreter, *words = request["argv"]
    kind = "module" if words[0] == "-m" else "script"
    target, *arguments = words[1:] if kind == "module" else words
    import_loader.prepare(kind, target, arguments)
    return leaving(script_runner.become(kind, target, [interpreter, *words]))
