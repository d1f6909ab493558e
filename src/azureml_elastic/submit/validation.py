"""Checks of a job as a whole, made before anything is uploaded."""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path, PurePosixPath

from azureml_elastic.environment import names as variables
from azureml_elastic.errors import CommandError, SubmitError
from azureml_elastic.masking import named_secrets
from azureml_elastic.plurals import counted
from azureml_elastic.program.command import FoundProgram, find_program, parse_program
from azureml_elastic.program.fixed_ranks import describe_fixed_ranks
from azureml_elastic.program.launching import refuse_launching
from azureml_elastic.program.source import program_modules
from azureml_elastic.program.translation import refuse_launcher
from azureml_elastic.submit.expressions import check_expressions, translated_command, with_literals
from azureml_elastic.submit.fields import JobFields, field_of
from azureml_elastic.submit.local_files import SCHEME

_LOG = logging.getLogger(__name__)

RESERVED_PREFIX = "azureml_elastic_"
"""Prefix of the inputs and outputs that this library adds to the job."""

_RESERVED_VARIABLES = variables.OWN - {variables.INTEGRATIONS, variables.STEP}
_RUN_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,254}", re.ASCII)
_STEP_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
_OWN_DISK = frozenset({"dev", "home", "root", "tmp", "var"})
"""Folders below the root of a container that no other node sees."""

_SHARED_STORAGE = re.compile(r"(?:azureml:(?://datastores|/{0,2}subscriptions)/|(?:abfss?|az)://)[^/]", re.IGNORECASE)
_CHECKPOINTS = (
    "Leave it out for the workspace's default blob store, or give a URL, such as "
    "'azureml://datastores/<datastore>/paths/<folder>/' or "
    "'abfs://<container>@<account>.dfs.core.windows.net/<folder>', or the path of a mount that all nodes share."
)
_MOST_NODES = 1000
"""A round is one row of the table with all its members, and 900 KiB have room for 1,000 of the longest names."""

_LONGEST_TEXTS = {"display_name": 256, "experiment_name": 256, "description": 5000}
_MOST_ENTRIES = 50
_LONGEST_ENTRY = (100, 1000)  # characters of a name and of its value
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)

_CHANGES_FOLDER = re.compile(r"(?:^|[\s;&|(])(?:cd|pushd)\s")


def check(job: JobFields) -> FoundProgram:
    """Check the fields of a job against each other, and return the position of the program in its command."""
    _check_names(job)
    _check_sizes(job)
    _check_resume_from(job)
    _check_path_on_compute(job)
    _check_literals(job)
    _check_checkpoint_path(job)
    _check_compute(job)
    _check_docker_args(job)
    _check_budget(job)
    if job.pools:
        _check_pools(job)
    if job.resources.effective_placement == "fan_out":
        _check_fan_out(job)
    check_expressions(job.command, job.inputs, job.outputs, reserved=RESERVED_PREFIX)
    refuse_launcher(job.command, job.distribution, partial(with_literals, inputs=job.inputs))
    found = find_program(job.command)
    _check_script(job, found)
    _check_text(job, found)
    translated_command(job, found)  # for what it refuses
    _warn_of_secrets(job)
    _warn_of_previews(job)
    return found


def _code_folder(job: JobFields) -> Path | None:
    if job.code is None or SCHEME.match(str(job.code)):
        return None
    code = Path(job.code)
    return code if code.is_dir() else code.parent


