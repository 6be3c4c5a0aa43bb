"""Log of a process on stderr: one line per record, as text or as JSON."""

import json
import logging
import logging.config
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

VARIABLE = "QLLM_LOG_FORMAT"
"""Environment variable that passes a server's log format to the processes of its engine."""


class _TextLines(logging.Formatter):
    """Formatter of text lines. It formats the time once per second for all lines."""

    _second = -1
    _shown = ""

    def format(self, record: logging.LogRecord) -> str:
        record.name = _name(record)
        return super().format(record)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        if int(record.created) != self._second:
            self._second = int(record.created)
            self._shown = time.strftime(self.default_time_format, time.localtime(self._second))
        return f"{self._shown},{int(record.msecs):03d}"


class _JsonLines(logging.Formatter):
    """Formatter of JSON lines, one object per line."""

    def format(self, record: logging.LogRecord) -> str:
        found = {
            "time_s": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": _name(record),
            "message": record.getMessage(),
        }
        found |= getattr(record, "fields", {})
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        return json.dumps(found)


def _name(record: logging.LogRecord) -> str:
    """Return the name of a record's logger.

    `uvicorn.error` logs all levels, so its name is `uvicorn`.
    """
    return record.name.removesuffix(".error")


FORMATS: dict[str, dict[str, Any]] = {
    "text": {"()": _TextLines, "fmt": "%(asctime)s %(levelname)s %(name)s: %(message)s"},
    "json": {"()": _JsonLines},
}
LOGGERS = ("uvicorn", "qllm")


def log_config(log_format: str) -> dict[str, Any]:
    """Return the logging configuration of the process, on stderr."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"ours": FORMATS[log_format]},
        "handlers": {"ours": {"class": "logging.StreamHandler", "formatter": "ours"}},
        "loggers": {
            name: {"handlers": ["ours"], "level": "INFO", "propagate": False} for name in LOGGERS
        },
    }


@contextmanager
def configured(log_format: str) -> Iterator[None]:
    """Log in a format during the block, also in processes that this process starts.

    Args:
        log_format: Format, "text" or "json".
    """
    loggers = [logging.getLogger(name) for name in (None, *LOGGERS)]
    before = [(x, x.handlers[:], x.level, x.propagate) for x in loggers]
    environ = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = log_format
    logging.config.dictConfig(log_config(log_format))
    logging.getLogger().handlers = logging.getLogger("qllm").handlers  # for warnings of libraries
    try:
        yield
    finally:
        for logger, handlers, level, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
        if environ is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = environ


def inherited() -> str:
    """Return the log format of the process that started this one."""
    found = os.environ.get(VARIABLE, "").lower()
    return found if found in FORMATS else "text"
