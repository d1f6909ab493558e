"""Whether a program uses the library: its own text and that of the local modules that it imports count."""

from __future__ import annotations

import pytest

from azureml_elastic.program.command import parse_program
from azureml_elastic.program.source import opens_session, program_modules

USES = "from azureml_elastic import train\n"


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
    assert opens_session(program_modules(parse_program([str(tmp_path / "train.py")]))) is expected


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
    assert opens_session(program_modules(parse_program(["python", "-m", target]))) is expected


def test_a_module_that_cannot_be_found_is_assumed_to_use_the_library():
    assert opens_session(program_modules(parse_program(["python", "-m", "not_a_module"])))
