"""A session of one process without an agent."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import Dataset

from azureml_elastic import train
from azureml_elastic.config import CheckpointPolicy, ElasticResources, Plan
from azureml_elastic.distributed.process import WorkerSettings
from azureml_elastic.environment import names
from azureml_elastic.environment.worker import WorkerEnvironment
from azureml_elastic.errors import CheckpointDamaged, Fenced, PlanError, UsageError
from azureml_elastic.train.optim.gradients import require_averaging
from tests.support.node_server import Script, run_script
from tests.support.paths import SAMPLES
from tests.support.train import workers
from tests.support.waiting import until
from tests.support.worlds import store_on_a_free_port


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in names.OWN:
        monkeypatch.delenv(name, raising=False)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


class Numbers(Dataset):
    """Sample i is the number i; the length is not negative."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([float(index)]), {"id": index, "pair": (index, index + 1)}


class Loop:
    """A training loop that can be stopped anywhere."""

    def __init__(self, folder, *, every_steps=None, length=20, global_batch_size=6, keep=2, **options):
        self.folder, self.every_steps = folder, every_steps
        self.run = train.start(workers.policy(folder, every_steps, keep))
        self.model = self.run.wrap(nn.Linear(1, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.run.track(model=self.model, optimizer=self.optimizer)
        self.loader = self.run.loader(Numbers(length), global_batch_size=global_batch_size, **options)
        self.seen = []

    def __enter__(self):
        self.run.__enter__()
        return self

    def __exit__(self, *details):
        self.run.__exit__(*details)

    def one(self, batch):
        x, extra = batch
        self.run.backward(self.model(x).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen.append(extra["id"].tolist())
        self.run.commit()

    def steps(self, epochs, stop=None):
        for _ in self.run.epochs(epochs):
            for batch in self.loader:
                self.one(batch)
                if self.run.steps == stop:
                    workers.wait_for_commit(self.folder, stop // self.every_steps * self.every_steps)
                    raise KeyboardInterrupt


def samples(windows):
    return sorted(sample for window in windows for sample in window)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "prefetch_factor": 4}])
def test_an_interrupted_epoch_goes_on_where_the_checkpoint_was(tmp_path, options, caplog):
    with Loop(tmp_path / "whole") as loop:
        loop.steps(2)
    whole = loop.seen
    assert [samples(whole[:4]), samples(whole[4:])] == [list(range(20))] * 2
    with pytest.raises(KeyboardInterrupt), Loop(tmp_path / "cut", every_steps=2, **options) as first:
        first.steps(2, stop=7)
    with Loop(tmp_path / "cut", **options) as second:
        assert (second.run.steps, second.run.epoch) == (6, 1)
        second.steps(2)
    assert first.seen[:6] + second.seen == whole
    assert "Nothing is left to train" not in caplog.text
    with Loop(tmp_path / "cut") as third:
        third.steps(2)
        assert third.run.steps == 8
    assert third.seen == []
    assert "Nothing is left to train: all 2 epochs, 8 steps" in caplog.text
    # Alone there is no submission, and no id of a run.
    assert f"begin anew, remove {tmp_path / 'cut'}, or give train.start() a policy with another path." in caplog.text


def pointer(folder):
    """Return the step of the committed checkpoint, 0 for none."""
    path = folder / "latest.json"
    return json.loads(path.read_text())["step"] if path.exists() else 0


def test_no_restart_point_lies_between_an_epochs_last_step_and_the_end_of_its_body(tmp_path):
    found = []
    with Loop(tmp_path, every_steps=4) as loop:
        for _ in loop.run.epochs(2):
            for batch in loop.loader:
                loop.one(batch)
            loop.run._run.state.settle()
            found.append(pointer(tmp_path))
    assert found == [0, 4]
    assert pointer(tmp_path) == 8


def test_code_after_the_last_step_of_an_epoch_runs_again_if_it_was_interrupted(tmp_path):
    with pytest.raises(KeyboardInterrupt), Loop(tmp_path, every_steps=3) as loop:  # noqa: PT012
        for _ in loop.run.epochs(2):
            for batch in loop.loader:
                loop.one(batch)
            workers.wait_for_commit(tmp_path, 3)
            raise KeyboardInterrupt
    entered = []
    with Loop(tmp_path) as loop:
        assert loop.run.steps == 3
        for epoch in loop.run.epochs(2):
            for batch in loop.loader:
                loop.one(batch)
            entered.append((epoch, len(loop.seen)))
    assert entered == [(0, 1), (1, 5)]


def test_a_run_that_resumes_after_an_epochs_last_step_runs_the_loop_once_and_trains_nothing(tmp_path):
    """A worker hands over such a state if a peer is lost there; here a loop without ``run.epochs()`` has saved it."""
    with Loop(tmp_path) as loop:
        for batch in loop.loader:
            loop.one(batch)
    weights = [parameter.clone() for parameter in loop.model.parameters()]
    with Loop(tmp_path) as loop:
        after = []
        for epoch in loop.run.epochs(2):
            assert len(loop.loader) == (1 if epoch == 0 else 4)
            for x, extra in loop.loader:
                loss = loop.model(x).square().mean()
                loop.run.backward(loss)
                loss.backward() if epoch == 0 else None  # a gradient that the discarded step drops
                torch.rand(())
                loop.optimizer.step()
                loop.optimizer.zero_grad()
                loop.run.commit()
                loop.seen.append(extra["id"].tolist())
            if epoch == 0:
                for before, now in zip(weights, loop.model.parameters(), strict=True):
                    assert torch.equal(before, now)
            after.append((epoch, loop.run.steps, loss.item() >= 0))
    assert after == [(0, 4, True), (1, 8, True)]
    assert samples(loop.seen[1:]) == list(range(20))


def test_save_takes_a_checkpoint_besides_those_of_the_policy(tmp_path):
    with Loop(tmp_path) as loop:
        for _ in loop.run.epochs(1):
            for batch in loop.loader:
                with pytest.raises(UsageError, match="within a step"):
                    loop.run.save()
                loop.one(batch)
                loop.run.save(wait=True)
                assert pointer(tmp_path) == min(loop.run.steps, 3)  # the last one is deferred until the end of the body
    assert pointer(tmp_path) == 4


def test_a_loop_that_is_left_early_keeps_its_last_step(tmp_path):
    with Loop(tmp_path) as loop:
        for _ in loop.run.epochs(5):
            for batch in loop.loader:
                loop.one(batch)
            break
    with Loop(tmp_path) as loop:
        assert (loop.run.steps, loop.run.epoch) == (4, 1)


@pytest.mark.parametrize(("drop_last", "expected"), [(False, 4), (True, 3)])
def test_the_length_of_a_loader_is_the_number_of_batches_that_follow(tmp_path, drop_last, expected):
    with pytest.raises(KeyboardInterrupt), Loop(tmp_path, every_steps=2, drop_last=drop_last) as loop:  # noqa: PT012
        assert (len(loop.loader), loop.loader.steps_per_epoch) == (expected, expected)
        loop.steps(2, stop=2)
    with Loop(tmp_path, drop_last=drop_last) as loop:
        for epoch in loop.run.epochs(2):
            assert len(loop.loader) == (expected - 2 if epoch == 0 else expected)
            begun = len(loop.seen)
            length = len(loop.loader)
            for batch in loop.loader:
                loop.one(batch)
            assert len(loop.seen) - begun == length
        assert loop.loader.steps_per_epoch == expected


def test_a_plain_module_is_refused_where_the_run_can_have_several_ranks(tmp_path):
    model = nn.Linear(1, 1)
    with pytest.raises(UsageError, match=r"as soon as the run has more than 1 rank.*model = run\.wrap\(model\)"):
        require_averaging({"model": model}, [], 1)
    with pytest.raises(UsageError, match=r"of its own\. Write"):
        require_averaging({"model": nn.ModuleDict({"a": model})}, [], 2)
    require_averaging({"model": model, "optimizer": object()}, [model], 2)
    require_averaging({"frozen": nn.Linear(1, 1).requires_grad_(False)}, [], 2)
    with train.start(workers.policy(tmp_path)) as run:
        wrapped = run.wrap(nn.Linear(1, 1))
        require_averaging({"model": wrapped, "pair": nn.ModuleList([wrapped])}, [], 2)
        average = torch.optim.swa_utils.AveragedModel(model)
        optimizer = torch.optim.SGD(wrapped.parameters())
        require_averaging({"model": wrapped, "average": average, "optimizer": optimizer}, [], 2)
        with pytest.raises(UsageError, match="of average=AveragedModel are not averaged"):
            require_averaging({"model": wrapped, "average": average}, [], 2)
        plain = run.wrap(model, average_gradients=False)
        assert plain is model
        run.track(model=plain)


def test_leaving_an_epoch_early_begins_the_next_one_at_its_start(tmp_path):
    with Loop(tmp_path) as loop:
        for _ in loop.run.epochs(2):
            for batch in loop.loader:
                loop.one(batch)
                break
    assert loop.run.steps == 2
    assert len(loop.seen[1]) == 6


def test_without_epochs_each_pass_over_the_loader_is_an_epoch(tmp_path):
    with Loop(tmp_path) as loop:
        assert len(loop.loader) == 4
        for _ in range(2):
            for batch in loop.loader:
                loop.one(batch)
    assert [samples(loop.seen[:4]), samples(loop.seen[4:])] == [list(range(20))] * 2
    assert loop.seen[:4] != loop.seen[4:]


def test_a_batch_keeps_its_structure(tmp_path):
    with Loop(tmp_path, shuffle=False) as loop:
        x, extra = next(iter(loop.loader))
        assert x.shape == (6, 1)
        assert extra["pair"][1].tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("misuse", "text"),
    [
        (lambda loop: [None for _ in loop.loader], r"run\.commit\(\) was not called"),
        (lambda loop: loop.run.commit(), "without a batch"),
        (lambda loop: loop.run.backward(torch.ones(())), "no batch"),
        (lambda loop: loop.run.track(model=loop.model), "was called before"),
        (lambda loop: loop.run.loader(Numbers(3), global_batch_size=2), "was called before"),
        (lambda loop: [loop.run.backward(torch.ones(3)) for _ in loop.loader], "has 3 values"),
        (lambda loop: (loop.run.finish(), loop.run.commit()), r"after run\.finish"),
    ],
)
def test_misuse_is_explained(tmp_path, misuse, text):
    with pytest.raises(UsageError, match=text), Loop(tmp_path) as loop:
        misuse(loop)


