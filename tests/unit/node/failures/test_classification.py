"""Classification of every way in which a worker may fail.

The texts in ``worker_output`` were written by real programs: see ``worker_output/produce.py``.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_elastic.environment import names as variables
from azureml_elastic.forks.stack_imports import for_plain_start
from azureml_elastic.memory import OomKillCounter
from azureml_elastic.node.core.failures import Failure
from azureml_elastic.node.failures.classification import FailedWorker, hang_failure, root_cause, signature_of
from azureml_elastic.node.failures.tracebacks import ExceptionInfo, Frame, find_dump, find_error
from tests.unit.node.failures.worker_output.produce import SCRIPTS

ENDINGS = Path(__file__).parent / "worker_output"
NAMES = sorted(path.stem for path in ENDINGS.glob("*.txt"))
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nValueError: no such file'

EXCEPTIONS = {"peer_after_user": "user", "import_then_user": "user"}
"""Expected kinds of outputs whose file names begin with another kind."""
INCONCLUSIVE = {"crashed", "killed", "killed_survivor"}


def failure(exitcode: int, stderr: Path, timestamp: int = 10) -> FailedWorker:
    return FailedWorker(exitcode, timestamp, stderr)


def ending(name: str) -> tuple[int, str]:
    first, _, text = (ENDINGS / f"{name}.txt").read_text().partition("\n")
    return int(first.removeprefix("exit code ")), text


def examined(tmp_path: Path, code: int, text: str | bytes, kills: OomKillCounter | None = None):
    path = tmp_path / "stderr.log"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    options = {} if kills is None else {"oom_kills": kills}
    return root_cause({3: failure(code, path)}, **options)


def kind_of(name: str) -> str:
    kinds = ("out_of_memory", "peer", "timeout", "import", "user", "killed", "crashed", "exit")
    return EXCEPTIONS.get(name) or next(kind for kind in kinds if name.startswith(kind))


def test_every_text_is_there():
    assert len(NAMES) > 35


@pytest.mark.parametrize("name", NAMES)
def test_the_kind_and_the_exit_code(tmp_path, name):
    code, text = ending(name)
    found = examined(tmp_path, code, text)
    assert (found.kind, found.rank) == (kind_of(name), 3)
    assert found.exit_code == (code if code > 0 else 128 - code)
    assert found.conclusive == (found.kind not in ("peer", "timeout") and name not in INCONCLUSIVE)
    assert found.message
    assert 9 <= len(found.signature) <= 120


@pytest.mark.parametrize(
    "name", [name for name in NAMES if "Traceback" in ending(name)[1] and name != "killed_survivor"]
)
def test_the_message_is_the_whole_chain_of_tracebacks_and_nothing_else(tmp_path, name):
    code, text = ending(name)
    message = examined(tmp_path, code, text).message
    assert message.startswith("Traceback (most recent call last):")
    plain = re.sub(r"^\[rank\d\]: ?", "", text, flags=re.MULTILINE)
    assert message in plain
    links = [line for line in plain.splitlines() if line.startswith(("The above exception", "During handling of"))]
    assert [line for line in message.splitlines() if line.startswith(("The above", "During"))] == links
    assert "not the cause" not in message


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("[gloo/unbound_buffer.cc:84] Timed out waiting 1800000ms for send operation to complete", "timeout"),
        ("monitoredBarrier: Rank 1 failed to pass monitoredBarrier in 3000 ms", "timeout"),
        ("[gloo/context.cc:9] connectFullMesh failed: timed out connecting", "peer"),
        ("[c10d] The client socket has timed out after 300000ms while trying to connect", "peer"),
    ],
)
def test_a_collective_that_has_waited_in_vain_is_no_broken_connection(tmp_path, message, kind):
    text = f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nRuntimeError: {message}'
    assert examined(tmp_path, 1, text).kind == kind


SIGNATURES = {
    "user": "JSONDecodeError: Expecting ',' delimiter: line # column # (char #) (train.py:4 load)",
    "user_cause": "RuntimeError: the data cannot be read (train.py:11 main)",
    "user_context": "OSError: the folder is gone (train.py:2 clean)",
    "user_lines": "Mismatch: these keys differ: (train.py:4 <module>)",
    "user_loader": "ValueError: Caught ValueError in DataLoader worker process #. (train.py:9 __getitem__)",
    "user_assertion": "AssertionError (train.py:2 main)",
    "user_then_noise": "ValueError: the cause (train.py:15 <module>)",
    "user_rank": "ValueError: loss is nan at sample # (train.py:12 <module>)",
    "peer_after_user": "ValueError: the loss is nan (train.py:16 <module>)",
    "import_module": "ModuleNotFoundError: No module named 'numpyy' (train.py:1 <module>)",
    "import_syntax": "SyntaxError: invalid syntax (train.py:1)",
    "import_syntax_module": "SyntaxError: expected ':' (broken.py:2)",
    "import_script": "NotLoaded: can't open file 'train.py': [Errno #] No such file or directory",
    "out_of_memory_python": "MemoryError (train.py:2 build)",
    "exit_code": "exit code 3",
    "exit_message": "exit code 1: the folder b has # files, not #",
    "crashed": "SIGSEGV",
    "crashed_reported": "SIGSEGV: Fatal Python error: Segmentation fault (train.py:5 kernel)",
    "crashed_abort": "SIGABRT: Fatal Python error: Aborted (train.py:5 give_up)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_head_of_a_signature_can_be_read(tmp_path, name):
    digest, _, head = examined(tmp_path, *ending(name)).signature.partition(" ")
    assert re.fullmatch("[0-9a-f]{8}", digest)
    assert head == SIGNATURES[name]


def test_different_errors_have_different_signatures(tmp_path):
    signatures = {name: examined(tmp_path, *ending(name)).signature for name in NAMES}
    # The same line of the same script, and the same signal without a word, cannot be distinguished.
    assert len(set(signatures.values())) >= len(NAMES) - 3


@pytest.mark.parametrize("name", [name for name in NAMES if ending(name)[1]])
def test_the_same_error_elsewhere_has_the_same_signature(tmp_path, name):
    code, text = ending(name)
    moved = re.sub(r"\brank( ?)(\d)\b", r"rank\g<1>7", re.sub(r"Rank (\d)", "Rank 6", text))
    moved = moved.replace("/mnt/job/", "/home/u/other_folder/").replace("tmp8gk2", "tmpzz91")
    moved = re.sub(r"0x[0-9a-f]+", "0xdeadbeef00", re.sub(r":\d{5}\b", ":1", moved))
    moved = moved.replace("127.0.0.1", "10.0.0.14").replace("sample 0", "sample 881")
    assert examined(tmp_path, code, moved).signature == examined(tmp_path, code, text).signature


@given(
    number=st.integers(0, 10**12),
    address=st.integers(0, 2**64 - 1),
    identity=st.uuids(),
    folder=st.text(st.sampled_from("abcdefghij0123456789_-"), min_size=1, max_size=20),
)
def test_what_varies_from_process_to_process_is_left_out(number, address, identity, folder):
    def signature(number, address, identity, folder):
        message = f"rank {number} at {address:#x} of {identity} cannot read /scratch/{folder}/data.bin: {number}.5 s"
        return signature_of(ExceptionInfo("OSError", message, (Frame(f"/mnt/{folder}/train.py", 3, "load"),)))

    assert signature(number, address, identity, folder) == signature(
        1, 0x7F, "123e4567-e89b-12d3-a456-426614174000", "a"
    )


def test_another_line_is_another_error():
    def at(line: int) -> str:
        return signature_of(ExceptionInfo("ValueError", "no", (Frame("/mnt/job/train.py", line, "f"),)))

    assert at(3) != at(4)


def test_text_that_is_not_utf_8_is_read_all_the_same(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nsys.stderr.buffer.write(b'\\xff bad\\n')\nsys.stderr.flush()\nraise ValueError('\\udcff\\u00e9')\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, timeout=60, check=False)
    found = examined(tmp_path, done.returncode, b"\x80\x81\n" + done.stderr + b"\xc3\x28 \xff\n")
    assert found.kind == "user"
    assert found.message.startswith("Traceback (most recent call last):")
    assert json.loads(json.dumps(found.message)) == found.message


@pytest.mark.parametrize("line", ["[rank0]:[W1121 c10d.cpp:138] [c10d] still there", "x" * 200, "warning: é"])
def test_a_megabyte_after_the_traceback_hides_nothing(tmp_path, line):
    noise = f"{line}\n" * (1024 * 1024 // len(line))
    _, text = ending("user")
    found = examined(tmp_path, 1, text + noise)
    assert found.signature == examined(tmp_path, 1, text).signature
    assert found.message.startswith(text.strip())
    assert len(found.message) < 17_000


def test_many_lines_like_those_of_a_syntax_error_take_no_hours():
    assert find_error('  File "train.py", line 3\n' * 100_000) is None


def test_a_message_has_an_end(tmp_path):
    _, text = ending("user")
    found = examined(tmp_path, 1, text.strip() + " and so on" * 50_000)
    assert len(found.message) < 17_000
    assert found.message.startswith("Traceback")
    assert found.message.endswith("and so on")


def test_the_last_traceback_counts(tmp_path):
    text = f"warning\n{TRACEBACK.replace('ValueError', 'KeyError')}\nmore\n{TRACEBACK}\n"
    assert examined(tmp_path, 1, text).message == TRACEBACK


def test_without_a_traceback_the_last_lines_count(tmp_path):
    found = examined(tmp_path, 1, "\n".join(str(line) for line in range(100)))
    assert found.message.splitlines()[-30:] == [str(line) for line in range(70, 100)]
    assert "69" not in found.message


SIBLINGS = {
    "the first one": ({4: (1, TRACEBACK, 20), 5: (-9, None, 10)}, (5, 137, "It ended with SIGKILL.")),
    "it alone": ({4: (1, TRACEBACK, 20)}, (4, 1, TRACEBACK)),
    "not one that was ended with it": ({0: (-15, None, 10), 2: (1, TRACEBACK, 10)}, (2, 1, TRACEBACK)),
    "the conclusive one": ({0: (1, None, 10), 1: (1, TRACEBACK, 10)}, (1, 1, TRACEBACK)),
}


@pytest.mark.parametrize(("failures", "reported"), SIBLINGS.values(), ids=SIBLINGS)
def test_of_several_failures_the_cause_is_reported(tmp_path, failures, reported):
    (tmp_path / "stderr.log").write_text(TRACEBACK)
    found = root_cause(
        {
            rank: failure(code, tmp_path / ("stderr.log" if text else "none"), at)
            for rank, (code, text, at) in failures.items()
        }
    )
    assert (found.rank, found.exit_code, found.message) == reported


def test_a_shell_between_does_not_hide_the_signal(tmp_path):
    found = examined(tmp_path, 139, "")
    assert (found.kind, found.exit_code) == ("crashed", 139)
    assert examined(tmp_path, 3 + 128, TRACEBACK).kind == "user"


@pytest.mark.parametrize("late", [10, 12])
@pytest.mark.parametrize("consequence", ["peer_killed", "timeout"])
@pytest.mark.parametrize("cause", ["user", "user_rank", "out_of_memory_cpu", "crashed", "killed", "exit_code"])
def test_the_cause_comes_before_its_consequence(tmp_path, cause, consequence, late):
    """Whichever of them torch has seen first."""
    for rank, name in enumerate((consequence, cause)):
        (tmp_path / str(rank)).write_text(ending(name)[1])
    failures = {0: failure(1, tmp_path / "0", 10), 1: failure(ending(cause)[0], tmp_path / "1", late)}
    assert root_cause(failures).rank == 1


def test_a_cause_that_hung_at_its_exit_and_was_stopped_is_still_the_cause(tmp_path):
    for rank, name in enumerate(("peer_killed", "user_rank")):
        (tmp_path / str(rank)).write_text(ending(name)[1])
    first = root_cause({0: failure(1, tmp_path / "0"), 1: failure(-signal.SIGTERM, tmp_path / "1")})
    assert (first.rank, first.kind, first.exit_code) == (1, "user", 143)


def run(tmp_path: Path, text: str, *arguments: str, plain: bool = False) -> FailedWorker:
    """Run a script that fails, as a worker without the preload server or, ``plain``, without our hook."""
    script, error_file, stderr = tmp_path / "train.py", tmp_path / "error.json", tmp_path / "stderr.log"
    script.write_text(text)
    environ = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(error_file), variables.CHANNEL: "/nowhere"}
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environ if plain else for_plain_start(environ),
        start_new_session=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    stderr.write_bytes(done.stderr)
    return FailedWorker.read(done.returncode, error_file, stderr)


def cause_of(failed: FailedWorker, **changes: object) -> Failure:
    return root_cause({3: replace(failed, **changes)})


RECORD = "from torch.distributed.elastic.multiprocessing.errors import record\n\n@record\n"


def test_the_error_file_of_torchs_decorator_is_believed_before_what_is_printed(tmp_path):
    """Written by the decorator alone, in a process without a hook of ours."""
    failed = run(tmp_path, RECORD + "def main():\n    raise ValueError('sample 3 is torn')\n\nmain()\n", plain=True)
    failed.stderr.write_text("nothing\n" * 100)
    found = cause_of(failed)
    assert found.message.startswith("Traceback (most recent call last):")
    assert found.signature.endswith("ValueError: sample # is torn (train.py:5 main)")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"message": "<NONE>"}', '{"message": {"extraInfo": {}}, "chain": [1]}']
)
def test_an_error_file_of_another_form_is_passed_over(tmp_path, content):
    (tmp_path / "error.json").write_text(content)
    failed = FailedWorker.read(3, tmp_path / "error.json", tmp_path / "stderr.log")
    assert (failed.error, cause_of(failed).kind) == (None, "exit")


def test_the_message_of_torchs_decorator_is_replaced_by_one_that_names_the_file(tmp_path):
    torn = tmp_path / "state.json"
    torn.write_text("{")
    main = "def main(path):\n    import json\n    with open(path) as file:\n        json.load(file)\n\n"
    failed = run(tmp_path, f"import sys\n{RECORD}{main}main(sys.argv[1])\n", str(torn))
    assert f"JSONDecodeError: while reading {torn} (1 bytes, " in cause_of(failed).message


FAILING = {
    **{name: textwrap.dedent(SCRIPTS[name]) for name in (
        "user", "user_cause", "user_context", "user_lines", "user_assertion", "user_interrupt", "user_loader",
        "import_module", "import_syntax",
    )},
    "suppressed": "try:\n    int('x')\nexcept ValueError:\n    raise RuntimeError('no data') from None\n",
    "half a surrogate pair": "raise ValueError('\\udcff')\n",
    "a key": "{}['a']\n",
    "a class in a class": "class A:\n    class B(Exception):\n        pass\n\nraise A.B(3)\n",
    "syntax of a module": (
        "from pathlib import Path\nPath(__file__).with_name('bad.py').write_text('x = (')\nimport bad\n"
    ),
    "recursion": "def f():\n    f()\n\nf()\n",
    "a note": "error = ValueError('no')\nerror.add_note('see there')\nraise error\n",
}  # fmt: skip
NEWER = {"a note"} if sys.version_info < (3, 11) else set()


@pytest.mark.parametrize("name", sorted(FAILING.keys() - NEWER))
def test_the_error_file_says_what_is_printed(tmp_path, name):
    failed = run(tmp_path, FAILING[name])
    assert failed.error.uncaught
    recorded, parsed = cause_of(failed, stderr=tmp_path / "none"), cause_of(failed, error=None)
    assert (recorded.kind, recorded.signature) == (parsed.kind, parsed.signature)
    assert recorded.message == parsed.message
    raised = find_error(failed.stderr.read_text())
    assert [(each.type, each.caused) for each in failed.error.chain] == [
        (each.type, each.caused) for each in raised.chain
    ]
    assert failed.error.chain[-1].where == raised.chain[-1].where


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has exception groups from 3.11 on")
def test_a_group_counts_as_its_first_exception(tmp_path):
    failed = run(
        tmp_path,
        "def inner():\n    raise ValueError('one')\n\ndef outer():\n    try:\n        inner()\n"
        "    except ValueError as error:\n        raise ExceptionGroup('several', [error, TypeError()])\n\nouter()\n",
    )
    found = cause_of(failed)
    assert (found.kind, found.signature.partition(" ")[2]) == ("user", "ValueError: one (train.py:2 inner)")
    assert "  + Exception Group Traceback (most recent call last):" in found.message


@pytest.mark.parametrize(
    ("error", "kind"), [("ValueError('torn')", "user"), ("RuntimeError('gloo: Connection closed by peer')", "peer")]
)
def test_of_a_process_that_torch_has_started_its_own_error_counts(tmp_path, error, kind):
    """Its traceback is the message of the exception that ends the worker."""
    text = f"import torch.multiprocessing as mp\n\ndef f(rank):\n    raise {error}\n\n"
    failed = run(tmp_path, f"{text}mp.start_processes(f, nprocs=1, start_method='fork')\n")
    found = cause_of(failed)
    assert found.kind == kind
    assert found.signature == cause_of(failed, error=None).signature
    assert "ProcessRaisedException" in found.message


def test_a_hook_of_the_script_that_ends_with_ours_changes_nothing(tmp_path):
    hook = "import sys\nold = sys.excepthook\nsys.excepthook = lambda *details: (print('Oh no'), old(*details))\n"
    failed = run(tmp_path, f"{hook}raise ValueError('no')\n")
    assert failed.error.chain[-1].type == "ValueError"


def test_what_a_script_keeps_from_our_hook_is_not_known(tmp_path):
    failed = run(tmp_path, "import sys\nsys.excepthook = lambda *_: None\nraise ValueError('no')\n")
    assert (failed.error, failed.stderr.read_text()) == (None, "")


def test_the_error_of_a_child_process_is_not_that_of_the_worker(tmp_path):
    text = "import os, sys\nif os.fork() == 0:\n    raise ValueError('in a fork')\nos.wait()\nsys.exit(3)\n"
    failed = run(tmp_path, text)
    assert "in a fork" in failed.stderr.read_text()
    assert failed.error is None


def test_an_error_in_a_thread_or_an_exit_writes_no_error_file(tmp_path):
    thread = "thread = threading.Thread(target=int, args=('x',))\nthread.start()\nthread.join()\n"
    text = f"import sys, threading\n{thread}sys.exit(3)\n"
    failed = run(tmp_path, text)
    assert "ValueError" in failed.stderr.read_text()
    assert failed.error is None


class Kernel:
    """The files in which the kernel counts, as both generations of control groups show them."""

    def __init__(self, folder: Path, generation: int):
        self.root, self.own = folder / "cgroup", folder / "own"
        if generation == 1:
            self.own.write_text("4:memory,cpu:/box/1\n1:name=systemd:/\n0::/\n")
            self._file = self.root / "memory" / "box" / "1" / "memory.oom_control"
        else:
            self.own.write_text("0::/box/1\n")
            self._file = self.root / "box" / "1" / "memory.events"
        self._file.parent.mkdir(parents=True)
        self.count(2)

    def count(self, kills: int) -> None:
        self._file.write_text(f"low 0\noom 7\noom_kill {kills}\nunder_oom 0\n")

    def kills(self) -> OomKillCounter:
        return OomKillCounter(self.root, self.own)


@pytest.mark.parametrize("generation", [1, 2])
def test_an_out_of_memory_kill_is_distinguished_from_another_one(tmp_path, generation):
    kernel = Kernel(tmp_path, generation)
    kills = kernel.kills()
    assert examined(tmp_path, -9, "", kills).kind == "killed"
    kernel.count(3)
    found = examined(tmp_path, -9, "epoch 3\n", kills)
    assert (found.kind, found.conclusive) == ("out_of_memory", False)
    assert "ran out of memory" in found.message
    assert examined(tmp_path, -9, "", kills).kind == "killed"


def test_a_data_loaders_process_that_the_kernel_killed_is_out_of_memory_too(tmp_path):
    kernel = Kernel(tmp_path, 2)
    kills = kernel.kills()
    text = (
        'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'
        "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. "
    )
    assert examined(tmp_path, 1, text, kills).kind == "user"
    kernel.count(3)
    assert examined(tmp_path, 1, text, kills).kind == "out_of_memory"


def test_without_the_kernels_counter_nothing_is_claimed(tmp_path):
    kills = OomKillCounter(tmp_path / "none", tmp_path / "nobody")
    assert not kills.more()
    assert examined(tmp_path, -9, "", kills).kind == "killed"


def test_this_machines_own_counter_can_be_asked():
    assert not OomKillCounter().more()


def test_a_hang_is_reported_by_the_detector():
    found = hang_failure(2, 1, "rank 2 waits in all_reduce")
    assert (found.kind, found.exit_code, found.message, found.conclusive) == (
        "hang",
        1,
        "rank 2 waits in all_reduce",
        False,
    )
    assert found.record("node-1", 7).step == 7


@given(st.text(st.sampled_from('Tab (){}:"\n|+-\t0x') | st.characters(), max_size=300))
def test_no_text_is_too_strange(text):
    find_error(text)
    find_dump(text)
    find_error(f"Traceback (most recent call last):\n{text}\nValueError: x")


@pytest.mark.parametrize("package", ["train", "checkpoint", "ipc", "config", "distributed", "ledger", "node"])
def test_frames_of_this_library_are_not_the_programs_own_code(package):
    assert not Frame(f"/job/runtime/azureml_elastic/{package}/module.py", 1).own
    assert Frame(f"/job/src/{package}/module.py", 1).own