def _check_sizes(job: JobFields) -> None:
    """Check what Azure ML would refuse after everything is uploaded, or accept and never start."""
    most = job.resources.max_instance_count
    if most > _MOST_NODES:
        raise SubmitError(f"max_instance_count={most} is above the limit of {_MOST_NODES} nodes of a run. Lower it.")
    try:
        job.distribution.node_limits(job.resources.min_instance_count, most)
        job.distribution.check_ports(job.rendezvous.port_range)
    except ValueError as error:
        raise SubmitError(f"{error}.") from None
    for field, longest in _LONGEST_TEXTS.items():
        length = len(getattr(job, field) or "")
        if length > longest:
            raise SubmitError(f"{field} has {length} characters, above the limit of {longest}. Shorten it.")
    for field, entries in (("tags", job.tags), ("properties", job.properties)):
        if len(entries) > _MOST_ENTRIES:
            raise SubmitError(f"The job has {len(entries)} {field}, above the limit of {_MOST_ENTRIES}. Remove some.")
        for name, value in entries.items():
            if len(name) > _LONGEST_ENTRY[0] or len(value) > _LONGEST_ENTRY[1]:
                raise SubmitError(
                    f"{name[:40]!r} of {field} has {len(name)} characters and its value {len(value)}; the limits are "
                    f"{_LONGEST_ENTRY[0]} and {_LONGEST_ENTRY[1]}. Shorten it."
                )


def _check_names(job: JobFields) -> None:
    for kind, names in (("input", job.inputs), ("output", job.outputs)):
        wrong = next((name for name in names if not _IDENTIFIER.fullmatch(name)), None)
        if wrong is not None:
            raise SubmitError(
                f"The {kind} {wrong!r} has a name that no expression can have. Give letters, digits and '_' alone, the "
                "first of which is no digit."
            )
        taken = sorted(name for name in names if name.startswith(RESERVED_PREFIX))
        if taken:
            raise SubmitError(
                f"The {kind} {taken[0]!r} begins with {RESERVED_PREFIX!r}, which is reserved for the inputs and "
                f"outputs that this library adds to the job. Rename the {kind}."
            )
    if variables.RUN_ID in job.environment_variables:
        raise SubmitError(
            f"The environment variable {variables.RUN_ID} is the id of one run, but the job may be submitted again, as "
            "by a schedule, and would find that run at its end. Remove it. Elastic steps of one pipeline differ "
            f"by {variables.STEP}, as in environment_variables={{{variables.STEP!r}: 'evaluate'}}; to continue a "
            "run give resume_from."
        )
    step = job.environment_variables.get(variables.STEP)
    if step is not None and not _STEP_NAME.fullmatch(step):
        raise SubmitError(
            f"The environment variable {variables.STEP} has the value {step!r}, which is no name of a step. Give at "
            "most 64 letters, digits, '-', '_' and '.', the first of which is a letter or a digit."
        )
    taken = sorted(_RESERVED_VARIABLES & set(job.environment_variables))
    if taken:
        raise SubmitError(
            f"The environment variable {taken[0]} is set by this library on the nodes. Remove it from "
            "environment_variables; use resources, distribution and checkpoint to configure the nodes."
        )


def _check_resume_from(job: JobFields) -> None:
    given = job.resume_from
    if given is None:
        return
    if not _RUN_NAME.fullmatch(given):
        raise SubmitError(
            f"resume_from={given!r} is no name of a run. Give the name that the submission printed, such as "
            "'olive_sun_t5kq8vzp2c', not an id or an address."
        )
    if given == job.name:
        raise SubmitError(
            f"resume_from={given!r} is the name of this job itself, and a run that has ended cannot be entered again. "
            "Give the job another name, or name=None for a new one."
        )


def _check_path_on_compute(job: JobFields) -> None:
    for kind, values in (("input", job.inputs), ("output", job.outputs)):
        for name, value in values.items():
            path = field_of(value, "path_on_compute")
            if path is not None:
                effect = "ignores it silently" if kind == "output" else "cannot submit a job with it"
                raise SubmitError(
                    f"The {kind} {name!r} has path_on_compute={path!r}, but azure-ai-ml {effect}, with any placement. "
                    f"Leave it out, and take the folder that ${{{{{kind}s.{name}}}}} names in the command."
                )


def _check_literals(job: JobFields) -> None:
    """Check literals against the limits of their ``Input``, of which azure-ai-ml submits the value alone."""
    for name, value in job.inputs.items():
        given, choices = field_of(value, "default"), field_of(value, "enum")
        least, most = field_of(value, "min"), field_of(value, "max")
        if given is None:
            continue
        if choices and given not in choices:
            raise SubmitError(f"The value of the input {name!r} is not in its enum {list(choices)}. Give one of these.")
        if (least is not None and given < least) or (most is not None and given > most):
            limits = " and ".join(f"{word} {one}" for word, one in (("min", least), ("max", most)) if one is not None)
            raise SubmitError(f"The value of the input {name!r}, {given}, is beyond its {limits}. Correct one of them.")


