"""Log lines: events with fields, and nothing in them that could fool a terminal."""

import logging

import pytest

from corolla.apps.cli.logs import EventFormatter, escape_unprintable, set_up_logging


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
