"""The fixture, as users have it."""

import importlib.metadata
import subprocess
import sys

import pytest
from azure.ai.ml import command

from azureml_elastic import testing
from azureml_elastic.testing import Eviction, Pool


@pytest.mark.local_workspace(
    pools={"spot": Pool(nodes=1)}, evictions=[Eviction(node=0, after=0, notice=0)], requeue=True
)
def test_the_fixture_is_a_workspace_made_with_the_arguments_of_the_mark(local_workspace):
    job = local_workspace.ml_client.jobs.create_or_update(
        command(
            command='case "$AZUREML_CR_COMPUTE_CONTEXT" in *\'"run_attempt_count": 1\'*) sleep 1000;; esac',
            environment="anything@latest",
            compute="spot",
        )
    )
    assert local_workspace.wait(job.name, 60) == "Completed"
    assert len(local_workspace.evicted) == 1


def test_the_plugin_is_announced_to_pytest():
    entries = importlib.metadata.entry_points(group="pytest11")
    homes = {entry.value for entry in entries}
    if "azureml_elastic.testing.plugin" not in homes:
        pytest.skip("azureml-elastic was installed before it had the plugin; install it again")


def test_every_start_of_pytest_pays_for_the_fixture_alone():
    code = "import sys, azureml_elastic.testing.plugin as p; print(*sorted(n for n in sys.modules if 'azure' in n))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["azureml_elastic", "azureml_elastic.testing", "azureml_elastic.testing.plugin"]


def test_the_package_has_the_names_that_it_promises():
    assert testing.__all__ == sorted(testing.__all__)
    assert set(testing.__all__) <= set(dir(testing))
    assert all(getattr(testing, name).__name__ == name for name in testing.__all__)
    with pytest.raises(AttributeError, match="Workspaces"):
        testing.Workspaces  # noqa: B018
