"""Errors of Azure's packages as one sentence."""

import json

import pytest
from azure.ai.ml.exceptions import ErrorCategory, ErrorTarget, MlException
from azure.core.exceptions import HttpResponseError

from azureml_elastic.errors import SubmitError
from azureml_elastic.submit.client import readable_errors

VALIDATION = {
    "result": "Failed",
    "errors": [
        {
            "message": "(NotFound) There is no compute 'spot'.\nCode: NotFound",
            "path": "compute",
            "value": "azureml:spot",
        },
        {"message": "Not a valid integer."},
    ],
}


def raised(text):
    return MlException(message=text, no_personal_data_message="", target=ErrorTarget.JOB, error_category=ErrorCategory)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            raised(json.dumps(VALIDATION, indent=2)),
            "compute: (NotFound) There is no compute 'spot'.; Not a valid integer.",
        ),
        (raised('{"result": "Failed", "errors": []}'), '{"result": "Failed", "errors": []}'),
        (raised("[1]\nmore"), "[1]"),
        (HttpResponseError("Forbidden\nCode: 403"), "Forbidden"),
    ],
)
def test_the_sentence_says_what_was_wrong(error, sentence):
    with pytest.raises(SubmitError) as caught, readable_errors("submit job.yml"):
        raise error
    assert str(caught.value) == f"Azure could not submit job.yml: {sentence}"
