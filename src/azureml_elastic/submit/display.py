"""Representations of a job for terminals and notebooks.

To keep secrets out, values of environment variables, arguments of the program and queries of URLs are omitted.
"""

from __future__ import annotations

from html import escape
from typing import Any

from azureml_elastic.config.presets import connection
from azureml_elastic.config.resources import SERVERLESS, NodePool
from azureml_elastic.errors import CommandError
from azureml_elastic.program.command import find_program, parse_program
from azureml_elastic.submit.fields import JobFields


def _rows(job: JobFields) -> list[tuple[str, str]]:
    """Return the labels and values that describe a job, which may fail to compile; unset fields are omitted."""
    resources = job.resources
    nodes = _range(resources.min_instance_count, resources.max_instance_count)
    compute = "; ".join(_pool(pool) for pool in job.pools) or ", ".join(
        part for part in (str(job.compute or SERVERLESS), resources.instance_type, job.job_tier) if part
    )
    each = job.distribution.process_count_per_instance
    found = [
        ("name", job.name),
        ("display name", job.display_name),
        ("experiment", job.experiment_name),
        ("program", _program(job.command)),
        ("code", None if job.code is None else _address(str(job.code))),
        ("environment", _environment(job.environment)),
        ("nodes", f"{nodes}, placement {resources.effective_placement}"),
        ("compute", compute),
        ("workers per node", "one per GPU" if each == "auto" else str(each)),
        ("inputs", ", ".join(f"{name}: {_value(value)}" for name, value in job.inputs.items())),
        ("outputs", ", ".join(f"{name}: {_value(value)}" for name, value in job.outputs.items())),
        ("environment variables", ", ".join(sorted(job.environment_variables))),
        ("presets", _presets(job)),
        ("profile", None if job.profile is None else str(job.profile)),
        ("services", ", ".join(job.services or {})),
        ("identity", None if job.identity is None else type(job.identity).__name__),
        ("timeout", None if job.timeout is None else str(job.timeout)),
        ("checkpoints", _address(job.checkpoint.path) if job.checkpoint.path else "default blob store"),
        ("resumes from", job.resume_from),
        ("tags", ", ".join(f"{name}={value}" for name, value in job.tags.items())),
    ]
    return [(name, text) for name, text in found if text]


def as_line(job: JobFields) -> str:
    """Return the job as one line, for ``repr``."""
    shown = ", ".join(f"{name.replace(' ', '_')}={text!r}" for name, text in _rows(job))
    return f"ElasticCommandJob({shown})"


def as_text(job: JobFields) -> str:
    """Return the job as an aligned list for a terminal."""
    shown = _rows(job)
    width = max(len(name) for name, _ in shown)
    return "\n".join(["ElasticCommandJob", *(f"  {name:<{width}}  {text}" for name, text in shown)])


def as_html(job: JobFields) -> str:
    """Return the job as an HTML table for a notebook."""
    cells = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{escape(text)}</td></tr>'
        for name, text in _rows(job)
    )
    return f"<table><caption>ElasticCommandJob</caption>{cells}</table>"


def _range(least: int, most: int) -> str:
    return f"{least} to {most}" if least != most else str(most)


def _pool(pool: NodePool) -> str:
    nodes = f"{pool.compute}: {_range(pool.min_instance_count, pool.max_instance_count)}"
    price = None if pool.price_per_hour is None else f"at {pool.price_per_hour:g} USD an hour"
    return " ".join(part for part in (nodes, pool.instance_type, pool.job_tier, price) if part)


def _program(command: str) -> str:
    try:
        program = parse_program([find_program(command).program])
    except CommandError:
        return "no program that can be started, see compile()"
    target = f"-m {program.target}" if program.kind == "module" else program.target
    return f"{program.interpreter or 'python'} {target}{' …' if program.arguments else ''}"


def _presets(job: JobFields) -> str:
    """Return the presets that differ from their defaults, including the network selected for the nodes."""
    presets = job.presets
    sizes, together = job.network_location
    network = connection(presets.network, sizes, together=together)
    unset = [name for name in ("network", "mount") if getattr(presets, name) is None]
    parts = {"network": network, "mount": None if presets.mount == "uncached" else presets.mount, "data": presets.data}
    return ", ".join([*(f"{name} {part}" for name, part in parts.items() if part), *(f"{name} off" for name in unset)])


def _environment(environment: Any) -> str:
    if isinstance(environment, str):
        return environment
    named = getattr(environment, "image", None) or getattr(environment, "name", None)
    return f"{type(environment).__name__} {named}" if named else type(environment).__name__


def _value(value: Any) -> str:
    fields = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if not fields:
        return type(value).__name__ if value is not None else "uri_folder"
    kind, path = str(fields.get("type") or "uri_folder"), fields.get("path")
    return f"{kind} {_address(str(path))}" if path else kind


def _address(path: str) -> str:
    """Return a URL without its query, which may be a signature, and without user information."""
    scheme, separator, rest = path.partition("://")
    if not separator:
        return path
    host, slash, tail = rest.partition("?")[0].partition("/")
    if "http" in scheme:
        host = host.rpartition("@")[2]
    return f"{scheme}://{host}{slash}{tail}"
