"""Training processes for the tests of recovery."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn

from azureml_elastic import train
from azureml_elastic.checkpoint.snapshots.snapshot import local_chunks
from azureml_elastic.checkpoint.snapshots.transfer import HeldChunks
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.checkpoint.storage.local import LocalStorage
from azureml_elastic.config import FixedGlobalBatch, FixedPerWorkerBatch
from azureml_elastic.distributed import device
from azureml_elastic.distributed.process_groups import ProcessGroups
from azureml_elastic.distributed.stuck_collective import is_stuck
from azureml_elastic.errors import ElasticError
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.train.agent_client.standalone import StandaloneAgent
from azureml_elastic.train.data.position import Position
from azureml_elastic.train.data.sampling import Cursor, DataSpec
from azureml_elastic.train.optim.learning_rate import LearningRate
from azureml_elastic.train.session.training_state import SessionContext, TrainingState
from azureml_elastic.train.step_state import StepMachine
from tests.support.deferred import DeferredDevice, DeferredSGD, reduce_later
from tests.support.train import workers
from tests.support.waiting import until


@contextmanager
def uncaught():
    """End a block as the interpreter ends a script by an error; multiprocessing does not call the hook."""
    try:
        yield
    except RuntimeError:
        sys.excepthook(*sys.exc_info())
        raise


def train_on(folder, epochs, fault=None, at=0, normalised=False):
    """Train; at one step, send this process a signal in the middle of the backward pass.

    Beside the model there is another one, which is not tracked and begins with weights that no other process has.
    """
    run = train.start(workers.policy(folder))
    with torch.random.fork_rng():
        torch.manual_seed(os.getpid())
        beside = run.wrap(nn.Linear(2, 2))
    victim = fault is not None and int(os.environ["LOCAL_RANK"]) == int(os.environ["VICTIM"])
    model = workers.network()
    if normalised:
        model = nn.Sequential(nn.BatchNorm1d(6).double(), model)
    if victim:
        first = next(model.parameters())
        first.register_hook(lambda _: os.kill(os.getpid(), fault) if run.steps + 1 == at else None)
    model = run.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.9)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    first_step, pid = run.steps, os.getpid()
    loader = run.loader(workers.dataset(48), global_batch_size=12)
    for _ in run.epochs(epochs):
        for x, y in loader:
            workers.one_step(run, model, optimizer, x, y, scheduler)
    run.finish()
    weights = workers.flat(model.parameters())
    others = workers.flat(beside.parameters()).tolist()
    return [first_step, run.steps, run.world_size, pid, others, scheduler.last_epoch, weights.tolist()]


def on_a_deferred_device(folder, kind):
    """Train on a device that runs behind the host; the victim's device dies in step 3.

    It dies before it reduces gradients, or, if weights are averaged behind the update (``"averaged"``), before that.
    With ``"unseen"`` the update is no step of a tracked optimizer, as in a CUDA graph. A file ``queued-RANK`` beside
    the checkpoints says that the host has queued the whole of that step, and only commits it yet.
    """
    gpu = DeferredDevice()
    device.register("cpu", gpu)
    victim = os.environ["LOCAL_RANK"] == os.environ["VICTIM"]
    run = train.start(workers.policy(folder), batch=FixedPerWorkerBatch(scaling="linear"))
    model = run.wrap(workers.network(), gradient_as_bucket_view=True)
    model.register_comm_hook(gpu, reduce_later)
    optimizer = DeferredSGD(model.parameters(), gpu, lr=0.05)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(workers.dataset(48), global_batch_size=2)

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in run.epochs(1):
        for x, y in loader:
            gpu.synchronize()  # the forward pass comes after the update
            dies = victim and run.steps + 1 == 3
            if dies and kind != "averaged":
                gpu.queue(die)
            run.backward(nn.functional.cross_entropy(model(x), y))
            if kind == "unseen":
                for parameter in model.parameters():
                    gpu.queue(partial(parameter.data.sub_, parameter.grad, alpha=0.05))
            else:
                optimizer.step()
            if dies and kind == "averaged":
                gpu.queue(die)
            if kind == "averaged":
                gpu.reduce(next(model.parameters()).data, divisor=run.world_size)
            optimizer.zero_grad()
            if run.steps + 1 == 3:
                (folder.parent / f"queued-{run.rank}").touch()
            run.commit()


@uncaught()
def within_an_update(folder, kind):
    """Train with L-BFGS; the victim dies in step 3, and the other ranks wait for it with weights that are of no step.

    It dies where the closure computes gradients again, in the update (``"closure"``) or between two changes of an
    optimizer (``"update"``), or with weights that the script has exchanged for others (``"exchanged"``). What a rank
    hands over is compared with a file beside the checkpoints.
    """
    victim = os.environ["LOCAL_RANK"] == os.environ["VICTIM"]
    run = train.start(workers.policy(folder))
    inner = nn.Sequential(nn.BatchNorm1d(6).double(), workers.network())
    model = run.wrap(inner)

    def die(calls):
        if victim and run.steps + 1 == 3 and calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    class Averaging(torch.optim.SGD):
        """Changes the weights, and averages them over all ranks."""

        def step(self):
            super().step()
            die(2)
            dist.all_reduce(inner[1][0].weight.data)
            inner[1][0].weight.data /= run.world_size

    if kind == "closure":
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=2)
    else:
        optimizer = (Averaging if kind == "update" else torch.optim.SGD)(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(workers.dataset(48), global_batch_size=12)
    for _ in run.epochs(1):
        for x, y in loader:
            calls = 0

            def closure(x=x, y=y):
                nonlocal calls
                calls += 1
                die(calls)
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                run.backward(loss)
                return loss

            if kind == "closure":
                optimizer.step(closure)
            else:
                closure()
                if kind == "exchanged" and run.steps + 1 == 3:
                    for weight in inner.parameters():
                        weight.data.mul_(0.5)
                    closure()
                optimizer.step()
            run.commit()
            torch.save((inner.state_dict(), optimizer.state_dict()), folder.parent / f"step-{run.steps}-{run.rank}")


def with_a_batch_per_worker(folder, at):
    """Train an epoch of 2 samples a worker and step, and kill one worker in a step; return the completed steps."""
    run = train.start(workers.policy(folder), batch=FixedPerWorkerBatch(scaling="none"))
    model = run.wrap(workers.network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(workers.dataset(48), global_batch_size=2)
    for _ in run.epochs(1):
        for x, y in loader:
            if run.steps + 1 == at and os.environ["LOCAL_RANK"] == os.environ["VICTIM"]:
                os.kill(os.getpid(), signal.SIGKILL)
            workers.one_step(run, model, optimizer, x, y)
    run.finish()
    return run.steps


def steps(folder, model):
    """Train, and yield the session after each step."""
    run = train.start(workers.policy(folder))
    model = run.wrap(model)
    run.track(model=model)
    loader = run.loader(workers.dataset(48), global_batch_size=12)
    for _ in run.epochs(100):
        for x, y in loader:
            run.backward(nn.functional.cross_entropy(model(x), y))
            run.commit()
            yield run


def send_much(folder, at):
    """Train a model with a large buffer, which rank 0 sends before each step, until the other one freezes waiting."""
    model = workers.network()
    model.register_buffer("large", torch.ones(8 << 20))
    frozen = Path(folder).parent / "freezes"
    for run in steps(folder, model):
        if run.steps != at:
            continue
        if os.environ["LOCAL_RANK"] == os.environ["VICTIM"]:
            threading.Thread(target=freeze_in_broadcast, args=(threading.get_ident(), frozen), daemon=True).start()
        else:
            until(frozen.exists)
            until(lambda: psutil.Process(int(frozen.read_text())).status() == psutil.STATUS_STOPPED)


def freeze_in_broadcast(thread, mark):
    """Freeze this process once one of its threads waits for a broadcast."""
    until(lambda: sys._current_frames()[thread].f_code.co_name == "_distributed_broadcast_coalesced")
    until(at_rest)  # its last instructions, and the message that it is ready to receive, cannot be observed
    mark.with_suffix(".new").write_text(str(os.getpid()))
    mark.with_suffix(".new").rename(mark)
    os.kill(os.getpid(), signal.SIGSTOP)


def at_rest():
    """Return whether no other thread of this process is runnable for a while."""
    own = str(threading.get_native_id())
    for _ in range(20):
        time.sleep(0.01)
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended
                if (task / "stat").read_text().rpartition(") ")[2][0] != "S" and task.name != own:
                    return False
    return True


def user_collective(folder, at):
    """Train until one rank dies before a collective of the script."""
    for run in steps(folder, workers.network()):
        if run.steps == at:
            if os.environ["LOCAL_RANK"] == os.environ["VICTIM"]:
                os.kill(os.getpid(), signal.SIGKILL)
            with uncaught():
                dist.all_reduce(torch.zeros(3))


def state_of_a_rank(folder):
    """Track a state that is a step further on the second rank; return it, and what it is made of."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3 + rank):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    identity = WorkerIdentity(rank, 0, 2, 4)
    storage = LocalStorage(Path(folder))
    agent = StandaloneAgent(storage, identity)
    position = Position(identity)
    world = ProcessGroups(identity, torch.device("cpu"))
    world.open()
    steps = StepMachine()
    rate = LearningRate(FixedGlobalBatch(), position, steps)
    training_state = TrainingState(
        SessionContext(identity, agent, storage, workers.policy(folder)), world, position, rate, steps
    )
    stream = position.add("train", DataSpec(1000, global_batch_size=12, seed=0, shuffle=True, drop_last=False))
    training_state.track(TrackedState({"model": model, "optimizer": optimizer}))
    for _ in range(rank):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    training_state.steps, stream.cursor = 3 + rank, Cursor(0, 12 * (3 + rank))
    return training_state, rank, world, agent, stream, model, optimizer


