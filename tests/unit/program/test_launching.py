"""The text of a program, and of what it is given, shows whether it is a launcher or a training script."""

import pytest

from azureml_elastic.program.command import parse_program
from azureml_elastic.program.launching import find_launching
from azureml_elastic.program.source import program_modules

TRAIN = """
import torch
from torch.utils.data import DataLoader
for batch in DataLoader(range(9)):
    torch.nn.functional.mse_loss(batch, batch).backward()
"""
GUARDED = "import run\nif __name__ == '__main__':\n    run.main()\n"
CONFIG = "_base_ = ['a.py']\nbatch_size = 12\nmodel = dict(type='UNet')\nmodel.update(depth=1)\nprint(model)\n"
GET_CONFIG = "import ml_collections\ndef get_config():\n    return ml_collections.ConfigDict()\n"
MODEL = "import torch\nclass Net(torch.nn.Module): ...\nif __name__ == '__main__':\n    print(Net())\n"

POPEN = """
'''Usage: python launch.py --num_gpus 4 script.py'''
import argparse, os, subprocess, sys
parser = argparse.ArgumentParser()
parser.add_argument("--num_gpus", type=int)
parser.add_argument("script"); parser.add_argument("rest", nargs="...")
args = parser.parse_args()
for rank in range(args.num_gpus):
    cmd = [sys.executable, "-u", args.script, *args.rest]
    subprocess.Popen(cmd, env={**os.environ, "RANK": str(rank)})
"""
BUILT = """
import sys
from subprocess import Popen
def command(script, rest):
    words = []
    words.append(sys.executable)
    return [*words, script, *rest]
Popen(command(sys.argv[1], sys.argv[2:])).wait()
"""
SHELL = """
import os, sys
for device in range(4):
    os.system(f"CUDA_VISIBLE_DEVICES={device} python {sys.argv[1]} &")
"""
SPAWNS = """
import runpy, sys
import torch.multiprocessing as mp
def work(rank):
    runpy.run_path(sys.argv[1], run_name="__main__")
if __name__ == "__main__":
    mp.spawn(work, nprocs=4)
"""
IMPORTS = "from torch.distributed.run import main\nmain()\n"
DASK = """
import argparse, subprocess
parser = argparse.ArgumentParser()
parser.add_argument("--script")
args = parser.parse_args()
subprocess.Popen(["dask-scheduler", "--port", "8786"])
subprocess.Popen(["dask-worker", "tcp://10.0.0.4:8786"])
subprocess.run(["python", args.script])
"""
RAY = "import os\nos.system('ray start --head --port 6379')\n"
TORCHRUN = "import subprocess\nsubprocess.run(['torchrun', '--nproc_per_node', '4', 'train.py'], check=True)\n"
ACCELERATE = "import shlex, subprocess\nline = 'accelerate launch train.py'\nsubprocess.run(shlex.split(line))\n"
DIST_TRAIN = "import sys, subprocess\nsubprocess.call([sys.executable, '-m', 'torch.distributed.launch', 'x.py'])\n"

FILES = {
    "train.py": TRAIN,
    "run.py": "def main(): ...\n",
    "guarded.py": GUARDED,
    "config.py": CONFIG,
    "configs/get.py": GET_CONFIG,
    "model.py": MODEL,
    "train.sh": "python train.py\n",
    "package/__init__.py": "",
    "package/task.py": TRAIN,
    "package/__main__.py": GUARDED,
}


def found(tmp_path, command, files=(), **options):
    for name, text in {**FILES, **dict(files)}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    program = parse_program([command])
    return find_launching(program, tmp_path, list(program_modules(program, tmp_path)), **options)


