"""A stream of frames gives the same messages however it is cut, and the same error for the same fault."""

import itertools
import struct
import tracemalloc
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corolla.errors import LocalProtocolError, RemoteProtocolError, SwarmError, Unsupported
from corolla.wire.frames import DEFAULT_LIMITS, PROTOCOL_VERSION, Limits, MessageReader, frame_message
from corolla.wire.messages import AnyMessage, Heartbeat, Output, Step
from corolla.wire.tensors import Buffer, WireTensor

SMALL = Limits(message_bytes=16_384, header_bytes=512, frame_bytes=700, first_frame_bytes=600)
START, MORE = 1, 2


def joined(parts: Sequence[Buffer]) -> bytes:
    return b"".join(parts)


def output(num_bytes: int) -> Output:
    return Output(step_no=1, position=1, hidden=WireTensor("float16", (num_bytes // 2,), bytes(num_bytes)))


def start(
    header: bytes,
    part: bytes = b"",
    *,
    version: int = PROTOCOL_VERSION,
    kind: int = START,
    length: int | None = None,
    header_len: int | None = None,
    body_len: int | None = None,
) -> bytes:
    """A START frame whose every number may lie."""
    length = 8 + len(header) + len(part) if length is None else length
    header_len = len(header) if header_len is None else header_len
    body_len = len(part) if body_len is None else body_len
    return struct.pack("<IBBHI", length, version, kind, header_len, body_len) + header + part


def more(part: bytes, *, length: int | None = None, kind: int = MORE) -> bytes:
    return struct.pack("<IBB", 2 + len(part) if length is None else length, PROTOCOL_VERSION, kind) + part


def read_all(
    reader: MessageReader, data: bytes, cuts: Sequence[int] = ()
) -> tuple[list[AnyMessage], SwarmError | None]:
    """What comes out, and the error that ends it."""
    messages: list[AnyMessage] = []
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    try:
        for begin, end in itertools.pairwise(edges):
            messages.extend(reader.feed(data[begin:end]))
        reader.finish()
    except (RemoteProtocolError, Unsupported) as error:
        return messages, error
    return messages, None


def frame_sizes(data: bytes) -> list[int]:
    sizes: list[int] = []
    while data:
        sizes.append(4 + struct.unpack_from("<I", data)[0])
        data = data[sizes[-1] :]
    return sizes


BEAT = msgspec.msgpack.encode({"t": "heartbeat", "nonce": 1})
OUT = msgspec.msgpack.encode({"t": "output", "step_no": 1, "position": 1, "hidden": ["float16", [400]]})


@given(data=st.data())
def test_messages_survive_any_chunking(data: st.DataObject, messages: st.SearchStrategy[Any]) -> None:
    limits = Limits(message_bytes=1 << 20, frame_bytes=17_000, first_frame_bytes=17_000)
    said = data.draw(st.lists(messages, max_size=4))
    stream = b"".join(joined(frame_message(message, limits)) for message in said)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12))
    assert read_all(MessageReader(limits, is_stranger=False), stream, cuts) == (said, None)


@given(body=st.integers(0, 3000), cuts=st.lists(st.integers(0, 4000), max_size=8))
def test_large_bodies_survive_any_fragmentation_and_chunking(body: int, cuts: list[int]) -> None:
    message = Step(
        step_no=1,
        position=0,
        hidden=WireTensor("float16", (body,), (bytes(range(256)) * 24)[: 2 * body]),
        token_ids=WireTensor("int64", (body // 9,), bytes(8 * (body // 9))),
    )
    stream = joined(frame_message(message, SMALL))
    assert max(frame_sizes(stream)) <= SMALL.frame_bytes
    assert read_all(MessageReader(SMALL, is_stranger=False), stream, cuts) == ([message], None)


@given(data=st.data())
@settings(max_examples=50)
def test_messages_before_a_fault_come_out_whatever_the_chunking(data: st.DataObject) -> None:
    stream = start(BEAT) + start(OUT, bytes(800)) + start(BEAT, version=9)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12))
    messages, error = read_all(MessageReader(is_stranger=False), stream, cuts)
    assert messages == [Heartbeat(nonce=1), output(800)]
    assert isinstance(error, Unsupported)


def test_byte_by_byte_is_as_good_as_at_once(examples: list[AnyMessage]) -> None:
    stream = b"".join(joined(frame_message(message)) for message in examples)
    assert read_all(MessageReader(), stream, range(len(stream))) == (examples, None)


def test_a_small_message_is_one_frame_and_its_tensor_is_not_copied() -> None:
    data = bytearray(2048)
    head, part = frame_message(Output(step_no=0, position=0, hidden=WireTensor("float16", (1024,), data)))
    assert memoryview(part).obj is data
    assert frame_sizes(bytes(head) + bytes(part)) == [len(head) + 2048]


def test_a_large_body_is_fragmented_into_full_frames_without_copying() -> None:
    data = bytearray(1_000_000)
    parts = frame_message(Output(step_no=0, position=0, hidden=WireTensor("float16", (500_000,), data)))
    assert {part.obj is data for part in parts if isinstance(part, memoryview)} == {True}
    assert frame_sizes(joined(parts))[:-1] == [DEFAULT_LIMITS.frame_bytes] * 3


def test_a_received_message_does_not_hold_on_to_its_chunk() -> None:
    chunk = bytearray(start(OUT, b"\x01" * 800))
    (message,) = MessageReader(is_stranger=False).feed(chunk)
    chunk[:] = bytes(len(chunk))
    assert message.hidden.data == b"\x01" * 800


MALFORMED = [
    pytest.param(start(BEAT, version=2), "version 2, this side version 1", id="unknown version"),
    pytest.param(start(BEAT, kind=0), "kind 0", id="kind 0"),
    pytest.param(start(BEAT, kind=3), "kind 3", id="kind 3"),
    pytest.param(more(b"x"), "kind 2 outside a message", id="more of nothing"),
    pytest.param(start(OUT, bytes(8), body_len=800) + start(BEAT), "kind 1 inside a message", id="start in a message"),
    pytest.param(start(BEAT, length=0xFFFFFFFF), "at most 700", id="a frame of 4 GB"),
    pytest.param(start(BEAT, length=697), "a frame of 701 bytes, at most 700", id="one byte too long"),
    pytest.param(start(BEAT, length=0), "a frame of 4 bytes", id="length 0"),
    pytest.param(start(BEAT, length=1), "a frame of 5 bytes", id="length 1"),
    pytest.param(start(BEAT, length=9), "a frame of 13 bytes", id="too short for its header"),
    pytest.param(start(BEAT, header_len=0), "a header of 0 bytes", id="no header"),
    pytest.param(start(bytes(513)), "a header of 513 bytes, 1 to 512", id="header too large"),
    pytest.param(start(OUT, bytes(8), body_len=16_384), "at most 16384", id="message too large"),
    pytest.param(start(OUT, bytes(8), body_len=0xFFFFFFFF), "at most 16384", id="a body of 4 GB"),
    pytest.param(start(OUT, bytes(8), body_len=7), "cannot start a message", id="more in the frame than in the body"),
    pytest.param(start(OUT, bytes(8), body_len=800) + more(b""), "brings 0 bytes", id="an empty frame"),
    pytest.param(start(OUT, bytes(8), body_len=800) + more(b"", length=1), "brings -1 bytes", id="a negative frame"),
    pytest.param(start(OUT, body_len=400) + more(bytes(401)), "brings 401 bytes of a body of which 400", id="too much"),
    pytest.param(start(OUT, bytes(8)), "takes 800 bytes, 8 of the body", id="a body too short for its tensor"),
    pytest.param(start(OUT, bytes(8), body_len=800), "ended inside a message: 8 of 800", id="ends in the body"),
    pytest.param(start(OUT, bytes(8))[:5], "ended inside a message", id="ends in the prefix"),
    pytest.param(start(OUT, bytes(8))[:11], "ended inside a message", id="ends in the numbers"),
    pytest.param(start(OUT, bytes(8))[:30], "ended inside a message", id="ends in the header"),
]


@pytest.mark.parametrize(("data", "says"), MALFORMED)
@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_a_malformed_stream_is_an_error_that_says_what_and_which_bound(data: bytes, says: str, step: int) -> None:
    reader = MessageReader(SMALL, is_stranger=False)
    messages, error = read_all(reader, start(BEAT) + data, range(0, len(data) + 100, step))
    assert messages == [Heartbeat(nonce=1)]
    assert says in str(error)


def test_another_version_is_told_apart_from_a_broken_peer() -> None:
    with pytest.raises(Unsupported) as caught:
        list(MessageReader().feed(start(BEAT, version=7)))
    assert (caught.value.value, caught.value.bound) == ("7", str(PROTOCOL_VERSION))


def test_a_reader_is_dead_after_an_error_and_repeats_it() -> None:
    reader = MessageReader()
    with pytest.raises(RemoteProtocolError) as first:
        list(reader.feed(start(b"\xc1")))
    for call in (lambda: list(reader.feed(start(BEAT))), reader.finish):
        with pytest.raises(RemoteProtocolError) as again:
            call()
        assert again.value is first.value


def test_a_strangers_first_message_must_lie_in_one_small_frame() -> None:
    fits = joined(frame_message(output(500), SMALL))
    assert len(fits) <= SMALL.first_frame_bytes
    assert list(MessageReader(SMALL).feed(fits)) == [output(500)]
    too_long = joined(frame_message(output(600), SMALL))
    assert SMALL.first_frame_bytes < len(too_long) <= SMALL.frame_bytes
    with pytest.raises(RemoteProtocolError, match="at most 600"):
        list(MessageReader(SMALL).feed(too_long))
    with pytest.raises(RemoteProtocolError, match="does not lie in one frame"):
        list(MessageReader(SMALL).feed(start(OUT, bytes(100), body_len=800)))


def test_after_the_first_message_a_stranger_may_send_large_ones() -> None:
    stream = joined(frame_message(Heartbeat(nonce=1), SMALL)) + joined(frame_message(output(9000), SMALL))
    assert list(MessageReader(SMALL).feed(stream)) == [Heartbeat(nonce=1), output(9000)]


def test_a_message_that_the_peer_would_not_take_fails_before_anything_is_sent() -> None:
    with pytest.raises(LocalProtocolError, match="at most 16384 travel in one message"):
        frame_message(output(16_384), SMALL)
    with pytest.raises(LocalProtocolError, match="first message on a stream at most 600"):
        frame_message(output(600), SMALL, is_stranger=True)
    rows = list(range(1000))
    step = Step(step_no=0, position=0, rows=rows, hidden=WireTensor("float16", (0,), b""))
    with pytest.raises(LocalProtocolError, match=r"header of .* at most 512"):
        frame_message(step, SMALL)


@pytest.mark.parametrize("is_stranger", [True, False])
def test_a_claimed_length_takes_no_memory(is_stranger: bool) -> None:
    claims = start(OUT, bytes(100), body_len=(64 << 20) - 1000)
    tracemalloc.start()
    try:
        read_all(MessageReader(is_stranger=is_stranger), claims)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_the_largest_message_takes_less_than_twice_its_size() -> None:
    size = (64 << 20) - 1000
    frames = frame_message(output(size))
    reader = MessageReader(is_stranger=False)
    tracemalloc.start()
    try:
        messages = [message for part in frames for message in reader.feed(part)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [message.hidden.nbytes for message in messages] == [size]
    assert peak < 1.3 * DEFAULT_LIMITS.message_bytes


@pytest.mark.parametrize(
    "wrong",
    [
        {"header_bytes": 0},
        {"header_bytes": 1 << 16},
        {"first_frame_bytes": 16 << 10},
        {"first_frame_bytes": 257 << 10},
        {"message_bytes": 1 << 32},
        {"message_bytes": 100},
    ],
)
def test_limits_that_contradict_each_other_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"={next(iter(wrong.values()))}"):
        Limits(**wrong)