def _check_checkpoint_path(job: JobFields) -> None:
    """Refuse a folder on a node's own disk, which is lost with the node and which the other nodes do not see."""
    path = job.checkpoint.path
    if path is None:
        return
    scheme = SCHEME.match(path)
    if scheme is None and "$" in path:  # a variable of the nodes, such as the path of a mount
        return
    if scheme is not None:
        if _SHARED_STORAGE.match(path):
            return
        problem = (
            "is a folder on each node's own disk, or in its memory, which is lost with the node"
            if scheme.group().lower() in ("file:", "memory:")
            else "is no storage that the nodes of an Azure ML job share: they log in to Azure alone"
        )
        raise SubmitError(f"checkpoint.path={path!r} {problem}. {_CHECKPOINTS}")
    folder = PurePosixPath(path)
    if not folder.is_absolute() or folder.parts[1:2] == () or folder.parts[1] in _OWN_DISK:
        raise SubmitError(
            f"checkpoint.path={path!r} is a folder on each node's own disk, which is lost with the node. {_CHECKPOINTS}"
        )


def _check_text(job: JobFields, found: FoundProgram) -> None:
    """Check that the program is no launcher by its text, and warn where it has ranks or an address of its own."""
    folder = _code_folder(job)
    if folder is None:
        return
    runs_engine = job.distribution.runs_engine
    modules = list(program_modules(parse_program([found.program]), folder))
    refuse_launching(found, folder, modules, runs_engine=runs_engine)
    if not runs_engine and (fixed := describe_fixed_ranks(modules)):
        _LOG.warning("%s", fixed)


def _warn_of_secrets(job: JobFields) -> None:
    for name in named_secrets(job.command):
        _LOG.warning(
            "The command has what looks like a secret after %r. Everyone who can read the job "
            "can read it. Let the script read it from a key vault, for which the nodes have an identity.",
            name,
        )


def _warn_of_previews(job: JobFields) -> None:
    """Warn of fields that the API version with which azure-ai-ml submits command jobs does not have."""
    resources = job.resources
    if resources.effective_placement == "fan_out":
        return
    version = "API version 2025-01-01-preview of command jobs has no"
    if resources.effective_placement == "service" and resources.max_instance_count > resources.min_instance_count:
        _LOG.warning(
            "%s resources.maxInstanceCount, on which the placement 'service' rests: Azure ML may ignore it and start "
            "min_instance_count=%d of the %d nodes; the replacement policy, if any, then requests the others as jobs "
            "of their own. Take the placement 'fan_out' to depend on no preview.",
            version,
            resources.min_instance_count,
            resources.max_instance_count,
        )
    fields = {
        "queueSettings.priority": ("priority", job.priority),
        "resources.locations": ("locations", resources.locations),
    }
    for field, (name, value) in fields.items():
        if value is not None:
            _LOG.warning("%s %s: Azure ML may ignore %s=%r.", version, field, name, value)


def _check_compute(job: JobFields) -> None:
    if job.compute == "local":  # a pool rejects it itself
        raise SubmitError(
            "compute='local' would run a single node in a container of this machine. To try the job here, run "
            "'azureml-elastic local'; to submit it, give the name of a cluster."
        )


def _check_docker_args(job: JobFields) -> None:
    resources = job.resources
    if resources.docker_args is None or isinstance(resources.docker_args, str):
        return
    problem = "docker_args is a list, and with a list azure-ai-ml drops"
    if resources.effective_placement == "service":
        raise SubmitError(
            f"{problem} the max_instance_count that the placement 'service' requires. Give one string, "
            "docker_args=shlex.join([...]), or take the placement 'fan_out'."
        )
    if resources.locations is not None:
        raise SubmitError(
            f"{problem} locations={list(resources.locations)!r}. Give one string, docker_args=shlex.join([...])."
        )


