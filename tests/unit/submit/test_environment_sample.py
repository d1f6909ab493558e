"""The sample environment has what a node needs, no more and no less, and its files agree with each other."""

import re
from importlib.metadata import requires
from pathlib import Path

import pytest

from azureml_elastic.submit.runtime.start import is_satisfied
from tests.support.paths import SAMPLES

yaml = pytest.importorskip("yaml")

SAMPLE = SAMPLES / "environment"
IMAGE = re.compile(r"mcr\.microsoft\.com/aifx/acpt/[\w-]+-py(3)(\d+)-torch(\d)(\d+)(\d):biweekly\.\d{6}\.\d")


def parts(requirement):
    """Return the name and the bounds, in any order."""
    name, bounds = re.fullmatch(r"([\w.-]+)\s*(.*)", requirement.strip()).groups()
    return name.lower(), frozenset(bound.strip() for bound in bounds.split(","))


def needed_by_nodes():
    split = [line.partition(";") for line in requires("azureml-elastic")]
    node = {parts(requirement) for requirement, _, marker in split if re.search(r"extra == ['\"]node['\"]", marker)}
    return node | {parts(requirement) for requirement, _, marker in split if parts(requirement)[0] == "pydantic"}


def dockerfile():
    lines = (SAMPLE / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    return [line.split(None, 1) for line in lines if line and not line.startswith("#")]


def test_the_conda_file_lists_what_the_extra_lists():
    document = yaml.safe_load((SAMPLE / "conda.yml").read_text(encoding="utf-8"))
    (python,) = [line for line in document["dependencies"] if str(line).startswith("python=")]
    assert is_satisfied(python.partition("=")[2], "python>=3.10")
    (pip,) = [entry["pip"] for entry in document["dependencies"] if isinstance(entry, dict)]
    assert {parts(line) for line in pip} == needed_by_nodes()
    assert len(pip) == len(needed_by_nodes())


def test_the_dockerfile_installs_the_wheel_with_that_extra_and_keeps_torch():
    instructions = dockerfile()
    assert [name for name, _ in instructions] == ["FROM", "COPY", "RUN", "RUN"]
    source, target = instructions[1][1].split()
    assert Path("azureml_elastic-0.1.0-py3-none-any.whl").match(source)
    (install,) = [text for name, text in instructions if name == "RUN" and "pip install" in text]
    assert f'"$(ls {target}*.whl)[node]"' in install
    assert "--constraint /tmp/torch.txt" in install


def test_the_image_has_a_torch_and_a_python_that_will_do():
    major, minor, *torch = IMAGE.fullmatch(dockerfile()[0][1]).groups()
    assert is_satisfied(f"{major}.{minor}", "python>=3.10")
    ((_, bounds),) = [(name, bounds) for name, bounds in needed_by_nodes() if name == "torch"]
    assert is_satisfied(".".join(torch), f"torch{','.join(bounds)}")


def test_the_text_names_the_same_image():
    text = (SAMPLE / "README.md").read_text(encoding="utf-8")
    assert [match.group() for match in IMAGE.finditer(text)] == [dockerfile()[0][1]]
