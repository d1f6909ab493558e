"""What the agent of a worker's node knows of the steps of its script's optimizers, and where the script waits."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from azureml_elastic.environment import names as variables
from azureml_elastic.forks.optimizer_steps import WorkerTraining, ask_to_hold, read_training
from tests.support.node_server import Script, run_script
from tests.support.waiting import until

HEAD = """
import os
from azureml_elastic.forks.state_files import record
record(os.environ)
import torch
import torch.distributed as dist

def make():
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    return torch.optim.SGD([weight])

def loss():
    return torch.nn.Parameter(torch.ones(1)).sum()

def open_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""


def run(folder: Path, code: str) -> tuple[int, ...]:
    """Run a script as a worker, and return the counts above 0."""
    script = folder / "script.py"
    script.write_text(f"{HEAD}{code}\nprint(os.getpid())")
    environ = {**os.environ, variables.CHANNEL: str(folder / "agent.sock")}
    done = run_script([sys.executable, script], timeout=120, env=environ)
    assert done.returncode == 0, done.stderr
    return tuple(filter(None, read_training(folder, int(done.stdout.split()[-1])).steps))


CASES = {
    "none": ("", ()),
    "two optimizers": ("optimizer = make()\nfor _ in range(3): optimizer.step()\nmake().step()", (3, 1)),
    "a group": ("optimizer = make()\noptimizer.step()\nopen_group()\noptimizer.step()", (2,)),
    "its group is closed": (
        """
open_group()
optimizer = make()
optimizer.step()
dist.destroy_process_group()
optimizer.step()
make().step()
open_group()
optimizer.step()
""",
        (2,),
    ),
    "a fork": (
        """
optimizer = make()
optimizer.step()
if os.fork() == 0:
    optimizer.step()
    os._exit(0)
os.wait()
""",
        (1,),
    ),
    "many optimizers": (
        "several = [make() for _ in range(100)]\nfor optimizer in several: optimizer.step()",
        (2,) * 36 + (1,) * 28,
    ),
    "an optimizer of its own": ("for _ in range(3): loss().backward()", (3,)),
    "backward passes": (
        """
optimizer = make()
for _ in range(3):
    loss().backward()
    optimizer.step()
    torch.autograd.backward(loss())
""",
        (1, 3),
    ),
    "compiled": ("step = torch.compile(make().step, backend='eager')\nfor _ in range(3): step()", (3,)),
}


@pytest.mark.parametrize(("code", "expected"), CASES.values(), ids=CASES)
def test_steps_are_counted_for_each_optimizer(tmp_path, code, expected):
    assert run(tmp_path, code) == expected


def test_a_worker_that_has_not_begun_has_taken_no_step(tmp_path):
    ask_to_hold(tmp_path, [1])
    (tmp_path / "steps-1").write_bytes(b"torn")
    assert read_training(tmp_path, 1) == read_training(tmp_path, 2) == WorkerTraining()


STEPWISE = f"""{HEAD}
import pickle, shutil, sys, threading, time
from pathlib import Path
from safetensors.torch import save_file

optimizer = make()

def rename(path):
    open("new.tmp", "wb").close()
    os.replace("new.tmp", path)

def copy(path):
    open("other.tmp", "wb").close()
    shutil.copyfile("other.tmp", path)

def backward():
    loss().backward()

for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Worker:
    """A process that trains line by line, as a worker of a node whose agent's folder is given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "script.py").write_text(STEPWISE)
        (folder / "out").mkdir()
        reading, self._lines = os.pipe()
        environ = {**os.environ, variables.CHANNEL: str(folder / "agent.sock")}
        with (folder / "output").open("wb") as output:
            argv = [sys.executable, folder / "script.py"]
            self._process = Script(argv, env=environ, cwd=folder, stdin=reading, stdout=output, stderr=output)
        os.close(reading)
        self._sent = 0

    def does(self, *lines: str) -> bool:
        """Have it run some lines, and return whether it waits in the last one of them."""
        for line in lines:
            os.write(self._lines, f"{line}\n".encode())
            self._sent += 1
            until(lambda: self.held or self.has_gone_on)
        return self.held

    @property
    def has_gone_on(self) -> bool:
        output = (self.folder / "output").read_text()
        assert "Traceback" not in output, output
        return output.count("done") == self._sent

    @property
    def held(self) -> bool:
        return self.training.held

    @property
    def training(self) -> WorkerTraining:
        return read_training(self.folder, self._process.pid)

    def ask(self, *, ask: bool = True) -> None:
        ask_to_hold(self.folder, [self._process.pid], ask=ask)

    def end(self) -> int:
        os.kill(self._process.pid, signal.SIGTERM)
        return self._process.wait(60)

    def close(self) -> None:
        os.close(self._lines)
        self._process.kill()


