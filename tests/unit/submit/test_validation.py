"""What is refused, with what message; none of it needs azure-ai-ml."""

from datetime import timedelta
from unittest import mock

import pytest
from pydantic import ValidationError

from azureml_elastic.config import ElasticResources
from azureml_elastic.errors import CommandError, SubmitError
from azureml_elastic.program.source import parse_quietly
from azureml_elastic.submit.job import ElasticCommandJob
from azureml_elastic.submit.validation import check
from tests.unit.submit.jobs import small_job

SERVICE = {"min_instance_count": 2, "max_instance_count": 5, "placement": "service"}
GANG = {"max_instance_count": 2, "placement": "gang"}


def make(**fields):
    return small_job(**{"environment": "e", **fields})


class Declared:
    """An input with fields, as azure-ai-ml has it."""

    def __init__(self, **fields):
        vars(self).update(fields)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"inputs": {"azureml_elastic_runtime": 1}}, ["input 'azureml_elastic_runtime'", "Rename"]),
        ({"outputs": {"azureml_elastic_x": {}}}, ["output 'azureml_elastic_x'", "Rename"]),
        ({"environment_variables": {"AZUREML_ELASTIC_PLAN": "{}"}}, ["AZUREML_ELASTIC_PLAN", "Remove it"]),
        ({"environment_variables": {"AZUREML_ELASTIC_NODE_ID": "a"}}, ["AZUREML_ELASTIC_NODE_ID"]),
        ({"environment_variables": {"AZUREML_ELASTIC_RUN_ID": "a"}}, ["by a schedule", "AZUREML_ELASTIC_STEP"]),
        ({"environment_variables": {"AZUREML_ELASTIC_STEP": "a b"}}, ["'a b'", "no name of a step"]),
        ({"checkpoint": {"path": "/tmp/run"}}, ["checkpoint.path='/tmp/run'", "own disk", "Leave it out"]),
        ({"checkpoint": {"path": "./outputs"}}, ["checkpoint.path='./outputs'", "own disk"]),
        ({"checkpoint": {"path": "file:///mnt/x"}}, ["checkpoint.path='file:///mnt/x'", "own disk"]),
        ({"checkpoint": {"path": "memory://x"}}, ["checkpoint.path='memory://x'", "in its memory"]),
        ({"checkpoint": {"path": "s3://b/x"}}, ["checkpoint.path='s3://b/x'", "log in to Azure alone"]),
        ({"checkpoint": {"path": "https://a.blob.core.windows.net/c"}}, ["'abfs://<container>@<account>"]),
        ({"checkpoint": {"path": "azureml:mine:1"}}, ["checkpoint.path='azureml:mine:1'"]),
        ({"compute": "local"}, ["azureml-elastic local"]),
        ({"resources": {**GANG, "max_instance_count": 1001}}, ["max_instance_count=1001", "limit of 1000 nodes"]),
        ({"inputs": {"a-b": 1}}, ["input 'a-b'", "letters, digits and '_'"]),
        (
            {"resources": ElasticResources(max_instance_count=2, placement="service", docker_args=("-e", "A=1 2"))},
            ["docker_args is a list", "max_instance_count", "docker_args=shlex.join("],
        ),
        (
            {"resources": ElasticResources(max_instance_count=2, docker_args=("-i",), locations=("westeurope",))},
            ["drops locations=['westeurope']", "docker_args=shlex.join("],
        ),
        ({"parent_job_name": "above"}, ["parent_job_name='above'", "'fan_out'", "'gang'"]),
        (
            {"outputs": {"model": {"type": "uri_folder", "name": "model", "version": "3"}}},
            ["output 'model'", "version='3'", "each of 2 nodes", "Leave the version out"],
        ),
        ({"code": "nowhere"}, ["code='nowhere'", "does not exist"]),
        (
            {"outputs": {"o": {"type": "uri_folder", "path_on_compute": "/data"}}},
            ["output 'o'", "path_on_compute='/data'", "ignores it silently", "${{outputs.o}}"],
        ),
        (
            {"inputs": {"i": Declared(path_on_compute="/data")}},
            ["input 'i'", "path_on_compute='/data'", "cannot submit"],
        ),
        ({"inputs": {"i": {"type": "string", "default": "c", "enum": ["a", "b"]}}}, ["input 'i'", "enum ['a', 'b']"]),
        ({"inputs": {"i": Declared(default=0, min=1)}}, ["input 'i', 0", "beyond its min 1"]),
        ({"inputs": {"i": Declared(default=7.5, min=1, max=5)}}, ["input 'i', 7.5", "beyond its min 1 and max 5"]),
    ],
)
def test_fields_that_contradict_each_other(fields, parts):
    with pytest.raises(SubmitError) as caught:
        check(make(**fields))
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("bash run.sh", "starts no Python program"),
        ("torchrun --nproc_per_node 2 train.py", "command='python train.py' and ElasticDistribution(process_count_per"),
        ("python other.py", "'other.py', which is not in code='src'"),
        ("python train.py --data ${{inputs.data}}", "'${{inputs.data}}', but the job declares no inputs. Add 'data'"),
        ("python train.py > ${{ outputs.log }}/a", "'${{ outputs.log }}', but the job declares no outputs"),
        (
            "python train.py ${{search_space.lr}}",
            "not those of a sweep's trials. Declare an input, and write ${{inputs.lr}}.",
        ),
        ("python train.py ${{ name }}", "'${{ name }}', but a job of its own has only the values of its inputs"),
        ("python train.py ${{parent.inputs.x}}", "write ${{inputs.x}}"),
        ("echo $RANK && python train.py", "$RANK in '$RANK', outside the arguments of its program"),
        ("python src/train.py", "'src/train.py', which is not in code='src'"),
    ],
)
def test_commands_that_start_no_program_of_the_job(command, part):
    with pytest.raises(CommandError) as caught:
        check(make(command=command))
    assert part in str(caught.value)


