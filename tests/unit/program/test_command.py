import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.errors import CommandError
from azureml_elastic.program.command import Program, find_program, parse_program


@pytest.mark.parametrize(
    ("argv", "program"),
    [
        (["python", "x.py", "a", "b"], Program("python", (), "script", "x.py", ("a", "b"))),
        (["python3.11", "-u", "-m", "pkg.mod", "--x"], Program("python3.11", ("-u",), "module", "pkg.mod", ("--x",))),
        (["/opt/bin/python", "x.py"], Program("/opt/bin/python", (), "script", "x.py", ())),
        (["C:\\py\\python.exe", "x.py"], Program("C:\\py\\python.exe", (), "script", "x.py", ())),
        (["./x.py", "-m"], Program(None, (), "script", "./x.py", ("-m",))),
        (["my train.py"], Program(None, (), "script", "my train.py", ())),
        (["a folder/of it's/train.py"], Program(None, (), "script", "a folder/of it's/train.py", ())),
        (["train.py --out y.py"], Program(None, (), "script", "train.py", ("--out", "y.py"))),
        (["python -u 'a b.py' --t=\"1 2\""], Program("python", ("-u",), "script", "a b.py", ("--t=1 2",))),
        (
            ["python train.py --lr ${{ inputs.lr }}"],
            Program("python", (), "script", "train.py", ("--lr", "${{ inputs.lr }}")),
        ),
        (
            ["python", "-W", "error", "-Xdev", "-O", "x"],
            Program("python", ("-W", "error", "-Xdev", "-O"), "script", "x", ()),
        ),
        (["python", "-OOum", "a.b", "-c"], Program("python", ("-OOu",), "module", "a.b", ("-c",))),
        (["python", "-ma.b"], Program("python", (), "module", "a.b", ())),
        (
            ["python", "--check-hash-based-pycs", "never", "x.py"],
            Program("python", ("--check-hash-based-pycs", "never"), "script", "x.py", ()),
        ),
    ],
)
def test_reads_a_python_program(argv, program):
    assert parse_program(argv) == program


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([], "empty"),
        ([" "], "empty"),
        (["python"], "without a program"),
        (["python", "-u"], "without a program"),
        (["python", "-m"], "names no module"),
        (["python", "-W"], "-W no value"),
        (["python", "-c", "print(1)"], "'-c'"),
        (["python", "-i", "x.py"], "'-i'"),
        (["python", "--version"], "'--version'"),
        (["python", "-"], "standard input"),
        (["bash", "run.sh"], "'bash run.sh' starts no Python program"),
        (["torchrun", "x.py"], "takes the launcher's place"),
        (["python", "-m", "torch.distributed.run", "x.py"], "starts the launcher 'torch.distributed.run'"),
        (["/opt/bin/accelerate", "launch", "x.py"], "takes the launcher's place"),
        (["pythonic", "x.py"], "starts no Python program"),
        (["python x.py && python y.py"], "2 shell commands"),
        (["python 'x.py"], "not closed"),
    ],
)
def test_refuses_what_starts_no_program(argv, part):
    with pytest.raises(CommandError) as caught:
        parse_program(argv)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("before", "program", "after"),
    [
        ("", "python train.py", ""),
        (
            "pip install -r r.txt && export A=1 && FOO=1 ",
            "python train.py --lr ${{inputs.lr}}",
            " | tee log",
        ),
        ("", "python train.py --a ${{ inputs.a }} '${{inputs.b}}'", " > log 2>&1"),
        ("python -m pip install -r r.txt\n", "python3 -u -m a.b \\\n  --x 1 \\\n  --y 'a; b'", "\n"),
        ("python -c 'import torch' && ", "./train.py", " || exit 3"),
        ("set -e; (cd src; time ", "python train.py", ")"),
        ("if true; then exec env A='1 2' ", "python train.py", "; fi"),
        (
            '# python no.py\necho "python no.py" \'python no.py\' `date` $(python no.py ")") ${A:-;}; ',
            "python y.py",
            " # end",
        ),
        ("for f in *.whl; do pip install $f; done; ", "python train.py", ""),
        ("2>err ", "python train.py > log --lr 1", " 2>&1 & wait %1"),
        ("", "python ${{inputs.code}}/train.py", ""),
        ("", 'python train.py "a \\" | b $(echo ")") c"', "|&tee log"),
        ("FOO=1 ", "python train.py", ""),
        ("numactl -N 0 --membind=0 ", "python train.py", ""),
        ("env -u A B='1 2' ", "python train.py", ""),
        ("conda run -n env --no-capture-output ", "python train.py", ""),
        ("/opt/conda/bin/conda run --name python3 ", "python train.py -n 1", ""),
        ("poetry run ", "python -m a.b", ""),
        ("uv run --python 3.11 --with numpy ", "train.py --x", ""),
        ("command python prepare.py --x && ", "python train.py", " && command python after.py"),
        ("nice -n 5 stdbuf -oL -e L taskset -c 0-3 ", "python train.py", " | tee log"),
        ("time -p nice -10 ionice -c2 -n 0 ", "python train.py", ""),
        ("timeout 60 python -m pip install x && sudo apt-get install -y python3 && ", "python train.py", ""),
        ("sudo -u root python -m pip install x && ", "python train.py", ""),
        ("python --version; python3 -VV && python ../pkg/setup.py develop && ", "python train.py", ""),
        ("", "$(which python3) train.py --x", ""),
        ("", "python train.py", " & wait $!"),
        ("(", "python train.py", ") & pid=$!; tail --pid=$pid -f log"),
        ("sleep 9 & ", "python train.py", ""),
        ("", "python train.py", " && echo done & wait -n"),
        ("", "python train.py", "; (tar cf a.tar a &)"),
        ("case $A in -a) true;; -b) ", "python train.py", ";; esac"),
        ("A=1\n", "python train.py", "\nB=$?; echo $B"),
        ("", "python a#b.py \\; $HOME", ";"),
    ],
)
def test_finds_the_program_and_touches_nothing_else(before, program, after):
    found = find_program(before + program + after)
    assert found == (before, program, after)


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("", "starts no Python program"),
        ("# python x.py", "starts no Python program"),
        ("bash run.sh", "'bash run.sh' starts no Python program"),
        ("python -m horovod.runner -np 4 python train.py", "starts the launcher 'horovod.runner'"),
        ("export A=1 && torchrun --nproc-per-node 4 train.py; echo done", "takes the launcher's place"),
        ("dask scheduler --port 8786", 'with ElasticDistribution(framework="dask") the elastic agent starts'),
        ("ray start --head --block", 'with ElasticDistribution(framework="ray") the elastic agent starts the cluster'),
        ("ray start --head && python train.py", "would start a cluster of its own on each node"),
        ("dask-worker tcp://x:1 & python search.py", "Leave 'dask-worker tcp://x:1' out"),
        ("horovodrun -np 8 -H a:4,b:4 python train.py -b 32", "Write 'python train.py -b 32'"),
        ("horovodrun -np 8 ./train.sh", 'with ElasticDistribution(framework="horovod") the elastic agent starts the'),
        ("mpirun -np 8 -x A python3 train.py", "Write 'python3 train.py'"),
        ("python -m ray.scripts.scripts start", 'framework="ray"'),
        ("python -m distributed.cli.dask_worker tcp://x:1", "starts the launcher 'distributed.cli.dask_worker'"),
        ("python -c 'import train'", "starts no Python program"),
        ("python", "without a program"),
        (
            "python a.py && python b.py",
            "'command python prepare.py && python train.py': the shell then runs them once per",
        ),
        ("python a.py && python b.py", "starts 2 Python programs ('python a.py', 'python b.py')"),
        ("nohup python train.py > log 2>&1 &", "in the background (&) and ends without it"),
        ("nohup python train.py & echo started", "Leave '&' out, and 'nohup'"),
        ("python train.py | tee log &", "in the background"),
        ("python train.py & wait", "'wait' alone succeeds however that ends"),
        ("python train.py & sleep 1; wait && echo done", "write 'wait $!'"),
        ("cd a && python train.py && echo b &", "in the background"),
        ("{ python train.py; echo $?; } &", "in the background"),
        ("(python train.py; echo $?) & echo", "in the background"),
        ("if true; then python train.py; fi & true", "in the background"),
        ("python train.py\n  --epochs 3\n  --lr 0.1\n", "Line 2 of the command begins with '--epochs'"),
        ("python train.py \\ \n  -e 3", "no space behind it"),
        ("torchrun\n  --nproc_per_node 4\n  train.py", "Line 2 of the command begins with '--nproc_per_node'"),
        ("pip list; python train.py\n  trainer.epochs=3", "begins with 'trainer.epochs=3'"),
        ("python train.py\n  +seed=3", "begins with '+seed=3'"),
        ("python train.py\n  lr=0.1 epochs=3\n", "assigns 'lr=0.1 epochs=3' after its program"),
        ("for i in 1 2; do python a.py; done", "in a shell loop"),
        ("cat > x.py <<EOF\nprint(1)\nEOF\npython x.py", "here-document"),
        ("timeout -k 5 3600 python train.py", "'timeout' would end the agent of each node"),
        ("pip list && timeout 1h python train.py", "give the job timeout=..., in seconds"),
        ("sudo -E python train.py", "'sudo' would start the agent without the environment variables"),
        ("nice sudo python train.py", "'sudo' would"),
        ("env -i A=1 python train.py", "'env' would start the agent without the environment variables"),
        ("nsys profile -o x --stats=true python train.py", "'nsys profile' would observe the agent"),
        ("py-spy record -o profile.svg -- python train.py", "give profile=Profile(...)"),
        ("coverage run train.py", "'coverage run' would observe"),
        ("ddtrace-run python train.py | tee log", "not known whether 'ddtrace-run' can start the agent"),
        ("command python train.py", "Leave 'command' out"),
        ("bash -lc 'python train.py $RANK' | tee log", "Give what follows -c as the command"),
        ("nohup bash run.sh train.py", "'bash run.sh train.py' starts no Python program"),
        ("python x.py 'a", "not closed"),
        ('python x.py "a $(b', "not closed"),
        ('python x.py "a', "not closed"),
        ("python x.py ${{inputs.a}", "not closed"),
        ("python x.py `a", "not closed"),
    ],
)
def test_refuses_a_command_without_exactly_one_program(command, part):
    with pytest.raises(CommandError) as caught:
        find_program(command)
    assert part in str(caught.value)


words = st.text(st.sampled_from("abpy'\"\\$(){}`;&|<># \n\t.=-"), max_size=12)


@given(st.lists(st.one_of(words, st.sampled_from(["python", "x.py", " ", "&&", "${{inputs.a}}", "\\\n"])), max_size=10))
def test_any_text_is_either_cut_in_three_or_refused(parts):
    text = "".join(parts)
    try:
        found = find_program(text)
    except CommandError:
        return
    assert "".join(found) == text
    assert parse_program([found.program]).target


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), max_size=5))
def test_the_words_are_those_that_the_shell_makes(arguments):
    text = shlex.join(["python", "train.py", *arguments])
    found = find_program(f"export A=1; {text} | tee log")
    assert found.program == text
    assert parse_program([f"{text} "]).arguments == tuple(arguments)
