"""The command line as a user meets it: messages on stderr, exit codes, no traceback."""

import logging
import os
import signal
import subprocess
import sys
import time
from importlib import metadata

import pytest
from rich.console import Console
from typer.testing import CliRunner

from azureml_elastic.cli import app
from azureml_elastic.cli.local import named_folder, parse_nodes
from azureml_elastic.errors import UsageError

RUN = CliRunner()


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A script in the working directory; no run may begin, so it need not do anything."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('never run')\n")
    return "train.py"


@pytest.mark.parametrize(("text", "counts"), [("1:3", (1, 3)), ("2", (2, 2)), ("4:4", (4, 4)), ("1:256", (1, 256))])
def test_node_counts(text, counts):
    assert parse_nodes(text) == counts


@pytest.mark.parametrize("text", ["0", "0:3", "-1", "-2:3", "3:1", "x", "1:x", "", ":", "1:", "1:2:3", "1.5", "1:257"])
def test_impossible_node_counts_are_refused(text, script):
    if text != "1:257":  # which are too many for one machine alone
        with pytest.raises(UsageError, match="--nodes"):
            parse_nodes(text)
    result = RUN.invoke(app, ["local", f"--nodes={text}", script])
    assert result.exit_code == 2
    assert text in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--chaos", "explode=any@step:3"], "unknown verb 'explode'"),
        (["--table", "ftp://x"], "'ftp://x'"),
        (["--nproc-per-node", "0"], "process_count_per_instance=0"),
        (["--max-restarts", "-1"], "max_restarts=-1"),
        (["--checkpoint-every-steps", "0"], "every_steps=0"),
        *((["--timeout", text], "--timeout: ") for text in ("0", "-1", "nan", "inf", "-inf", "1e999")),
        (["--timeout", "soon"], "--timeout: 'soon' is no duration"),
        (["--nproc-per-node", "nan"], "valid integer"),
        (["--max-restarts", "inf"], "valid integer"),
        (["--checkpoint-every-steps", "-1"], "every_steps=-1"),
        (["--chaos", "add=257@step:3"], "adds '257' nodes; give a number from 1 to 256"),
        (["--chaos", f"add@{'9' * 400}s"], "is infinite"),
        (["--chaos", f"freeze=any@step:3/{'9' * 400}s"], "is infinite"),
    ],
)
def test_wrong_options_are_explained_before_anything_starts(options, said, script, tmp_path):
    result = RUN.invoke(app, ["local", *options, script])
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("seconds", ["inf", "nan", "0", "1e9"])
def test_a_pause_between_checks_is_at_most_a_day(seconds):
    result = RUN.invoke(app, ["replace-nodes", "run", "--interval", seconds])
    assert result.exit_code == 2
    assert "--interval" in result.output + result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (["nothere.py"], "'nothere.py' does not exist"),
        (["python", "nothere.py", "--lr", "1"], "'nothere.py' does not exist"),
        (["torchrun", "train.py"], "torchrun"),
        (["ls", "-l"], "no Python program"),
    ],
)
def test_a_program_that_cannot_run_is_refused(program, said, script, tmp_path):
    result = RUN.invoke(app, ["local", "--", *program])
    assert result.exit_code == 2
    assert said in result.stderr
    assert not (tmp_path / "runs").exists()


def test_options_after_the_program_are_the_program_s(script):
    result = RUN.invoke(app, ["local", "--nodes", "0", script, "--chaos", "explode", "--unknown"])
    assert result.exit_code == 2
    assert "--nodes '0'" in result.stderr


def test_no_program_is_a_usage_error():
    assert RUN.invoke(app, ["local"]).exit_code == 2
    assert RUN.invoke(app, ["local", "--unknown", "train.py"]).exit_code == 2


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["-h"], 0, "Usage"),
        (["submit", "-h"], 0, "Usage"),
        (["statsu"], 2, "status"),
    ],
)
def test_what_a_newcomer_types_is_answered(words, code, said):
    shown = RUN.invoke(app, words)
    assert (shown.exit_code, said in shown.output) == (code, True), shown.output


def test_the_folder_of_a_run_is_named_at_its_start_and_when_a_signal_ends_it(tmp_path, capsys):
    @named_folder(Console(), tmp_path / "a run")
    def interrupted():
        assert capsys.readouterr().out == f"files: {tmp_path / 'a run'}\n"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert capsys.readouterr().err == f"azureml-elastic: files: {tmp_path / 'a run'}\n", "it has no checkpoint"


def test_no_command_shows_what_the_sdk_logs_about_its_own_classes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger("azure.ai.ml._utils._experimental")
    monkeypatch.setattr(logger, "level", logging.INFO)
    RUN.invoke(app, ["cancel", "run"])
    assert logger.level > logging.WARNING


def test_the_version():
    result = RUN.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.strip() == f"azureml-elastic {metadata.version('azureml-elastic')}"


def test_a_report_of_no_run_is_refused(tmp_path):
    result = RUN.invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert "neither report.json nor events" in result.stderr


def test_a_missing_torch_is_explained(script, tmp_path):
    """Python without site packages, but with everything that the base installation has."""
    hide = (
        "import sys, importlib.util\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'torch' else real(name, *rest)\n"
        "from azureml_elastic.cli import main; sys.argv = ['azureml-elastic', 'local', 'train.py']; main()"
    )
    argv = [sys.executable, "-c", hide]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, cwd=tmp_path, timeout=30)
    assert done.returncode == 2
    assert "pip install 'azureml-elastic[node]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_imports_neither_torch_nor_azure():
    check = (
        "import sys; from azureml_elastic.cli import app\n"
        "try: app(['local', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'azure', 'numpy', 'plotly', 'psutil', 'sklearn'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", check], check=True, stdout=subprocess.DEVNULL, timeout=30)


def test_ctrl_c_exits_with_130(tmp_path):
    """The nodes are never reached: they hang in a program of ours that stands in their place."""
    body = (
        "import sys, time\n"
        "from azureml_elastic.local import cluster\n"
        "from azureml_elastic.cli.failures import explained\n"
        "from pathlib import Path\n"
        "node = (sys.executable, '-c', 'import time; print(\"ready\", flush=True); time.sleep(60)')\n"
        "with explained():\n"
        "    cluster.LocalCluster((1, 1), run_dir=Path('run'), node_command=node).run(['x.py'])\n"
    )
    runner = "import typer, sys\napp = typer.Typer()\n@app.command()\ndef go():\n" + "".join(
        f"    {line}\n" for line in body.splitlines()
    )
    argv = [sys.executable, "-c", runner + "app()\n"]
    with subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        log = tmp_path / "run" / "logs" / "node-0.log"
        while process.poll() is None and not (log.exists() and "ready" in log.read_text()):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, output = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Interrupted" in output
    assert "Traceback" not in output
    assert '"outcome": "interrupted"' in (tmp_path / "run" / "report.json").read_text()