@pytest.mark.parametrize(
    ("text", "command", "given", "argument", "where", "what"),
    [
        (POPEN, "python launch.py --num_gpus 4 train.py --lr 1", "train.py", 2, "launch.py:10", "subprocess.Popen()"),
        (POPEN, "launch.py --num_gpus 4 guarded.py config.py", "guarded.py", 2, "launch.py:10", "subprocess.Popen()"),
        (POPEN, "python -m launch --num_gpus 4 train.py", "train.py", 2, "launch.py:10", "calls"),
        (POPEN, "python launch.py elsewhere.py", "elsewhere.py", 0, "launch.py:10", "calls"),
        (POPEN, "python launch.py --script=train.py", "train.py", 0, "launch.py:10", "calls"),
        (POPEN, "python launch.py -- -m package.task --lr 1", "package.task", 2, "launch.py:10", "calls"),
        (POPEN, "python launch.py --num_gpus 2 train.sh", "train.sh", 2, "launch.py:10", "calls"),
        (BUILT, "python launch.py train.py", "train.py", 0, "launch.py:8", "calls subprocess.Popen()"),
        (SHELL, "python launch.py train.py", "train.py", 0, "launch.py:4", "calls os.system()"),
        (SPAWNS, "python launch.py train.py", "train.py", 0, "launch.py:7", "calls torch.multiprocessing.spawn()"),
    ],
)
def test_a_program_that_starts_the_program_that_it_is_given(tmp_path, text, command, given, argument, where, what):
    launching = found(tmp_path, command, {"launch.py": text})
    assert (launching.given.name, launching.given.argument, launching.where) == (given, argument, where)
    assert what in launching.what
    assert launching.given.is_module == (given == "package.task")
    assert not launching.starts


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        (DASK, "dask-scheduler"),
        (RAY, "ray"),
        (TORCHRUN, "torchrun"),
        (ACCELERATE, "accelerate"),
        (DIST_TRAIN, "python"),
        (IMPORTS, "torch.distributed.run"),
    ],
)
def test_a_program_that_starts_a_launcher_or_a_cluster(tmp_path, text, starts):
    assert found(tmp_path, "python start.py", {"start.py": text}).starts[0] == starts
    split = {"start.py": "import tools.start\n", "tools/__init__.py": "", "tools/start.py": text}
    assert found(tmp_path, "python start.py --script train.py", split).starts[0] == starts


@pytest.mark.parametrize(
    ("command", "given", "where"),
    [
        ("python -m colossalai.cli run --nproc_per_node 4 train.py", "train.py", "train.py:4"),
        ("python -m lightning run --accelerator=cuda guarded.py", "guarded.py", "guarded.py"),
        ("python /opt/tools/launch.py --verbose train.py", "train.py", "train.py:4"),
        ("python $(which composer) -n 8 train.py", "train.py", "train.py:4"),
    ],
)
def test_a_program_whose_text_is_elsewhere_and_that_is_given_one(tmp_path, command, given, where):
    launching = found(tmp_path, command)
    assert (launching.given.name, launching.where) == (given, where)


GIT = "import library, subprocess\nprint('run it with python')\nsubprocess.run(['git', 'describe'])\nlibrary.run()\n"
PIP = "import library, subprocess, sys\nsubprocess.run([sys.executable, '-m', 'pip', 'install', 'x'])\nlibrary.run()\n"
HELP = "import subprocess\nprint('torchrun --nproc_per_node 4')\nsubprocess.run(['ls'])\n"


@pytest.mark.parametrize(
    ("files", "command"),
    [
        ({}, "python train.py config.py"),
        ({}, "python train.py model.py"),
        ({"tools/train.py": "from mmengine import Runner\nRunner().train()\n"}, "python tools/train.py config.py"),
        ({"eval.py": f"{POPEN}\nmodel.fit(data)\n"}, "python eval.py guarded.py"),
        ({"main.py": f"{POPEN}\nimport loop\n", "loop.py": TRAIN}, "python main.py guarded.py"),
        ({"main.py": f"{POPEN}\nfrom azureml_elastic import train\n"}, "python main.py guarded.py"),
        ({"main.py": POPEN}, "python main.py config.py"),
        ({"main.py": POPEN}, "python main.py --config configs/get.py --epochs 3"),
        ({"main.py": GIT}, "python main.py --model model.py"),
        ({"main.py": PIP}, "python main.py --model model.py"),
        ({"main.py": f"{TRAIN}\nimport subprocess\nsubprocess.run(['ray', 'start', '--head'])\n"}, "python main.py"),
        ({"main.py": "import runpy, sys\nrunpy.run_path(sys.argv[1])\n"}, "python main.py train.py"),
        ({"main.py": HELP}, "python main.py"),
        ({"main.py": "def broken(:\n"}, "python main.py train.py"),
        ({}, "python -m axolotl.train config.yml"),
        ({}, "python -m library.train config.py"),
        ({}, "python -m library.train --config-file configs/get.py"),
        ({}, "python -m library.train --model-file model.py"),
        ({}, "python -m package config.py"),
        ({}, "python train.py --language python guarded.txt"),
    ],
)
def test_a_training_program_may_be_given_files_and_start_others(tmp_path, files, command):
    assert found(tmp_path, command, files) is None


def test_a_driver_of_a_cluster_may_start_programs_but_no_cluster(tmp_path):
    files = {"search.py": POPEN, "start.py": DASK}
    assert found(tmp_path, "python search.py train.py", files, runs_engine=True) is None
    assert found(tmp_path, "python -m library.search train.py", files, runs_engine=True) is None
    assert found(tmp_path, "python start.py --script train.py", files, runs_engine=True).starts[0] == "dask-scheduler"
