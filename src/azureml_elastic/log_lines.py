"""Lines of a node's log: how they are written, and which part of them is the message."""

from __future__ import annotations

import logging
import re
import sys

_PACKAGE = "azureml_elastic"
_BEGIN = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ [\w.-]+: ")


class _Lines(logging.Formatter):
    """Formatter that names of this package's loggers the package and the module, and all of others."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(short_name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        own = record.name.startswith(f"{_PACKAGE}.")
        record.short_name = f"{_PACKAGE}.{record.name.rpartition('.')[2]}" if own else record.name
        return super().format(record)


def write_log_lines(level: str | None) -> None:
    """Write what is logged to stderr, details of this package too if the level is ``DEBUG``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    if (level or "").upper() == "DEBUG":
        logging.getLogger(_PACKAGE).setLevel(logging.DEBUG)


def message_of_line(line: str) -> str:
    """Return a line of a node's output without date, level and logger, if it has them."""
    match = _BEGIN.match(line)
    return line if match is None else line[match.end() :]
