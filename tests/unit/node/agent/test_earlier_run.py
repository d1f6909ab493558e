"""The last committed checkpoint of the run that a run continues, from its table and its folder."""

import contextlib
import shutil

import pytest

from azureml_elastic.checkpoint.format.manifest import COMMITTED, MANIFEST, FolderName, Manifest
from azureml_elastic.checkpoint.storage.local import LocalStorage
from azureml_elastic.config import ElasticResources, Plan, TableRendezvous
from azureml_elastic.config.plan import EarlierRun
from azureml_elastic.environment import names as variables
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import UsageError
from azureml_elastic.node.agent.earlier_run import with_earlier_checkpoint
from azureml_elastic.node.host.identity import read_identity
from azureml_elastic.node.table import open_table
from azureml_elastic.node.table.checkpoint_pointer import CheckpointPointer


class Runs:
    """A table and a checkpoint folder of several runs."""

    def __init__(self, folder):
        self.checkpoints = folder / "checkpoints"
        self.rendezvous = TableRendezvous(endpoint=str(folder / "table.sqlite"))

    def table(self, run):
        return contextlib.closing(open_table(self.rendezvous, run, NodeEnvironment.read({})))

    def write(self, run, step, *, committed=True):
        storage, name = LocalStorage(self.checkpoints / run), str(FolderName(step, 1, f"{step:08x}"))
        manifest = Manifest(name, step, 1, 1, None, {}, {}, None, "2.13.0")
        storage.make(name)
        storage.write(name, MANIFEST, [manifest.to_bytes()])
        if committed:
            storage.write(name, COMMITTED, [b""])
        return manifest.reference

    def commit(self, run, reference):
        with self.table(run) as table:
            CheckpointPointer(table, 1, "owner").commit(reference.to_json())

    def resume(self, earlier, run="new", *, checkpoint_dir=True, **given):
        plan = Plan(
            resources=ElasticResources(max_instance_count=1),
            rendezvous=self.rendezvous,
            resume_from=EarlierRun(name=earlier, **given),
        )
        folder = str(self.checkpoints) if checkpoint_dir else None
        identity = read_identity(
            NodeEnvironment.read({variables.PLAN: plan.to_json(), variables.RUN_ID: run}), checkpoint_dir=folder
        )
        with self.table(run) as table:
            return with_earlier_checkpoint(identity, table, NodeEnvironment.read({})).plan.resume_from


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path)


def test_the_checkpoint_that_the_table_names_is_taken(runs):
    reference = runs.write("old", 5)
    runs.write("old", 9)
    runs.commit("old", reference)
    found = runs.resume("old")
    assert found.checkpoint == reference.to_json()
    assert found.path == str(runs.checkpoints / "old")


def test_a_run_with_another_table_is_found_by_its_commit_markers(runs):
    reference = runs.write("old", 5)
    runs.write("old", 9, committed=False)
    assert runs.resume("old").checkpoint == reference.to_json()


def test_a_folder_may_be_given_with_its_checkpoint(runs):
    reference = runs.write("elsewhere", 5)
    runs.write("elsewhere", 9)
    path = str(runs.checkpoints / "elsewhere")
    found = runs.resume("old", checkpoint_dir=False, path=path, checkpoint=reference.to_json())
    assert (found.path, found.checkpoint) == (path, reference.to_json())


def test_a_run_that_does_not_exist_is_refused(runs):
    runs.write("olive_sun_t5kq8vzp2c", 5)
    with pytest.raises(UsageError, match=r"there is no such run: .* did you mean 'olive_sun_t5kq8vzp2c'"):
        runs.resume("olive_sun_t5kq8vzp2d")
    with pytest.raises(UsageError, match=r"there is no such run: .* a folder of its name\. Give the name"):
        runs.resume("another")


def test_a_run_without_a_committed_checkpoint_is_refused(runs):
    runs.write("old", 5, committed=False)
    with pytest.raises(UsageError, match="has no committed checkpoint"):
        runs.resume("old")
    with runs.table("joined") as table:
        table.insert("member.a", {})
    with pytest.raises(UsageError, match="has no committed checkpoint"):
        runs.resume("joined")


def test_a_run_with_another_checkpoint_path_is_refused(runs):
    reference = runs.write("elsewhere", 5)
    runs.commit("old", reference)
    with pytest.raises(UsageError, match=r"is not in .*/old .*Give the job the checkpoint path of that run"):
        runs.resume("old")


@pytest.mark.parametrize("damage", ["gone", "torn", "its folder is gone"])
def test_without_the_newest_manifest_the_checkpoint_before_it_is_taken(runs, damage, caplog):
    before, newest = runs.write("old", 5), runs.write("old", 9)
    runs.commit("old", newest)
    folder = runs.checkpoints / "old" / newest.directory
    if damage == "torn":
        (folder / MANIFEST).write_bytes((folder / MANIFEST).read_bytes()[:40])
    elif damage == "gone":
        (folder / MANIFEST).unlink()
    else:
        shutil.rmtree(folder)
    assert runs.resume("old").checkpoint == before.to_json()
    assert newest.directory in caplog.text
    assert f"continues from {before.directory}" in caplog.text


def test_a_run_does_not_continue_itself_and_needs_a_folder(runs):
    with pytest.raises(UsageError, match="is this run itself"):
        runs.resume("new")
    with pytest.raises(UsageError, match="--checkpoint-dir"):
        runs.resume("old", checkpoint_dir=False)


def test_a_run_with_a_checkpoint_of_its_own_does_not_need_the_earlier_run(runs):
    runs.commit("new", runs.write("new", 20))
    assert runs.resume("gone").checkpoint is None
