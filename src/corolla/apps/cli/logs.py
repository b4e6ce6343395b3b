"""Logs of the command line: one line per event on standard error, `time level event key=value …`, or as JSON.

Fields are what was passed as `extra`. They may hold what peers sent (names, reasons), so characters that could
move the cursor or reverse the text are written as escapes.
"""

import json
import logging
import sys
import time
from datetime import UTC, datetime

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

_OWN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class EventFormatter(logging.Formatter):
    """`09:12:55 info hop failed peer=12D3… reason="stream reset"`."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = [f"{name}={_as_field(value)}" for name, value in vars(record).items() if name not in _OWN_ATTRIBUTES]
        line = " ".join([clock, record.levelname.lower(), escape_unprintable(record.getMessage()), *fields])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """`{"time": "2026-11-30T09:12:55.123+00:00", "level": "info", "event": "hop failed", "peer": "12D3…"}`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in vars(record).items() if name not in _OWN_ATTRIBUTES}
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        known = {"time": moment, "level": record.levelname.lower(), "event": record.getMessage()}
        failure = {"exception": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps({**known, **fields, **known, **failure}, default=str)  # ASCII: nothing moves a cursor


def set_up_logging(level: str, form: str = "text") -> None:
    """Send events of `level` and above to standard error; of other libraries, warnings and above."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else EventFormatter())
    number = getattr(logging, level.upper())
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)
    logging.getLogger("corolla").setLevel(number)


def escape_unprintable(text: str) -> str:
    r"""`text` on one line, with what a terminal would not show as a character written as `\x1b` or `\u202e`."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _as_field(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else escape_unprintable(str(value))
    if text and not any(char in text for char in ' "='):
        return text
    return '"' + text.replace('"', '\\"') + '"'