def different_steps(folder):
    """Restore the state of a rank that is a step ahead on the other rank."""
    training_state, rank, world, agent, stream, model, optimizer = state_of_a_rank(folder)
    training_state._origin = world.identity.round
    world.identity = WorkerIdentity(1 - rank, 0, 2, 5)
    agent.pointer = None  # the last round has trained it: nobody asks the table
    training_state.enter()
    steps = [int(state["step"]) for state in optimizer.state.values()]
    return [training_state.steps, stream.cursor.consumed, steps, workers.flat(model.parameters()).tolist()]


def save_without_a_rank(folder):
    """Save while the second rank dies before its first collective; return whether the next round has to save."""
    training_state, rank, *_ = state_of_a_rank(folder)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with suppress(RuntimeError, ElasticError):
        training_state.save(must_commit=True)
        return "saved"
    return training_state._snapshot().save_pending


def queued(pid):
    """Return the number of bytes queued in the connections of a process."""
    ports = {each.laddr.port for each in psutil.Process(pid).net_connections("tcp4") if each.raddr}
    table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(line[4].split(":")[0], 16) for line in table if int(line[1].split(":")[1], 16) in ports)


STUCK = 7
"""Exit code of a process whose training thread does not return from gloo."""


def send_to_a_frozen_rank(folder):
    """Send a state to a rank that freezes in the middle, and abort the round; return whether the sending has failed."""
    rank, mark = int(os.environ["RANK"]), Path(folder).with_suffix(".freezes")
    groups = ProcessGroups(WorkerIdentity(rank, 0, 2, 1), torch.device("cpu"))
    groups.open()
    state = local_chunks({"x": torch.ones(16 << 20)})
    if rank == 1:
        HeldChunks(1, [*state], [[0]], {}).read({"x": torch.zeros(16 << 20)}, FreezingRank(groups.control, mark))
    over, thread = threading.Event(), threading.get_ident()

    def abort():
        until(mark.exists)
        until(lambda: psutil.Process(int(mark.read_text() or 1)).status() == psutil.STATUS_STOPPED)
        until(lambda: queued(os.getpid()) > 1 << 16)  # the connection is full
        groups.abort()
        if is_stuck(thread, lambda: not over.is_set()):
            os._exit(STUCK)

    watch = threading.Thread(target=abort)
    watch.start()
    try:
        HeldChunks(1, [*state], [[0]], state).read({}, groups.control)
    except RuntimeError:
        return True
    finally:
        over.set()
        watch.join()
    return False


