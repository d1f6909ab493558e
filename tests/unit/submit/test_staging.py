"""The archive that goes to the nodes."""

import ast
import json
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from azureml_elastic.config import CheckpointPolicy, ElasticResources, Plan, TableRendezvous
from azureml_elastic.environment import names
from azureml_elastic.environment.user import UserEnvironment
from azureml_elastic.errors import SubmitError
from azureml_elastic.submit.runtime import start as starter
from azureml_elastic.submit.runtime.staging import copy_runtime, stage_runtime

SCRIPT = """
import json, os
import azureml_elastic, azureml_elastic.nebula
from azureml_elastic import train
from azureml_elastic.checkpoint.state import deepspeed_engine

run = train.start()
print(json.dumps([azureml_elastic.__file__, run.round, run.world_size]), flush=True)
run.finish()
"""


def listing(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture
def site(tmp_path):
    """The library as a node unpacks it."""
    with zipfile.ZipFile(stage_runtime(tmp_path / "cache")) as archive:
        archive.extractall(tmp_path / "unpacked")
    return tmp_path / "unpacked" / "site"


def test_holds_the_library_its_starter_and_what_they_need(tmp_path):
    content = listing(stage_runtime(tmp_path))
    assert {"__main__.py", "requirements.json", "site/azureml_elastic/__init__.py"} <= content.keys()
    assert content["__main__.py"] == Path(starter.__file__).read_bytes()
    assert {"site/azureml_elastic/py.typed", "site/azureml_elastic/node/__main__.py"} <= content.keys()
    assert not [name for name in content if "__pycache__" in name or name.endswith(".pyc")]
    needed = json.loads(content["requirements.json"])
    assert needed.keys() == {
        "azure.data.tables",
        "azure.identity",
        "numpy",
        "psutil",
        "pydantic",
        "torch",
        "xxhash",
    }
    assert needed["torch"].startswith("torch>=")
    assert all(";" not in requirement and ">=" in requirement for requirement in needed.values())


def test_equal_content_is_in_the_same_place_for_every_user_in_the_same_bytes(tmp_path):
    first, second = stage_runtime(tmp_path / "a"), stage_runtime(tmp_path / "b")
    assert first.relative_to(tmp_path / "a") == second.relative_to(tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()
    assert first.name == "azureml_elastic_runtime.pyz"
    assert list(first.parent.iterdir()) == [first]


def test_a_second_call_writes_nothing(tmp_path):
    place = stage_runtime(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert stage_runtime(tmp_path) == place
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:5000])])
def test_a_damaged_file_is_made_anew(tmp_path, damage):
    place = stage_runtime(tmp_path)
    whole = place.read_bytes()
    damage(place)
    assert stage_runtime(tmp_path) == place
    assert place.read_bytes() == whole
    assert list((tmp_path / "runtime").rglob("*")) == [place.parent, place]


def test_many_at_once_agree(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        places = set(threads.map(stage_runtime, [tmp_path] * 16))
    (place,) = places
    assert "__main__.py" in listing(place)
    assert list((tmp_path / "runtime").rglob("*")) == [place.parent, place]


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SubmitError, match=r"cannot be written to .*XDG_CACHE_HOME"):
        stage_runtime(tmp_path / "file")


def test_a_copy_beside_a_file_is_the_same_and_written_once(tmp_path):
    place, written = copy_runtime(tmp_path / "compiled")
    assert (place, written) == (tmp_path / "compiled" / "azureml_elastic_runtime.pyz", True)
    assert place.read_bytes() == stage_runtime(tmp_path / "cache").read_bytes()
    before = place.stat().st_mtime_ns
    assert copy_runtime(tmp_path / "compiled") == (place, False)
    assert place.stat().st_mtime_ns == before


def test_an_older_copy_is_replaced(tmp_path):
    folder = tmp_path / "compiled"
    folder.mkdir()
    place = folder / "azureml_elastic_runtime.pyz"
    with zipfile.ZipFile(place, "w") as archive:
        archive.writestr("requirements.json", "{}")
    assert copy_runtime(folder) == (place, True)
    assert "__main__.py" in listing(place)
    assert list(folder.iterdir()) == [place]


def test_an_unrelated_file_is_not_replaced(tmp_path):
    (tmp_path / "azureml_elastic_runtime.pyz").write_text("mine")
    with pytest.raises(SubmitError, match="is no copy of the runtime"):
        copy_runtime(tmp_path)
    assert (tmp_path / "azureml_elastic_runtime.pyz").read_text() == "mine"


def test_a_copy_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SubmitError, match=r"azureml_elastic_runtime.pyz \("):
        copy_runtime(tmp_path / "file")


def test_the_cache_is_the_user_s(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert UserEnvironment.read().cache == tmp_path / "azureml-elastic"


def imported(path):
    """Yield the modules that a file imports or starts, but for those that only type checkers see."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield node.module
            if node.module == "azureml_elastic":
                yield from (f"azureml_elastic.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "find_spec")):
            yield from (str(argument.value) for argument in node.args if isinstance(argument, ast.Constant))
        elif isinstance(node, (ast.List, ast.Tuple)):  # an interpreter's arguments
            words = [getattr(element, "value", None) for element in node.elts]
            yield from (module for option, module in pairwise(words) if option == "-m")


def test_a_shipped_module_imports_nothing_that_is_not_shipped(site):
    lacking, found = [], 0
    for path in site.rglob("*.py"):
        for name in imported(path):
            if str(name).partition(".")[0] != "azureml_elastic":
                continue
            found += 1
            place = site.joinpath(*name.split("."))
            if not (place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()):
                lacking.append(f"{path.relative_to(site)} imports {name}")
    assert not lacking, f"what nodes need must not be in _EXCLUDED_PACKAGES of submit/runtime/staging.py: {lacking}"
    assert found > 300


def test_what_only_the_submitting_machine_needs_stays_there(site):
    parts = {path.name for path in (site / "azureml_elastic").iterdir()}
    assert {"node", "train", "nebula", "py.typed"} <= parts
    assert parts.isdisjoint({"cli", "local", "report", "submit", "testing"})


def test_a_node_trains_with_the_shipped_file_alone(tmp_path):
    pytest.importorskip("torch")
    place = stage_runtime(tmp_path / "cache")
    (tmp_path / "train.py").write_text(SCRIPT)
    plan = Plan(
        resources=ElasticResources(max_instance_count=1),
        rendezvous=TableRendezvous(endpoint=str(tmp_path / "table.sqlite")),
        checkpoint=CheckpointPolicy(path=str(tmp_path / "checkpoints")),
        name="alone",
    )
    variables = {
        names.PLAN: plan.to_json(),
        names.NODE_ID: "node-0",
        names.RUN_DIR: str(tmp_path / "run"),
        names.LOCAL_ADDRESS: "127.0.0.1",
        names.SCHEDULED_EVENTS: "",
    }
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [sys.executable, place, "--checkpoint-dir", tmp_path / "checkpoints", "--", "python", "train.py"],
        cwd=tmp_path,
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "__init__.py" in line]
    (unpacked,) = place.parent.glob("azureml-elastic-*")
    assert json.loads(line[line.index('["') :]) == [str(unpacked / "site" / "azureml_elastic" / "__init__.py"), 1, 1]
