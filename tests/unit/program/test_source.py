"""The text of programs: which modules belong to one, whether they use the library, and syntax trees beside threads."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys

import pytest

from azureml_elastic.program.command import parse_program
from azureml_elastic.program.source import opens_session, parse_quietly, program_modules

USES = "from azureml_elastic import train\n"


def uses_it(*words):
    return opens_session(program_modules(parse_program(words)))


@pytest.mark.parametrize(
    ("main", "files", "expected"),
    [
        (USES, {}, True),
        ("import torch\n", {}, False),
        ("import loop\n", {"loop.py": USES}, True),
        ("import other\n", {"loop.py": USES, "other.py": "import math\n"}, False),
        ("def main():\n    from package import loop\n", {"package/__init__.py": "", "package/loop.py": USES}, True),
        ("import package\n", {"package/__init__.py": "from . import loop\n", "package/loop.py": USES}, True),
        (
            "import package.a\n",
            {"package/a.py": "from .b import run\n", "package/b.py": "import c\n", "c.py": USES},
            True,
        ),
        ("import a\n", {"a.py": "import b\n", "b.py": "import a\n"}, False),
        ("not python (\n", {}, False),
    ],
)
def test_the_imports_of_local_modules_are_followed(tmp_path, main, files, expected):
    for name, text in {"train.py": main, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert uses_it(str(tmp_path / "train.py")) is expected


@pytest.mark.parametrize(
    ("target", "files", "expected"),
    [
        ("pkg.train", {"pkg/__init__.py": "", "pkg/train.py": "import torch\n"}, False),
        ("pkg.train", {"pkg/train.py": USES}, True),
        ("pkg.train", {"pkg/__init__.py": "", "pkg/train.py": "from pkg import loop\n", "pkg/loop.py": USES}, True),
        ("pkg.train", {"pkg/__init__.py": "", "pkg/train.py": "import other\n", "other.py": USES}, False),
        ("pkg", {"pkg/__init__.py": "", "pkg/__main__.py": "from .loop import run\n", "pkg/loop.py": USES}, True),
        ("pkg", {"pkg/__init__.py": "raise SystemExit('executed')", "pkg/__main__.py": "import torch\n"}, False),
        ("pkg.sub", {"pkg/__init__.py": "", "pkg/sub/__init__.py": "", "pkg/sub/__main__.py": "import pkg\n"}, False),
        ("single", {"single.py": "import other\n", "other.py": USES}, False),
        ("pkg.missing", {"pkg/__init__.py": ""}, True),
        ("pkg.train.more", {"pkg/__init__.py": "", "pkg/train.py": ""}, True),
        ("pkg", {"pkg/__init__.py": ""}, True),
    ],
)
def test_an_installed_program_is_read_within_its_package(tmp_path, monkeypatch, target, files, expected):
    for name, text in files.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert uses_it("python", "-m", target) is expected


def test_a_module_that_cannot_be_found_is_assumed_to_use_the_library():
    assert uses_it("python", "-m", "not_a_module")


PROGRAM = """
import gc, sys, threading, time
from azureml_elastic.program.source import parse_quietly

class Finalized:
    def __init__(self):
        self.itself = self
    def __del__(self):
        time.sleep(0)  # another thread runs

def parse_beside(depth):
    if depth:
        return parse_beside(depth - 1)
    while not ended.is_set():
        try:
            compile("a = f(1)[2] + {}.x()", "beside", "exec", 0x400)
        except SystemError:
            pass

sys.setswitchinterval(1e-6)
gc.set_threshold(50)
ended = threading.Event()
beside = threading.Thread(target=parse_beside, args=(20,))
beside.start()
try:
    for _ in range(20):
        Finalized()
        assert parse_quietly(b"def f(a):\\n    return [x for x in a if x > 1]\\n" * 50) is not None
finally:
    ended.set()
    beside.join()
"""


def test_a_collection_that_lets_another_thread_parse_ends_in_no_error():
    """With ``ast.parse()`` alone CPython 3.11 raises SystemError in nearly each of these calls."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr


def test_collections_are_as_before():
    assert isinstance(parse_quietly(b"a = 1"), ast.Module)
    assert gc.isenabled()
    assert parse_quietly(b"a = ") is None
    assert gc.isenabled()
