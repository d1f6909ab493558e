"""Ranks and addresses that a program fixes itself, found in its text, and what is no such thing."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from azureml_elastic.program.command import parse_program
from azureml_elastic.program.fixed_ranks import describe_fixed_ranks, find_fixed_ranks
from azureml_elastic.program.source import Module, program_modules


def found(main, **others):
    """Return the lines and kinds of what is found in a program."""
    modules = [Module(Path(), dedent(text).encode(), name) for name, text in {"train": main, **others}.items()]
    return [each[:3] for each in find_fixed_ranks(modules)]


SPAWNED = """\
    import os
    import torch.distributed as dist
    import torch.multiprocessing as workers
    def open_group(rank, size):
        os.environ["MASTER_ADDR"] = "localhost"
        dist.init_process_group("gloo", rank=rank, world_size=size)
    def main(rank, size):
        open_group(rank, size)
    if __name__ == "__main__":
        workers.spawn(main, args=(2,), nprocs=2)
    """


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SPAWNED, [("train", 5, "variable"), ("train", 10, "spawn")]),
        ('import os\nos.environ["MASTER_PORT"] = "12355"\n', [("train", 2, "variable")]),
        ("import os as o\no.environ['RANK'] = str(0)\n", [("train", 2, "variable")]),
        ("from os import environ\nenviron.update(WORLD_SIZE='1')\n", [("train", 2, "variable")]),
        ("import os\nos.environ.update({'LR': '1', 'RANK': '0'})\n", [("train", 2, "variable")]),
        ("import os\nPORT = 29501\nos.environ['MASTER_PORT'] = f'{PORT}'\n", [("train", 3, "variable")]),
        ("import os, random\nos.putenv('MASTER_PORT', str(9999 + random.randint(0, 9)))\n", [("train", 2, "variable")]),
        (
            "import torch.distributed as d\nd.init_process_group('nccl', init_method='tcp://10.0.0.4:23456', rank=r)\n",
            [("train", 2, "group")],
        ),
        ("import deepspeed\ndeepspeed.init_distributed('nccl', rank=0, world_size=1)\n", [("train", 2, "group")]),
        (
            "from torch.distributed import init_process_group\nURL = 'file:///x'\ninit_process_group('gloo', URL)\n",
            [("train", 3, "group")],
        ),
        (
            """\
            import os
            class Trainer:
                def __init__(self):
                    self.connect()
                def connect(self):
                    with quiet():
                        for _ in range(1):
                            os.environ["MASTER_ADDR"] = "127.0.0.1"
            def main():
                Trainer()
            main()
            """,
            [("train", 8, "variable")],
        ),
        ('import os\nif os.name:\n    print("posix")\nos.environ["RANK"] = "0"\n', [("train", 4, "variable")]),
        (
            """\
            import os
            try:
                os.environ["MASTER_ADDR"] = "127.0.0.1"
            finally:
                print("set")
            """,
            [("train", 3, "variable")],
        ),
    ],
)
def test_what_a_program_fixes_in_any_case_is_found(text, expected):
    assert found(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        'import os\nos.environ.setdefault("MASTER_ADDR", "localhost")\n',
        'import os\nos.environ["MASTER_ADDR"] = os.environ.get("MASTER_ADDR", "localhost")\n',
        'import os\nhost = os.getenv("HOST")\nos.environ["MASTER_ADDR"] = host\n',
        'import os\nhost = "a"\nif os.name:\n    host = "b"\nos.environ["MASTER_ADDR"] = host\n',
        'import os\nif "RANK" not in os.environ:\n    os.environ["RANK"] = "0"\n    os.environ["WORLD_SIZE"] = "1"\n',
        'import os\nos.environ["RANK"] = "0" if args.alone else os.environ["RANK"]\n',
        'import os\nprint(os.environ["RANK"], os.environ["MASTER_ADDR"])\n',
        'import os\ntry:\n    rank = os.environ["RANK"]\nexcept KeyError:\n    os.environ["RANK"] = "0"\n',
        'import os\nos.environ["CUDA_VISIBLE_DEVICES"] = "0"\n',
        'import os\ndef setup(port="12355"):\n    os.environ["MASTER_PORT"] = port\nsetup()\n',
        'import os\ndef alone():\n    os.environ["RANK"] = "0"\nif not launched():\n    alone()\n',
        'import os\ndef never_called():\n    os.environ["RANK"] = "0"\n',
        'import os\nlaunched() or os.environ.update(RANK="0")\n',
        """\
        import os
        def setup():
            if "RANK" in os.environ:
                return
            os.environ["MASTER_ADDR"] = "localhost"
        setup()
        """,
        """\
        import os, sys
        if os.environ.get("RANK"):
            train()
            sys.exit()
        os.environ["MASTER_ADDR"] = "localhost"
        """,
        """\
        import os
        import torch.distributed as dist
        dist.init_process_group("nccl", init_method="env://", rank=int(os.environ["RANK"]), world_size=size)
        """,
        'import torch.distributed as dist\ndist.init_process_group("gloo", rank=0, world_size=1, store=store)\n',
        "import torch.distributed as dist\ndist.init_process_group('gloo', rank=-1, world_size=-1)\n",
        """\
        import torch.distributed as dist
        import torch.multiprocessing as mp
        def tokenize(index):
            print(index)
        mp.set_start_method("spawn")
        mp.spawn(tokenize, nprocs=8)
        dist.init_process_group("nccl")
        """,
        """\
        import torch.multiprocessing as mp
        import torch.distributed as dist
        def main(gpu):
            dist.init_process_group(args.backend, init_method=args.url, world_size=args.size, rank=args.rank)
        if args.multiprocessing_distributed:
            mp.spawn(main, nprocs=8)
        else:
            main(args.gpu)
        """,
        'match mode:\n    case "alone":\n        import os\n        os.environ["RANK"] = "0"\n',
        "not python (\n",
    ],
)
def test_what_depends_on_anything_is_left_alone(text):
    assert found(text) == []


def test_local_modules_count_but_not_their_own_main():
    text = 'import os\ndef connect():\n    os.environ["MASTER_ADDR"] = "a"\nif __name__ == "__main__":\n    connect()\n'
    assert found("import group\n", group=text) == []
    assert found("import group\ngroup.connect()\n", group=text) == [("group", 3, "variable")]
    assert found(text) == [("train", 3, "variable")]


def test_the_sentence_names_the_place_and_what_to_write(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text(dedent(SPAWNED))
    program = parse_program(["python", "src/train.py"])
    modules = list(program_modules(program, tmp_path))
    text = describe_fixed_ranks(modules)
    assert text.startswith("src/train.py:5 sets MASTER_ADDR to 'localhost'; src/train.py:10 starts its ranks itself")
    for advice in ("process_count_per_instance", "os.environ.setdefault", "init_process_group() without"):
        assert advice in text
