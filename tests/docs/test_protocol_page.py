"""The protocol's page says what the code says: every message, field and error code, and the example's bytes."""

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from corolla import errors
from corolla.net.records import MAX_LIFETIME_S, MAX_RECORD_BYTES
from corolla.server.config import SessionLimits
from corolla.server.push import MAX_JOURNAL_BYTES
from corolla.wire.frames import DEFAULT_LIMITS, frame_message
from corolla.wire.messages import AnyMessage, Heartbeat
from corolla.wire.protocol import CONTROL_PROTOCOL, DATA_PROTOCOL

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
IN_OWN_SECTION = re.compile(r"^### `(\w+)`.*?$(.*?)(?=^##)", re.MULTILINE | re.DOTALL)
IN_TABLE = re.compile(r"^\| `(\w+)` \| (?:both|server|client) \| (.*?)\|", re.MULTILINE)
SECTIONS = dict([*IN_OWN_SECTION.findall(PAGE), *IN_TABLE.findall(PAGE)])
MESSAGES = {kind.__struct_config__.tag: kind for kind in get_args(AnyMessage)}


def test_every_message_has_its_section_and_no_other_has_one() -> None:
    assert SECTIONS.keys() == MESSAGES.keys()


@pytest.mark.parametrize("tag", MESSAGES)
def test_every_field_is_named(tag: str) -> None:
    names = {field.encode_name for field in msgspec.structs.fields(MESSAGES[tag])}
    assert names <= set(re.findall(r"`(\w+)`", SECTIONS[tag]))


def test_every_error_code_is_explained() -> None:
    codes = {kind.code for kind in [errors.Refused, *errors.Refused.__subclasses__()]}
    table = PAGE[PAGE.index("| code | means") : PAGE.index("A refusal is no fault")]
    assert codes <= set(re.findall(r"`(\w+)`", table))


def test_the_examples_bytes_are_the_codes() -> None:
    said = re.search(r"```text\n((?:[0-9a-f]{2} ?)+)\n```", PAGE)
    assert said is not None
    assert bytes.fromhex(said[1]) == b"".join(map(bytes, frame_message(Heartbeat(nonce=7))))


def test_the_limits_are_the_codes() -> None:
    limits = SessionLimits()
    assert CONTROL_PROTOCOL in PAGE
    assert DATA_PROTOCOL in PAGE
    for bound in (
        f"{DEFAULT_LIMITS.message_bytes >> 20} MiB",
        f"{DEFAULT_LIMITS.header_bytes >> 10} KiB",
        f"{DEFAULT_LIMITS.frame_bytes >> 10} KiB",
        f"{DEFAULT_LIMITS.first_frame_bytes >> 10} KiB",
        f"(default {limits.max_chunk_tokens:,})",
        f"{limits.max_session_tokens:,}; {limits.max_rows} (defaults)",
        f"| {limits.max_sessions}; {limits.max_sessions_per_peer}; ",
        f"| {limits.cache_wait_s:g} s |",
        f"| {limits.idle_timeout_s:g} s |",
        f"| {MAX_JOURNAL_BYTES >> 20} MiB, oldest",
        f"at most {limits.max_journal_bytes >> 30} GiB;",
        f"{MAX_RECORD_BYTES:,} bytes",
        f"{MAX_LIFETIME_S:g} s ahead",
    ):
        assert bound in PAGE, bound
