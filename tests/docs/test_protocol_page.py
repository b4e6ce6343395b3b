"""The protocol's page says what the code says: messages, fields, error codes, numbers, what is done with a step."""

import re
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec.structs import replace

from corolla import errors
from corolla.client import hop, mending, slowness, steps
from corolla.client.config import ClientConfig
from corolla.client.replays import NOTHING_LIVE
from corolla.ids import PeerId, SessionId
from corolla.net import gate
from corolla.net.buckets import Rate
from corolla.net.channel import MAX_PENDING_BYTES
from corolla.net.guard import StreamLimits
from corolla.net.libp2p.sealed import WINDOW_S
from corolla.net.liveness import Liveness
from corolla.net.places import MAX_PER_KEY
from corolla.net.records import CLOCK_SKEW_S, MAX_LIFETIME_S, MAX_RECORD_BYTES
from corolla.net.swarm_key import MAX_KEYS
from corolla.server import handler, hosted
from corolla.server.config import ServerConfig, SessionLimits
from corolla.server.control import MAX_CONTROL_STREAMS_PER_PEER
from corolla.server.kv import PAGE_TOKENS
from corolla.server.neighbours import MIN_REFRESH_S
from corolla.server.opening import caps_of
from corolla.server.push import MAX_JOURNAL_BYTES
from corolla.server.session import (
    Action,
    AnswerFromJournal,
    Break,
    Compute,
    Ignore,
    Refuse,
    SessionState,
    Wait,
    on_step,
)
from corolla.swarm.announcement import MAX_VALUE_BYTES
from corolla.wire.frames import DEFAULT_LIMITS, frame_message
from corolla.wire.journal import MAX_RECENT
from corolla.wire.messages import MAX_HOPS, MAX_ROWS, AnyMessage, Heartbeat, HopTiming, Step
from corolla.wire.protocol import CONTROL_PROTOCOL, DATA_PROTOCOL
from corolla.wire.tensors import MAX_ELEMENTS, MAX_RANK, WireTensor

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
IN_OWN_SECTION = re.compile(r"^### `(\w+)`.*?$(.*?)(?=^##)", re.MULTILINE | re.DOTALL)
IN_TABLE = re.compile(r"^\| `(\w+)` \| (?:both|server|client) \| (.*?)\|", re.MULTILINE)
SECTIONS = dict([*IN_OWN_SECTION.findall(PAGE), *IN_TABLE.findall(PAGE)])
MESSAGES = {kind.__struct_config__.tag: kind for kind in get_args(AnyMessage)}

LIMITS, CLIENT, LIVENESS, STREAMS = SessionLimits(), ClientConfig(), Liveness(), StreamLimits()
CAPS = caps_of(LIMITS, ServerConfig("a model").cache_tokens // PAGE_TOKENS)


def table_under(heading: str, first_column: str) -> dict[str, list[str]]:
    """The rows of the first such table of a section: first cell → the others."""
    section = PAGE[PAGE.index(f"\n{heading}\n") :]
    lines = section[section.index(f"\n| {first_column} |") :].splitlines()[3:]
    rows = [line.strip("| ").split(" | ") for line in lines[: next(i for i, line in enumerate(lines) if not line)]]
    return {first: rest for first, *rest in rows}


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


# --- numbers


def mib(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 20):g}"


def rate(each: Rate) -> str:
    return f"{each.per_s:g} a second after a burst of {each.burst:g}"


