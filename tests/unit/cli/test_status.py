"""``status`` and ``logs`` of a run on this machine, by its folder, and what such commands import."""

import pytest
from typer.testing import CliRunner

from azureml_elastic.cli import app
from azureml_elastic.ledger.events import CheckpointCommitted, RunEnded
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.summary import NodeSummary, Paths, report_of
from tests.support.command_imports import completions, imported_packages
from tests.support.histories import loss_and_newcomer, write_events

RUN = CliRunner()
DEAR = {"azure", "torch", "numpy", "pandas", "psutil", "sklearn", "plotly", "mlflow", "fsspec", "yaml", "transformers"}
"""Packages that take longer to import than a short command may take."""


@pytest.fixture
def folder(tmp_path):
    """The folder of a run of four nodes that goes on: one is lost, and one has come later."""
    paths = Paths.of(tmp_path / "run-7")
    events = [event for event in loss_and_newcomer() if not isinstance(event, RunEnded) and event.time < 47]
    events.append(CheckpointCommitted(time=46.0, node="node-1", round=3, step=29, directory="d", seconds=0.1, nbytes=9))
    write_events(paths.events, events)
    paths.logs.mkdir()
    for number in range(4):
        (paths.logs / f"node-{number}.log").write_text(f"first of {number}\nlast of {number}\n")
    return paths.run_dir


def end(folder):
    """Write the report, as the launcher does."""
    report = report_of(Paths.of(folder), Picture.of(loss_and_newcomer()))
    nodes = tuple(
        NodeSummary(name=node.name, exit_code=0, ending="killed" if node.name == "node-0" else "exited")
        for node in report.nodes
    )
    report.model_copy(update={"nodes": nodes}).write()


def test_the_state_of_a_run_and_its_end(folder):
    shown = RUN.invoke(app, ["status", str(folder)])
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    begin = ["run-7: running", "Round 3: world size 3 on 3 nodes", "step 30, checkpoint of step 29"]
    assert lines[:3] == begin
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│ node-" in line]
    assert sorted(cells) == [
        ["node-0", "", "12", "lost"],
        ["node-1", "0", "30", "training"],
        ["node-2", "1", "30", "training"],
        ["node-3", "2", "30", "training"],
    ]
    end(folder)
    lines = RUN.invoke(app, ["status", str(folder)]).output.splitlines()
    assert lines[:2] == ["run-7: succeeded", "step 30, checkpoint of step 29"]
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│ node-" in line]
    assert {cell[0]: cell[3] for cell in cells} == {
        "node-0": "killed",
        **dict.fromkeys(("node-1", "node-2", "node-3"), "finished"),
    }


def test_the_log_of_rank_0_of_another_node_and_of_all(folder):
    end(folder)
    assert RUN.invoke(app, ["logs", str(folder)]).stdout == "first of 1\nlast of 1\n"
    assert RUN.invoke(app, ["logs", str(folder), "--node", "node-3", "--tail", "1"]).stdout == "last of 3\n"
    every = RUN.invoke(app, ["logs", str(folder), "--all", "--tail", "1"]).stdout.splitlines()
    assert every == [f"node-{number} | last of {number}" for number in range(4)]
    wrong = RUN.invoke(app, ["logs", str(folder), "--node", "node-9"])
    assert wrong.exit_code == 2
    assert "has no node 'node-9'. There are: node-0, node-1, node-2, node-3." in wrong.stderr


@pytest.mark.parametrize("command", ["status", "logs"])
def test_a_folder_without_a_run_is_refused(command, tmp_path):
    wrong = RUN.invoke(app, [command, str(tmp_path)])
    assert wrong.exit_code == 2
    assert "of a run" in wrong.stderr
    assert "There is no folder" in RUN.invoke(app, [command, str(tmp_path / "none")]).stderr


def test_commands_about_files_import_nothing_dear(folder, tmp_path):
    """Each package costs a good part of a second on each call."""
    words = ["--help"], ["schema"], ["init", str(tmp_path / "new")], ["status", str(folder)]
    words += ["logs", str(folder), "--tail", "1"], ["report", str(folder)]
    assert imported_packages(words) & DEAR == set()


def test_folders_of_runs_are_completed(folder, monkeypatch):
    (folder.parent / "runs").mkdir()
    folder.rename(folder.parent / "runs" / folder.name)
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("AZURE_CONFIG_DIR", str(folder.parent))
    assert completions("azureml-elastic report ru") == [f"runs/{folder.name}"]
    assert completions("azureml-elastic logs other") == []


def test_options_of_the_live_view_need_it(folder):
    refused = RUN.invoke(app, ["status", str(folder), "--plain"])
    assert refused.exit_code == 2
    assert "--plain needs --watch" in refused.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "0"], "Only --serve listens. Leave --port out."),
        (["--serve", "--json"], "writes no files. Leave --json out."),
    ],
)
def test_options_of_the_served_report_and_of_the_written_one_are_not_mixed(folder, options, said):
    refused = RUN.invoke(app, ["report", str(folder), *options])
    assert refused.exit_code == 2
    assert said in refused.stderr
