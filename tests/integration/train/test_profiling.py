"""The profiler over steps of the run: which traces it writes, and that its failures do not end training."""

from __future__ import annotations

import gzip
import json
import logging
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from azureml_elastic import train
from azureml_elastic.checkpoint.storage.local import LocalStorage
from azureml_elastic.config import CheckpointPolicy, ElasticDistribution, ElasticResources, Plan, Profile
from azureml_elastic.distributed.device import ends_within
from azureml_elastic.distributed.process import trace_folder
from azureml_elastic.environment import names
from azureml_elastic.environment.worker import WorkerEnvironment
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.ledger.events import Progress
from azureml_elastic.ledger.reading import EventReader
from azureml_elastic.train.agent_client.standalone import StandaloneAgent
from azureml_elastic.train.session.records import Profiling
from tests.support.node_server import run_script
from tests.support.paths import SUPPORT
from tests.support.train import training, workers
from tests.support.whole_runs import after_gathering, assert_whole, gathering_cluster

PROGRAM = SUPPORT / "train" / "profiled.py"
CPU = torch.device("cpu")
SHORT = {"first_step": 3, "steps": 2, "warmup_steps": 1}


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    training.forget_environment(monkeypatch)
    monkeypatch.setenv(names.RUN_DIR, str(tmp_path))
    monkeypatch.setenv(names.NODE_ID, "node 1")


def steps(folder, profile, *, until=10, every_steps=None, finish=True):
    """Train, from the checkpoint if there is one."""
    run = train.start(workers.policy(folder, every_steps), profile=profile)
    with run:
        model = run.wrap(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer)
        begun = run.steps
        for (x,) in run.loader(TensorDataset(torch.ones(80, 4)), global_batch_size=8):
            run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            run.commit()
            if run.steps == until:
                break
        if not finish:
            workers.wait_for_commit(folder, until // every_steps * every_steps)
            run._run.exit_hooks.failed = True  # as if the process had died
    return begun, run.steps


def traces(folder):
    """Return the steps in each trace, by the parts of its file name."""
    found = {}
    for path in sorted(Path(folder).glob("*.pt.trace.json.gz")):
        node, rank, round_, recorded = re.fullmatch(
            r"(.*)_rank(\d+)_round(\d+)_steps([\d-]+)\.\d+\.pt\.trace\.json\.gz", path.name
        ).groups()
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        shown = sorted(
            {int(event["name"].partition("#")[2]) for event in events if "ProfilerStep#" in event.get("name", "")}
        )
        found[node, int(rank), int(round_), recorded] = shown
        assert any(event.get("name") == "aten::linear" for event in events)
    return found


def test_the_chosen_steps_are_recorded_under_the_run_s_own_numbers(tmp_path):
    assert steps(tmp_path / "c", Profile(**SHORT)) == (0, 10)
    assert traces(tmp_path / "profiles") == {("node_1", 0, 0, "3-4"): [3, 4]}


@pytest.mark.parametrize("warmup", [0, 1, 2])
def test_recordings_repeat(tmp_path, warmup):
    steps(
        tmp_path / "c",
        Profile(first_step=2, steps=1, warmup_steps=warmup, every_steps=3, folder=str(tmp_path / "traces")),
    )
    assert traces(tmp_path / "traces") == {("node_1", 0, 0, f"{step}-{step}"): [step] for step in (2, 5, 8)}
    assert not (tmp_path / "profiles").exists()


def test_the_first_step_can_be_recorded(tmp_path):
    steps(tmp_path / "c", Profile(first_step=1, steps=2))
    assert traces(tmp_path / "profiles") == {("node_1", 0, 0, "1-2"): [1, 2]}


def test_other_ranks_record_nothing(tmp_path):
    steps(tmp_path / "c", Profile(**SHORT, ranks=(1, 7)))
    assert not (tmp_path / "profiles").exists()


def test_steps_are_counted_over_restarts(tmp_path):
    profile = Profile(first_step=3, steps=2, warmup_steps=1, every_steps=4)
    assert steps(tmp_path / "c", profile, until=5, every_steps=5, finish=False) == (0, 5)
    assert traces(tmp_path / "profiles") == {("node_1", 0, 0, "3-4"): [3, 4]}
    assert steps(tmp_path / "c", profile, until=9) == (5, 9)
    assert traces(tmp_path / "profiles").keys() == {("node_1", 0, 0, "3-4"), ("node_1", 0, 0, "7-8")}


def test_each_round_can_have_its_own(tmp_path):
    profile = Profile(**SHORT, each_round=True)
    steps(tmp_path / "c", profile, until=5, every_steps=5, finish=False)
    steps(tmp_path / "c", profile, until=9)
    assert traces(tmp_path / "profiles").keys() == {("node_1", 0, 0, "3-4"), ("node_1", 0, 0, "8-9")}


def test_a_script_that_ends_in_the_middle_has_a_trace_of_what_was_recorded(tmp_path):
    steps(tmp_path / "c", Profile(first_step=9, steps=5))
    assert traces(tmp_path / "profiles") == {("node_1", 0, 0, "9-10"): [9, 10, 11]}  # the last: after step 10
    steps(tmp_path / "d", Profile(first_step=11, steps=5, folder=str(tmp_path / "none")))
    assert not (tmp_path / "none").exists()


def test_a_failure_is_said_once_and_training_goes_on(tmp_path, caplog):
    (tmp_path / "profiles").write_text("a file where the folder should be")
    assert steps(tmp_path / "c", Profile(first_step=2, steps=1, warmup_steps=0, every_steps=2)) == (0, 10)
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.name for record in warned] == ["azureml_elastic.train.session.records"]
    assert "stays off; training continues" in warned[0].getMessage()