def test_workers_that_stay_have_no_arguments_that_change():
    stay = {"recovery": "in_process"}
    assert check(make(command="python train.py $LOCAL_RANK", distribution=stay)).program
    with pytest.raises(CommandError, match=r"have \$RANK, which changes") as caught:
        check(make(command="python train.py $RANK", distribution=stay))
    assert 'give recovery="restart"' in str(caught.value)


def test_the_refusal_of_an_undeclared_input_names_the_one_that_is_close():
    with pytest.raises(CommandError) as caught:
        check(make(command="python train.py ${{inputs.epoch}}", inputs={"epochs": 3, "data": "x"}))
    assert "declares the inputs data, epochs. Did you mean ${{inputs.epochs}}?" in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"command": "cd sub && python other.py"},
        {"command": "python -m package.module"},
        {"command": "python /opt/train.py"},
        {"command": "python ${{inputs.code}}/other.py", "inputs": {"code": 1}},
        {
            "command": "python train.py ${{ inputs.a.b }} ${{outputs.o}}",
            "inputs": {"a": 1, "b": 2},
            "outputs": {"o": {}},
        },
        {"command": "python train.py ${{outputs.azureml_elastic_checkpoints}}"},
        {"command": "python other.py", "code": None},
        {"command": "python other.py", "code": "azureml:code:1"},
        {"command": "python other.py", "code": "git+https://example.org/x.git"},
        {"command": "python train.py", "code": "src/train.py"},
        {"compute": None, "job_tier": "Spot"},
        {"compute": None, "resources": ElasticResources(max_instance_count=2, instance_type="x")},
        {"environment_variables": {"AZUREML_ELASTIC_STEP": "evaluate-2"}},
        {"resources": ElasticResources(max_instance_count=2, docker_args=("-e", "A=1"))},
        {
            "inputs": {
                "i": {"type": "string", "default": "b", "enum": ["a", "b"]},
                "n": Declared(default=1, min=1, max=1),
            }
        },
        {"inputs": {"i": Declared(default=0, min=None, max=None, enum=None), "p": Declared(path="azureml:a:1", max=3)}},
    ],
)
def test_what_may_well_work_is_let_through(fields):
    assert check(make(**fields)).program.startswith("python")


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"resume_from": "/subscriptions/x/jobs/old"}, "is no name of a run"),
        ({"resume_from": ""}, "is no name of a run"),
        ({"resume_from": "old", "name": "old"}, "the name of this job itself"),
    ],
)
def test_an_earlier_run_that_no_job_can_continue(fields, part):
    with pytest.raises(SubmitError, match=part):
        check(make(**fields))


def test_the_earlier_run_is_in_the_plan():
    job = make(resume_from="olive_sun_t5kq8vzp2c")
    assert check(job).program.startswith("python")
    assert job.plan.resume_from.name == "olive_sun_t5kq8vzp2c"
    assert "olive_sun_t5kq8vzp2c" in str(job)