BOUNDS = {
    "a message, ": f"{mib(DEFAULT_LIMITS.message_bytes)} MiB",
    "a header": f"{DEFAULT_LIMITS.header_bytes >> 10} KiB",
    "a frame": f"{DEFAULT_LIMITS.frame_bytes >> 10} KiB",
    "the first message ": f"{DEFAULT_LIMITS.first_frame_bytes >> 10} KiB",
    "dimensions of a tensor; ": f"{MAX_RANK}; 2²⁶",
    f"entries of `rows`, each below {MAX_ROWS:,}, ": f"{MAX_ROWS:,}",
    "hops that `timings` ": f"{MAX_HOPS}; {MAX_HOPS - 1} in a step",
    "unsent bytes ": f"{mib(MAX_PENDING_BYTES)} MiB",
    "steps of one session on the ring": f"{steps.WINDOW_STEPS}, or {mib(steps.WINDOW_BYTES)} MiB of them",
    "steps of one session in line": f"{hosted.WINDOW_STEPS}; {mib(hosted.WINDOW_BYTES)} MiB",
    "steps of all sessions": f"{LIMITS.max_waiting_steps:,}",
    "bytes of steps ": "; ".join(map(mib, astuple(CAPS.bytes_in_flight))),
    "positions × rows ": f"`max_chunk_tokens` (default {LIMITS.max_chunk_tokens:,})",
    "bytes of hidden states ": f"`window_bytes` (default {mib(LIMITS.max_chunk_bytes)} MiB)",
    "steps kept as they were": f"{MAX_RECENT}",
    "a session's journal ": f"{mib(MAX_JOURNAL_BYTES)} MiB",
    "all sessions' journals and last replies ": "half of the memory that it leaves alone, or a quarter of the "
    f"machine's where the device has its own, at most {LIMITS.max_journal_bytes >> 30} GiB",
    "a client's journals": f"{CLIENT.max_journal_bytes >> 30} GiB",
    "positions in a session; rows": f"{LIMITS.max_session_tokens:,}; {LIMITS.max_rows}",
    "sessions of one client": "; ".join(map(str, astuple(CAPS.sessions))),
    "leased positions ": "half the cache, but one longest session always; 3 caches; 4 caches",
    "new sessions ": f"{rate(CAPS.peer_opens)}; {CAPS.group_opens.per_s:g} after {CAPS.group_opens.burst:g}",
    "new routes ": f"{rate(CAPS.peer_routes)}; {CAPS.group_routes.per_s:g} after {CAPS.group_routes.burst:,g}",
    "control streams ": f"{MAX_CONTROL_STREAMS_PER_PEER}",
    "data streams ": f"{LIMITS.max_sessions}",
    "streams that one peer opens": f"{rate(STREAMS.peer)}, and {STREAMS.peer.burst:g} open at once; "
    f"{STREAMS.group.per_s:g} after {STREAMS.group.burst:,g}. One with nonsense counts as {STREAMS.nonsense:g}",
    "streams of one peer closed": f"{STREAMS.refused.burst:g}, and one each {1 / STREAMS.refused.per_s:g} s; ",
}
WAITS = {
    "a dial": f"{CLIENT.dial_timeout_s:g} s",
    "the answer to an `open`": f"{CLIENT.open_timeout_s:g} s",
    "in line for cache": f"{LIMITS.cache_wait_s:g} s",
    "an `attach` ": f"{LIMITS.attach_timeout_s:g} s",
    "the handshake ": f"{gate.HANDSHAKE_TIMEOUT_S:g} s",
    "a `replay` ": f"{LIMITS.dial_timeout_s:g} s",
    "the output of a step": f"{CLIENT.step_timeout_s:g} s, and a second for each {steps.SLOWEST_LINK:,} bytes",
    "no output, ": f"{LIVENESS.dead_after_s:g} s where a server pushes to another, else {LIVENESS.dead_after_s * 3:g}",
    "a single-position step ": f"{slowness.STUCK_S:g} s, and at least {slowness.STUCK_TIMES:g} times",
    "after `overloaded` ": f"{mending.OVERLOAD_PAUSE_S:g} s",
    "before a recovery, ": "0, 0, 0.1, 0.5, 1, then 2 s",
    "nobody covers a block": f"{CLIENT.wait_for_servers_s:g} s",
    "silence: ": f"{LIVENESS.interval_s:g} s, {LIVENESS.dead_after_s:g} s",
    "a server called dead ": f"{hop.AWAIT_SIGN_S:g} s",
    "a control stream without a session": f"{hop.IDLE_LINK_S:g} s",
    "a session without a step": f"{LIMITS.idle_timeout_s:g} s",
    "the client's streams ": f"{handler.FAREWELL_S:g} s",
    "a drain": f"{ServerConfig('a model').drain_timeout_s:g} s",
}