def test_a_script_s_own_profiler_comes_first(tmp_path, caplog):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        assert steps(tmp_path / "c", Profile(**SHORT)) == (0, 10)
    assert "stays off" in caplog.text
    assert any(event.key == "aten::linear" for event in own.key_averages())
    assert not (tmp_path / "profiles").exists()


def test_without_a_profile_there_is_nothing(tmp_path):
    run = train.start(workers.policy(tmp_path / "c"))
    with run:
        assert run._run.context.profiling is None


def test_the_plan_s_profile_is_the_default(tmp_path, monkeypatch):
    resources = ElasticResources(max_instance_count=1)
    monkeypatch.setenv(names.PLAN, Plan(resources=resources, profile=Profile(**SHORT)).to_json())
    steps(tmp_path / "c", None)
    assert traces(tmp_path / "profiles").keys() == {("node_1", 0, 0, "3-4")}
    steps(tmp_path / "d", Profile(first_step=5, steps=1, folder=str(tmp_path / "own")))
    assert traces(tmp_path / "own").keys() == {("node_1", 0, 0, "5-5")}


def test_the_folder_may_name_variables_of_the_node():
    environment = WorkerEnvironment.read({"AZURE_ML_OUTPUT_traces": "/mnt/x", "A": "1", names.RUN_DIR: "/run"})
    assert trace_folder("$AZURE_ML_OUTPUT_traces/y", environment) == Path("/mnt/x/y")
    assert trace_folder("${A}b$C", environment) == Path("1b$C")
    assert trace_folder(None, environment) == Path("/run/profiles")
    assert trace_folder(None, WorkerEnvironment.read({})) == Path("profiles")


@pytest.fixture
def profiling(tmp_path):
    """A recording from step 3 to 4 of each round, and one step of a model."""
    identity = WorkerIdentity(0, 0, 1, 1)
    agent = StandaloneAgent(LocalStorage(tmp_path), identity)
    yield Profiling(Profile(**SHORT, each_round=True), tmp_path / "t", "n", CPU, agent)
    agent.close()


def go(profiling, identity, begin, end):
    for step in range(begin, end + 1):
        nn.Linear(2, 2)(torch.ones(1, 2))
        profiling.between_steps(identity, step)


@pytest.mark.parametrize("lost_after", [2, 3])
def test_a_round_that_ends_in_the_middle_of_a_recording_leaves_none(profiling, tmp_path, lost_after):
    before, after = WorkerIdentity(0, 0, 2, 1), WorkerIdentity(0, 0, 1, 2)
    profiling.between_steps(before, 0)
    go(profiling, before, 1, lost_after)
    go(profiling, after, lost_after + 1, lost_after + 6)  # the first of them begins the new round
    profiling.finish(lost_after + 6)
    profiling.close()
    first = lost_after + 4
    assert traces(tmp_path / "t") == {("n", 0, 2, f"{first}-{first + 1}"): [first, first + 1]}


def test_a_rank_that_is_chosen_no_more_stops(profiling, tmp_path):
    before, after = WorkerIdentity(0, 0, 2, 1), WorkerIdentity(1, 1, 2, 2)
    profiling.between_steps(before, 0)
    go(profiling, before, 1, 3)
    go(profiling, after, 4, 20)
    profiling.close()
    assert not (tmp_path / "t").exists()


def test_what_hangs_is_not_waited_for():
    never = threading.Event()
    assert ends_within(10, lambda: None)
    assert not ends_within(0.05, never.wait)
    never.set()


@pytest.mark.parametrize(
    ("ending", "code"), [("raise", 1), ("exit", 5), ("terminate", train.EXIT_TERMINATED), ("finish", 0)]
)
def test_a_script_that_ends_while_the_profiler_runs_ends_as_it_would(tmp_path, ending, code):
    program = [PROGRAM, "--end-at", "4", "--ending", ending]
    if ending == "finish":  # one in a new process, with whatever imports warn of
        command = [sys.executable, "-W", "error", *program]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    else:
        done = run_script([sys.executable, *program, "--strict"], cwd=tmp_path, timeout=600)
    assert done.returncode == code, done.stderr
    found = traces(tmp_path / "profiles") if (tmp_path / "profiles").exists() else {}
    assert found == ({("node_1", 0, 0, "3-4"): [3, 4, 5]} if ending in ("finish", "exit") else {})


@pytest.mark.parametrize("recovery", ["restart", "in_process"])
def test_nodes_come_and_go_while_they_are_profiled(tmp_path, recovery):
    options = {"distribution": ElasticDistribution(recovery=recovery), "checkpoint": CheckpointPolicy()}
    cluster = gathering_cluster(tmp_path, "kill=node-1@step:15", **options)
    arguments = ["--first", "10", "--steps", "40", "--each-round", "--end-at", "120", "--gather", "2"]
    report = cluster.run([str(PROGRAM), *arguments])
    assert_whole(report)
    assert after_gathering(report, 2) == (2, 1)
    events = [event for event in EventReader(report.paths.events).read() if isinstance(event, Progress)]
    number = max(event.round for event in events)
    found = traces(tmp_path / "run" / "profiles")
    ((node, rank, round_, recorded),) = [key for key in found if key[2] == number]
    assert (node, rank) == ("node-0", 0)
    first = report.rounds[-1].restored_step + 10
    assert (round_, recorded) == (number, f"{first}-{first + 39}")
    assert found[node, rank, round_, recorded] == list(range(first, first + 40))
    assert not [key for key in found if key[2] < number and key[0] == "node-0"]
