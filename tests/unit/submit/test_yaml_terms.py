"""Messages about files are in the terms of files."""

import pytest
import yaml
from typer.testing import CliRunner

from azureml_elastic.cli.app import app
from azureml_elastic.errors import SubmitError
from azureml_elastic.submit import load_elastic_sweep
from azureml_elastic.submit.yaml.yaml_terms import in_terms_of_yaml

SWEEP = """
type: sweep
trial: {code: ., command: "python x.py ${{search_space.lr}}", environment: "azureml:e:1", elastic: {}}
compute: azureml:gpu
sampling_algorithm: random
search_space: {lr: {type: choice, values: [1, 2]}}
objective: {goal: minimize, primary_metric: loss}
limits: {max_total_trials: 2}
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "Take job.with_options(resources={'placement': 'gang'}).sweep(...), or x.",
            "Take t.elastic.placement: gang, or x.",
        ),
        ('give distribution=ElasticDistribution(framework="ray").', "give t.elastic.distribution.framework: ray."),
        (
            "Give from_command(..., resources=ElasticResources(max_instance_count=...)).",
            "Give t.elastic.max_instance_count: N.",
        ),
        ("as in job.model_copy(update={'services': None}).sweep(...).", "as in t.services: null."),
        (
            "as in Output(type='uri_folder', path='azureml://x'), or",
            "as in {type: uri_folder, path: 'azureml://x'}, or",
        ),
        ("Give environment='<name>@latest', or", "Give t.environment: <name>@latest, or"),
        ('with recovery="in_process" workers', "with t.elastic.distribution.recovery: in_process workers"),
        ("checkpoint.path='/tmp/x' is a folder", "t.elastic.checkpoint.path: /tmp/x is a folder"),
        ("compute=[NodePool('a', max_instance_count=4)].", "t.compute: [{compute: a, max_instance_count: 4}]."),
        ("A=1 PATH=/bin python x.py --a=3 --code='x' ${{inputs.x}} f(x)", None),
        ("it has path='x', an open ( and 'quote", None),
    ],
)
def test_expressions_of_python_become_fields_and_all_else_stays(text, said):
    assert in_terms_of_yaml(text, "t.") == (text if said is None else said)


def test_a_missing_file_is_said_before_a_missing_workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["submit", "nope.yml"])
    assert (shown.exit_code, shown.stderr.startswith("azureml-elastic: nope.yml cannot be read")) == (2, True)


def test_the_shortest_block_makes_trials_of_one_job(tmp_path):
    (tmp_path / "x.py").write_text("")
    document = yaml.safe_load(SWEEP)
    document["trial"]["elastic"] = {"max_instance_count": 3}
    (tmp_path / "sweep.yml").write_text(yaml.safe_dump(document))
    assert load_elastic_sweep(tmp_path / "sweep.yml").resources.instance_count == 3


def test_the_errors_of_a_sweep_have_the_paths_of_its_file(tmp_path):
    def refused(**block):
        document = yaml.safe_load(SWEEP)
        document["trial"]["elastic"] = block
        (tmp_path / "sweep.yml").write_text(yaml.safe_dump(document))
        with pytest.raises(SubmitError) as caught:
            load_elastic_sweep(tmp_path / "sweep.yml")
        return str(caught.value)

    (tmp_path / "x.py").write_text("")
    assert "trial.elastic.most is no field" in refused(most=3)
    assert "trial.elastic.keep is no field; it belongs to trial.elastic.checkpoint." in refused(keep=3)
    assert "trial.elastic.min_instance_count: 4" in refused(min_instance_count=4, max_instance_count=2)
