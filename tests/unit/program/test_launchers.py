"""Commands with a launcher: what they mean without it, or what to write instead."""

import pytest

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.errors import CommandError
from azureml_elastic.program.launchers import LAUNCHERS
from azureml_elastic.program.translation import read_launcher, refuse_launcher
from azureml_elastic.submit.expressions import with_literals


@pytest.mark.parametrize(
    "command",
    [
        "python train.py --torchrun torchrun",
        "pip install torchrun && python -m torch.utils.collect_env",
        "accelerate config && python train.py",
        "echo torchrun; python -m package.train",
        "python train.py --nproc_per_node 4",
        "python train.py --nproc_per_node 4 --config config.py",
        "python train.py config.py --nnodes 2",
        "python -m accelerate.commands.accelerate_cli env && python train.py",
        "torchrun_wrapper train.py && python train.py",
    ],
)
def test_without_a_launcher_there_is_nothing_to_read(command):
    assert read_launcher(command) is None
    refuse_launcher(command, ElasticDistribution())


@pytest.mark.parametrize(
    ("command", "plain", "fields"),
    [
        ("torchrun train.py", "python train.py", {}),
        ("torchrun --nproc_per_node 4 train.py -x", "python train.py -x", {"process_count_per_instance": 4}),
        ("torchrun --nproc-per-node=gpu train.py", "python train.py", {"process_count_per_instance": "auto"}),
        (
            "torchrun --standalone --nproc_per_node=2 -m a.b --lr 1",
            "python -m a.b --lr 1",
            {"process_count_per_instance": 2},
        ),
        (
            "pip list && torchrun --nnodes $N --node_rank $R --master_addr $A --master_port 1 train.py | tee log",
            "pip list && python train.py | tee log",
            {},
        ),
        (
            "OMP=1 torchrun --rdzv_backend c10d --rdzv-endpoint=$A:1 --max_restarts 5 train.py ${{inputs.x}}",
            "OMP=1 python train.py ${{inputs.x}}",
            {"max_restarts": 5},
        ),
        (
            "python3.11 -m torch.distributed.run --monitor-interval 2 train.py",
            "python3.11 train.py",
            {},
        ),
        (
            "python -u -m torch.distributed.run \\\n  --nproc_per_node 2 \\\n  'my train.py' a",
            "python -u 'my train.py' a",
            {"process_count_per_instance": 2},
        ),
        ("/opt/bin/torchrun -- train.py", "python train.py", {}),
        (
            "python -m torch.distributed.launch --use_env --nproc_per_node 2 train.py",
            "python train.py",
            {"process_count_per_instance": 2},
        ),
        (
            "python -m torch.distributed.launch --nproc_per_node 2 -m 'a.b' --x",
            "python -m 'a.b' --local-rank=$LOCAL_RANK --x",
            {"process_count_per_instance": 2},
        ),
        (
            "python3 -u $(which torchrun) --nproc_per_node 2 train.py",
            "python3 -u train.py",
            {"process_count_per_instance": 2},
        ),
        ("`which torchrun` train.py > log", "python train.py > log", {}),
        ("python $(command -v deepspeed) --no_local_rank train.py", "python train.py", {}),
        (
            "timeout 60 pip list; nice -n 5 torchrun --nproc-per-node=2 --max-restarts=1 train.py",
            "timeout 60 pip list; nice -n 5 python train.py",
            {"process_count_per_instance": 2, "max_restarts": 1},
        ),
        ("torchrun --no-python ./x.py --a", "./x.py --a", {}),
        ("torchrun --no-python --nproc_per_node 2 python -O x.py", "python -O x.py", {"process_count_per_instance": 2}),
        (
            "deepspeed --hostfile=h --num_nodes 2 --num_gpus 8 --master_port 1 train.py --deepspeed z.json",
            "python train.py --local_rank=$LOCAL_RANK --deepspeed z.json",
            {"process_count_per_instance": 8},
        ),
        (
            "python -m deepspeed.launcher.runner --num_gpus -1 --module a.b",
            "python -m a.b --local_rank=$LOCAL_RANK",
            {"process_count_per_instance": "auto"},
        ),
        (
            "accelerate launch --multi_gpu --num_processes 8 train.py",
            "python train.py",
            {"process_count_per_instance": 8},
        ),
        (
            "A=1 accelerate launch --num-processes=8 --num-machines=2 --machine_rank $NODE_RANK -m a.b --lr 1",
            "A=1 python -m a.b --lr 1",
            {"process_count_per_instance": 4},
        ),
        (
            "pip list && accelerate launch --mixed_precision fp16 --num_cpu_threads_per_process=2 train.py --lr 1",
            "pip list && env ACCELERATE_MIXED_PRECISION=fp16 OMP_NUM_THREADS=2 python train.py --lr 1",
            {},
        ),
        ("python -m accelerate.commands.launch train.py", "python train.py", {}),
        (
            "python -u -m accelerate.commands.accelerate_cli launch --num_processes 2 train.py",
            "python -u train.py",
            {"process_count_per_instance": 2},
        ),
        (
            "python a.py; if true; then A=1 nice python b.py; fi; torchrun x.py && ./c.py",
            "command python a.py; if true; then A=1 command nice python b.py; fi; python x.py && command ./c.py",
            {},
        ),
    ],
)
def test_torchrun_becomes_the_program_and_fields_of_the_distribution(command, plain, fields):
    launched = read_launcher(command)
    assert (launched.command, launched.fields, launched.refused) == (plain, fields, "")


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("torchrun --nproc_per_node 4 train.py", ["command='python train.py'", "process_count_per_instance=4"]),
        (
            "torchrun --no-python --nproc_per_node 2 bash run.sh",
            ["--no-python starts 'bash run.sh', which is no Python program. Give the one that it starts."],
        ),
        ("torchrun --nproc_per_node ${{inputs.n}} train.py", ["--nproc-per-node ${{inputs.n}} cannot be read"]),
        ("torchrun --nproc_per_node $N train.py", ["process_count_per_instance=...) the number of workers per node"]),
        ("torchrun --log-dir logs --tee 3 train.py", ["--log-dir", "--tee", "command='python train.py'"]),
        ("torchrun --invented train.py", ["--invented", "command='python train.py'"]),
        ("torchrun --invented x -m a.b", ["--invented", "command='python -m a.b'"]),
        ("torchrun --nproc_per_node 2", ["names no program"]),
        ("torchrun --max_restarts $N train.py", ["--max-restarts $N cannot be read as a number"]),
        ("torchrun a.py && torchrun b.py", ["starts 2 of them; submit a job for each"]),
        (
            "pip list && accelerate launch --use_fsdp --config_file c.yml train.py --lr 1",
            ["'accelerate launch'", "(--use-fsdp --config-file c.yml)", "command='pip list && python train.py --lr 1'"],
        ),
        (
            "accelerate launch --num_processes 7 --num_machines 2 train.py",
            ["--num-processes 7 are not equally many on each of 2 nodes", "the number of workers per node"],
        ),
        (
            "accelerate launch --num_processes 8 --num_machines $N train.py",
            ["--num-processes 8 over --num-machines $N cannot be read as a count"],
        ),
        ("deepspeed --include localhost:0,1 train.py", ["--include of deepspeed has no equivalent"]),
        (
            "python torchrun_wrapper.py --nproc_per_node 4 --standalone train.py --lr 1",
            [
                "'torchrun_wrapper.py' is given",
                "'train.py'",
                "'python train.py --lr 1'",
                "process_count_per_instance=4",
            ],
        ),
        (
            "python -u -m a.launch --nnodes=2 train.py",
            ["'a.launch' is given --nnodes and", "command='python -u train.py'"],
        ),
        (
            "./wrapper.py --nnodes=2 train.py",
            ["'./wrapper.py' is given --nnodes and 'train.py'", "command='python train.py'"],
        ),
    ],
)
def test_a_refusal_has_the_command_to_write(command, parts):
    with pytest.raises(CommandError) as caught:
        refuse_launcher(command, ElasticDistribution())
    for part in ["takes the launcher's place", *parts]:
        assert part in str(caught.value)


