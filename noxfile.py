"""Every way to set up and check this project. ``python -m nox`` runs what a change must pass; see CONTRIBUTING.md."""

from __future__ import annotations

import ast
import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nox

# uv installs an environment in 3 s instead of 140, from links into its cache; pip does where there is no uv.
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "docs", "package", "tests", "oldest_sdk", "deepspeed"]

PYPROJECT = nox.project.load_toml("pyproject.toml")
OLDEST_SDK = "1.28.1"
DEEPSPEED = "0.19.8"
OLDEST_DEEPSPEED = "0.16.9"
OLDEST_TRANSFORMERS = "4.57.6"
OLD_TORCH = (("3.10", "2.6.0"), ("3.11", "2.7.1"), ("3.12", "2.8.0"), ("3.13", None))
"""Each supported Python, with one of the oldest supported releases of torch or with that of the constraints."""

OLD_TORCH_TESTS = (
    "integration/forks/test_round_store.py",
    "runs/test_plain_scripts.py::test_what_a_script_saves_on_sigterm_is_what_the_next_round_continues_from",
    "stacks/test_transformers.py::test_a_run_with_faults_is_the_same_training",
    "stacks/test_accelerate.py::test_weights_do_not_depend_on_the_world_size",
    "stacks/test_lightning.py::test_a_run_with_faults_is_the_same_training",
)
LONG = ("-o", "test_cpu_limit=1800", "-o", "test_wait_limit=1800")
GROUPED = ("--dist", "loadgroup", "--no-loadscope-reorder")
"""Tests that share what a module sets up run in one process."""
TWO, THREE, FOUR, FIVE = (("-n", str(number), *GROUPED) for number in (2, 3, 4, 5))
STACKS = ("transformers", "accelerate", "lightning")
OF_LIGHTNING = ("pytorch-lightning", "jsonargparse[signatures]", "torchdata")
"""Lightning is published under two names; its command line needs jsonargparse."""

SDK_USERS = (
    "bodies",
    "compilation",
    "composition",
    "conversion",
    "paths_on_compute",
    "pools",
    "presets",
    "readable_errors",
    "references",
    "replacement_bodies",
    "request_bodies",
    "sdk_hooks",
    "service_models",
    "step_edits",
    "steps",
    "submission",
    "upload_size",
    "validate_call",
    "yaml_job",
    "yaml_round_trip",
)
SDK_PIPELINES = (
    "what_any_node_has_written_is_the_output_of_its_step_or_job_each_a_run_of_its_own[fan_out]",
    "each_trigger_of_an_elastic_jobs_schedule_trains_as_a_run_of_its_own",
    "the_command_submits_a_sweep_whose_trials_are_runs",
)
SDK_COMMANDS = (
    "file_is_shown_and_submitted_and_its_run_is_followed_read_and_downloaded",
    "run_on_this_machine_ends_as_its_command",
)
SDK_TESTS = (
    *(f"unit/submit/test_{name}.py" for name in SDK_USERS),
    "integration/testing/test_workspace.py",
    "integration/testing/test_composed.py",
    *(f"integration/testing/test_pipelines.py::test_{name}" for name in SDK_PIPELINES),
    *(f"integration/testing/test_commands.py::test_a_{name}" for name in SDK_COMMANDS),
    "integration/testing/test_sweep_sample.py",
    "integration/testing/test_secrets.py::test_a_job_shows_no_secret_of_its_author",
    "integration/testing/test_elastic.py::test_a_gang_that_the_service_starts_again_goes_on_from_its_checkpoint",
)
"""What reaches azure-ai-ml; the other tests of submit pass or fail whatever its release."""

ENGINE_SAMPLES = (
    "runs/test_dask.py::test_the_sample_searches_on_all_nodes",
    "runs/test_ray.py::test_the_sample_goes_on_from_its_checkpoint_when_the_heads_node_is_lost",
)
T5_SAMPLE = "stacks/test_t5_summarization.py"
CONSTRAINTS = Path(__file__).parent / "constraints.txt"

# uv compiles no bytecode: Python writes that of the modules it imports, instead of a minute of CPU for all of them.
# Where it must not, each of the many processes would compile torch again, for 3 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

FULL = "full"
"""The tag of what is too long for every change: ``python -m nox -t full``."""

SHORT_PATHS = {"TMPDIR": "/tmp"}  # noqa: S108 - Ray's sockets need a short path, and nox's is long

