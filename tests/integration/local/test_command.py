"""The command ``azureml-elastic local`` with real nodes, in a process of its own."""

import subprocess
import sys

COMMAND = (sys.executable, "-c", "from azureml_elastic.cli import main; main()", "local", "--plain")


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
        timeout=150,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("received") == 2
    wrong = subprocess.run(
        [*COMMAND, "--recovery", "in_process", "train.py", "--rank", "$RANK"],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=150,
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