INPUTS = {
    "n": 4,
    "precision": "bf16",
    "data": {"type": "uri_folder", "path": "x"},
    "m": {"type": "integer", "default": 2},
}


@pytest.mark.parametrize(
    ("command", "plain", "count"),
    [
        ("torchrun --nproc_per_node=${{inputs.n}} train.py ${{inputs.n}}", "python train.py ${{inputs.n}}", 4),
        ("torchrun --nproc_per_node ${{ inputs.m }} train.py", "python train.py", 2),
        ("accelerate launch --num_processes ${{inputs.n}} --num_machines ${{inputs.m}} train.py", "python train.py", 2),
        (
            "accelerate launch --num_processes ${{inputs.n}} --mixed_precision ${{inputs.precision}} train.py",
            "env ACCELERATE_MIXED_PRECISION=${{inputs.precision}} python train.py",
            4,
        ),
    ],
)
def test_counts_may_be_literal_inputs(command, plain, count):
    launched = read_launcher(command, lambda text: with_literals(text, INPUTS))
    assert (launched.command, launched.refused) == (plain, "")
    assert launched.fields == {"process_count_per_instance": count}


def test_a_refusal_repeats_no_count_that_the_distribution_has():
    command = "torchrun --nproc_per_node 4 --max_restarts 7 train.py"
    with pytest.raises(CommandError) as caught:
        refuse_launcher(command, ElasticDistribution(process_count_per_instance=4))
    assert str(caught.value).endswith("Give command='python train.py' and ElasticDistribution(max_restarts=7).")
    with pytest.raises(CommandError, match=r"and ElasticDistribution\(process_count_per_instance=4\)"):
        refuse_launcher(command, ElasticDistribution(process_count_per_instance=8))


def test_a_refusal_names_the_count_that_torchrun_has_by_default():
    with pytest.raises(CommandError, match=r"and ElasticDistribution\(process_count_per_instance=1\)"):
        refuse_launcher("torchrun train.py", ElasticDistribution())
    for command, given in (
        ("torchrun train.py", ElasticDistribution(process_count_per_instance=8)),
        ("accelerate launch train.py", ElasticDistribution()),
    ):
        with pytest.raises(CommandError, match=r"Give command='python train\.py'\.$"):
            refuse_launcher(command, given)


@pytest.mark.parametrize(
    ("name", "module", "parser"),
    [
        ("torchrun", "torch.distributed.run", "get_args_parser"),
        ("accelerate launch", "accelerate.commands.launch", "launch_command_parser"),
    ],
)
def test_options_take_a_value_as_in_the_launcher(name, module, parser):
    (launcher,) = [each for each in LAUNCHERS if each.name == name]
    for action in getattr(pytest.importorskip(module), parser)()._actions:
        for option in action.option_strings:
            known = launcher.short.get(option, option.lstrip("-").replace("_", "-"))
            if known not in {"h", "help"}:
                assert (known in launcher.without_value) == (action.nargs == 0), option