UV_NAMES = {
    "find-links": ("UV_FIND_LINKS", ","),
    "index-url": ("UV_DEFAULT_INDEX", None),
    "extra-index-url": ("UV_INDEX", " "),
    "cert": ("SSL_CERT_FILE", None),
}
"""pip's options that say where packages come from: uv's variable, and what separates its values where it takes many."""

WHEELS: list[Path] = []
"""The built wheel, once there is one: all sessions of one run of nox install the same."""


@functools.cache
def uv_variables() -> dict[str, str]:
    """Return variables that make uv find packages where pip is configured to, a CPU build of torch among them.

    uv reads nothing of pip's configuration, and without it takes torch from PyPI, with gigabytes of CUDA. What is set
    already stays.
    """
    listing = (sys.executable, "-m", "pip", "config", "list")
    result = subprocess.run(listing, capture_output=True, text=True, check=False)
    values = {}
    for scope in ("global", "install", ":env:"):  # each overrides those before
        for line in result.stdout.splitlines():
            key, _, value = line.partition("=")
            section, _, option = key.rpartition(".")
            if section == scope and option in UV_NAMES:
                values[option] = ast.literal_eval(value)
    variables = {}
    for option, value in values.items():
        name, separator = UV_NAMES[option]
        variables[name] = separator.join(value.split()) if separator else value
    if "UV_INDEX" in variables:
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # as pip chooses: the best version of all indexes
    return {name: value for name, value in variables.items() if name not in os.environ}


def has_uv(session: nox.Session) -> bool:
    """Return whether uv has made the session's environment and installs into it."""
    return session.venv_backend == "uv"


def package_sources(session: nox.Session) -> dict[str, str]:
    """Return variables that say where what installs into the session's environment finds packages."""
    return uv_variables() if has_uv(session) else {}


def install(session: nox.Session, *wanted: str, constraints: Path | None = CONSTRAINTS) -> None:
    """Install packages, in the versions of the constraints."""
    pinned = () if constraints is None else ("--constraint", str(constraints))
    session.install(*pinned, *wanted, env=package_sources(session))


def build_wheel(session: nox.Session) -> Path | None:
    """Build the wheel unless this run of nox has built it already, and return its path; None under --no-install."""
    if not WHEELS:
        folder = tempfile.mkdtemp(prefix="azureml-elastic-wheel-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        # Part of the installation, which --install-only does too.
        if has_uv(session):
            build = ("uv", "build", "--quiet", "--wheel", "--out-dir", folder)
        else:
            build = ("python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ".")
        session.run_install(*build, env=package_sources(session), silent=True)
        WHEELS.extend(Path(folder).glob("*.whl"))
    return WHEELS[0] if WHEELS else None


def constraints_without(session: nox.Session, *packages: str) -> Path:
    """Return a file of the constraints without those of some packages, of which the session has other versions."""
    path = Path(session.create_tmp()) / "constraints.txt"
    names = tuple(f"{package}==" for package in packages)
    lines = CONSTRAINTS.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith(names)))
    return path


