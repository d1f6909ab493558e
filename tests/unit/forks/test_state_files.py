"""What a worker notes of the files that its script looks for before its first step, and which it saves later."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from azureml_elastic.environment import names as variables
from azureml_elastic.forks.stack_imports import for_plain_start
from azureml_elastic.forks.state_files import is_state_file, read_lookups

SHOW = "\nprint(os.getpid())\n"


def run(folder: Path, code: str, **more: str) -> set[str]:
    """Run a script as a worker that is started plainly, in a folder of its own, and return its notes."""
    script, work = folder / "script.py", folder / "work"
    script.write_text(f"import os, shutil\nfrom pathlib import Path\n{code}{SHOW}")
    work.mkdir(exist_ok=True)
    environ = for_plain_start({**os.environ, variables.CHANNEL: str(folder / "agent.sock"), **more})
    done = subprocess.run(
        [sys.executable, str(script)], env=environ, cwd=work, capture_output=True, text=True, check=True
    )
    found = read_lookups(folder, [int(done.stdout.split()[-1]), 1])
    return {path.removeprefix(f"{work}/") for path in found if path.startswith(str(folder))}


@pytest.mark.parametrize(
    "code",
    [
        "os.path.exists('last.pt')",
        "Path('last.pt').exists()",
        "os.path.getmtime('last.pt') if os.path.isfile('last.pt') else 0",
        "Path('last.pt').is_file()",
        "try: open('last.pt', 'rb')\nexcept FileNotFoundError: pass",
        "try: Path('last.pt').read_bytes()\nexcept OSError: pass",
        "import pickle\nopen('last.pt', 'wb').write(pickle.dumps(1))\npickle.load(open('last.pt', 'rb'))",
    ],
)
def test_a_file_that_is_asked_for_or_opened_is_noted_present_or_not(tmp_path, code):
    assert run(tmp_path, code) == {"last.pt"}


@pytest.mark.parametrize(
    "code",
    [
        "os.listdir('saves')",
        "list(os.scandir(Path('saves')))",
        "import glob\nglob.glob('saves/*.pt')",
        "list(Path('saves').glob('*.pt'))",
        "list(os.walk('saves'))",
    ],
)
def test_a_folder_that_is_listed_is_noted(tmp_path, code):
    (tmp_path / "work" / "saves").mkdir(parents=True)
    assert run(tmp_path, code) == {"saves/"}


@pytest.mark.parametrize(
    "code",
    [
        "open('last.pt', 'wb').close()",
        "os.path.exists('train.log')\nopen('train.log', 'a').close()",
        "open(script, 'rb') if (script := __file__) else 0",
        "os.open('/dev/null', os.O_RDONLY)",
        "if os.fork() == 0: os.path.exists('last.pt'); os._exit(0)\nos.wait()",
    ],
)
def test_what_is_written_or_holds_no_state_is_not_noted(tmp_path, code):
    assert run(tmp_path, code) == set()


def test_lookups_are_noted_where_the_integrations_are_switched_off(tmp_path):
    """A stack resumes from its own checkpoints then."""
    assert run(tmp_path, "os.path.exists('last.pt')", **{variables.INTEGRATIONS: "off"}) == {"last.pt"}


@pytest.mark.parametrize("first", ["torch.optim.SGD([weight]).step()", "weight.sum().backward()"])
def test_the_first_step_or_backward_pass_ends_the_notes(tmp_path, first):
    """Neither the imports before it are noted, which list the script's folder, nor a save."""
    code = f"""
import torch
try:
    torch.load("before.pt")
except FileNotFoundError:
    torch.save(1, "saved.pt")
assert type(os.stat).__name__ == "function"
weight = torch.nn.Parameter(torch.ones(1))
{first}
os.path.exists("after.pt"), open("saved.pt", "rb"), os.listdir()
assert type(os.stat).__name__ == "builtin_function_or_method"
"""
    assert run(tmp_path, code) == {"before.pt"}


def test_a_script_that_reads_thousands_of_files_is_not_noted_for_ever(tmp_path):
    code = "for number in range(3000): os.path.exists(f'{number}.npy')"
    assert len(run(tmp_path, code)) == 1000


def test_wrong_calls_get_their_own_errors(tmp_path):
    code = """
for call in (lambda: os.stat([]), lambda: os.stat("a\\0"), lambda: open("", "rb"), lambda: os.listdir(1.5)):
    try:
        call()
    except (TypeError, ValueError, OSError) as error:
        print(type(error).__name__)
    else:
        raise SystemExit("no error")
assert os.stat(0) and os.stat(Path(), follow_symlinks=False) and os.stat(b".")
descriptor = os.open(".", os.O_RDONLY)
assert os.stat(".", dir_fd=descriptor)
shutil.copytree(".", "../copy")
shutil.rmtree("../copy")
"""
    run(tmp_path, code)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.safetensors", True),
        ("PYTORCH_MODEL.BIN", True),
        ("__0_0.distcp", True),
        ("checkpoint_7", True),
        ("events.out.tfevents.1", False),
        ("trainer_state.json", False),
        ("checkpoint.json", False),
        ("model.pt.tmp", False),
        (".model.pt", False),
        ("train.log", False),
    ],
)
def test_logs_and_settings_are_no_state(name, expected):
    assert is_state_file(f"/checkpoints/{name}") == expected