def _check_budget(job: JobFields) -> None:
    budget = None if job.replacement is None else job.replacement.budget
    if budget is None:
        return
    if not job.pools:
        raise SubmitError(
            f"replacement.budget={budget:g} USD needs a price. Name the compute as a pool that has one: "
            f"compute=[NodePool({job.compute or 'serverless'!r}, max_instance_count=..., price_per_hour=...)]."
        )
    unpriced = [pool.compute for pool in job.pools if pool.price_per_hour is None]
    if unpriced:
        raise SubmitError(
            f"replacement.budget={budget:g} USD needs the price of every pool, and {unpriced[0]!r} has none. Give "
            "NodePool(..., price_per_hour=...)."
        )


def _check_pools(job: JobFields) -> None:
    if job.resources.placement not in (None, "fan_out"):
        raise SubmitError(
            f"Node pools need the placement 'fan_out', whose nodes are separate jobs; placement="
            f"{job.resources.placement!r} is one job on one compute. Leave placement out, or name one compute."
        )
    kinds = [(pool.compute, pool.instance_type, pool.job_tier) for pool in job.pools]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise SubmitError(f"The pool {kind[0]!r} is there {kinds.count(kind)} times. Combine them into one.")
    for field, value in (("job_tier", job.job_tier), ("resources.instance_type", job.resources.instance_type)):
        if value is not None:
            raise SubmitError(
                f"{field}={value!r} cannot be combined with node pools, each of which has its own. Give it to a "
                f"pool: NodePool('serverless', {field.rpartition('.')[2]}={value!r}, ...)."
            )
    most = job.resources.max_instance_count
    least_of_pools = sum(pool.min_instance_count for pool in job.pools)
    most_of_pools = sum(pool.max_instance_count for pool in job.pools)
    if least_of_pools > most:
        raise SubmitError(
            f"The pools' min_instance_count add up to {least_of_pools} nodes, above max_instance_count={most} of the "
            "resources. Lower the pools' min_instance_count or raise max_instance_count."
        )
    if most_of_pools < most:
        raise SubmitError(
            f"The pools give {counted(most_of_pools, 'node')} at most, below max_instance_count={most} of the "
            "resources. Raise the pools' max_instance_count or lower that of the resources."
        )


def _check_fan_out(job: JobFields) -> None:
    if job.parent_job_name is not None:
        raise SubmitError(
            f"parent_job_name={job.parent_job_name!r} cannot be carried by the placement 'fan_out', whose nodes have "
            "the pipeline as their parent. Leave it out, or take the placement 'gang' or 'service'."
        )
    if re.match("https?://", str(job.code), re.IGNORECASE):
        raise SubmitError(
            f"code={str(job.code)!r} is an address, which azure-ai-ml takes for a job of its own alone, and with the "
            "placement 'fan_out' the nodes are steps of a pipeline. Give a local folder, or take the placement 'gang'."
        )
    for name, output in job.outputs.items():
        version = field_of(output, "version")
        if version is not None and job.resources.max_instance_count > 1:
            raise SubmitError(
                f"The output {name!r} registers version={version!r}, but with the placement 'fan_out' each of "
                f"{job.resources.max_instance_count} nodes would register it. Leave the version out, and each node "
                "registers one of its own, or take the placement 'gang' or 'service'."
            )


def _check_script(job: JobFields, found: FoundProgram) -> None:
    folder = _code_folder(job)
    if folder is None:
        return
    code = Path(str(job.code))
    if not code.exists():
        raise SubmitError(
            f"code={str(job.code)!r} does not exist (looked for {code.absolute()}). Give the folder that holds the "
            "script, or code=None where the script is in the environment."
        )
    program = parse_program([found.program])
    target = program.target
    if program.kind == "module" or "$" in target or target.startswith(("/", "~")):
        return
    # After 'cd' it is not known what the path is relative to.
    if _CHANGES_FOLDER.search(found.before) or (folder / target).exists():
        return
    raise CommandError(
        f"The command starts {target!r}, which is not in code={str(job.code)!r} (looked for "
        f"{(folder / target).absolute()}). Correct the script's path, which is relative to the code folder, or code."
    )