def install_wheel(
    session: nox.Session,
    *extras: str,
    groups: tuple[str, ...] = (),
    others: tuple[str, ...] = (),
    constraints: Path = CONSTRAINTS,
) -> None:
    """Install the built wheel, never the source tree, with pinned dependencies."""
    wheel = build_wheel(session)
    if wheel is None:
        return
    wanted = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
    dependencies = nox.project.dependency_groups(PYPROJECT, *groups) if groups else ()
    # A wheel of the same version may be in a reused environment.
    again = ("--reinstall-package", "azureml-elastic") if has_uv(session) else ()
    install(session, *again, wanted, *dependencies, *others, constraints=constraints)
    if not again:
        session.install("--quiet", "--force-reinstall", "--no-deps", str(wheel))


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests against the installed wheel, those of training stacks and engines that are not built among them."""
    groups = ("test", "integrations", "notebooks")
    install_wheel(session, "all", *STACKS, "dask", "ray", groups=groups, others=OF_LIGHTNING)
    # Most of the time is spent waiting for processes to start and to die, so more run at once than there are cores.
    others = [f"--deselect=tests/{test}" for test in (T5_SAMPLE, *ENGINE_SAMPLES)]
    arguments = session.posargs or (*FIVE, *others)
    session.run("python", "-m", "pytest", *arguments, env=SHORT_PATHS)


@nox.session(tags=[FULL])
def chaos(session: nox.Session) -> None:
    """Run a hundred random faults of nodes, their processes, the network, the table and the disk; list standstills.

    With them a flood of connections, and ten thousand kills and damages of checkpoints.
    """
    install_wheel(session, "all", groups=("test",))
    many = {"CAMPAIGN_SEEDS": "0:100", "CHECKPOINT_CASES": "10000"}
    runs = ("campaign", "dying_agents", "faulty_table", "lost_state")
    files = tuple(f"runs/test_{name}.py" for name in runs)
    files += ("runs/test_recovery.py::test_a_frozen_node_costs_no_step_and_comes_back",)
    files += (
        "integration/checkpoint/test_damage.py",
        "integration/node/attacks/test_flood.py",
        "integration/train/test_chaos.py",
    )
    arguments = session.posargs or FOUR
    paths = [f"tests/{file}" for file in files]
    session.run("python", "-m", "pytest", "-m", "", *arguments, *LONG, *paths, env=many)


@nox.session(tags=[FULL])
def attack(session: nox.Session) -> None:
    """Send 100,000 random messages each to hubs, agents and HTTP servers, and run all other attacks.

    Hubs get them from processes with and without the run's key. The table is replaced by 3,000 series of arbitrary
    answers. The machines of all nodes go through 10,000 schedules of faults.
    """
    install_wheel(session, "all", groups=("test",))
    arguments = session.posargs or TWO
    env = {"ATTACK_MESSAGES": "100000", "ATTACK_ANSWERS": "3000", "SCHEDULES": "10000"}
    files = (
        "node/attacks",
        "node/test_shard_transfer.py",
        "node/table/test_arbitrary_answers.py",
        "testing/test_attacks.py",
        "local/test_random_requests.py",
    )
    paths = ["tests/unit/node/test_schedules.py", *(f"tests/integration/{file}" for file in files)]
    session.run("python", "-m", "pytest", *arguments, *LONG, *paths, env=env)


@nox.session(tags=[FULL])
def mutations(session: nox.Session) -> None:
    """Break what is guaranteed, one behaviour at a time, and verify that the tests or random schedules notice."""
    install_wheel(session, "all", groups=("test",))
    session.run("python", "tools/mutations.py", *session.posargs)


@nox.session
def bench_checkpoints(session: nox.Session) -> None:
    """Measure what checkpoints cost beside torch's own; writes benchmarks/results/checkpoints.md."""
    install_wheel(session, "node", groups=("test",))
    session.run("python", "benchmarks/saving.py", *session.posargs)


@nox.session
def bench_gpu(session: nox.Session) -> None:
    """Measure what GPUs cost, where there is one; writes benchmarks/results/gpu.md."""
    install_wheel(session, "node", groups=("test",))
    session.run("python", "benchmarks/gpu.py", *session.posargs)


@nox.session
def bench_simulation(session: nox.Session) -> None:
    """Measure the simulator beside runs of real processes; writes benchmarks/results/simulation.md."""
    install_wheel(session, "node", groups=("test",))
    session.run("python", "benchmarks/simulation.py", *session.posargs)


@nox.session
def bench_stacks(session: nox.Session) -> None:
    """Measure recovery under training stacks beside a session's; writes benchmarks/results/stacks.md."""
    install_wheel(session, "node", *STACKS, groups=("test",), others=(f"deepspeed=={DEEPSPEED}",))
    session.run("python", "benchmarks/stacks.py", *session.posargs)


@nox.session(tags=[FULL])
def corpus(session: nox.Session) -> None:
    """Run scripts in the shapes of public examples under a hundred random schedules, twenty of two workers a node."""
    install_wheel(session, "node", *STACKS, groups=("test",), others=OF_LIGHTNING)
    tests = "tests/stacks/test_corpus.py::test_a_script_trains_under_random_faults_as_without"
    session.run("python", "-m", "pytest", *(session.posargs or TWO), *LONG, tests, env={"CORPUS_SEEDS": "0:100"})


@nox.session(tags=[FULL])
def trainers(session: nox.Session) -> None:
    """Run the real trainers of public libraries under faults; writes docs/how-to/stacks/libraries.md."""
    install_wheel(session, "node", *STACKS, groups=("test", "trainers"))
    # It asks for torchaudio, which does not load with every torch, and which training does not need.
    install(session, "--no-deps", "speechbrain")
    env = {"TRAINERS": "all", **({} if session.posargs else {"TRAINERS_PAGE": "1"})}
    session.run("python", "-m", "pytest", *(session.posargs or TWO), *LONG, "tests/trainers", env=env)


