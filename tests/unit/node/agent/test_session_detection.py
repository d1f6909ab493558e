"""Whether a program uses the library: its own text and that of the local modules that it imports count."""

from __future__ import annotations

import pytest

from azureml_elastic.config.command.program import parse_program
from azureml_elastic.node.agent.session_detection import opens_session

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
    assert opens_session(parse_program([str(tmp_path / "train.py")])) is expected


def test_a_module_that_is_not_a_local_file_is_assumed_to_use_the_library():
    assert opens_session(parse_program(["python", "-m", "not_a_local_module"]))
