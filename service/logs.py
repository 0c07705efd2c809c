"""One log format, to stderr, in both processes: lines for people or JSON for machines.

A record may carry fields beside its message (see with_fields). Neither form holds a line break within a record, apart
from a traceback's in the one for people.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from dataclasses import dataclass
from typing import Any

# The attribute of a log record that holds its fields.
_FIELDS = "nybble_fields"


@dataclass(frozen=True)
class LogConfig:
    """level is for our own loggers; libraries are heard from warnings on. form: "human" or "json"."""

    level: int | str = "INFO"
    form: str = "human"


def with_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The `extra` of a log call. Values are strings, numbers, None, or lists and dicts of them; None is left out."""
    return {_FIELDS: {name: value for name, value in fields.items() if value is not None}}


class HumanFormatter(logging.Formatter):
    """time LEVEL logger: message name=value ..."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        fields: dict[str, Any] = getattr(record, _FIELDS, {})
        return line + "".join(f" {name}={self._shown(value)}" for name, value in fields.items())

    @staticmethod
    def _shown(value: Any) -> str:
        plain = isinstance(value, str) and value.isprintable() and value and not set(value) & set(' "')
        return str(value) if plain else json.dumps(value, ensure_ascii=False)


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, the fields, and exception, a traceback, where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


FORMATTERS: dict[str, type[logging.Formatter]] = {"human": HumanFormatter, "json": JsonFormatter}


def configure_logging(config: LogConfig) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATTERS[config.form]())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("nybble").setLevel(config.level)
