"""The variables of a worker in the arguments of the program, such as ``$RANK`` in ``python train.py --rank $RANK``.

The shell expands a command once per node, before any worker is started. At submission these variables are therefore
replaced by placeholders, which the agent replaces by the values of each worker.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from azureml_elastic.config.distribution import ElasticDistribution
from azureml_elastic.errors import CommandError
from azureml_elastic.program.command import FoundProgram, parse_program
from azureml_elastic.program.shell import Word, all_words, placeholder, replaced, simple_commands, unused_name

_NAMES = "GROUP_RANK|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|NODE_RANK|RANK|WORLD_SIZE"
_OTHER_NAMES = {"NODE_RANK": "GROUP_RANK"}
"""Azure ML's name of a variable that torch's launcher, and so the agent, calls otherwise."""

_KEPT_VARIABLES = frozenset({"LOCAL_RANK", "LOCAL_WORLD_SIZE"})
"""Those whose values a worker keeps over all rounds."""

_PLAIN = re.compile(rf"\$(?:({_NAMES})|\{{({_NAMES})(?::?[-=?].*)?\}})", re.ASCII | re.DOTALL)
"""The variable itself. Its value after ``:-`` is not needed, since each worker has the variable."""

_IN_WORD = re.compile(rf"\$(?:({_NAMES})(?!\w)|\{{({_NAMES})(?::?[-=?][^{{}}]*)?\}})", re.ASCII)
_USED = re.compile(rf"\$\{{?[#!]?({_NAMES})\b", re.ASCII)
_LAUNCHERS = {
    **dict.fromkeys(("OMPI_", "MV2_", "MPI_LOCAL", "PMI_", "PMIX_"), "MPI's launcher"),
    "SLURM_": "Slurm",
    "AZ_BATCH": "MPI on Azure Batch",
}
"""What sets variables of ranks and addresses, by their prefix."""

_EQUAL = {
    theirs: ours
    for ours, names in {
        "RANK": "OMPI_COMM_WORLD_RANK MV2_COMM_WORLD_RANK PMI_RANK PMIX_RANK SLURM_PROCID",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE MV2_COMM_WORLD_SIZE PMI_SIZE SLURM_NTASKS SLURM_NPROCS",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_LOCAL_RANK MPI_LOCALRANKID PMI_LOCAL_RANK "
        "SLURM_LOCALID",
        "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE MV2_COMM_WORLD_LOCAL_SIZE MPI_LOCALNRANKS PMI_LOCAL_SIZE "
        "SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE",
        "NODE_RANK": "OMPI_COMM_WORLD_NODE_RANK SLURM_NODEID AZ_BATCHAI_TASK_INDEX",
        "MASTER_ADDR": "SLURM_LAUNCH_NODE_IPADDR AZ_BATCHAI_MPI_MASTER_NODE",
        "MASTER_ADDR:$MASTER_PORT": "AZ_BATCH_MASTER_NODE",
    }.items()
    for theirs in names.split()
}
"""Variables of theirs, and the ones of torchrun with the same values."""

_OF_A_LAUNCHER = re.compile(rf"\$\{{?[#!]?((?:{'|'.join(_LAUNCHERS)})\w*)", re.ASCII)
_WITHOUT_DEFAULT = re.compile(r"\$(?:\w+|\{\w+\})", re.ASCII)
_USED_IN_ARITHMETIC = re.compile(rf"\b({_NAMES})\b", re.ASCII)


class Translated(NamedTuple):
    """A command whose program has placeholders."""

    found: FoundProgram
    name: str | None
    """Name in the placeholders, as in ``%{name:RANK}``; ``None`` if there are none."""
    variables: frozenset[str]
    """The variables that were replaced."""


def with_placeholders(found: FoundProgram, texts: Iterable[str] = (), own: Collection[str] = ()) -> Translated:
    r"""Replace the variables of a worker in the arguments of the program by placeholders.

    Variables that the shell does not expand (``'$RANK'``, ``\$RANK``) stay as they are.

    Args:
        texts: texts that may become part of the arguments, from which the placeholders must differ.
        own: names of variables that the job sets itself, whatever launcher has them, too.

    Raises:
        CommandError: the shell would expand such a variable elsewhere, or as a part of an expression; or the command
            has a variable of another launcher.
    """
    command = "".join(found)
    starts = {word.start for word in _arguments(found)}
    variables: list[tuple[int, int, str]] = []
    for word in all_words(command):
        for start, end in word.expansions:
            expansion, inside = command[start:end], word.start in starts
            # Elsewhere, the shell itself goes on with a default, or asks whether it runs under that launcher.
            if (match := _OF_A_LAUNCHER.match(expansion)) and match[1] not in own and f"{match[1]}=" not in command:
                if inside or (_WITHOUT_DEFAULT.fullmatch(expansion) and match[1] in _EQUAL):
                    raise _of_a_launcher(expansion, match[1])
                continue
            name = _variable(expansion)
            if name is None:
                continue
            if not inside:
                raise CommandError(
                    f"The command has ${name} in {command[word.start : word.end]!r}, outside the arguments of its "
                    "program. The shell reads it once per node, before the agent starts the workers that have it. Give "
                    f"it to the program, as in 'python train.py --{name.lower().replace('_', '-')} ${name}', or read "
                    f"os.environ[{_OTHER_NAMES.get(name, name)!r}] in the script."
                )
            if not _PLAIN.fullmatch(command, start, end):
                raise CommandError(
                    f"The command has {expansion!r}, which the shell would compute once per node, before the agent "
                    f"starts the workers that have ${name}. Give the program ${name} itself, and compute in the script."
                )
            variables.append((start, end, name))
    if not variables:
        return Translated(found, None, frozenset())
    chosen = unused_name((command, *texts))
    parts = [(start, end, placeholder(chosen, _OTHER_NAMES.get(name, name))) for start, end, name in variables]
    program = replaced(command, parts)[len(found.before) :].removesuffix(found.after)
    return Translated(found._replace(program=program), chosen, frozenset(name for _, _, name in variables))


def words_with_placeholders(words: Sequence[str]) -> tuple[tuple[str, ...], str | None, frozenset[str]]:
    """Replace the variables of a worker in the words of a program, which no shell reads, by placeholders.

    The words may be one text, in which quotes have the meaning of a shell. The result is as in :class:`Translated`.

    Raises:
        CommandError: the words start no Python program, or such a variable is a part of an expression.
    """
    program = parse_program(words)
    if len(words) == 1 and program.arguments:
        found, name, variables = with_placeholders(FoundProgram("", words[0], ""))
        return (found.program,), name, variables
    start = len(words) - len(program.arguments)
    chosen = unused_name(words)
    names: set[str] = set()

    def put(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        names.add(name)
        return placeholder(chosen, _OTHER_NAMES.get(name, name))

    changed = (*words[:start], *(_IN_WORD.sub(put, word) for word in words[start:]))
    return changed, chosen if names else None, frozenset(names)


def refuse_changing(variables: Iterable[str], distribution: ElasticDistribution) -> None:
    """Check that the variables in a program's arguments have the same value as long as its processes run.

    Raises:
        CommandError: one of them changes, or the program is no worker.
    """
    if distribution.runs_engine and (found := sorted(variables)):
        raise CommandError(
            f"The program's arguments have ${found[0]}, a variable of a worker, but with framework="
            f'"{distribution.framework}" the program runs once, and uses the cluster. Leave it out.'
        )
    changing = sorted(set(variables) - _KEPT_VARIABLES)
    if changing and distribution.recovery == "in_process":
        raise CommandError(
            f"The program's arguments have ${changing[0]}, which changes when nodes come and go, but with "
            'recovery="in_process" workers keep their arguments over such changes. Read it from the session in the '
            'script, as in run.rank, or give recovery="restart".'
        )


def _arguments(found: FoundProgram) -> list[Word]:
    start = len(found.before)
    for words in simple_commands("".join(found)):
        inside = [word for word in words if word.start >= start]
        if inside and inside[0].start == start:
            return inside[len(inside) - len(parse_program([found.program]).arguments) :]
    return []


def _variable(expansion: str) -> str | None:
    match = _PLAIN.fullmatch(expansion) or _USED.search(expansion)
    if match is None and expansion.startswith("$(("):
        match = _USED_IN_ARITHMETIC.search(expansion)
    return None if match is None else next(name for name in match.groups() if name)


def _of_a_launcher(expansion: str, variable: str) -> CommandError:
    launcher = next(each for prefix, each in _LAUNCHERS.items() if variable.startswith(prefix))
    instead = "Leave it out: each worker has RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR, as under torchrun."
    if variable in _EQUAL:
        instead = f"Give the program ${_EQUAL[variable]} instead."
    return CommandError(
        f"The command has {expansion!r}, which only {launcher} sets; the elastic agent starts the workers in its "
        f"place. {instead}"
    )
