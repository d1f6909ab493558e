"""A script behaves the same whether it is forked from the preload server or started by torch.

Only these may differ: process ids, the parent, ``/proc/self/cmdline``, ``sys.modules``, the garbage collector's frozen
objects, string hashes (which workers of a node share), and one more frame below the script's.
"""

from __future__ import annotations

import json
import os
import runpy
import sys

import pytest

from tests.support.forks.starting import ENVIRON, on_path, preload_server, run_forked, run_plain
from tests.support.paths import SUPPORT

HERE = SUPPORT / "forks"

PROBES = [name for name in runpy.run_path(str(HERE / "probe.py"))["PROBES"] if name not in {"draw", "recurse", "wait"}]


@pytest.fixture(scope="module")
def server():
    process = preload_server(os.path.relpath(HERE / "probe.py"), "--x", "1")
    assert process.wait_ready(120), process.refusal
    yield process
    process.close()


def environment(probe):
    return {**ENVIRON, "RANK": probe, "AZUREML_ELASTIC_ROUND": "1"}


@pytest.mark.parametrize("probe", PROBES)
def test_forked_and_plain_workers_are_equal(server, tmp_path, probe):
    if probe == "a hook that fails" and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 shows one frame of ours")
    environ = environment(probe)
    forked = run_forked(server, environ, tmp_path, "forked")
    started = run_plain(server.program.command, environ, tmp_path, "plain")
    if forked.stdout.startswith("{"):
        assert json.loads(forked.stdout) == json.loads(started.stdout)
    assert forked == started


def test_workers_have_different_random_numbers(server, tmp_path):
    drawn = [json.loads(run_forked(server, environment("draw"), tmp_path, str(i)).stdout) for i in range(2)]
    for one, other in zip(*drawn, strict=True):
        assert one != other


def test_the_stack_has_at_most_one_more_frame(server, tmp_path):
    forked = run_forked(server, environment("recurse"), tmp_path, "forked")
    started = run_plain(server.program.command, environment("recurse"), tmp_path, "plain")
    assert int(started.stdout) - int(forked.stdout) in (0, 1, 2)  # it takes room on two stacks


def test_a_module_with_packages_of_its_own(tmp_path, monkeypatch):
    """A module in the working directory, without ``-u``."""
    package = tmp_path / "own" / "deep"
    package.mkdir(parents=True)
    (tmp_path / "own" / "__init__.py").write_text("print('package', __name__)\n")
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("import json\nLOADED = __name__\n")
    (package / "main.py").write_text(
        "'''Documentation.'''\n"
        "import sys, inspect\n"
        "from . import part\n"
        "number: int = 1\n"
        "main = vars(sys.modules['__main__'])\n"
        "print(__name__, __doc__, __package__, __spec__.name, __file__, sys.argv, sys.orig_argv, sys.path)\n"
        "print(part.LOADED)\n"
        "print(sorted(main), main['__annotations__'], inspect.stack()[-1].filename)\n"
        "print(sorted(name for name in sys.modules if name.startswith('own')))\n"
        "1 / 0\n"
    )
    monkeypatch.chdir(tmp_path)
    process = preload_server("own.deep.main", "a b", "", kind="module", options=("-W", "default"))
    try:
        assert process.wait_ready(120), process.refusal
        forked = run_forked(process, ENVIRON, tmp_path, "forked")
        started = run_plain(process.program.command, ENVIRON, tmp_path, "plain")
        assert forked == started
        assert "ZeroDivisionError" in forked.stderr
        (package / "main.py").unlink()
        forked = run_forked(process, ENVIRON, tmp_path, "forked")
        assert forked == run_plain(process.program.command, ENVIRON, tmp_path, "plain")
        assert "No module named own.deep.main" in forked.stderr
    finally:
        process.close()


NOISY = """
import os, sys, warnings
print("imported")
print("as an error", file=sys.stderr)
warnings.warn("at the import", stacklevel=1)
os.environ["NOISY"] = "1"
"""

RANKED = "import os\nRANK = os.environ.get('RANK')\n"


def test_changed_scripts_and_effects_of_imports(tmp_path, monkeypatch):
    """Imports that print, set variables or read the rank; then broken and missing scripts."""
    site = tmp_path / "site"
    (site / "noisy-1.dist-info").mkdir(parents=True)
    (site / "noisy.py").write_text(NOISY)
    (site / "ranked.py").write_text(RANKED)
    script = tmp_path / "script.py"
    (tmp_path / "local.py").write_text("import noisy\n")
    environ = {**on_path(site), "RANK": "5"}
    monkeypatch.chdir(tmp_path)
    texts = {
        "imports": "import local, ranked, no_such_module_here\n",
        "fails later": "import os, ranked, local\nprint(ranked.RANK, os.environ['NOISY'])\nf = {}['a']\n",
        "syntax": "print(1\n",
        "encoding": b"# \xff\n",
        "empty": "",
    }
    script.write_text("import local, ranked\n")
    process = preload_server("script.py", environ=environ)
    try:
        assert process.wait_ready(120), process.refusal
        for name, text in texts.items():
            script.write_bytes(text if isinstance(text, bytes) else text.encode())
            forked = run_forked(process, environ, tmp_path, "forked")
            started = run_plain(process.program.command, environ, tmp_path, "plain")
            if name == "fails later":
                assert "5 1" in forked.stdout
            if "local" in str(text):
                assert sorted(forked.stdout.split("\n")) == sorted(started.stdout.split("\n")), name
                assert sorted(forked.stderr.split("\n")) == sorted(started.stderr.split("\n")), name
                assert forked.code == started.code
        script.unlink()
        forked = run_forked(process, environ, tmp_path, "forked")
        assert forked == run_plain(process.program.command, environ, tmp_path, "plain")
        assert forked.code == 2
    finally:
        process.close()
