"""The arguments that the workers of a submitted job receive, with variables of each worker.

``tests/runs/test_arguments.py`` has the other ways of starting workers and programs.
"""

from azureml_elastic import ElasticCommandJob, ElasticDistribution, ElasticResources
from azureml_elastic.testing import LocalWorkspace
from tests.support.node_server import FORKED

SCRIPT = """
import os, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"]
expected = [os.environ[name] for name in names]
assert sys.argv[1:] == [*expected, "$RANK", "%{worker:RANK}", "%{worker:RANK}"], sys.argv
assert sys.orig_argv[-10:] == sys.argv[1:], sys.orig_argv
sys.stdout.write(f"arguments of rank {' '.join(sys.argv[1:5])}\\n")
"""
ARGUMENTS = (
    '$RANK "${LOCAL_RANK}" ${WORLD_SIZE:-1} $LOCAL_WORLD_SIZE $NODE_RANK $MASTER_ADDR "$MASTER_PORT" '
    "'$RANK' %{worker:RANK} ${{inputs.text}}"
)


def test_each_worker_of_a_job_receives_its_own_arguments(script):
    script(SCRIPT)
    job = ElasticCommandJob(
        code="src",
        command=f"python train.py {ARGUMENTS} | tee log.txt",
        inputs={"text": "%{worker:RANK}"},
        environment_variables={"LOGLEVEL": "DEBUG"},  # says how workers are started
        environment="anything@latest",
        compute="cluster",
        resources=ElasticResources(min_instance_count=2, max_instance_count=2),
        distribution=ElasticDistribution(process_count_per_instance=2),
    )
    with LocalWorkspace(start=FORKED) as workspace:
        submitted = workspace.ml_client.jobs.create_or_update(job)
        status = workspace.wait(submitted.name, 200)
        children = list(workspace.ml_client.jobs.list(parent_job_name=submitted.name))
        text = "\n".join(workspace.log(child.name) for child in children)
    assert status == "Completed", text
    lines = sorted(line.partition("arguments of ")[2] for line in text.splitlines() if "arguments of" in line)
    assert lines == ["rank 0 0 4 2", "rank 1 1 4 2", "rank 2 0 4 2", "rank 3 1 4 2"]
    assert "from the preload server" in text


def run(command, **distribution):
    """Run a command on one node and return its output."""
    job = ElasticCommandJob(
        code="src",
        command=command,
        environment="anything@latest",
        compute="cluster",
        resources=ElasticResources(max_instance_count=1),
        distribution=ElasticDistribution(preload_workers=False, **distribution),
    )
    with LocalWorkspace() as workspace:
        submitted = workspace.ml_client.jobs.create_or_update(job)
        status = workspace.wait(submitted.name, 200)
        text = workspace.log(submitted.name)
    assert status == "Completed", text
    return text


def test_prefixes_apply_to_the_agent_and_so_to_its_workers(script):
    script("import os; assert (os.environ['A'], os.environ['B']) == ('1', '2'); assert os.nice(0) >= 5")
    run("A=1 nice -n 5 env -u C B=2 stdbuf -oL $(which python) train.py")


def test_a_command_left_to_the_shell_runs_once_per_node_before_the_workers(script):
    script("print('prepared', flush=True); open('prepared', 'x')", "prepare.py")
    script("import os; assert os.path.exists('prepared')")
    text = run("command python prepare.py && python train.py", process_count_per_instance=2)
    assert text.count("prepared") == 1
