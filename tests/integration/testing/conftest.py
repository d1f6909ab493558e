"""Requirements of the local workspace: azure-ai-ml, and a folder to submit from."""

import warnings
from pathlib import Path

import pytest

from azureml_elastic.testing.plugin import local_workspace

__all__ = ["local_workspace"]

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what azure-ai-ml does with marshmallow while it is imported
        import azure.ai.ml  # noqa: F401
except ModuleNotFoundError:
    collect_ignore = [
        "test_composed.py",
        "test_corpus.py",
        "test_elastic.py",
        "test_engines.py",
        "test_forks.py",
        "test_gateway.py",
        "test_horovod_job.py",
        "test_locations.py",
        "test_losses.py",
        "test_plugin.py",
        "test_sweep_sample.py",
        "test_workspace.py",
    ]

_WARNINGS = (
    "ignore::marshmallow.warnings.RemovedInMarshmallow4Warning",
    r"ignore:datetime\.datetime\.utc:DeprecationWarning:azure\.ai\.ml\.",
    "ignore:The use of a 'BlobProperties' instance:DeprecationWarning",
    "ignore:content_as_bytes is deprecated:DeprecationWarning",
)


def pytest_configure(config):
    config.addinivalue_line("markers", "local_workspace(**arguments): of the fixture local_workspace")


def pytest_collection_modifyitems(items):
    """Let azure-ai-ml use what marshmallow 3, Python 3.12 and azure-storage-blob have announced to drop."""
    here = f"{Path(__file__).parent}/"
    for item in items:
        if str(item.path).startswith(here):
            for warning in _WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """The current folder, with an empty ``src``, and no cache of staged runtimes but an empty one."""
    folder = tmp_path / "a project"
    (folder / "src").mkdir(parents=True)
    monkeypatch.chdir(folder)
    # A folder itself is no ceiling for what runs in it, but its parent is.
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    return folder


@pytest.fixture
def script(project):
    """Write the script of a job."""

    def write(text, name="train.py"):
        (project / "src" / name).write_text(text)

    return write