@pytest.fixture
def worker(tmp_path):
    made = Worker(tmp_path)
    yield made
    made.close()


LOOKED_FOR = "os.path.exists('last.pt'), os.listdir('out'), os.path.exists('step.txt')"


@pytest.mark.parametrize(
    "save",
    [
        "torch.save(1, 'last.pt')",
        "torch.save(1, Path('out/checkpoint-7'))",
        "torch.save(1, 'out/\u00e4.pt')",
        "pickle.dump(1, open('last.pt', 'wb'))",
        "Path('step.txt').write_text('1')",
        "rename('last.pt')",
        "copy('out/model.pt')",
        "save_file({'x': torch.zeros(1)}, 'out/model.safetensors')",
        "os.makedirs('out/1/2'); torch.save(1, 'out/1/2/model.pt')",
        "open('x.tmp', 'wb').close(); os.symlink('x.tmp', 'last.pt')",
    ],
)
def test_a_worker_that_is_asked_waits_in_the_first_step_after_its_save(worker, save):
    began = time.time()
    worker.does(LOOKED_FOR, "optimizer.step()")
    worker.ask()
    assert not worker.does("optimizer.step()", "optimizer.step()")
    assert worker.training.saved_at == 0
    assert not worker.does(save), "it may be the last one"
    assert began < worker.training.saved_at < time.time()
    assert worker.does("optimizer.step()")
    worker.ask(ask=False)
    until(lambda: not worker.held and worker.has_gone_on)
    worker.ask()
    assert not worker.does("optimizer.step()"), "the work since that save would be lost"
    assert worker.does("torch.save(2, 'out/last.ckpt')", "optimizer.step()")


@pytest.mark.parametrize(
    "lines",
    [
        ["torch.save(1, 'other.pt')", "optimizer.step()"],
        ["open('out/events.log', 'w').close()", "optimizer.step()"],
        ["torch.save(1, 'last.pt')", "make().step()"],
        ["torch.save(1, 'last.pt')", "loss().backward()"],
        [
            "open_group(); optimizer.step()",
            "torch.save(1, 'last.pt'); dist.destroy_process_group()",
            "optimizer.step()",
        ],
        ["if os.fork() == 0: torch.save(1, 'last.pt'); os._exit(0)", "os.wait()", "optimizer.step()"],
        ["open('last.pt', 'rb').close() if os.path.exists('last.pt') else 0", "optimizer.step()"],
    ],
    ids=["not looked for", "a log", "calibrates", "evaluates", "group is closed", "a fork", "reads"],
)
def test_what_is_no_save_or_does_not_train_on_holds_no_worker(worker, lines):
    worker.does(LOOKED_FOR, "optimizer.step()")
    worker.ask()
    assert not worker.does(*lines)


def test_a_save_before_the_training_or_before_a_node_waits_does_not_count(worker):
    worker.does(LOOKED_FOR, "torch.save(1, 'last.pt')", "optimizer.step()", "torch.save(1, 'last.pt')")
    assert worker.training.saved_at > 0
    worker.does("optimizer.step()")
    worker.ask()
    assert not worker.does("optimizer.step()")


def test_a_save_of_another_thread_is_waited_for(worker):
    worker.does(LOOKED_FOR, "optimizer.step()")
    worker.ask()
    assert not worker.does(
        "file = []",
        "thread = threading.Thread(target=lambda: file.append(open('out/1.pt', 'wb')))",
        "thread.start(); thread.join()",
        "time.sleep(2.1)",
        "optimizer.step()",
    ), "it has the file open"
    worker.does("file.pop().close()", "thread = threading.Thread(target=rename, args=('out/2.pt',))")
    assert not worker.does("thread.start(); thread.join()", "optimizer.step()"), "it may open the next one"
    assert worker.does("time.sleep(2.1)", "optimizer.step()")


def test_a_program_without_optimizers_of_torch_waits_after_a_backward_pass(worker):
    worker.does(LOOKED_FOR, "loss().backward()")
    worker.ask()
    assert not worker.does("loss().backward()", "torch.save(1, 'last.pt')")
    assert worker.does("loss().backward()")


def test_a_worker_that_waits_handles_signals(worker):
    """It has the time between SIGTERM and SIGKILL to save, as each other one."""
    worker.does(
        "import signal", "signal.signal(signal.SIGTERM, lambda *_: os._exit(7))", LOOKED_FOR, "optimizer.step()"
    )
    worker.ask()
    assert worker.does("torch.save(1, 'last.pt')", "optimizer.step()")
    assert worker.end() == 7


def test_a_script_may_say_that_it_has_saved(worker):
    worker.does("from azureml_elastic.train import saved", "optimizer.step()")
    worker.ask()
    assert not worker.does("saved()")
    assert worker.does("optimizer.step()")
