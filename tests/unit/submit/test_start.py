"""The starter, run as a node runs it: an archive with a library, in a process of its own."""

import base64
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from azureml_elastic.submit.runtime import start as starter

NODE = """
import os, subprocess, sys
import {module}

def main(argv):
    child = "import azureml_elastic.node, {module}; print('child', {module}.__name__)"
    done = subprocess.run([sys.executable, "-c", child], check=True, capture_output=True, text=True)
    print(argv, sys.argv[1:] == argv, os.path.dirname(__file__), done.stdout.strip())
    return 7
"""


@pytest.fixture
def runtime(tmp_path):
    """An archive with a node that prints what it was given."""

    def make(needed, module="json"):
        place = tmp_path / "the runtime" / "library.pyz"
        place.parent.mkdir()
        with zipfile.ZipFile(place, "w") as archive:
            archive.write(starter.__file__, "__main__.py")
            archive.writestr("requirements.json", json.dumps(needed))
            for name in ("azureml_elastic", "azureml_elastic/node"):
                archive.writestr(f"site/{name}/__init__.py", "")
            archive.writestr("site/azureml_elastic/node/__main__.py", NODE.format(module=module))
        return place

    return make


def unpacked(place):
    """Return the folder into which an archive was unpacked."""
    (folder,) = place.parent.glob("azureml-elastic-*")
    return folder


