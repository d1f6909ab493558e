"""Job files of the shapes that users have: each runs on the local workspace, or is refused for the quoted reason."""

from pathlib import Path

import pytest

from azureml_elastic.errors import CommandError, SubmitError
from azureml_elastic.submit.yaml.job_file import load_elastic_job
from azureml_elastic.testing import LocalWorkspace, Pool
from tests.support.node_server import FORKED

CORPUS = Path(__file__).parent / "corpus"
RUN = {
    "curated_environment": [f"[{rank} of 2] --epochs 3 --learning-rate 0.001 --name first" for rank in range(2)],
    "inline_environment": ["[0 of 1] --out outputs"],
    "inputs_and_outputs": [
        (
            "[0 of 1] folder of table.csv --file file of a,b --flag True 4 --text two words"
            " empty folder empty folder empty folder"
        )
    ],
    "launcher_variables": ["[0 of 2] 0 0 2", "[1 of 2] 1 1 2"],
    "pools": ["[0 of 2]", "[1 of 2]"],
    "prefixes": ["[0 of 1] conda poetry uv"],
    "prepared": [f"[{rank} of 2] a module with --epochs 2" for rank in range(2)],
    "several_commands": ["[0 of 1] sourced notebook --epochs 2"],
    "torchrun": [f"[{rank} of 2] --batch 8" for rank in range(2)],
    "without_code": [],
}
"""What the workers of each job print."""

REFUSED = {
    "accelerate_with_configuration": "Move its options (--config-file accelerate.yaml) to the script",
    "deepspeed_with_hosts": "--include of deepspeed has no equivalent in the agent. Give command: python main.py",
    "here_document": "The command holds a here-document",
    "loop": "in a shell loop; an elastic job runs its program once. Move the loop into the training script",
    "mpi": "distribution.type is 'mpi', but an elastic job runs PyTorch, Horovod, Dask or Ray. If the script runs so",
    "mpi_variables": "'$OMPI_COMM_WORLD_RANK', which only MPI's launcher sets; the elastic agent starts the workers",
    "mpirun": "starts no Python program but the launcher 'mpirun'",
    "not_elastic": "there is no elastic: block, which sets how many nodes may train",
    "notebook": "'papermill train.ipynb out.ipynb' starts no Python program",
    "once_per_node": "The command has $NODE_RANK in '$NODE_RANK', outside the arguments of its program",
    "pipeline": "type is 'pipeline': a pipeline is submitted to a workspace",
    "profiler": "'nsys profile' would observe the agent of each node, not the workers",
    "r_script": "'Rscript train.R --epochs 3' starts no Python program",
    "shell_script": "'bash run.sh' starts no Python program",
    "shell_text": "a shell of its own, whose program the agent cannot find. Give what follows -c as the command",
    "sweep": "type is 'sweep': a sweep is submitted to a workspace",
    "tensorflow": "The distribution 'tensorflow' cannot be carried: an elastic job runs PyTorch, Horovod",
    "this_machine": "To try the job here, run 'azureml-elastic local'",
    "timeout": "'timeout' would end the agent of each node by itself",
    "torchrun_without_count": "Give command: python main.py and elastic.distribution.process_count_per_instance: 1.",
    "trial": "not those of a sweep's trials. Declare an input, and write ${{inputs.lr}}",
    "two_programs": "Write 'command' before the others, as in 'command python prepare.py && python train.py'",
    "typed_inputs": "inputs.count.type is 'integer', which only a component's input may have. Give the value itself",
    "undeclared_input": "The command has '${{inputs.data}}', but the job declares no inputs. Add 'data' to inputs",
    "unknown_script": "The command starts 'trian.py', which is not in code=",
    "wrapper": "Give command: python main.py --batch 8 and elastic.distribution.process_count_per_instance: 8.",
}
"""A part of the message that each job is refused with."""

PLAIN = ["elastic.metrics.mlflow=false"]
"""The agents start in less time without MLflow."""


def test_the_corpus_has_a_result_for_each_file():
    assert sorted([*RUN, *REFUSED]) == sorted(path.stem for path in CORPUS.glob("*.yml"))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_run_is_refused_before_anything_is_sent(name):
    with pytest.raises((CommandError, SubmitError)) as caught:
        load_elastic_job(CORPUS / f"{name}.yml").compile()
    assert REFUSED[name] in str(caught.value)


@pytest.mark.limits(cpu_s=900, wait_s=900)
def test_what_is_accepted_runs():
    shown, logs = {}, {}
    with LocalWorkspace(pools={"gpu-cluster": Pool(nodes=2), "spot": Pool(nodes=1)}, start=FORKED) as workspace:
        client = workspace.ml_client
        jobs = {name: load_elastic_job(CORPUS / f"{name}.yml", PLAIN) for name in sorted(RUN)}
        submitted = {name: client.jobs.create_or_update(job).name for name, job in jobs.items()}
        for name, job in submitted.items():
            status = workspace.wait(job, 500)
            nodes = [node.name for node in client.jobs.list(parent_job_name=job)] or [job]
            logs[name] = "\n".join(workspace.log(node) for node in nodes)
            lines = [line.partition("]:")[2].strip() for line in logs[name].splitlines()]
            shown[name] = status, sorted(line for line in lines if line.startswith("["))
    assert shown == {name: ("Completed", lines) for name, lines in RUN.items()}, logs
    assert logs["prepared"].count("prepared once") == 1
    assert "Beautiful is better than ugly." in logs["without_code"]
