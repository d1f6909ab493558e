"""Every way to set up and check this project. ``python -m nox`` runs what a change must pass; see CONTRIBUTING.md."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import nox

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "docs", "tests", "oldest_sdk", "deepspeed", "stacks", "engines"]

PYPROJECT = nox.project.load_toml("pyproject.toml")
OLDEST_SDK = "1.28.1"
DEEPSPEED = "0.19.8"
OLDEST_DEEPSPEED = "0.16.9"
OLDEST_TRANSFORMERS = "4.57.6"
PARALLEL = ("-n", "4", "--dist", "loadgroup", "--no-loadscope-reorder")
SDK_TESTS = (
    "unit/submit",
    "unit/config",
    "integration/testing/test_workspace.py",
    "integration/testing/test_secrets.py::test_a_job_shows_no_secret_of_its_author",
    "integration/testing/test_elastic.py::test_a_gang_that_the_service_starts_again_goes_on_from_its_checkpoint",
)
CONSTRAINTS = Path(__file__).parent / "constraints.txt"


WHEELS: list[Path] = []
"""The built wheel, once there is one: all sessions of one run of nox install the same."""


def build_wheel(session: nox.Session) -> Path:
    """Build the wheel unless this run of nox has built it already, and return its path."""
    if not WHEELS:
        folder = tempfile.mkdtemp(prefix="azureml-elastic-wheel-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        session.run("python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ".", silent=True)
        WHEELS.extend(Path(folder).glob("*.whl"))
    return WHEELS[0]


def install_wheel(session: nox.Session, *extras: str, groups: tuple[str, ...] = ()) -> None:
    """Install the built wheel, never the source tree, with pinned dependencies."""
    wheel = build_wheel(session)
    wanted = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
    dependencies = nox.project.dependency_groups(PYPROJECT, *groups) if groups else ()
    session.install("--constraint", str(CONSTRAINTS), wanted, *dependencies)
    # A wheel of the same version may be in a reused environment.
    session.install("--quiet", "--force-reinstall", "--no-deps", str(wheel))


@nox.session
def demo(session: nox.Session) -> None:
    """Train on three local nodes, lose rank 0's, get a new one, and prove that each sample was seen exactly once."""
    install_wheel(session, "node", "demo")
    session.run("azureml-elastic", "demo", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests against the installed wheel."""
    install_wheel(session, "all", groups=("test", "integrations", "notebooks"))
    # Most of the time is spent waiting for processes to start and to die, so more run at once than there are cores.
    session.run("python", "-m", "pytest", *(session.posargs or (*PARALLEL, "--durations=10", "--ignore=tests/stacks")))


@nox.session
def chaos(session: nox.Session) -> None:
    """Run a hundred random schedules of losses, freezes, new nodes and faults of the table, over real processes.

    With them fifty preemptions, bursts of losses among twelve nodes, a flood of connections, and ten thousand kills and
    damages of checkpoints.
    """
    install_wheel(session, "all", groups=("test",))
    many = {"CHAOS_SEEDS": "0:100", "NOTICE_SEEDS": "0:50", "CHECKPOINT_CASES": "10000"}
    files = (
        "runs/test_random_schedules.py",
        "runs/test_faulty_table.py",
        "runs/test_notices.py",
        "runs/test_bursts.py",
    )
    files += ("runs/test_recovery.py::test_a_frozen_node_costs_no_step_and_comes_back",)
    files += ("integration/checkpoint/test_damage.py", "integration/node/attacks/test_flood.py")
    arguments = session.posargs or PARALLEL
    paths = [f"tests/{file}" for file in files]
    session.run("python", "-m", "pytest", "-m", "", *arguments, "--timeout", "1800", *paths, env=many)


@nox.session
def attack(session: nox.Session) -> None:
    """Send 100,000 random messages each to hubs, agents and HTTP servers, and run all other attacks.

    Hubs get them from processes with and without the run's key.
    """
    install_wheel(session, "all", groups=("test",))
    arguments = session.posargs or ("-n", "2")
    env = {"ATTACK_MESSAGES": "100000"}
    files = ("node/attacks", "node/test_shard_transfer.py", "testing/test_attacks.py", "local/test_random_requests.py")
    paths = [f"tests/integration/{file}" for file in files]
    session.run("python", "-m", "pytest", *arguments, "--timeout", "1800", *paths, env=env)


@nox.session
def bench_checkpoints(session: nox.Session) -> None:
    """Measure what checkpoints cost beside torch's own; writes docs/reference/benchmarks-checkpoints.md."""
    install_wheel(session, "node", groups=("test",))
    session.run("python", "benchmarks/saving.py", *session.posargs)


@nox.session
def bench_simulation(session: nox.Session) -> None:
    """Measure the simulator beside runs of real processes; writes docs/reference/benchmarks-simulation.md."""
    install_wheel(session, "node", groups=("test",))
    session.run("python", "benchmarks/simulation.py", *session.posargs)


@nox.session
def bench_stacks(session: nox.Session) -> None:
    """Measure recovery under training stacks beside a session's; writes docs/reference/benchmarks-stacks.md."""
    install_wheel(session, "node", "transformers", "accelerate", "lightning", groups=("test",))
    session.install("--constraint", str(CONSTRAINTS), f"deepspeed=={DEEPSPEED}")
    session.run("python", "benchmarks/stacks.py", *session.posargs)


@nox.session
def stacks(session: nox.Session) -> None:
    """Run stock scripts of training stacks under faults: a node's loss, an arrival and a preemption with notice."""
    install_wheel(session, "node", "transformers", "accelerate", "lightning", groups=("test", "samples"))
    session.install("--constraint", str(CONSTRAINTS), "pytorch-lightning")  # the same under its other name
    session.run("python", "-m", "pytest", *(session.posargs or ("-n", "2", "--durations=10")), "tests/stacks")


@nox.session
def stacks_oldest(session: nox.Session) -> None:
    """Run stock scripts of the stacks' oldest supported releases; not by default."""
    install_wheel(session, "node", "transformers", groups=("test",))
    session.install(f"transformers=={OLDEST_TRANSFORMERS}")
    session.run("python", "-m", "pytest", *(session.posargs or ("-n", "2")), "tests/stacks/test_transformers.py")


@nox.session
def oldest_sdk(session: nox.Session) -> None:
    """Run what depends on azure-ai-ml, submissions to the local workspace among it, on its oldest supported release."""
    install_wheel(session, "node", "demo", "testing", groups=("test",))
    others = Path(session.create_tmp()) / "constraints.txt"
    lines = CONSTRAINTS.read_text().splitlines(keepends=True)
    others.write_text("".join(line for line in lines if not line.startswith("azure-ai-ml==")))
    session.install("--constraint", str(others), f"azure-ai-ml=={OLDEST_SDK}")
    arguments = session.posargs or PARALLEL
    session.run("python", "-m", "pytest", *arguments, *(f"tests/{path}" for path in SDK_TESTS))


def run_deepspeed_tests(session: nox.Session, version: str) -> None:
    """Run the tests that need DeepSpeed."""
    install_wheel(session, "node", "transformers", "accelerate", groups=("test",))
    session.install("--constraint", str(CONSTRAINTS), f"deepspeed=={version}")
    extensions = Path(session.create_tmp()) / "extensions"
    shutil.rmtree(extensions, ignore_errors=True)
    env = {"DEEPSPEED_TESTS": "1", "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(extensions)}
    # It compiles a part of itself when it is first used: here, outside of the tests' time limits.
    session.run("python", "-c", "from deepspeed.comm.torch import build_shm_op; build_shm_op()", env=env)
    files = ("integration/deepspeed", "stacks/test_deepspeed.py", "unit/train/integrations", "unit/node/preload")
    paths = [f"tests/{file}" for file in files]
    session.run("python", "-m", "pytest", *(session.posargs or ("-n", "2")), *paths, env=env)


@nox.session
def deepspeed(session: nox.Session) -> None:
    """Run the tests that need DeepSpeed on the newest supported release."""
    run_deepspeed_tests(session, DEEPSPEED)


@nox.session
def deepspeed_oldest(session: nox.Session) -> None:
    """Run the tests that need DeepSpeed on the oldest supported release; not by default."""
    run_deepspeed_tests(session, OLDEST_DEEPSPEED)


@nox.session
def engines(session: nox.Session) -> None:
    """Run the tests of Dask, Ray and Horovod, which is built for the installed torch where there is a compiler."""
    install_wheel(session, "all", "dask", "ray", groups=("test",))
    if shutil.which("c++") is not None and shutil.which("cmake") is not None:
        session.install("setuptools<80", "wheel", "packaging")
        wheels = Path(session.create_tmp()) / "horovod"
        if not list(wheels.glob("*.whl")):
            session.run("python", "tools/build_horovod.py", str(wheels), silent=True)
        session.install("--constraint", str(CONSTRAINTS), *map(str, wheels.glob("*.whl")))
    else:
        session.warn("Horovod's tests are skipped: it is built with a C++ compiler and CMake, which are not here.")
    files = [f"runs/test_{framework}.py" for framework in ("dask", "ray", "horovod")]
    files += ["integration/engines", "integration/testing/test_engines.py", "integration/testing/test_horovod_job.py"]
    paths = [f"tests/{file}" for file in files]
    env = {"TMPDIR": "/tmp"}  # noqa: S108 - Ray's sockets need a short path, and nox's is long
    session.run("python", "-m", "pytest", *(session.posargs or ("-n", "2", "--durations=10")), *paths, env=env)
    if os.geteuid() == 0 and not session.posargs:  # Ray needs a network in which 127.0.0.1 is the only address
        again = "ip link set lo up && exec python -m pytest -k ray tests/integration/testing/test_engines.py"
        session.run("unshare", "--net", "bash", "-c", again, external=True, env=env)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting, the import contracts and the vocabulary."""
    session.install("--constraint", str(CONSTRAINTS), *nox.project.dependency_groups(PYPROJECT, "lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", env={"PYTHONPATH": "src"})
    session.run("python", "tools/vocabulary.py")


@nox.session
def types(session: nox.Session) -> None:
    """Check types strictly, against the real dependencies."""
    install_wheel(session, "all", groups=("types",))
    session.run("mypy", env={"MYPYPATH": "src"})


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a broken link is an error."""
    session.install("--constraint", str(CONSTRAINTS), *nox.project.dependency_groups(PYPROJECT, "docs"))
    site = Path(session.create_tmp()) / "site"
    session.run("mkdocs", "build", "--strict", "--site-dir", str(site), env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def bench(session: nox.Session) -> None:
    """Measure this library beside its peers in one run; writes docs/reference/benchmarks.md."""
    install_wheel(session, "node", groups=("test",))
    session.run("python", "benchmarks/run.py", *session.posargs)


@nox.session
def bench_startup(session: nox.Session) -> None:
    """Measure starting nodes and their memory beside peers; writes docs/reference/benchmarks-startup.md."""
    install_wheel(session, "node", groups=("test", "integrations"))  # torchft needs OpenTelemetry
    # In folders of their own, as some change what `import torch` imports; without torch, which is installed above.
    peers = Path(session.create_tmp()) / "peers"
    shutil.rmtree(peers, ignore_errors=True)
    wanted = {"torchft": ["torchft-nightly"], "nvrx": ["nvidia-resiliency-ext", "defusedxml", "nvidia-ml-py"]}
    options = ("--quiet", "--no-deps", "--constraint", str(CONSTRAINTS))
    for name, packages in wanted.items():
        # Not on every platform; the benchmark prints that it leaves out what is missing.
        install = ("python", "-m", "pip", "install", *options, "--target", str(peers / name), *packages)
        session.run(*install, success_codes=[0, 1])
    session.run("python", "benchmarks/startup.py", "--peers-in", str(peers), *session.posargs)
