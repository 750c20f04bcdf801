"""Logs as one JSON object a line, with session and round; no prompt and no text unless asked for."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

from skydraft.characters import json_line

_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "taskName"}


class JsonLines(logging.Formatter):
    """time, level, event, and whatever was given as `extra`; an exception as one string."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json_line(line)


class _Stderr(logging.Handler):
    """Writes to what stderr is at the moment, which others may have replaced since."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def log_to_stderr(level: str) -> None:
    """Send this package's logs, and what gRPC's Python side complains about, to stderr as JSON lines."""
    handler = _Stderr()
    handler.setFormatter(JsonLines())
    for name in ("skydraft", "grpc"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper() if name == "skydraft" else logging.WARNING)
