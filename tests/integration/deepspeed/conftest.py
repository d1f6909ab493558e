"""Needs DeepSpeed, which the other tests do without: ``python -m nox -s deepspeed`` installs it."""

from __future__ import annotations

import os
import warnings

from azureml_elastic.forks.import_loader import LATER_OF_PACKAGES
from tests.support import worlds

os.environ.setdefault("DS_ACCELERATOR", "cpu")

if "DEEPSPEED_TESTS" not in os.environ:
    collect_ignore_glob = ["test_*"]
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # older releases make use of what torch has deprecated
        import deepspeed  # noqa: F401
    worlds.preload("deepspeed", *LATER_OF_PACKAGES["deepspeed"])  # or each rank imports it, for 4 s
