"""Translation of a job's command, in which variables of the workers become placeholders."""

from __future__ import annotations

from azureml_elastic.config.command.program import FoundProgram
from azureml_elastic.config.command.worker_variables import Translated, refuse_changing, with_placeholders
from azureml_elastic.submit.expressions import literal_of
from azureml_elastic.submit.fields import JobFields

__all__ = ["translated_command"]


def translated_command(job: JobFields, found: FoundProgram) -> Translated:
    """Return the job's command with placeholders for the variables of its workers.

    Raises:
        CommandError: such a variable is used where it has no value.
    """
    literals = [str(literal_of(value) or "") for value in job.inputs.values()]
    translated = with_placeholders(found, [*literals, *job.environment_variables.values()], job.environment_variables)
    refuse_changing(translated.variables, job.distribution)
    return translated
