"""The command ``azureml-elastic local`` with real nodes, in a process of its own."""

import contextlib
import subprocess
import sys

import pytest

from tests.support.waiting import until

PROGRAM = (sys.executable, "-c", "from azureml_elastic.cli import main; main()")
COMMAND = (*PROGRAM, "local", "--plain")


def test_each_worker_receives_its_own_values_of_variables_in_the_arguments(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, sys; assert sys.argv[1:] == ['--rank', os.environ['RANK'], '$RANK'], sys.argv; print('received')\n"
    )
    options = ("--nodes", "1", "--nproc-per-node", "2", "--timeout", "120")
    done = subprocess.run(
        [*COMMAND, *options, "python train.py --rank $RANK '$RANK'"],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("received") == 2
    wrong = subprocess.run(
        [*COMMAND, "--recovery", "in_process", "train.py", "--rank", "$RANK"],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )
    assert wrong.returncode == 2
    assert "$RANK, which changes when nodes come and go" in " ".join(wrong.stderr.split())
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_run_that_succeeded_without_its_faults_exits_with_125_and_names_them(tmp_path):
    (tmp_path / "train.py").write_text("print('trained')\n")
    options = ("--nodes", "1", "--run-dir", "run", "--chaos", "kill=node-9@0s,kill=any@3600s", "--timeout", "120")
    done = subprocess.run(
        [*COMMAND, *options, "train.py"], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=150
    )
    assert "trained" in done.stdout, done.stderr
    output = " ".join(done.stdout.split())
    assert "the run succeeded" in output
    assert "the fault kill=node-9@0s did not happen: there was no node-9; started were node-0" in output
    assert "the fault kill=any@3600s did not happen: the run ended after" in output
    assert done.returncode == 125


def status(folder):
    """What is shown of a run on this machine."""
    return subprocess.run([*PROGRAM, "status", "run"], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("exit_code", [0, 3])
def test_a_running_run_is_watched_from_another_process_until_it_ends(tmp_path, exit_code):
    (tmp_path / "train.py").write_text(
        "import pathlib, sys, time\n"
        "print('trains', flush=True)\n"
        "while not pathlib.Path('enough').exists():\n"
        "    time.sleep(0.05)\n"
        f"sys.exit({exit_code})\n"
    )
    options = ("--nodes", "1", "--run-dir", "run", "--max-restarts", "0", "--timeout", "120")
    watched, followed = tmp_path / "watched.txt", tmp_path / "followed.txt"
    with contextlib.ExitStack() as stack:

        def start(words, path):
            out = stack.enter_context(path.open("w"))
            process = stack.enter_context(subprocess.Popen(words, cwd=tmp_path, stdout=out, stderr=out))
            stack.callback(process.kill)
            return process

        run = start([*COMMAND, *options, "train.py"], tmp_path / "out.txt")
        until((tmp_path / "run/events").is_dir)
        watch = start([*PROGRAM, "status", "--watch", "run", "--plain"], watched)
        until(lambda: "node-0 | [rank0]: trains" in watched.read_text())
        follow = start([*PROGRAM, "logs", "run"], followed)
        until(lambda: "[rank0]: trains" in followed.read_text())
        assert status(tmp_path).splitlines()[:2] == ["run: running", "Round 1: world size 1 on 1 node"]
        (tmp_path / "enough").touch()
        assert watch.wait(300) == (1 if exit_code else 0), watched.read_text()
        assert run.wait(300) == exit_code
        assert follow.wait(300) == 0
    text = watched.read_text()
    assert "round 1: 1 worker on node-0" in text
    assert ("the run failed" if exit_code else "the run succeeded") in text
    assert followed.read_text().splitlines()[-1] == (tmp_path / "run/logs/node-0.log").read_text().splitlines()[-1]
    assert status(tmp_path).splitlines()[0] == ("run: failed" if exit_code else "run: succeeded")


def test_a_folder_without_a_run_is_not_watched(tmp_path):
    done = subprocess.run([*PROGRAM, "status", "--watch", str(tmp_path)], check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "contains no events of a run" in done.stderr
