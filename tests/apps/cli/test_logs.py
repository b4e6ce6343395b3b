"""Log lines: events with fields, and nothing in them that could fool a terminal."""

import json
import logging
from pathlib import Path

import click
import pytest

from corolla.apps.cli.logs import EventFormatter, JsonFormatter, escape_unprintable, set_up_logging
from corolla.apps.cli.options import logging_options


def line_of(message: str, **fields: object) -> str:
    record = logging.makeLogRecord({"msg": message, "levelname": "INFO", **fields})
    return EventFormatter().format(record).split(" ", 1)[1]


def test_an_event_shows_its_fields() -> None:
    assert line_of("hop failed", peer="12D3", seconds=0.123456) == "info hop failed peer=12D3 seconds=0.1235"


def test_a_value_with_spaces_is_quoted() -> None:
    assert line_of("left", reason='said "bye" first') == r'info left reason="said \"bye\" first"'


@pytest.mark.parametrize("text", ["\x1b[2Jgone", "a\rb", "a\nb", "\u202egnp.exe", "\x9b31m", "\u2028"])
def test_a_peers_text_cannot_move_the_cursor(text: str) -> None:
    escaped = escape_unprintable(text)
    assert escaped.isprintable()
    assert escape_unprintable(f"name {escaped}") == f"name {escaped}"
    assert line_of("seen", name=text).isprintable()


def test_as_json_an_event_is_one_line_with_its_fields_and_none_hides_the_event() -> None:
    fields = {"peer": "12D3", "seconds": 0.5, "event": "faked", "name_of": "\u202e\n", "path": Path("/x")}
    record = logging.makeLogRecord({"msg": "hop failed", "levelname": "INFO", "created": 0.0, **fields})
    line = JsonFormatter().format(record)
    assert line.isprintable()
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.000+00:00", "level": "info", "event": "hop failed",
        "peer": "12D3", "seconds": 0.5, "name_of": "\u202e\n", "path": "/x",
    }  # fmt: skip


def test_the_command_line_takes_either_form(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    @logging_options("info")
    def command() -> None:
        logging.getLogger("corolla.test").info("here", extra={"peer": "12D3"})

    root, ours = logging.getLogger(), logging.getLogger("corolla")
    before = root.handlers[:], root.level, ours.level
    try:
        command.main(["--log-level", "info", "--log-format", "json"], standalone_mode=False)
        assert json.loads(capsys.readouterr().err)["event"] == "here"
        command.main([], standalone_mode=False)
        assert capsys.readouterr().err.endswith("info here peer=12D3\n")
    finally:
        root.handlers[:], root.level = before[0], before[1]
        ours.setLevel(before[2])


def test_other_libraries_are_heard_only_when_they_warn() -> None:
    root, ours = logging.getLogger(), logging.getLogger("corolla")
    before = root.handlers[:], root.level, ours.level
    try:
        set_up_logging("debug")
        assert logging.getLogger("corolla.net").isEnabledFor(logging.DEBUG)
        assert not logging.getLogger("filelock").isEnabledFor(logging.INFO)
        set_up_logging("error")
        assert not logging.getLogger("filelock").isEnabledFor(logging.WARNING)
    finally:
        root.handlers[:], root.level = before[0], before[1]
        ours.setLevel(before[2])
