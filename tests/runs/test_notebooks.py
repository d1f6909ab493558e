"""The notebooks run from their first cell to their last against a local workspace, and say what their text promises."""

import json
import os
import re
import shutil
import sys
import warnings
from pathlib import Path

import pytest

from azureml_elastic.environment.user import UserEnvironment
from azureml_elastic.local.azurite import azurite_command
from tests.support.node_server import FORKED
from tests.support.paths import SAMPLES

pytest.importorskip("azure.ai.ml")
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
kernelspec = pytest.importorskip("ipykernel.kernelspec")

from azureml_elastic.testing import Eviction, LocalWorkspace, Pool  # noqa: E402 - after what it needs

NOTEBOOKS = sorted((SAMPLES / "notebooks").glob("*.ipynb"))

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::marshmallow.warnings.RemovedInMarshmallow4Warning"),
]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of the samples, without what runs leave behind."""
    folder = tmp_path / "samples"
    shutil.copytree(SAMPLES, folder, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    # A folder itself is no ceiling for what runs in it, but its parent is.
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    installations = UserEnvironment.read().cache
    cache = tmp_path / "cache" / installations.name
    cache.mkdir(parents=True)
    azurite_command()  # npm would install it again for each test: for two thirds of the test's time
    for installed in installations.glob("azurite-*"):
        (cache / installed.name).symlink_to(installed)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    # The kernel and the commands of the cells take this interpreter, not the one that PATH or an installed spec names.
    kernelspec.write_kernel_spec(tmp_path / "jupyter" / "kernels" / "python3")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return folder


@pytest.fixture
def foreign_kernel(tmp_path, monkeypatch):
    """A spec of the default kernel in the user's folder that starts another interpreter, which does not exist."""
    folder = tmp_path / "user" / "kernels" / "python3"
    kernelspec.write_kernel_spec(folder, overrides={"argv": ["/nonexistent/python", "-m", "ipykernel_launcher"]})
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(folder.parents[1]))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")


def execute(project, name, **workspace):
    """Run a notebook, and return what its cells have printed and shown."""
    folder = project / "notebooks"
    notebook = nbformat.read(folder / f"{name}.ipynb", as_version=4)
    with LocalWorkspace(**workspace, start=FORKED) as local:
        (folder / "config.json").write_text(json.dumps(dict(local.config)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations in Jupyter's packages
            client = nbclient.NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(folder)}})
            client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    return "".join(texts), outputs


def test_every_notebook_is_tested_and_has_no_outputs():
    assert [path.stem for path in NOTEBOOKS] == [
        "from_an_existing_job",
        "pipeline",
        "quick_start",
        "spot_with_fallback",
    ]
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
        # A folder around the notebook has what the notebook downloads, which each further run would upload.
        assert not [cell for cell in cells if 'code=".' in cell.source]
        for text in (
            " ".join(cell.source.split()) for cell in cells if "azureml-elastic workspace start" in cell.source
        ):
            # The command prints a line for the shell, and no variables.
            assert "a line such as `. /path/to/workspace.sh`" in text or "the line that it prints" in text, path
            assert re.search(r"terminal, and start Jupyter there|in the terminal in which you start Jupyter", text), (
                path
            )


def test_the_kernel_is_the_interpreter_of_the_tests(foreign_kernel, project):
    cell = nbformat.v4.new_code_cell("import shutil, sys; print(sys.executable, shutil.which('python'))")
    notebook = nbformat.v4.new_notebook(cells=[cell])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations in Jupyter's packages
        nbclient.NotebookClient(notebook, timeout=60).execute()
    interpreter, found = notebook.cells[0].outputs[0].text.split()
    assert interpreter == sys.executable
    assert Path(found).parent == Path(sys.executable).parent


def test_quick_start(project):
    evictions = [Eviction(node=1, at_step=10)]
    text, outputs = execute(project, "quick_start", pools={"cpu-cluster": Pool(nodes=3)}, evictions=evictions)
    shown = [output.get("data", {}).get("text/html", "") for output in outputs]
    (table,) = [text for text in shown if "ElasticCommandJob" in text]
    assert "cpu-cluster" in table
    assert "node_1     Failed" in text
    assert "node_0     Completed" in text
    assert "checkpoints, the newest in step-" in text
    assert [path.name for path in (project / "notebooks" / "src").iterdir()] == ["digits.py"]


def test_spot_with_fallback(project):
    evictions = [Eviction(node=0, at_step=15), Eviction(node=1, at_step=30, notice=0)]
    pools = {"spot": Pool(nodes=2, refill=None), "dedicated": Pool(nodes=3, tier="dedicated")}
    text, _ = execute(project, "spot_with_fallback", pools=pools, evictions=evictions)
    assert "spot_0       spot       Failed" in text
    assert "dedicated_0  dedicated  Completed" in text
    assert "dedicated_1  dedicated" in text
    assert "Canceled" in text


def test_pipeline(project):
    # The step before is node 0, so that this is the second node.
    evictions = [Eviction(node=2, at_step=10, notice=0)]
    text, _ = execute(project, "pipeline", pools={"cluster": Pool(nodes=3)}, evictions=evictions)
    shown = [line.split() for line in text.splitlines() if line.endswith(("Completed", "Failed"))]
    assert [words for words in shown if len(words) == 2] == [
        ["prepared", "Completed"],
        ["trained", "Completed"],
        ["node_0", "Completed"],
        ["node_1", "Failed"],
        ["node_2", "Completed"],
        ["evaluated", "Completed"],
    ]
    assert float(text.rpartition("{'accuracy': ")[2].rstrip().rstrip("}")) > 0.9


def test_from_an_existing_job(project):
    text, _ = execute(project, "from_an_existing_job", pools={"cpu-cluster": Pool(nodes=3)})
    assert "program python plain_ddp.py" in " ".join(text.split())
    assert "1 to 3" in text
    assert "completed" in text.splitlines()[-1].lower()  # as the SDK's release writes it
