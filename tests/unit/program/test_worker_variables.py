"""Variables of the workers in a command: replaced by placeholders, of which each worker gets its own values."""

import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.config.distribution import ElasticDistribution
from azureml_elastic.errors import CommandError
from azureml_elastic.program.command import Program, find_program, parse_program
from azureml_elastic.program.shell import fill
from azureml_elastic.program.worker_variables import (
    refuse_changing,
    with_placeholders,
    words_with_placeholders,
)

WORKER = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"} | {
    "GROUP_RANK": "2", "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "29500"
}  # fmt: skip


def received(command: str, *texts: str) -> tuple[str, ...]:
    """Return the arguments that a worker receives: after the shell of the node and its agent."""
    translated = with_placeholders(find_program(command), texts)
    script = f"python() {{ printf '%s\\0' \"$@\"; }}\n{''.join(translated.found)}"
    output = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env={"HOME": "/h"})
    return fill(output.stdout.split("\0")[1:-1], translated.name, WORKER)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--local_rank $RANK", ["--local_rank", "5"]),
        ("--local_rank=${LOCAL_RANK} -x", ["--local_rank=1", "-x"]),
        ("$WORLD_SIZE $LOCAL_WORLD_SIZE $NODE_RANK ${GROUP_RANK}", ["8", "2", "2", "2"]),
        ('--init "tcp://$MASTER_ADDR:${MASTER_PORT}"', ["--init", "tcp://10.0.0.4:29500"]),
        ("a$RANK-b out_${RANK}_x", ["a5-b", "out_5_x"]),
        ("'$RANK' \\$RANK \"\\$RANK\" x'y'$RANK", ["$RANK", "$RANK", "$RANK", "xy5"]),
        ('${RANK:-0} ${RANK-0} "${LOCAL_RANK:-$RANK}" ${RANK:-${LOCAL_RANK}}', ["5", "5", "1", "5"]),
        ("$RANKS-$HOME ${HOME}$RANK", ["-/h", "/h5"]),
        ("\\\n  --rank \\\n  $RANK # $RANK", ["--rank", "5"]),
        ("%{worker:RANK} $RANK '%{worker2:RANK}'", ["%{worker:RANK}", "5", "%{worker2:RANK}"]),
        ("'%{worker:RANK}'", ["%{worker:RANK}"]),
        ("{a,$RANK} $RANK{x,y}", ["a", "5", "5x", "5y"]),
    ],
)
def test_each_worker_receives_its_own_values(arguments, expected):
    assert list(received(f"cd / && python train.py {arguments}")) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py", "--rank", "$RANK", "x${LOCAL_RANK}y", "$RANKS $HOME"], ["--rank", "5", "x1y", "$RANKS $HOME"]),
        (["python", "-m", "a.b", "$NODE_RANK-${RANK:-0}", "%{worker:RANK}"], ["2-5", "%{worker:RANK}"]),
        (["python train.py --rank $RANK '$RANK' $HOME"], ["--rank", "5", "$RANK", "$HOME"]),
        (["train.py"], []),
        (["python $RANK/train.py"], []),
    ],
)
def test_words_that_no_shell_reads_have_the_values_of_each_worker(words, expected):
    changed, name, _ = words_with_placeholders(words)
    assert list(fill(parse_program(changed).arguments, name, WORKER)) == expected


def test_words_that_no_shell_reads_hold_no_expression_of_a_variable():
    with pytest.raises(CommandError, match="compute in the script"):
        words_with_placeholders(["train.py --rank $((RANK + 1))"])


def test_a_value_of_the_job_is_not_taken_for_a_placeholder():
    name = with_placeholders(find_program("python train.py $X $RANK"), ["%{worker:RANK}"]).name
    assert fill(["%{worker:RANK}", f"%{{{name}:RANK}}"], name, WORKER) == ("%{worker:RANK}", "5")