def run(place, tmp_path, *arguments, **variables):
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "TMPDIR": str(scratch),
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "PYTHONDONTWRITEBYTECODE": "",
        **variables,
    }
    return subprocess.run(
        [sys.executable, place, *arguments],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def wheel(folder, name, version="1.5"):
    """Write the smallest wheel that pip installs."""
    files = {
        f"{name}.py": "",
        f"{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{name}-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{name}-{version}.dist-info/RECORD"
    lines = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(text)}\n")
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in {**files, record: "".join([*lines, f"{record},,\n"])}.items():
            archive.writestr(path, text)


def test_enters_the_node_with_the_library_first_for_every_process(runtime, tmp_path):
    place = runtime({})
    done = run(place, tmp_path, "--checkpoint-dir", "c d", "--", "python", "x.py", PYTHONPATH="")
    assert done.stderr == ""
    node = unpacked(place) / "site" / "azureml_elastic" / "node"
    assert done.stdout == f"['--checkpoint-dir', 'c d', '--', 'python', 'x.py'] True {node} child json\n"
    assert done.returncode == 7
    assert unpacked(place).stat().st_mode & 0o777 == 0o700


def test_a_second_start_uses_the_unpacked_files_unless_some_are_gone(runtime, tmp_path):
    place = runtime({})
    assert run(place, tmp_path).returncode == 7
    folder = unpacked(place)
    before = (folder / "requirements.json").stat().st_mtime_ns
    assert run(place, tmp_path).returncode == 7
    assert (folder / "requirements.json").stat().st_mtime_ns == before
    (folder / "site" / "azureml_elastic" / "node" / "__main__.py").unlink()
    done = run(place, tmp_path)
    assert done.returncode == 7, done.stderr
    assert str(folder) not in done.stdout
    assert len(list(place.parent.iterdir())) == 3


def test_another_process_compiles_what_the_agent_does_not_import(runtime, tmp_path):
    place = runtime({})
    with zipfile.ZipFile(place, "a") as archive:
        archive.writestr("site/azureml_elastic/train/__init__.py", "import json")
        archive.writestr("site/azureml_elastic/torn.py", "def")
    assert run(place, tmp_path, "--", "x.py").stderr == ""
    train = unpacked(place) / "site" / "azureml_elastic" / "train"
    compiled = Path(importlib.util.cache_from_source(str(train / "__init__.py")))
    while not compiled.exists():
        time.sleep(0.01)


def test_nothing_is_compiled_where_python_must_not_write_byte_code(runtime, tmp_path):
    place = runtime({})
    assert run(place, tmp_path, "--", "x.py", PYTHONDONTWRITEBYTECODE="1").returncode == 7
    assert not list(unpacked(place).rglob("*.pyc"))


def test_many_starts_at_once_unpack_one_folder(runtime, tmp_path):
    place = runtime({})
    with ThreadPoolExecutor(8) as threads:
        done = list(threads.map(lambda _: run(place, tmp_path), range(8)))
    assert {each.returncode for each in done} == {7}
    assert {str(unpacked(place)) in each.stdout for each in done} == {True}


def test_another_folder_is_used_where_the_archive_s_cannot_be_written(runtime, tmp_path):
    place = runtime({})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert starter.unpack(place, [tmp_path / "missing", elsewhere]).parent == elsewhere


def test_a_library_that_cannot_be_unpacked_or_read_is_said(runtime, tmp_path, capsys):
    place = runtime({})
    with pytest.raises(SystemExit):
        starter.unpack(place, [tmp_path / "missing"])
    assert "cannot be unpacked" in (said := capsys.readouterr().err)
    assert "TMPDIR" in said
    data = bytearray(place.read_bytes())
    data[data.index(b"import os, subprocess") + 3] ^= 1
    place.write_bytes(data)
    with pytest.raises(SystemExit):
        starter.unpack(place, [tmp_path])
    assert "is damaged" in capsys.readouterr().err
    assert not list(tmp_path.glob("azureml-elastic-*"))


def test_what_is_there_is_not_installed(runtime, tmp_path):
    done = run(runtime({"pydantic": "pydantic>=2"}, "pydantic"), tmp_path, "--", "x.py")
    assert (done.stderr, done.returncode) == ("", 7)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_what_is_missing_is_installed_for_this_node_once(runtime, tmp_path):
    pytest.importorskip("pip")
    wheel(tmp_path, "missing_one")
    place = runtime({"missing_one": "missing_one>=1.2"}, "missing_one")
    done = run(place, tmp_path, PIP_FIND_LINKS=str(tmp_path))
    assert "installing missing_one>=1.2 for this node" in done.stderr
    assert done.stdout.endswith("child missing_one\n")
    (folder,) = (tmp_path / "scratch").iterdir()
    assert (folder / "missing_one.py").exists()
    again = run(place, tmp_path)
    assert (again.stderr, again.stdout, again.returncode) == ("", done.stdout, 7)


def test_what_cannot_be_installed_is_said_with_the_next_step(runtime, tmp_path):
    done = run(runtime({"missing_one": "missing_one>=1.2"}), tmp_path)
    assert done.returncode == 2
    assert "lacks missing_one>=1.2, and pip could not install it" in done.stderr
    assert "pip install 'azureml-elastic[node]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "scratch").iterdir()) == []


def test_torch_is_never_installed(runtime, tmp_path):
    done = run(runtime({"torch": "torch>=999"}), tmp_path)
    assert done.returncode == 2
    assert "no 'torch>=999', which is never installed at start" in done.stderr


@pytest.mark.parametrize(
    ("installed", "requirement", "answer"),
    [
        ("2.8", "pydantic<3,>=2.8", True),
        ("2.8.0", "pydantic>=2.8", True),
        ("2.10.1", "pydantic<3,>=2.8", True),
        ("1.10.9", "pydantic<3,>=2.8", False),
        ("3.0", "pydantic<3,>=2.8", False),
        ("2.13.0+cpu", "torch>=2.6", True),
        ("2.6", "torch>=2.6.1", False),
        ("7.0b1", "psutil", True),
    ],
)
def test_versions_are_compared_by_their_numbers(installed, requirement, answer):
    assert starter.is_satisfied(installed, requirement) is answer


def test_unmet_names_what_is_missing_or_too_old():
    needed = {"pydantic": "pydantic>=2", "json": "json", "no_such": "no-such>=1", "no_such.inner": "no-such-inner"}
    assert starter.unmet(needed) == {"no_such": "no-such>=1", "no_such.inner": "no-such-inner"}
    assert starter.unmet({"pydantic": "pydantic>=999"}) == {"pydantic": "pydantic>=999"}


def test_the_starter_needs_the_standard_library_alone(tmp_path):
    code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='x')"
    command = [sys.executable, "-I", "-S", "-c", code, Path(starter.__file__)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stderr, done.returncode) == ("", 0)
