"""``python -m azureml_elastic``: the command ``azureml-elastic``, where it is not in the PATH."""

from __future__ import annotations

from azureml_elastic.cli import main

if __name__ == "__main__":
    main()
