"""What commands import, in the order in which they are run in one new process; what a shell completes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from typer.testing import CliRunner

from azureml_elastic.cli import app

_RUN = """
import json, sys
from azureml_elastic.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["azureml-elastic", *words]
    try:
        main()
    except SystemExit as end:
        if end.code:
            sys.exit(f"{words} ends with {end.code}")
names = {name if name.startswith("azure.ai") else name.partition(".")[0] for name in sys.modules}
print(json.dumps(sorted(names)), file=sys.stderr)
"""


def imported_packages(
    commands: Sequence[Sequence[str]], environ: Mapping[str, str] | None = None, **options: object
) -> set[str]:
    """Return the packages that have been imported when all commands have succeeded, ``azure.ai`` beside ``azure``."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN, json.dumps(commands)],
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


def completions(line: str) -> list[str]:
    """Return the words that bash offers for the last one of a command line."""
    environ = {
        "_AZUREML_ELASTIC_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }
    return CliRunner().invoke(app, env=environ, prog_name="azureml-elastic").stdout.split()
