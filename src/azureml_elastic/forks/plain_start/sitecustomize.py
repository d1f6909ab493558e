"""Attaches the integrations of training stacks in a worker that is started plainly, by Python's own start-up hook.

The exception that ends it is recorded, and its lookups of files are noted, as those of a forked worker.

Its folder comes first in ``PYTHONPATH``. It takes the folder out again, and runs the ``sitecustomize`` that it hides.
"""

import contextlib
import importlib
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib would slow each start down

sys.path[:] = [entry for entry in sys.path if entry != _FOLDER]
_left = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry != _FOLDER]
if any(_left):
    os.environ["PYTHONPATH"] = os.pathsep.join(_left)
else:
    os.environ.pop("PYTHONPATH", None)
_own = sys.modules.pop("sitecustomize")
with contextlib.suppress(ModuleNotFoundError):
    importlib.import_module("sitecustomize")
sys.modules.setdefault("sitecustomize", _own)  # the import of this module looks for one when it ends
with contextlib.suppress(ModuleNotFoundError):  # the script's interpreter may be another one than the agent's
    importlib.import_module("azureml_elastic.forks.stack_imports").register()
    importlib.import_module("azureml_elastic.forks.uncaught_error").install(os.environ)
    importlib.import_module("azureml_elastic.forks.state_files").record(os.environ)