def test_a_measurement_after_the_end_is_refused(tmp_path):
    if dist.is_initialized():  # left by a session that has failed
        dist.destroy_process_group()
    with Loop(tmp_path) as loop:
        pass
    with pytest.raises(UsageError, match="has ended"):
        loop.run.evaluate(lambda batch: {"sum": batch[0].sum()}, Numbers(3), batch_size=2)


def test_options_of_the_loader_that_are_ours_are_refused(tmp_path):
    with pytest.raises(UsageError, match="batch_size"):
        Loop(tmp_path, batch_size=3)


def test_steps_without_tracked_objects_are_refused(tmp_path):
    with train.start(workers.policy(tmp_path)) as run, pytest.raises(UsageError, match="track"):
        run.commit()


@pytest.mark.parametrize(
    ("tracked", "text"),
    [
        (lambda: {"thing": object()}, "state_dict"),
        (lambda: {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())}, "do not all belong to tracked modules"),
        (lambda: {"a/b": nn.Linear(1, 1)}, "'/'"),
    ],
)
def test_what_cannot_be_tracked_is_explained(tmp_path, tracked, text):
    with train.start(workers.policy(tmp_path)) as run, pytest.raises(UsageError, match=text):
        run.track(**tracked())


def test_a_checkpoint_that_does_not_fit_is_explained(tmp_path):
    with Loop(tmp_path) as loop:
        loop.steps(1)
    with pytest.raises(UsageError, match="global_batch_size was 6 and is 5"):
        Loop(tmp_path, global_batch_size=5).run.finish()
    for tracked, text in [
        ({"other": nn.Linear(1, 1)}, r"holds \['model', 'optimizer'\].* tracks \['other'\]"),
    ]:
        with train.start(workers.policy(tmp_path)) as run, pytest.raises(UsageError, match=text):
            run.track(**tracked)
    with train.start(workers.policy(tmp_path)) as run:
        model = run.wrap(nn.Linear(2, 1))
        with pytest.raises(UsageError, match="does not fit"):
            run.track(model=model, optimizer=torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
        lambda parameters: torch.optim.AdamW([{"params": list(parameters), "lr": 0.2}]),
        lambda parameters: torch.optim.RMSprop(parameters, centered=True),
    ],
)
def test_optimizers_and_whatever_has_a_state_come_back(tmp_path, make):
    class Ema:
        def __init__(self):
            self.state = {"mean": torch.zeros(3), "best": float("inf"), 3: (1, b"x")}

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

    def build(run):
        torch.manual_seed(run.steps)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        model[0].bias.requires_grad_(False)
        model = run.wrap(model)
        optimizer = make(model.parameters())
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return model, optimizer, plateau, Ema()

    with train.start(workers.policy(tmp_path)) as run:
        model, optimizer, plateau, ema = build(run)
        run.track(model=model, optimizer=optimizer, plateau=plateau, ema=ema)
        for step in range(3):
            model(torch.full((2, 3), float(step))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            plateau.step(1.0)
            ema.state["mean"] += 1
            run.commit()
    with train.start(workers.policy(tmp_path)) as run:
        model2, optimizer2, plateau2, ema2 = build(run)
        run.track(model=model2, optimizer=optimizer2, plateau=plateau2, ema=ema2)
        assert run.steps == 3
    for left, right in zip(model.parameters(), model2.parameters(), strict=True):
        assert torch.equal(left, right)
    assert str(optimizer.state_dict()) == str(optimizer2.state_dict())
    assert plateau.state_dict() == plateau2.state_dict()
    assert str(ema.state) == str(ema2.state)


def test_old_checkpoints_are_removed_and_the_chain_is_kept(tmp_path):
    with Loop(tmp_path, every_steps=1, keep=3) as loop:
        loop.steps(2)
    kept = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert [name[:17] for name in kept] == ["step-000000000006", "step-000000000007", "step-000000000008"]
    newest = json.loads((tmp_path / "latest.json").read_text())["directory"]
    assert newest in kept
    for name in kept:
        assert (tmp_path / name / "manifest.json").exists()


def test_half_a_step_is_never_saved(tmp_path, caplog):
    with Loop(tmp_path, every_steps=1) as loop:
        for _ in loop.run.epochs(1):
            for batch in loop.loader:
                if loop.run.steps == 2:
                    loop.run.backward(loop.model(batch[0]).square().mean())
                    loop.optimizer.step()
                    break
                loop.one(batch)
            break
    assert "that step is not saved" in caplog.text
    whole = [parameter.clone() for parameter in loop.model.parameters()]
    with Loop(tmp_path) as again:
        assert again.run.steps == 2
        for before, after in zip(whole, again.model.parameters(), strict=True):
            assert not torch.equal(before, after)
        again.steps(1)
    assert [len(ids) for ids in again.seen] == [6, 2]


def test_a_script_that_stops_early_saves_its_last_step(tmp_path):
    code = """
import atexit, contextlib, sys, time, torch
from pathlib import Path
from torch.utils.data import TensorDataset
from azureml_elastic import train
from azureml_elastic.config import CheckpointPolicy
def last():
    left, until = ["gloo"], time.monotonic() + 5  # an ended thread is listed for a moment
    while left and time.monotonic() < until:
        left = []
        for path in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(OSError):
                left += [name for name in path.read_text().split() if "gloo" in name]
    print("left:", *left)
atexit.register(last)
run = train.start(CheckpointPolicy(path=sys.argv[1], every=None))
model = run.wrap(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
print("resumed at", run.steps, flush=True)
for _ in run.epochs(1):
    for (x,) in run.loader(TensorDataset(torch.ones(8, 1)), global_batch_size=2):
        run.backward(model(x).mean())
        optimizer.step()
        run.commit()
        if run.steps == int(sys.argv[2]):
            if sys.argv[3] == "finish":
                run.finish()
            sys.exit(0)
"""

    script = tmp_path / "script.py"
    script.write_text(code)

    def resumed(stop: int, how: str) -> str:
        result = run_script([sys.executable, script, str(tmp_path / "c"), str(stop), how], timeout=600)
        assert result.returncode == 0, (result.returncode, result.stderr)
        first, last = result.stdout.splitlines()
        assert last.split() == ["left:"]  # a thread of gloo's that outlives the interpreter ends the process with -6
        return first

    assert resumed(2, "exit") == "resumed at 0"
    assert resumed(3, "finish") == "resumed at 2"
    assert resumed(99, "exit") == "resumed at 3"
    assert resumed(99, "exit") == "resumed at 4"


def test_a_script_that_ends_early_on_one_rank_alone_logs_that_its_steps_are_not_saved(tmp_path):
    code = """
import logging, os, sys, time, torch
from torch.utils.data import TensorDataset
from azureml_elastic import train
from azureml_elastic.config import CheckpointPolicy
from azureml_elastic.train.session import session
logging.basicConfig(level=logging.WARNING)
session._LEAVING_SECONDS = 1.0
run = train.start(CheckpointPolicy(path=sys.argv[1], every=None))
model = run.wrap(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
for _ in run.epochs(2):
    for (x,) in run.loader(TensorDataset(torch.ones(8, 1)), global_batch_size=2):
        run.backward(model(x).mean())
        optimizer.step()
        run.commit()
        if run.steps == 2 and not run.is_main:
            sys.stdin.read()  # until the test has seen the end of the other rank
            os._exit(0)
        if run.steps == 2:
            sys.exit(0)
"""
    store = store_on_a_free_port()
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    script = tmp_path / "script.py"
    script.write_text(code)
    waits, ends = os.pipe()
    with (tmp_path / "log").open("w") as log, (tmp_path / "other").open("w") as other:
        first, second = (
            Script(
                [sys.executable, script, tmp_path / "c"],
                env={**os.environ, **address, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
                stdin=waits,
                stdout=other,
                stderr=(log, other)[rank],
            )
            for rank in range(2)
        )
    os.close(waits)
    first.wait(300)
    os.close(ends)
    second.wait(300)
    log = (tmp_path / "log").read_text()
    assert (first.returncode, second.returncode) == (0, 0), log + (tmp_path / "other").read_text()
    assert "The script ends after step 2, before its last epoch" in log
    assert "its last steps are not saved. Call run.finish() on all ranks" in log
    assert not (tmp_path / "c" / "latest.json").exists()


def test_exports_are_sorted_and_there():
    assert train.__all__ == sorted(train.__all__, key=lambda name: (not name.isupper(), name))
    for name in train.__all__:
        assert hasattr(train, name)


def test_the_audit_says_what_each_step_has_trained(tmp_path, monkeypatch):
    monkeypatch.setenv(names.RUN_DIR, str(tmp_path))
    plan = Plan(resources=ElasticResources(max_instance_count=1), audit=True)
    monkeypatch.setenv(names.PLAN, plan.to_json())
    with Loop(tmp_path / "c") as loop:
        loop.steps(1)
    lines = (tmp_path / "samples" / "round-0.rank-0.jsonl").read_text().splitlines()
    expected = []
    for step, ids in enumerate(loop.seen, 1):
        begun = {"round": 0, "step": step, "loader": "train", "epoch": 0, "of": 20, "ids": ids}
        expected += [begun, {"round": 0, "step": step, "done": True}]
    assert [json.loads(line) for line in lines] == expected


def test_a_pointer_that_names_nothing_is_damage(tmp_path):
    (tmp_path / "latest.json").write_text("{}")
    with train.start(workers.policy(tmp_path)) as run:
        with pytest.raises(Exception, match=r"latest\.json") as caught:
            run.track(model=nn.Linear(1, 1))
        assert "does not name a checkpoint" in str(caught.value)
        (tmp_path / "latest.json").write_text('{"directory": "gone", "step": 1, "digest": "x"}')
        with pytest.raises(CheckpointDamaged, match="gone"):
            run.track(model=nn.Linear(1, 1))


@pytest.mark.parametrize("pointer_file", [None, "{torn", '{"directory": "gone", "step": 2, "digest": "x"}'])
def test_without_a_usable_pointer_the_newest_committed_checkpoint_is_restored_and_none_is_lost(
    tmp_path, pointer_file, caplog
):
    with pytest.raises(KeyboardInterrupt), Loop(tmp_path, every_steps=2) as loop:
        loop.steps(2, stop=7)
    newest = json.loads((tmp_path / "latest.json").read_text())
    (tmp_path / "latest.json").unlink()
    if pointer_file is not None:
        (tmp_path / "latest.json").write_text(pointer_file)
    with Loop(tmp_path, every_steps=2) as loop:
        assert loop.run.steps == newest["step"] == 6
        loop.steps(2)
    assert newest["directory"] in caplog.text or "damaged" in caplog.text
    assert pointer(tmp_path) == loop.run.steps


def test_a_second_run_in_the_same_folder_is_detected(tmp_path):
    with (  # noqa: PT012
        pytest.raises(Fenced, match="Another run writes to"),
        train.start(workers.policy(tmp_path)) as run,
    ):
        run.track(model=nn.Linear(1, 1))
        run.commit()
        run.save()
        workers.wait_for_commit(tmp_path, 1)
        other = json.loads((tmp_path / "latest.json").read_text()) | {"digest": "of another run"}
        (tmp_path / "latest.json").write_text(json.dumps(other))
        run.commit()
    assert json.loads((tmp_path / "latest.json").read_text()) == other


def test_wall_time_brings_checkpoints(tmp_path):
    policy = CheckpointPolicy(path=str(tmp_path), every=1e-6)
    with train.start(policy) as run:
        run.track(model=nn.Linear(1, 1))
        for step in range(1, 4):
            run.commit()
            workers.wait_for_commit(tmp_path, step)


def test_the_environment_is_read_and_checked(tmp_path):
    plan = Plan(resources=ElasticResources(max_instance_count=2), checkpoint=CheckpointPolicy(path="/p", keep=5))
    world = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    read = WorkerSettings.of(WorkerEnvironment.read({**world, names.PLAN: plan.to_json(), names.ROUND: "4"}))
    assert (read.identity.rank, read.identity.world_size, read.identity.round) == (1, 2, 4)
    assert read.policy(None) == plan.checkpoint
    assert read.policy(CheckpointPolicy(keep=3)) == CheckpointPolicy(path="/p", keep=3)
    assert read.policy(CheckpointPolicy(every_steps=7)) == CheckpointPolicy(path="/p", keep=5, every_steps=7)
    assert WorkerSettings.of(WorkerEnvironment.read({})).policy(None).path == "./checkpoints"
    assert WorkerSettings.of(WorkerEnvironment.read({names.RUN_DIR: "/r"})).policy(None).path == "/r/checkpoints"
    with pytest.raises(UsageError, match="RANK='x'"):
        WorkerSettings.of(WorkerEnvironment.read({"RANK": "x"}))
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        WorkerSettings.of(WorkerEnvironment.read({"RANK": "0", "WORLD_SIZE": "2"}))
    with pytest.raises(PlanError, match="not JSON"):
        WorkerSettings.of(WorkerEnvironment.read({names.PLAN: "{"}))
    with pytest.raises(PlanError, match=names.ROUND):
        WorkerSettings.of(WorkerEnvironment.read({names.CHANNEL: "/s"}))


def test_the_sample_survives_sigterm_and_learns(tmp_path):
    command = [sys.executable, SAMPLES / "digits.py", "--epochs", "2"]
    log = tmp_path / "log"
    with log.open("w") as output:
        process = Script([*command, "--step-delay", "0.2"], cwd=tmp_path, stdout=output, stderr=output)
    try:
        until(lambda: " step 1 " in log.read_text())
        process.terminate()
        process.wait(300)
    finally:
        process.kill()
    assert process.returncode == train.EXIT_TERMINATED, log.read_text()
    assert "handed over" not in log.read_text(), "without an agent nobody would take the state"
    step = json.loads((tmp_path / "checkpoints" / "latest.json").read_text())["step"]
    assert 1 <= step < 46
    second, third = (run_script(command, cwd=tmp_path, timeout=600) for _ in range(2))
    assert second.returncode == 0, second.stderr
    assert f"continuing after step {step}" in second.stdout
    assert "after 46 steps" in second.stdout
    assert third.returncode == 0, third.stderr
    assert "continuing after step 46" in third.stdout
    assert third.stdout.splitlines()[-1] == second.stdout.splitlines()[-1]


FAILING = """
import atexit, os, torch
from azureml_elastic import train

class Abort:
    def __del__(self):  # as threads of torch sometimes do at that time
        os.abort()

abort = Abort()
atexit.register(print, "said at exit")
"""


@pytest.mark.parametrize(
    "session",
    [
        "run = train.start()\nrun.track(model=torch.nn.Linear(1, 1))\nrun.commit()\nraise RuntimeError('it failed')",
        "with train.start() as run:\n run.track(model=torch.nn.Linear(1, 1))\n raise RuntimeError('it failed')",
    ],
    ids=["open", "block"],
)
def test_a_script_that_fails_commits_nothing_at_its_end(tmp_path, session):
    script = tmp_path / "script.py"
    script.write_text(FAILING + session)
    failed = run_script([sys.executable, script], cwd=tmp_path, timeout=600)
    assert failed.returncode == 1, failed.stderr
    assert "RuntimeError: it failed" in failed.stderr
    assert failed.stdout == "said at exit\n"
    assert list((tmp_path / "checkpoints").iterdir()) == []
