"""The folder that goes to the nodes."""

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from azureml_elastic.errors import SubmitError
from azureml_elastic.submit.staging import cache_folder, stage_runtime


def listing(place):
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_holds_the_library_its_starter_and_what_they_need(tmp_path):
    content = listing(stage_runtime(tmp_path))
    assert {"start.py", "requirements.json", "site/azureml_elastic/__init__.py"} <= content.keys()
    assert content["start.py"] == content["site/azureml_elastic/submit/start.py"]
    assert {"site/azureml_elastic/py.typed", "site/azureml_elastic/node/__main__.py"} <= content.keys()
    assert not [name for name in content if "__pycache__" in name or name.endswith(".pyc")]
    needed = json.loads(content["requirements.json"])
    assert needed.keys() == {
        "azure.data.tables",
        "azure.identity",
        "numpy",
        "psutil",
        "pydantic",
        "tenacity",
        "torch",
        "xxhash",
    }
    assert needed["torch"].startswith("torch>=")
    assert all(";" not in requirement and ">=" in requirement for requirement in needed.values())


def test_equal_content_is_in_the_same_place_whoever_stages_it(tmp_path):
    first, second = stage_runtime(tmp_path / "a"), stage_runtime(tmp_path / "b")
    assert first.relative_to(tmp_path / "a") == second.relative_to(tmp_path / "b")
    assert listing(first) == listing(second)
    assert first.name == "azureml_elastic_runtime"


def test_a_second_call_writes_nothing(tmp_path):
    place = stage_runtime(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert stage_runtime(tmp_path) == place
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("damage", ["removed", "changed", "compiled", "emptied"])
def test_a_damaged_folder_is_made_anew(tmp_path, damage):
    place = stage_runtime(tmp_path)
    whole = listing(place)
    if damage == "removed":
        (place / "start.py").unlink()
    elif damage == "changed":
        (place / "start.py").write_text("import os")
    elif damage == "compiled":
        subprocess.run([sys.executable, "-m", "compileall", "-q", place], check=True, timeout=60)
    else:
        shutil.rmtree(place)
        place.mkdir()
    assert stage_runtime(tmp_path) == place
    assert listing(place) == whole
    assert list((tmp_path / "runtime").iterdir()) == [place.parent]


def test_many_at_once_agree(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        places = set(threads.map(stage_runtime, [tmp_path] * 16))
    (place,) = places
    assert "start.py" in listing(place)
    assert list((tmp_path / "runtime").iterdir()) == [place.parent]


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SubmitError, match=r"cannot be written to .*XDG_CACHE_HOME"):
        stage_runtime(tmp_path / "file")


def test_the_cache_is_the_user_s(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "azureml-elastic"