class PyTorchDistribution:
    def __repr__(self):
        return "PyTorchDistribution()"


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"distribution": PyTorchDistribution()}, "takes an ElasticDistribution"),
        ({"resources": PyTorchDistribution()}, "takes an ElasticResources"),
        ({"instance_count": 2}, "instance_count"),
        ({"timeout": timedelta(0)}, "not positive"),
        ({"job_tier": "cheap"}, "'Spot'"),
        ({"environment_variables": {"A": []}}, "environment_variables"),
        ({"comand": "x"}, "comand is no field of ElasticCommandJob; did you mean command?"),
        ({"resources": {"max_instance_cout": 2}}, "resources.max_instance_cout"),
        ({"resources": {"max_instance_cout": 2}}, "did you mean max_instance_count?"),
        ({"resources": {"max_instance_count": True}}, "True is no number"),
        ({"distribution": {"process_count_per_instance": True}}, "True is no number"),
        ({"distribution": {"stop_timeout": False}}, "False is no number"),
        ({"checkpoint": {"every": True}}, "checkpoint.every\n  True is no number"),
        ({"replacement": {"budget": True}}, "True is no number"),
        ({"timeout": True}, "True is no number"),
        ({"compute": ""}, "compute='' is no name of a compute"),
        ({"compute": "my cluster"}, "compute='my cluster' is no name of a compute"),
        ({"compute": "azureml:x@latest"}, "compute='azureml:x@latest' is no name"),
        ({"compute": "${{inputs.c}}"}, "compute='${{inputs.c}}' is no name"),
        ({"resources": {"max_instance_count": 2, "shm_size": "64 gb"}}, "as in '64g'"),
        ({"resources": None}, "resources is missing; give the number of nodes"),
        ({"timeout": "2 hours"}, "'2 hours' is no duration; give a number of seconds"),
        ({"timeout": object()}, "a value of the type object is no duration"),
        ({"name": "my run!"}, "name='my run!' is no name that Azure ML takes"),
        ({"identity": "user_identity"}, "UserIdentityConfiguration()"),
        ({"compute": ["spot"]}, "the name 'spot' in its list; a list has pools"),
        ({"compute": 3}, "compute is of the type int"),
    ],
)
def test_fields_that_are_wrong_in_themselves(fields, part):
    with pytest.raises(ValidationError) as caught:
        make(**fields)
    assert part in str(caught.value)


def test_errors_of_pools_are_those_of_their_fields_alone():
    with pytest.raises(ValidationError) as caught:
        make(compute=[{"compute": "spot", "max_instance_cout": 2}])
    places = [".".join(map(str, error["loc"])) for error in caught.value.errors()]
    assert sorted(places) == ["compute.0.max_instance_count", "compute.0.max_instance_cout"]


def test_the_scheme_of_a_compute_is_no_part_of_its_name():
    assert make(compute="azureml:spot").compute == "spot"
    whole = "/subscriptions/s/resourceGroups/g/providers/Microsoft.MachineLearningServices/workspaces/w/computes/spot"
    assert make(compute=f"azureml:{whole}").compute == whole


@pytest.mark.parametrize("path", ["abfs://c@a.dfs.core.windows.net/x", "azureml://datastores/d/paths/x", "/mnt/nfs/x"])
def test_checkpoint_paths_that_all_nodes_see(path):
    check(make(checkpoint={"path": path}))


def test_carriage_returns_at_the_ends_of_lines_are_no_part_of_the_command():
    job = make(command="pip list \\\r\n  -v\r\npython train.py \\\r\n  --x 'a\rb'\r\n")
    assert job.command == "pip list \\\n  -v\npython train.py \\\n  --x 'a\rb'\n"
    assert make(command="python train.py\r").command == "python train.py"


def test_numbers_in_environment_variables_become_text():
    assert make(environment_variables={"A": 1, "B": True}).environment_variables == {"A": "1", "B": "True"}


def test_equal_jobs_have_equal_hashes():
    assert len({make(), make(), make(name="other")}) == 2


def test_a_job_of_names_and_fields_can_be_written_as_json():
    text = make(environment_variables={"A": 1}).model_dump_json()
    assert ElasticCommandJob.model_validate_json(text) == make(environment_variables={"A": "1"})


def test_a_job_with_objects_cannot_be_written_as_json():
    with pytest.raises(SubmitError, match="cannot be written as JSON"):
        make(environment=Declared(path="x")).model_dump_json()


