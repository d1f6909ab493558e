"""``python -m azureml_elastic.local.watchdog NONCE``: kill the nodes of a launcher that has ended.

Standard input is a pipe that only the launcher holds open. When it closes, also because the launcher was killed, all
processes with the launcher's marker are killed.
"""

from __future__ import annotations

import sys

from azureml_elastic.local.processes import end_tree, marked

__all__: list[str] = []


def _main() -> None:
    sys.stdin.buffer.read()
    end_tree(lambda: marked(sys.argv[1] + "/"))


if __name__ == "__main__":
    _main()
