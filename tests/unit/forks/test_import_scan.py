"""The imports of a program are found in its text."""

from __future__ import annotations

import sys
from textwrap import dedent

import pytest

from azureml_elastic.forks.import_scan import Import, find_imports


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return a function that writes modules to a folder that is first on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(**files):
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__in__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(text))
        return str(tmp_path / "script.py")

    yield write
    assert set(sys.modules) == before, "something was imported"


def modules(script, kind="script"):
    return [found.module for found in find_imports(kind, script).imports]


def test_imports_come_in_order_with_their_names_and_once(project):
    script = project(script="import torch\nfrom numpy import random, linalg as la\nimport torch, json\n")
    assert find_imports("script", script).imports == (
        Import("torch"),
        Import("numpy", ("random", "linalg")),
        Import("json"),
    )


def test_blocks_at_the_top_level_count_and_functions_do_not(project):
    script = project(
        script="""
        from typing import TYPE_CHECKING
        import typing
        if TYPE_CHECKING:
            import ast
        elif typing.TYPE_CHECKING:
            import wave
        else:
            import csv
        with open("x") as file:
            import json
        for _ in range(3):
            import shelve
        while False:
            import zipfile
        class A:
            import tarfile
            def f(self):
                import this
        match 1:
            case 1:
                import bz2
        def g():
            import antigravity
        async def h():
            import turtle
        if __name__ == "__main__":
            import uuid
        """
    )
    assert modules(script) == ["typing", "typing", "csv", "json", "shelve", "zipfile", "tarfile", "bz2", "uuid"]


def test_this_library_is_imported_last_where_only_functions_import_it(project):
    script = project(
        script="""
        class Trainer:
            def fit(self):
                import wave, azureml_elastic.train
        def main():
            if True:
                from azureml_elastic import train
                from .azureml_elastic import nothing
        import json
        """
    )
    assert find_imports("script", script).imports == (Import("json"), Import("azureml_elastic", ("train",)))
    project(script="import os\nos.environ['WHATEVER'] = '1'\ndef main():\n    from azureml_elastic import train\n")
    assert "azureml_elastic" not in modules(script)


def test_alternatives_are_read_only_where_the_first_choice_is_missing(project):
    script = project(
        script="""
        try:
            import json
        except ImportError:
            import csv
        try:
            import no_such_module_anywhere
            import no_such_module_either
        except ImportError:
            import wave
        else:
            import bz2
        finally:
            import uuid
        """
    )
    assert modules(script) == ["json", "wave", "uuid"]


def test_the_users_own_modules_are_followed_and_not_executed(project):
    script = project(
        script="import json\nimport own.deep.model\nfrom own import tools\nfrom helper import *\nimport wave",
        own__in____init__="import csv\nraise SystemExit('executed')",
        own__in__deep__in____init__="from .. import tools\nfrom . import layers, model",
        own__in__deep__in__layers="import bz2",
        own__in__deep__in__model="import zipfile, own.deep.layers, script\nif __name__ == '__main__':\n import lzma",
        own__in__tools="import shelve",
        helper="import uuid\nimport helper",
    )
    found = modules(script)
    assert found == ["json", "csv", "shelve", "bz2", "zipfile", "uuid", "wave"]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("own.main", ["csv", "bz2", "json", "uuid"]),
        ("own", ["csv", "shelve"]),
        ("own.missing", ["csv"]),
        ("missing.main", []),
    ],
)
def test_a_module_is_read_after_its_packages(project, target, expected):
    project(
        own__in____init__="import csv",
        own__in__main="from .part import x\nimport json\nif __name__ == '__main__':\n import uuid",
        own__in__part="import bz2",
        own__in____main__="import shelve",
    )
    assert modules(target, "module") == expected


def test_an_installed_module_that_is_run_is_read_and_its_packages_are_imported():
    found = find_imports("module", "azureml_elastic.node").imports
    assert found[0] == Import("azureml_elastic")
    assert Import("argparse") in found
    assert Import("azureml_elastic.node.__main__") not in found


@pytest.mark.parametrize("text", ["def broken(:\n", "\0", "# coding: no-such\n"])
def test_what_cannot_be_read_has_no_imports(project, text):
    assert modules(project(script=text)) == []
    assert modules("no/such/script.py") == []


@pytest.mark.parametrize(
    "line",
    [
        'os.environ["OMP_NUM_THREADS"] = "1"',
        'environ["PYTORCH_CUDA_ALLOC_CONF"] = "x"',
        'os.environ.setdefault("MKL_NUM_THREADS", "1")',
        'os.environ.update({"WANDB_MODE": "x", "TORCH_LOGS": "y"})',
        'os.environ.update(OMP_NUM_THREADS="1")',
        "os.environ.update(settings)",
        "os.environ[name] = value",
        'del os.environ["OMP_NUM_THREADS"]',
        'os.environ |= {"A": "1"}',
        'os.putenv("KMP_BLOCKTIME", "0")',
        "dotenv.load_dotenv()",
        'if True:\n    os.environ["OMP_NUM_THREADS"] = "1"',
    ],
)
def test_variables_that_torch_reads_are_an_obstacle_only_before_torch(project, line):
    before = find_imports("script", project(script=f"import os\n{line}\nimport torch\n"))
    assert before.obstacle is not None
    assert "script.py:" in before.obstacle
    assert "before torch is imported" in before.obstacle
    assert find_imports("script", project(script=f"import os, torch\n{line}\nimport numpy\n")).obstacle is None


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ('os.environ["MASTER_PORT"] = "1"', ["os", "pydantic", "torch", "csv"]),
        ('os.environ["CUDA_VISIBLE_DEVICES"] = "0"', ["os", "pydantic", "torch", "csv"]),
        ('os.environ["NCCL_DEBUG"] = "INFO"', ["os", "pydantic", "torch", "csv"]),
        ('sys.path.append("lib")', ["os", "pydantic", "torch", "csv"]),
        ('print(os.environ["HOME"])', ["os", "pydantic", "torch", "csv"]),
        ('def f():\n    os.environ["HOME"] = "x"', ["os", "pydantic", "torch", "csv"]),
        ('f = lambda: os.environ.pop("HOME")', ["os", "pydantic", "torch", "csv"]),
        ('os.environ["WANDB_MODE"] = "offline"', ["os", "torch", "csv"]),
        ('sys.path.insert(0, "lib")', ["os", "torch", "csv"]),
        ('sys.path[0:0] = ["lib"]', ["os", "torch", "csv"]),
        ('sys.path = ["lib"]', ["os", "torch", "csv"]),
    ],
)
def test_what_is_prepared_is_left_to_the_script(project, line, left):
    script = project(script=f"import os\n{line}\nimport pydantic, torch, csv\n")
    assert modules(script) == left
    assert find_imports("script", script).obstacle is None