@pytest.mark.parametrize(
    ("arguments", "warnings"), [("--token hf_abc", 1), ("--token $TOKEN", 0), ("--token ${{inputs.token}}", 0)]
)
def test_a_secret_in_the_command_is_warned_about(arguments, warnings, caplog):
    check(make(command=f"python train.py {arguments}", inputs={"token": "x"}))
    assert len(caplog.records) == warnings
    assert "hf_abc" not in caplog.text


def test_the_integrations_can_be_switched_off():
    check(make(environment_variables={"AZUREML_ELASTIC_INTEGRATIONS": "off"}))


@pytest.mark.parametrize(
    ("line", "distribution", "warnings"),
    [
        ('os.environ["MASTER_ADDR"] = "localhost"', {}, 1),
        ('os.environ.setdefault("MASTER_ADDR", "localhost")', {}, 0),
        ('os.environ["MASTER_ADDR"] = "localhost"', {"framework": "ray"}, 0),
    ],
)
@pytest.mark.parametrize("command", ["python train.py", "python -m train"])
def test_ranks_and_addresses_in_the_script_are_warned_about(line, distribution, warnings, command, tmp_path, caplog):
    (tmp_path / "train.py").write_text("import connect\n")
    (tmp_path / "connect.py").write_text(f"import os\n{line}\n")
    check(make(code=str(tmp_path), command=command, distribution=distribution))
    assert len(caplog.records) == warnings
    assert caplog.text.count("connect.py:2 sets MASTER_ADDR to 'localhost'") == warnings


POPEN = "import subprocess, sys\nsubprocess.Popen([sys.executable, *sys.argv[3:]])\n"
SCRIPT = "model(1).backward()\n"
DASK = "import subprocess, sys\nsubprocess.Popen(['dask-scheduler', '--port', '8786'])\n"


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        (
            "pip list && python -u launch.py --num_gpus 4 train.py --lr $A | tee log",
            [
                "'launch.py' is given the program 'train.py', as a launcher is (launch.py:2 calls subprocess.Popen())",
                "command='pip list && python -u train.py --lr $A | tee log'",
                "process_count_per_instance",
            ],
        ),
        ("A=1 ./launch.py --gpus 4 'train.py' ${{inputs.x}}", ["command=\"A=1 python 'train.py' ${{inputs.x}}\""]),
        ("python launch.py --script=train.py -x", ["command='python train.py -x'"]),
        ("python -m launch -m train -x", ["command='python -m train -x'"]),
        (
            "python -m colossalai.cli run --nproc_per_node 4 train.py --lr 1",
            [
                "'colossalai.cli' is given the program 'train.py'",
                "(train.py:1 calls backward())",
                "'python train.py --lr 1'",
            ],
        ),
        (
            "python start.py --script train.py",
            [
                "start.py:2 starts 'dask-scheduler --port 8786', so that 'start.py' is a launcher",
                'with ElasticDistribution(framework="dask") the elastic agent starts the cluster',
            ],
        ),
        ("python -m deepspeed --num_gpus 4 train.py", ["command='python train.py --local_rank=$LOCAL_RANK'"]),
    ],
)
def test_launchers_are_refused_with_the_command_to_write(command, parts, tmp_path):
    for name, text in {"launch.py": POPEN, "train.py": SCRIPT, "start.py": DASK}.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CommandError) as caught:
        check(make(code=str(tmp_path), command=command, inputs={"x": 1}))
    for part in parts:
        assert part in str(caught.value)


def test_each_module_of_a_program_is_parsed_once(tmp_path):
    (tmp_path / "train.py").write_text(f"import connect\n{POPEN}{SCRIPT}")
    (tmp_path / "connect.py").write_text("import os\nos.environ['RANK'] = '0'\n")
    with mock.patch("azureml_elastic.program.source.parse_quietly", wraps=parse_quietly) as parse:
        check(make(code=str(tmp_path), command="python train.py config.py"))
    assert parse.call_count == 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"resources": SERVICE}, ["has no resources.maxInstanceCount", "min_instance_count=2 of the 5 nodes"]),
        ({"resources": GANG, "priority": "low"}, ["has no queueSettings.priority", "may ignore priority='low'"]),
        ({"resources": {**GANG, "locations": ["westeurope"]}}, ["has no resources.locations", "('westeurope',)"]),
        ({"resources": GANG}, []),
        ({"resources": {"max_instance_count": 5}, "priority": "low"}, []),
    ],
)
def test_fields_that_the_api_version_does_not_have_are_warned_about(fields, said, caplog):
    check(make(**fields))
    assert len(caplog.records) == bool(said)
    for text in said:
        assert text in caplog.text