def test_a_command_without_such_variables_stays_as_it_is():
    found = find_program(
        "export RANK=1; A=${OMPI_COMM_WORLD_RANK:-0} python train.py '$RANK' ${{inputs.RANK}} $ARANK # $RANK"
    )
    assert with_placeholders(found) == (found, None, frozenset())


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("echo $RANK && python train.py", ["$RANK in '$RANK', outside", "'python train.py --rank $RANK'"]),
        (
            'if [ "$NODE_RANK" = 0 ]; then pip list; fi; python train.py',
            ["--node-rank $NODE_RANK", "os.environ['GROUP_RANK']"],
        ),
        ("A=$RANK python train.py", ["'A=$RANK'"]),
        ("python train_$RANK.py", ["'train_$RANK.py'"]),
        ("python train.py > log_${LOCAL_RANK}.txt", ["$LOCAL_RANK in 'log_${LOCAL_RANK}.txt'"]),
        ("python train.py && cp a b$RANK", ["'b$RANK'"]),
        ("python train.py $((RANK + 1))", ["'$((RANK + 1))'", "Give the program $RANK itself"]),
        ("python train.py ${RANK%0}", ["'${RANK%0}'"]),
        ("python train.py ${#RANK}", ["'${#RANK}'"]),
        ("python train.py $(echo $RANK)", ["'$(echo $RANK)'"]),
        ('python train.py "${A:-$RANK}"', ["'${A:-$RANK}'"]),
        ("python train.py `echo $RANK`", ["'`echo $RANK`'"]),
        (
            'python train.py --rank "${OMPI_COMM_WORLD_RANK}"',
            ["only MPI's launcher sets", "Give the program $RANK instead"],
        ),
        ("python train.py $OMPI_COMM_WORLD_SIZE", ["'$OMPI_COMM_WORLD_SIZE'", "$WORLD_SIZE instead"]),
        ("python train.py ${OMPI_COMM_WORLD_RANK:-0}", ["'${OMPI_COMM_WORLD_RANK:-0}'", "$RANK instead"]),
        ("python train.py --rank $PMI_RANK", ["only MPI's launcher sets", "Give the program $RANK instead"]),
        ("python train.py --local ${MPI_LOCALRANKID}", ["$LOCAL_RANK instead"]),
        ("export RANK=$SLURM_PROCID && python train.py", ["'$SLURM_PROCID', which only Slurm sets", "$RANK instead"]),
        ("python train.py --gpus $SLURM_NTASKS_PER_NODE", ["$LOCAL_WORLD_SIZE instead"]),
        ("python train.py --job $SLURM_JOB_ID", ["'$SLURM_JOB_ID'", "Leave it out", "as under torchrun"]),
        ("python train.py --at tcp://$AZ_BATCH_MASTER_NODE", ["Azure Batch", "$MASTER_ADDR:$MASTER_PORT instead"]),
        ("python train.py --hosts ${AZ_BATCH_HOST_LIST}", ["'${AZ_BATCH_HOST_LIST}'", "Leave it out"]),
    ],
)
def test_elsewhere_they_are_refused_by_name(command, parts):
    with pytest.raises(CommandError) as caught:
        with_placeholders(find_program(command))
    for part in parts:
        assert part in str(caught.value)


def test_variables_of_another_launcher_that_the_job_sets_are_its_own():
    for command in (
        'if [ -n "$SLURM_CLUSTER_NAME" ]; then module load cuda; fi; python train.py',
        "python train.py $SLURM_JOB_ID",
        "export PMI_RANK=0 && python train.py $PMI_RANK",
    ):
        found = find_program(command)
        assert with_placeholders(found, own={"SLURM_JOB_ID"}) == (found, None, frozenset())


@given(st.lists(st.sampled_from(["$RANK", "${RANK}", "'$RANK'", "\\$RANK", '"$RANK"', "-", " ", "%{worker:RANK}"])))
def test_the_arguments_are_those_of_a_shell_that_has_the_variables(parts):
    command = f"python train.py {''.join(parts)}"
    translated = with_placeholders(find_program(command))
    words = shlex.split(translated.found.program)[2:]
    shell = subprocess.run(
        ["bash", "-c", f"python() {{ printf '%s\\0' \"$@\"; }}\n{command}"],
        capture_output=True,
        text=True,
        check=True,
        env=WORKER,
    )
    assert list(fill(words, translated.name, WORKER)) == shell.stdout.split("\0")[1:-1]


def test_a_program_without_a_name_has_no_placeholders():
    program = Program("python", (), "script", "train.py", ("%{worker:RANK}",))
    assert program.command_for(WORKER) == program.command


def test_a_program_that_uses_a_cluster_is_no_worker():
    distribution = ElasticDistribution(framework="dask")
    refuse_changing((), distribution)
    for variables in (["RANK"], ["LOCAL_WORLD_SIZE"]):
        with pytest.raises(CommandError, match=rf'\${variables[0]}, .* framework="dask" the program runs once'):
            refuse_changing(variables, distribution)