class FreezingRank:
    """A rank that freezes when the first piece has arrived and others are on their way."""

    def __init__(self, control, mark):
        self.rank, self.world_size, self.from_rank, self.gather = 1, 2, control.from_rank, control.gather
        self._control, self._mark = control, mark

    def receive(self, tensor, rank, number):
        transfer = self._control.receive(tensor, rank, number)
        return transfer if number else Freezing(transfer, self._mark)


class Freezing:
    def __init__(self, transfer, mark):
        self._transfer, self._mark = transfer, mark

    def wait(self):
        self._transfer.wait()
        self._mark.with_suffix(".new").write_text(str(os.getpid()))
        self._mark.with_suffix(".new").rename(self._mark)
        os.kill(os.getpid(), signal.SIGSTOP)


def abort_beside_other_connections(folder):
    """Abort the groups of a process that opened a connection of its own meanwhile; return what still works."""
    opened, joined = Path(folder).with_suffix(".opened"), Path(folder).with_suffix(".joined")
    groups = ProcessGroups(WorkerIdentity(int(os.environ["RANK"]), 0, 2, 1), torch.device("cpu"))
    if groups.identity.rank == 1:
        until(opened.exists)
        groups.open()
        joined.touch()
        return [_fails(groups)]
    ends: list[socket.socket] = []

    def connect():
        until(lambda: any(each.raddr and each.raddr.port == store for each in psutil.Process().net_connections()))
        with socket.create_server(("127.0.0.1", 0)) as server, selectors.EpollSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            ends.append(socket.create_connection(server.getsockname()))
            selector.select(10)
            ends.append(server.accept()[0])
        opened.touch()

    store = int(os.environ["MASTER_PORT"])
    other = threading.Thread(target=connect)
    other.start()
    groups.open()
    other.join()
    until(joined.exists)  # an abort before would fail the opening of the other rank
    groups.abort()
    failure = _fails(groups)
    ends[0].sendall(b"open")
    return [failure, ends[1].recv(4)]


def _fails(groups):
    with suppress(RuntimeError):
        groups.control.all_true(True)
        return False
    return True
