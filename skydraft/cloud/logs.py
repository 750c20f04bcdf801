"""Logs: one JSON object a line, with session and round, without prompts and texts."""

import logging
from datetime import UTC, datetime

from skydraft.characters import json_line

_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "taskName"}


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json_line(line)


def log_to_stderr(level: str) -> None:
    """Send the logs of this package and of gRPC's Python code to stderr, as JSON lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    for name in ("skydraft", "grpc"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper() if name == "skydraft" else logging.WARNING)