@pytest.mark.parametrize(("heading", "said"), [("## Limits", BOUNDS), ("## Time-outs", WAITS)])
def test_every_number_of_the_tables_is_the_codes(heading: str, said: dict[str, str]) -> None:
    rows = table_under(heading, "what")
    for start, cell in said.items():
        [row] = [row for row in rows if row.startswith(start)]
        assert re.match(re.escape(cell) + r"(?!\d)", rows.pop(row)[0]), row
    assert not rows, "rows that nothing here compares"


def test_the_numbers_beside_the_tables_are_the_codes() -> None:
    assert MAX_ELEMENTS == 1 << 26
    assert LIMITS.dial_timeout_s == CLIENT.dial_timeout_s, "the page has one row for both"
    assert MIN_REFRESH_S == 1, "the page says: once a second"
    assert mending.RETRY_PAUSES_S == (0, 0, 0.1, 0.5, 1, 2)
    assert f"after {mending.MAX_FRUITLESS}, once {CLIENT.wait_for_servers_s:g} s have passed" in PAGE
    tokens = ServerConfig("a model").cache_tokens
    assert astuple(CAPS.leased_tokens) == (tokens // 2, 3 * tokens, 4 * tokens)
    for bound in (
        CONTROL_PROTOCOL,
        DATA_PROTOCOL,
        f"{mib(steps.WINDOW_BYTES)} MiB / min({steps.WINDOW_STEPS}, `S` + 1)",
        f"else {LIVENESS.dead_after_s * 3:g} s; and a second for each {steps.SLOWEST_LINK:,} bytes",
        f"for {STREAMS.cut.first_s:g} s, twice as long each time up to {STREAMS.cut.longest_s:g} s",
        f"steps {20 - MAX_RECENT + 1}…19 as they were, replay",
        f"the history and steps {29 - MAX_RECENT + 1}…29, all marked replay",
        f"live_from 2{str(NOTHING_LIVE.bit_length() - 1).translate(str.maketrans('0123456789', '⁰¹²³⁴⁵⁶⁷⁸⁹'))}",
        f"of its keys: 1…{MAX_KEYS}",
        f"more than {WINDOW_S:g} s off",
        f"{MAX_RECORD_BYTES:,} bytes",
        f"{MAX_LIFETIME_S:g} s ahead",
        f"{CLOCK_SKEW_S:g} s more",
        f"fewer than {MAX_PER_KEY} records",
        f"at most {MAX_VALUE_BYTES} bytes",
    ):
        assert bound in PAGE, bound


# --- the rules of a step

SHAPE = (1, 1, 4)


def a_step(step_no: int, position: int, *, shape: tuple[int, ...] = SHAPE, **fields: Any) -> Step:
    return Step(step_no=step_no, position=position, hidden=WireTensor("float32", shape, bytes(4096)), **fields)


def is_refused(code: str) -> Callable[[Action], bool]:
    return lambda action: isinstance(action, Refuse) and action.error.code == code


def is_a(kind: type[Action]) -> Callable[[Action], bool]:
    return lambda action: isinstance(action, kind)


HELD = SessionState(
    session=SessionId(bytes(16)), owner=PeerId("client"), upstream=PeerId("before"), route_version=1, max_tokens=64,
    max_rows=1, max_chunk_tokens=8, hidden_size=4, last_step_no=20, position=21, rows=1,
    recent=tuple((number, number) for number in range(13, 21)),
)  # fmt: skip
UNTRIMMED = replace(HELD, can_trim=False)
WHOLE_ONLY = replace(HELD, prefill_in_chunks=False)
ON: dict[str, Any] = {"route_version": 1}
REPLAYED: dict[str, Any] = {"route_version": 1, "replay": True}

JUDGED: dict[str, list[tuple[SessionState, Step, Callable[[Action], bool]]]] = {
    "of an older `route_version`": [(HELD, a_step(21, 21), is_a(Ignore))],
    "of a newer one, ": [(HELD, a_step(21, 21, route_version=2), is_a(Wait))],
    "marked `replay`, `step_no > last`": [(HELD, a_step(30, 21, **REPLAYED), is_a(Compute))],
    "marked `replay`, `step_no = last`, ": [(HELD, a_step(20, 21, **REPLAYED), is_a(Compute))],
    "marked `replay`, else": [
        (HELD, a_step(20, 20, **REPLAYED), is_a(Ignore)),
        (HELD, a_step(20, 21, trim_to=21, **REPLAYED), is_a(Ignore)),
        (HELD, a_step(3, 21, **REPLAYED), is_a(Ignore)),
    ],
    "`step_no > last + 1`; ": [
        (HELD, a_step(22, 21, **ON), is_refused("out_of_order")),
        (replace(HELD, last_step_no=-1, position=0, rows=0), a_step(22, 0, **ON), is_a(Compute)),
    ],
    "`step_no ≤ last`, among the newest 8, same ": [
        (HELD, a_step(13, 13, **ON), is_a(AnswerFromJournal)),
        (HELD, a_step(20, 20, shape=(1, 3, 4), **ON), is_a(AnswerFromJournal)),
    ],
    "`step_no ≤ last`, among the newest 8, other ": [(HELD, a_step(20, 19, **ON), is_a(Break))],
    "`step_no ≤ last`, older": [(HELD, a_step(12, 12, **ON), is_refused("journal_gap"))],
    "would be computed, but not at the position held": [
        (HELD, a_step(21, 20, **ON), is_refused("out_of_order")),
        (HELD, a_step(21, 20, **REPLAYED), is_refused("out_of_order")),
    ],
    "would be computed, but trims further": [(UNTRIMMED, a_step(21, 9, trim_to=9, **ON), is_refused("needs_replay"))],
    "would be computed, but wrong shape, ": [
        (HELD, a_step(21, 21, shape=(1, 1, 5), **ON), is_refused("unsupported")),
        (HELD, a_step(21, 21, shape=(2, 1, 4), **ON), is_refused("unsupported")),
        (HELD, a_step(21, 21, shape=(1, 9, 4), **ON), is_refused("unsupported")),
        (HELD, a_step(21, 21, left_padding=[0, 0], **ON), is_refused("unsupported")),
        (HELD, a_step(21, 22, trim_to=22, **ON), is_refused("unsupported")),
        (HELD, a_step(21, 21, timings=[HopTiming(0, 0, 0)] * 256, **ON), is_refused("unsupported")),
        (replace(HELD, needs_token_ids=True), a_step(21, 21, **ON), is_refused("unsupported")),
        (replace(HELD, max_tokens=21), a_step(21, 21, **REPLAYED), is_refused("unsupported")),
    ],
    "would be computed, but several positions ": [
        (WHOLE_ONLY, a_step(21, 21, shape=(1, 2, 4), **ON), is_refused("unsupported")),
    ],
    "`step_no = last + 1`": [(HELD, a_step(21, 21, **ON), is_a(Compute))],
}
BEYOND_A_STATE = (
    "while a new route ",
    "when 1,024 of all sessions ",
    "over the bytes ",
    "from the client",
    "from anybody else",
    "would be computed, but holds ",
    "computed, ",
)
"""What `on_step` cannot know: who sent it, how much is in line, what it holds and what it gives."""


def test_each_row_of_the_step_table_is_what_a_server_does() -> None:
    rows = list(table_under("## Rules of a session", "the step"))
    for start, cases in JUDGED.items():
        [row] = [row for row in rows if row.startswith(start)]
        rows.remove(row)
        for state, step, is_said in cases:
            after, action = on_step(state, step)
            assert is_said(action), (row, action)
            assert (after == state) != isinstance(action, Compute), row
    assert all(row.startswith(BEYOND_A_STATE) for row in rows), rows
