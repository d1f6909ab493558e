"""A folder of checkpoints as a user meets it on the command line."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from azureml_elastic import train
from azureml_elastic.cli import app
from azureml_elastic.cli.checkpoints import folder_of_submitted
from azureml_elastic.config import CheckpointPolicy, ElasticResources, Plan
from azureml_elastic.environment import names as variables
from azureml_elastic.errors import UsageError
from azureml_elastic.submit.run import ElasticRun, JobRecord

RUN = CliRunner(env={"COLUMNS": "200"})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The checkpoints 2, 4 and 6 of a run of a small model."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "c"
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(torch.bfloat16)
    with train.start(CheckpointPolicy(path=str(path), every=None, every_steps=2, keep=5)) as run:
        run.track(model=model, optimizer=torch.optim.Adam(model.parameters()))
        for step in range(6):
            with torch.no_grad():
                model[0].weight.fill_(step + 1)
            run.commit()
    return path


def checkpoint(folder, step):
    (found,) = folder.glob(f"step-{step:012d}*")
    return found


def corrupt(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_list_shows_what_is_there(folder):
    (checkpoint(folder, 4) / "committed").unlink()
    (checkpoint(folder, 2) / "manifest.json").unlink()
    result = RUN.invoke(app, ["checkpoints", "list", str(folder)])
    assert result.exit_code == 0, result.output
    lines = {line.split("│")[1].strip(): line for line in result.stdout.splitlines() if line.count("│") > 2}
    assert "committed" in lines["6"]
    assert "complete, not committed" in lines["4"]
    assert "never completed" in lines["2"]


def test_verify_finds_a_flipped_bit(folder):
    assert RUN.invoke(app, ["checkpoints", "verify", str(folder)]).exit_code == 0
    corrupt(checkpoint(folder, 4) / "rank-00000.safetensors")
    result = RUN.invoke(app, ["checkpoints", "verify", str(folder)])
    assert result.exit_code == 1
    assert "another checksum" in result.stdout
    assert "1 committed checkpoint." in result.stderr
    assert result.stdout.count(": whole") == 2


def test_prune_keeps_the_newest_whole_ones(folder):
    corrupt(checkpoint(folder, 6) / "rank-00000.safetensors")
    asked = RUN.invoke(app, ["checkpoints", "prune", str(folder), "--keep", "1"], input="n\n")
    assert asked.exit_code == 1
    assert len(list(folder.glob("step-*"))) == 3
    result = RUN.invoke(app, ["checkpoints", "prune", str(folder), "--keep", "1", "--yes"])
    assert result.exit_code == 0, result.output
    assert [path.name[:17] for path in folder.glob("step-*")] == ["step-000000000004"]


def test_nothing_is_pruned_where_nothing_is_whole(folder):
    for step in (2, 4, 6):
        corrupt(checkpoint(folder, step) / "rank-00000.safetensors")
    result = RUN.invoke(app, ["checkpoints", "prune", str(folder), "--yes"])
    assert result.exit_code == 2
    assert "nothing was removed" in result.stderr
    assert len(list(folder.glob("step-*"))) == 3


def test_export_is_what_the_model_loads(folder, tmp_path):
    target = tmp_path / "model.safetensors"
    result = RUN.invoke(app, ["checkpoints", "export", str(folder), str(target), "--step", "4"])
    assert result.exit_code == 0, result.output
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(torch.bfloat16)
    model.load_state_dict(load_file(target))
    assert model[0].weight.unique().tolist() == [4.0]
    again = RUN.invoke(app, ["checkpoints", "export", str(folder), str(target)])
    assert again.exit_code == 2
    assert "exists" in again.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "{folder}", "x.safetensors", "--object", "net"], "holds no tensors of 'net'"),
        (["export", "{folder}", "x.safetensors", "--step", "3"], "there are 2, 4, 6"),
        (["list", "{folder}/nothing"], "There is no folder"),
        (["list", "empty"], "There are no checkpoints"),
    ],
)
def test_wrong_input_is_explained(folder, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    result = RUN.invoke(app, ["checkpoints", *(word.format(folder=folder) for word in words)])
    assert result.exit_code == 2
    assert said in result.stderr
    assert not (tmp_path / "x.safetensors").exists()


def test_the_folder_of_a_run_in_both_layouts(folder, tmp_path):
    """``local`` writes checkpoints to the folder that it has, and the nodes of a job to one of their run in it."""
    by_local, by_job = tmp_path / "local", tmp_path / "job"
    by_local.mkdir()
    shutil.copytree(folder, by_local / "checkpoints")
    shutil.copytree(folder, by_job / "checkpoints" / "olive_sun")
    for named, where in (
        (by_local, by_local / "checkpoints"),
        (by_job, by_job / "checkpoints" / "olive_sun"),
        (by_job / "checkpoints", by_job / "checkpoints" / "olive_sun"),
    ):
        shown = RUN.invoke(app, ["checkpoints", "list", str(named)])
        assert shown.exit_code == 0, shown.output
        assert shown.stdout.splitlines()[0] == str(where)
        assert shown.stdout.count("committed") == 3
    shutil.copytree(folder, by_job / "checkpoints" / "misty_sea")
    several = RUN.invoke(app, ["checkpoints", "prune", str(by_job), "--yes"])
    assert several.exit_code == 2
    assert "several runs: misty_sea, olive_sun" in several.stderr
    assert len(list((by_job / "checkpoints" / "misty_sea").glob("step-*"))) == 3


class Workspace:
    """A workspace with one job of a run and one datastore of blobs."""

    def __init__(self, path):
        plan = Plan(resources=ElasticResources(max_instance_count=1), checkpoint=CheckpointPolicy(path=path))
        self.record = JobRecord("olive_sun", "Completed", variables=({variables.PLAN: plan.to_json()},))

    def job(self, name):
        return self.record if name == "olive_sun" else None

    def steps(self, name):
        return []

    def container_url(self, datastore):
        return "abfs://box@account.dfs.core.windows.net" if datastore == "workspaceblobstore" else None


BOX = "abfs://box@account.dfs.core.windows.net"


@pytest.mark.parametrize(
    ("path", "where"),
    [
        (None, f"{BOX}/azureml-elastic/olive_sun"),
        ("azureml://datastores/workspaceblobstore/paths/a b/c", f"{BOX}/a b/c/olive_sun"),
        ("azureml://subscriptions/s/workspaces/w/datastores/workspaceblobstore/paths/c/", f"{BOX}/c/olive_sun"),
        ("abfs://own@other.dfs.core.windows.net/c", "abfs://own@other.dfs.core.windows.net/c/olive_sun"),
    ],
)
def test_the_place_of_a_submitted_run_s_checkpoints(path, where):
    jobs = Workspace(path)
    assert folder_of_submitted(ElasticRun(jobs, "olive_sun"), jobs) == where


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/mnt/shared/c", r"in the folder /mnt/shared/c/olive_sun of its nodes"),
        ("azureml://datastores/files/paths/c", r"below azureml://datastores/files/paths/c, whose container"),
        ("azureml://datastores/workspaceblobstore/paths/${{name}}", r"whose container is not known here"),
        ("azureml:my_data:3", r"whose container is not known here"),
    ],
)
def test_a_place_that_only_the_nodes_know_is_named(path, said):
    jobs = Workspace(path)
    with pytest.raises(UsageError, match=re.escape(said)):
        folder_of_submitted(ElasticRun(jobs, "olive_sun"), jobs)


def test_the_list_as_json(folder):
    (checkpoint(folder, 4) / "committed").unlink()
    document = json.loads(RUN.invoke(app, ["checkpoints", "list", str(folder), "--json"]).stdout)
    assert document["folder"] == str(folder)
    found = {each["step"]: each for each in document["checkpoints"]}
    assert found[6]["state"] == "committed"
    assert (found[4]["state"], found[4]["committed"]) == ("complete, not committed", False)
    assert (folder / found[6]["folder"]).is_dir()
