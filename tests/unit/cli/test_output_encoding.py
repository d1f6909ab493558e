"""Output whose encoding lacks characters: every command's help, and the tables of those that show some."""

import json
import os
import subprocess
import sys

import pytest
import typer

from azureml_elastic.checkpoint.format.manifest import FolderName
from azureml_elastic.cli import app
from azureml_elastic.ledger.events import NodeStarted, Progress, RoundEntered, RunEnded
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.summary import Paths, report_of

ENCODINGS = {
    "cp1252": {"PYTHONIOENCODING": "cp1252"},
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "the C locale": {"PYTHONUTF8": "0", "LC_ALL": "C"},
}

IN_ONE_PROCESS = """
import json, os, sys
from azureml_elastic.cli import main
for words in json.loads(os.environ["COMMANDS"]):
    sys.argv = ["azureml-elastic", *(os.fsdecode(word.encode()) for word in words)]
    try:
        main()
    except SystemExit as end:
        if end.code:
            sys.exit(f"{words} ends with {end.code}")
"""


def commands(group, *before):
    """All commands, in words."""
    for name, command in sorted(group.commands.items()):
        yield [*before, name]
        if hasattr(command, "commands"):
            yield from commands(command, *before, name)


@pytest.fixture
def shown(tmp_path):
    """A run with what is shown of it: ``checkpoints list``, ``report`` and ``status --watch``."""
    run = tmp_path / "caf\u00e9 \u4f60"
    events = [NodeStarted(time=1.0, node="n\u00e9", round=0, host="h", pid=1, job="", began=0.5)]
    events += [
        RoundEntered(time=1.5, node="n\u00e9", round=1, rank=0, members=("n\u00e9",), world_size=1),
        Progress(time=2.0, node="n\u00e9", round=1, step=3),
        RunEnded(time=3.0, node="n\u00e9", round=1, succeeded=True, message="caf\u00e9 \u4f60 \u2014 failed"),
    ]
    (run / "events").mkdir(parents=True)
    (run / "events" / "node-0.jsonl").write_text("".join(f"{event.model_dump_json()}\n" for event in events))
    (run / "logs").mkdir()
    (run / "logs" / "n\u00e9.log").write_text("caf\u00e9 \u4f60\n")
    (run / "report.json").write_text(report_of(Paths.of(run), Picture.of(events)).model_dump_json())
    (run / "checkpoints" / str(FolderName(5, 1, "00000005"))).mkdir(parents=True)
    return [
        ["checkpoints", "list", str(run)],
        ["status", str(run)],
        ["logs", str(run)],
        ["report", str(run)],
        ["status", "--watch", str(run)],
        ["--version"],
    ]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_command_writes_in_any_encoding(encoding, shown):
    every = [[*words, "--help"] for words in commands(typer.main.get_command(app))] + shown
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("LC_", "PYTHONIO", "PYTHONUTF"))
    }
    environ |= ENCODINGS[encoding] | {"COMMANDS": json.dumps(every), "COLUMNS": "60"}
    done = subprocess.run(
        [sys.executable, "-c", IN_ONE_PROCESS], env=environ, capture_output=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode("latin-1")[-2000:]
    codec = ENCODINGS[encoding].get("PYTHONIOENCODING", "ascii")
    assert "Usage" in done.stdout.decode(codec)


def test_the_package_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "azureml_elastic", "--version"], capture_output=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout.split()[:1]) == (0, [b"azureml-elastic"])
