"""Commands with a launcher: what they mean without it, or what to write instead."""

import pytest

from azureml_elastic.errors import CommandError
from azureml_elastic.submit.launchers import read_launcher, refuse_launcher


@pytest.mark.parametrize(
    "command",
    [
        "python train.py --torchrun torchrun",
        "pip install torchrun && python -m torch.utils.collect_env",
        "accelerate config && python train.py",
        "echo torchrun; python -m package.train",
    ],
)
def test_without_a_launcher_there_is_nothing_to_read(command):
    assert read_launcher(command) is None
    refuse_launcher(command)


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
            {"monitor_interval": 2.0},
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
    ],
)
def test_torchrun_becomes_the_program_and_fields_of_the_distribution(command, plain, fields):
    launched = read_launcher(command)
    assert (launched.command, launched.fields, launched.refused) == (plain, fields, "")


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("torchrun --nproc_per_node 4 train.py", ["command='python train.py'", "process_count_per_instance=4"]),
        ("torchrun --no-python bash run.sh", ["--no-python"]),
        ("torchrun --nproc_per_node ${{inputs.n}} train.py", ["--nproc-per-node ${{inputs.n}} cannot be read"]),
        ("torchrun --log-dir logs --tee 3 train.py", ["--log-dir", "--tee", "command='python train.py'"]),
        ("torchrun --invented train.py", ["--invented", "command='python train.py'"]),
        ("torchrun --nproc_per_node 2", ["names no program"]),
        ("python -m torch.distributed.launch train.py", ["LOCAL_RANK", "command='python train.py'"]),
        (
            "pip list && accelerate launch --mixed_precision fp16 train.py --lr 1",
            ["'accelerate launch'", "(--mixed_precision fp16)", "command='pip list && python train.py --lr 1'"],
        ),
        ("deepspeed --num_gpus 4 train.py --ds z.json", ["'deepspeed'", "command='python train.py --ds z.json'"]),
        ("python -m accelerate.commands.launch train.py", ["'accelerate launch'", "command='python train.py'"]),
    ],
)
def test_a_refusal_has_the_command_to_write(command, parts):
    with pytest.raises(CommandError) as caught:
        refuse_launcher(command)
    for part in ["takes the launcher's place", *parts]:
        assert part in str(caught.value)