@nox.session(tags=[FULL])
def t5_sample(session: nox.Session) -> None:
    """Run the T5 sample, which costs as much as a fifth of the stacks' tests and is a Trainer's script as theirs."""
    install_wheel(session, "node", "transformers", groups=("test", "samples"))
    session.run("python", "-m", "pytest", *session.posargs, f"tests/{T5_SAMPLE}")


@nox.session(tags=[FULL])
def stacks_oldest(session: nox.Session) -> None:
    """Run stock scripts of the stacks' oldest supported releases."""
    install_wheel(session, "node", "transformers", groups=("test",))
    install(session, f"transformers=={OLDEST_TRANSFORMERS}", constraints=None)  # it needs older dependencies, too
    session.run("python", "-m", "pytest", *(session.posargs or TWO), "tests/stacks/test_transformers.py")


@nox.session
def oldest_sdk(session: nox.Session) -> None:
    """Run what depends on azure-ai-ml, submissions to the local workspace among it, on its oldest supported release.

    Sweeps log their metric to MLflow, and the commands of checkpoints read blobs.
    """
    install_wheel(session, "node", "blob", "demo", "testing", groups=("test", "notebooks"), others=("mlflow-skinny",))
    install(session, f"azure-ai-ml=={OLDEST_SDK}", constraints=constraints_without(session, "azure-ai-ml"))
    arguments = session.posargs or THREE
    session.run("python", "-m", "pytest", *arguments, *(f"tests/{path}" for path in SDK_TESTS))


@nox.session(tags=[FULL])
@nox.parametrize(("python", "torch"), OLD_TORCH)
def oldest_torch(session: nox.Session, torch: str | None) -> None:
    """Run the demo on each Python, and scripts with and without stacks on the oldest supported releases of torch."""
    release = () if torch is None else (f"torch=={torch}",)
    stacks = STACKS if torch else ()
    install_wheel(
        session,
        *("node", "demo", *stacks),
        groups=("test",),
        others=(*release, *(OF_LIGHTNING if torch else ())),
        constraints=constraints_without(session, "torch", "sympy") if torch else CONSTRAINTS,  # torch pins sympy
    )
    session.run("azureml-elastic", "demo")
    if torch:
        paths = [f"tests/{test}" for test in OLD_TORCH_TESTS]
        session.run("python", "-m", "pytest", *(session.posargs or TWO), *paths)


def run_deepspeed_tests(session: nox.Session, version: str) -> None:
    """Run the tests that need DeepSpeed."""
    install_wheel(session, "node", "transformers", "accelerate", groups=("test",), others=(f"deepspeed=={version}",))
    extensions = Path(session.create_tmp()) / "extensions"
    shutil.rmtree(extensions, ignore_errors=True)
    env = {
        "DEEPSPEED_TESTS": "1",
        "TRAINERS": "deepspeed",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(extensions),
    }
    # It compiles a part of itself when it is first used: here, outside of the tests' time limits.
    session.run("python", "-c", "from deepspeed.comm.torch import build_shm_op; build_shm_op()", env=env)
    paths = ("tests/integration/deepspeed", "tests/stacks/test_deepspeed.py", "tests/trainers/test_trainers.py")
    session.run("python", "-m", "pytest", *(session.posargs or FOUR), *paths, env=env)


@nox.session
def deepspeed(session: nox.Session) -> None:
    """Run the tests that need DeepSpeed on the newest supported release."""
    run_deepspeed_tests(session, DEEPSPEED)


@nox.session(tags=[FULL])
def deepspeed_oldest(session: nox.Session) -> None:
    """Run the tests that need DeepSpeed on the oldest supported release."""
    run_deepspeed_tests(session, OLDEST_DEEPSPEED)


@nox.session(tags=[FULL])
def engine_samples(session: nox.Session) -> None:
    """Run the samples of Dask and Ray, and jobs with Ray: they cost as much as the engines' other tests."""
    install_wheel(session, "all", "dask", "ray", groups=("test",))
    paths = [f"tests/{test}" for test in ENGINE_SAMPLES]
    session.run("python", "-m", "pytest", *(session.posargs or TWO), *paths, env=SHORT_PATHS)
    if os.geteuid() == 0 and not session.posargs:  # Ray needs a network in which 127.0.0.1 is the only address
        again = "ip link set lo up && exec python -m pytest -k ray tests/integration/testing/test_engines.py"
        session.run("unshare", "--net", "bash", "-c", again, external=True, env=SHORT_PATHS)


