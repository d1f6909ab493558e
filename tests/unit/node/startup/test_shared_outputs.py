"""Outputs that the nodes of a step write together, each a job of its own."""

from pathlib import Path

import pytest

from azureml_elastic.environment.names import FIRST_NODE
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import UsageError
from azureml_elastic.node.startup.shared_outputs import SharedOutputs
from azureml_elastic.program.command import parse_program


@pytest.fixture
def node(tmp_path):
    """Return the outputs of a node whose job has a folder for ``model`` and a file for ``log``."""
    opened = []

    def node(name, run_id="run"):
        model, log = tmp_path / name / "model", tmp_path / name / "log"
        model.mkdir(parents=True)
        outputs = SharedOutputs([f"model={model}", f"log={log}"])
        opened.append(outputs)
        words = ["python", "train.py", str(model), f"--best={model}/best.pt", f"{model}2", str(log)]
        arguments = outputs.redirected(parse_program([" ".join(words)])).arguments
        outputs.open(str(tmp_path / "checkpoints"), run_id)
        return outputs, arguments, model, log

    yield node
    for outputs in opened:
        outputs.close()


def test_what_any_node_has_written_is_the_output_of_the_first_node(node):
    first, (folder, _, other, _), model, log = node("node_0")
    assert other == f"{model}2"
    second, (same, best, _, file), own, _ = node("node_1")
    Path(best.removeprefix("--best=")).write_text("best")
    Path(same, "all.txt").write_text("all")
    Path(file).write_text("log")
    assert Path(folder, "all.txt").read_text() == "all"
    (model / "before.txt").write_text("the command's own")
    second.publish(NodeEnvironment.read({}))
    assert list(own.iterdir()) == []
    first.publish(NodeEnvironment.read({FIRST_NODE: "1"}))
    assert {path.name: path.read_text() for path in model.iterdir()} == {
        "all.txt": "all",
        "best.pt": "best",
        "before.txt": "the command's own",
    }
    assert log.read_text() == "log"


def test_another_run_has_another_folder(node):
    _, (one, *_), _, _ = node("node_0", "monday/1")
    _, (other, *_), _, _ = node("node_1", "tuesday")
    Path(one, "a").touch()
    assert not Path(other, "a").exists()


def test_a_folder_that_cannot_be_made_and_an_output_that_cannot_be_copied_say_which(node, tmp_path):
    outputs, (folder, *_), model, _ = node("node_0")
    Path(folder, "a").touch()
    model.rmdir()
    model.write_text("in the way")
    with pytest.raises(UsageError, match="'model' could not be copied"):
        outputs.publish(NodeEnvironment.read({FIRST_NODE: "1"}))
    (tmp_path / "taken").write_text("")
    again = SharedOutputs([f"model={model}"])
    with pytest.raises(UsageError, match=r"write the output 'model', cannot be made"):
        again.open(str(tmp_path / "taken"), "run")
    again.close()
    with pytest.raises(UsageError, match="NAME=PATH"):
        SharedOutputs(["model"])
