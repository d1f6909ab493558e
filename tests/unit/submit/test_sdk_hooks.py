"""What has to be imported, and when."""

import subprocess
import sys

import pytest

MISSING = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "azure.ai.ml" or name.startswith("azure.ai.ml."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def run(code, folder):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


JOB = 'ElasticCommandJob(command="python train.py", environment="e", resources={"max_instance_count": 2})'


@pytest.mark.parametrize(
    "code",
    [
        f"""
import sys
from azureml_elastic.submit.job import ElasticCommandJob
assert {JOB}.plan.resources.max_instance_count == 2
assert not any(name.startswith("azure.ai") for name in sys.modules)
""",
        f"""
from azureml_elastic.submit import ElasticCommandJob
from azure.ai.ml.entities._builders import BaseNode, Command
assert isinstance({JOB}, BaseNode) and not isinstance({JOB}, Command)
""",
    ],
    ids=["alone", "registered"],
)
def test_the_model_alone_does_without_azure_ai_ml_and_the_package_registers_it(folder, code):
    assert run(code, folder).stderr == ""


@pytest.mark.parametrize(
    "code",
    [
        "from azureml_elastic.submit import ElasticCommandJob",
        f"from azureml_elastic.submit.job import ElasticCommandJob\n{JOB}.compile()",
    ],
)
def test_without_azure_ai_ml_the_error_names_the_extra(folder, code):
    done = run(MISSING + code, folder)
    assert "MissingExtra" in done.stderr
    assert "pip install 'azureml-elastic[submit]'" in done.stderr


def test_the_package_has_no_other_names():
    from azureml_elastic import submit

    assert "ElasticCommandJob" in dir(submit)
    with pytest.raises(AttributeError, match="Elastic"):
        submit.ElasticJob  # noqa: B018
