"""``python -m azureml_elastic.local.watchdog NONCE``: ends the nodes of a launcher that is no more.

Its standard input is a pipe that only the launcher holds open. When that ends, for whatever reason, SIGKILL included,
everything that carries the launcher's marker is ended.
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
