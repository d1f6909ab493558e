"""A job that continues a failed one, submitted from Python and by the command line."""

import json
import shutil

from typer.testing import CliRunner

from azureml_elastic import CheckpointPolicy, ElasticCommandJob, ElasticDistribution, ElasticResources
from azureml_elastic.cli import app
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.ledger.summary import audit_folder
from azureml_elastic.testing import LocalWorkspace, Pool
from tests.support.node_server import FORKED
from tests.support.paths import PROGRAMS
from tests.support.whole_runs import together

JOB = """
type: command
code: src
command: python failing.py never notes
environment: azureml:anything@latest
compute: azureml:cluster
elastic:
  max_instance_count: 1
  audit: true
  checkpoint: {every_steps: 3}
"""


def make(**fields):
    return ElasticCommandJob(
        **{
            "code": "src",
            "command": "python failing.py all notes 8",
            "environment": "anything@latest",
            "compute": "cluster",
            "resources": ElasticResources(min_instance_count=2, max_instance_count=2),
            "distribution": ElasticDistribution(max_restarts=0),
            "checkpoint": CheckpointPolicy(every_steps=3),
            "replacement": None,
            "audit": True,
            **fields,
        }
    )


def test_a_failed_run_is_continued_and_each_sample_is_seen_once(project, tmp_path):
    shutil.copy(PROGRAMS / "failing.py", project / "src")
    (project / "job.yml").write_text(JOB)
    folder = tmp_path / "workspace"
    with LocalWorkspace(pools={"cluster": Pool(nodes=2)}, folder=folder, start=FORKED) as workspace:
        (project / "config.json").write_text(json.dumps(dict(workspace.config)))
        create = workspace.ml_client.jobs.create_or_update
        waiting = f"until [ -e {tmp_path / 'go'} ]; do sleep 0.1; done; python failing.py all notes 8"
        first = create(make(command=waiting))
        runner = CliRunner()
        refused = runner.invoke(app, ["submit", "job.yml", "--resume-from", first.name])
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert "that run still has 2 active nodes" in " ".join(refused.stderr.split())
        (tmp_path / "go").touch()
        assert workspace.wait(first.name, 200) == "Failed"
        before = together(folder, tmp_path / "first")
        shutil.rmtree(folder / "nodes")

        one = ElasticResources(max_instance_count=1)
        command = "python failing.py never notes"
        unknown = create(make(command=command, resources=one, resume_from=first.name[:-1] + "_"))
        assert workspace.wait(unknown.name, 100) == "Failed"
        text = workspace.log(unknown.name)
        assert "there is no such run" in text
        assert f"did you mean '{first.name}'?" in text

        refused = runner.invoke(app, ["submit", "job.yml", "--resume-from", "nobody"])
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert "has no job" in " ".join(refused.stderr.split())
        done = runner.invoke(app, ["submit", "job.yml", "--resume-from", first.name])
        assert done.exit_code == 0, done.output
        second = done.stdout.split()[0]
        assert workspace.wait(second, 200) == "Completed", workspace.log(second)
        after = together(folder, tmp_path / "second")
    audit = audit_folder(after, Picture.of(read_events(after.events)), [before.run_dir])
    assert audit.complete
    assert (audit.seen, audit.steps) == (80, 20)
