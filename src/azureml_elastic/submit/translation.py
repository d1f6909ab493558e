"""Translation of a job's command, in which variables of the workers become placeholders."""

from __future__ import annotations

from azureml_elastic.config.command.program import FoundProgram
from azureml_elastic.config.command.worker_variables import KEPT_VARIABLES, Translated, with_placeholders
from azureml_elastic.errors import CommandError
from azureml_elastic.submit.expressions import literal_of
from azureml_elastic.submit.fields import JobFields

__all__ = ["translated_command"]


def translated_command(job: JobFields, found: FoundProgram) -> Translated:
    """Return the job's command with placeholders for the variables of its workers.

    Raises:
        CommandError: such a variable is used where it has no value.
    """
    literals = [str(literal_of(value) or "") for value in job.inputs.values()]
    translated = with_placeholders(found, [*literals, *job.environment_variables.values()])
    changing = sorted(translated.variables - KEPT_VARIABLES)
    if changing and job.distribution.recovery == "in_process":
        raise CommandError(
            f"The program's arguments have ${changing[0]}, which changes when nodes come and go, but with "
            'recovery="in_process" workers keep their arguments over such changes. Read it from the session in the '
            'script, as in run.rank, or give recovery="restart".'
        )
    return translated