@nox.session(tags=[FULL])
def horovod(session: nox.Session) -> None:
    """Run the tests of Horovod, which is built for the installed torch: that takes five minutes of CPU."""
    if shutil.which("c++") is None or shutil.which("cmake") is None:
        session.skip("Horovod is built with a C++ compiler and CMake, which are not here.")
    install_wheel(session, "all", groups=("test",), others=("pip", "setuptools<80", "wheel", "packaging"))
    torch = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    wheels = Path(session.create_tmp()) / f"horovod-for-{torch}"
    if not list(wheels.glob("*.whl")):
        session.run_install("python", "tools/build_horovod.py", str(wheels), silent=True)
    install(session, *map(str, wheels.glob("*.whl")))
    files = ("runs/test_horovod.py", "integration/engines", "integration/testing/test_horovod_job.py")
    paths = [f"tests/{file}" for file in files]
    session.run("python", "-m", "pytest", *(session.posargs or TWO), *paths, env=SHORT_PATHS)


def check_style(session: nox.Session) -> None:
    """Run everything that looks at the source alone."""
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", env={"PYTHONPATH": "src"})
    session.run("python", "tools/vocabulary.py")
    session.run("python", "tools/environment.py")
    session.run("python", "tools/budget.py")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting, import contracts, vocabulary, where the environment is read, and that nothing grows."""
    install(session, *nox.project.dependency_groups(PYPROJECT, "lint"))
    check_style(session)


@nox.session
def quick(session: nox.Session) -> None:
    """Run lint and the unit tests, for the loop between two commits."""
    install_wheel(session, "all", groups=("test", "integrations", "lint"))
    check_style(session)
    # Unit tests wait for nothing, so more processes than cores would only import and collect once more each.
    session.run("python", "-m", "pytest", *(session.posargs or TWO), "tests/unit")


@nox.session
def types(session: nox.Session) -> None:
    """Check types strictly, against the real dependencies; those of what is shown by a user's checkers."""
    install_wheel(session, "all", groups=("types",))
    session.run("mypy", env={"MYPYPATH": "src"})
    session.run("python", "tools/typed_examples.py")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a broken link is an error."""
    install(session, *nox.project.dependency_groups(PYPROJECT, "docs"))
    site = Path(session.create_tmp()) / "site"
    session.run("mkdocs", "build", "--strict", "--site-dir", str(site), env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def package(session: nox.Session) -> None:
    """Build the wheel and the source distribution, and check their files and metadata."""
    install(session, *nox.project.dependency_groups(PYPROJECT, "package"))
    folder = Path(session.create_tmp()) / "distributions"
    shutil.rmtree(folder, ignore_errors=True)
    # The wheel is built from the source distribution, as by those who package it again.
    session.run("python", "-m", "build", "--no-isolation", "--outdir", str(folder), silent=True)
    session.run("python", "tools/check_package.py", str(folder))
    session.run("twine", "check", "--strict", *map(str, sorted(folder.glob("*"))))


@nox.session
def bench(session: nox.Session) -> None:
    """Measure this library beside its peers in one run; writes benchmarks/results/recovery.md."""
    install_wheel(session, "node", groups=("test",))
    session.run("python", "benchmarks/run.py", *session.posargs)


@nox.session
def bench_startup(session: nox.Session) -> None:
    """Measure starting nodes and their memory beside peers; writes benchmarks/results/startup.md."""
    install_wheel(session, "node", groups=("test", "integrations"))  # torchft needs OpenTelemetry
    # In folders of their own, as some change what `import torch` imports; without torch, which is installed above.
    peers = Path(session.create_tmp()) / "peers"
    shutil.rmtree(peers, ignore_errors=True)
    wanted = {"torchft": ["torchft-nightly"], "nvrx": ["nvidia-resiliency-ext", "defusedxml", "nvidia-ml-py"]}
    for name, packages in wanted.items():
        try:
            install(session, "--no-deps", "--target", str(peers / name), *packages)
        except nox.command.CommandFailed:  # it is not published for every platform, and the benchmark leaves it out
            session.warn(f"{name} cannot be installed here.")
    session.run("python", "benchmarks/startup.py", "--peers-in", str(peers), *session.posargs)
