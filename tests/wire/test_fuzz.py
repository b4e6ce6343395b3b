"""Whatever bytes come, only RemoteProtocolError or Unsupported goes out, and memory stays bounded.

Valid frames of every type are damaged in twelve ways: some break the framing, others keep it and damage the header or
the body. A case is *past the header* when damaged bytes still give a message, and that message is a valid one.
"""

import itertools
import random
import struct
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
import pytest

from corolla.errors import RemoteProtocolError, Unsupported
from corolla.wire.codec import MessageDecoder, encode
from corolla.wire.frames import Limits, MessageReader, frame_message
from corolla.wire.messages import AnyMessage, Output
from corolla.wire.tensors import WireTensor

LIMITS = Limits(message_bytes=128 << 10, header_bytes=4 << 10, frame_bytes=6 << 10, first_frame_bytes=6 << 10)
"""Tight, so that a reader which believed a claimed length would be seen at once."""

HOSTILE_NUMBERS = [0, 1, 2, 5, 6, 7, 8, 11, 12, 255, 4096, 4097, 6 << 10, 65535, 128 << 10, 1 << 31, (1 << 32) - 1]
HOSTILE_VALUES: list[Any] = [
    None, True, -1, 0, 1, 1 << 24, 1 << 62, 1 << 63, (1 << 64) - 1, 0.5, -0.0, 1e300, float("nan"), float("inf"), "",
    "x", "float32", "last", "\x1b[2J", "x" * 1025, "\U0010ffff" * 64, b"", bytes(16), bytes(17), [], [0], [[]], [1023],
    [1024], [-1], [0] * 1025, {}, {"t": "open"}, ["float32", [1]], ["int64", [0]], ["bfloat16", [2, 3, 32]],
    ["float32", []], ["float32", [1 << 40]], ["float32", [0, 1 << 62]], ["int64", [65536] * 8], ["float32", [-1, -512]],
    ["float16", [True]], ["float16", [1.0]], ["float64", [1]], [["float32"], [1]], ["float32", [1], 1],
    msgspec.msgpack.Ext(5, b"abc"),
]  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """A valid message as bytes, whole and in parts."""

    header: bytes
    body: bytes
    stream: bytes


def sample_of(message: AnyMessage) -> Sample:
    header, parts = encode(message)
    return Sample(header, b"".join(parts), b"".join(frame_message(message, LIMITS)))


def reframed(header: bytes, body: bytes) -> bytes:
    """Valid frames around any header and body."""
    room = max(0, LIMITS.frame_bytes - 12 - len(header))
    first, rest = body[:room], body[room:]
    stream = struct.pack("<IBBHI", 8 + len(header) + len(first), 1, 1, len(header), len(body)) + header + first
    for begin in range(0, len(rest), LIMITS.frame_bytes - 6):
        part = rest[begin : begin + LIMITS.frame_bytes - 6]
        stream += struct.pack("<IBB", 2 + len(part), 1, 2) + part
    return stream


def flipped(rng: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def flip_anywhere(rng: random.Random, sample: Sample, _: Sample) -> bytes:
    return flipped(rng, sample.stream)


def truncate(rng: random.Random, sample: Sample, _: Sample) -> bytes:
    return sample.stream[: rng.randrange(len(sample.stream))]


def lie_about_a_length(rng: random.Random, sample: Sample, _: Sample) -> bytes:
    damaged = bytearray(sample.stream)
    field, offset = rng.choice([("<I", 0), ("<B", 4), ("<B", 5), ("<H", 6), ("<I", 8)])
    most = (1 << 8 * struct.calcsize(field)) - 1
    struct.pack_into(field, damaged, offset, min(most, rng.choice([*HOSTILE_NUMBERS, rng.randint(0, most)])))
    return bytes(damaged)


def splice(rng: random.Random, sample: Sample, other: Sample) -> bytes:
    return sample.stream[: rng.randrange(len(sample.stream))] + other.stream[rng.randrange(len(other.stream)) :]


def insert_or_delete(rng: random.Random, sample: Sample, _: Sample) -> bytes:
    at, num_bytes = rng.randrange(len(sample.stream)), rng.randint(1, 8)
    if rng.random() < 0.5:
        return sample.stream[:at] + sample.stream[at + num_bytes :]
    return sample.stream[:at] + rng.randbytes(num_bytes) + sample.stream[at:]


def flip_in_header(rng: random.Random, sample: Sample, _: Sample) -> bytes:
    return reframed(flipped(rng, sample.header), sample.body)


def set_a_field(rng: random.Random, sample: Sample, _: Sample) -> bytes:
    fields = msgspec.msgpack.decode(sample.header)
    fields[rng.choice(list(fields))] = rng.choice(HOSTILE_VALUES)
    return reframed(msgspec.msgpack.encode(fields), sample.body)


def nudge_a_number(rng: random.Random, sample: Sample, _: Sample) -> bytes:
    fields = msgspec.msgpack.decode(sample.header)
    if numbers := [key for key, value in fields.items() if isinstance(value, int | float)]:
        fields[rng.choice(numbers)] += rng.choice([-1, 1, 7, 1 << 20, 1 << 40])
    return reframed(msgspec.msgpack.encode(fields), sample.body)


def mix_fields(rng: random.Random, sample: Sample, other: Sample) -> bytes:
    """Drops a field, adds one that nobody knows, or takes some from another message."""
    fields = msgspec.msgpack.decode(sample.header)
    match rng.randrange(3):
        case 0:
            del fields[rng.choice(list(fields))]
        case 1:
            fields[rng.choice(["new", "x" * 200, ""])] = rng.choice(HOSTILE_VALUES)
        case _:
            fields |= {key: value for key, value in msgspec.msgpack.decode(other.header).items() if rng.random() < 0.5}
    return reframed(msgspec.msgpack.encode(fields), sample.body)


def reshape(rng: random.Random, sample: Sample, _: Sample) -> bytes:
    fields = msgspec.msgpack.decode(sample.header)
    if tensors := [value for value in fields.values() if isinstance(value, list) and value and value[0] == "bfloat16"]:
        shape = rng.choice(tensors)[1]
        shape[rng.randrange(len(shape))] = rng.choice([0, 1, 2, 3, 32, -1, 1 << 20, 1 << 63])
        rng.shuffle(shape)
    return reframed(msgspec.msgpack.encode(fields), sample.body)


def replace_body(rng: random.Random, sample: Sample, _: Sample) -> bytes:
    return reframed(sample.header, rng.randbytes(len(sample.body)))


def resize_body(rng: random.Random, sample: Sample, _: Sample) -> bytes:
    return reframed(sample.header, sample.body[rng.randint(0, 3) :] + rng.randbytes(rng.randint(0, 3)))


DAMAGES: list[Callable[[random.Random, Sample, Sample], bytes]] = [
    flip_anywhere,
    truncate,
    lie_about_a_length,
    splice,
    insert_or_delete,
    flip_in_header,
    set_a_field,
    nudge_a_number,
    mix_fields,
    reshape,
    replace_body,
    resize_body,
]


def read(rng: random.Random, stream: bytes) -> list[AnyMessage]:
    """Everything that the stream says before it fails or ends, cut anyhow. Any other error passes through."""
    reader = MessageReader(LIMITS, is_stranger=rng.random() < 0.2)
    edges = sorted([0, len(stream), *(rng.randint(0, len(stream)) for _ in range(rng.randint(0, 3)))])
    messages: list[AnyMessage] = []
    text = ""
    try:
        for begin, end in itertools.pairwise(edges):
            messages.extend(reader.feed(stream[begin:end]))
        reader.finish()
    except (RemoteProtocolError, Unsupported) as error:
        text = str(error)
        error.with_traceback(None)  # as a channel does: or the frames in it keep each reader until the next collection
    assert text.isprintable()
    return messages


def assert_valid(message: AnyMessage) -> None:
    """What came through the checks can be said again, unchanged."""
    header, parts = encode(message)
    assert len(header) + sum(map(len, parts)) <= LIMITS.message_bytes + LIMITS.header_bytes
    assert encode(MessageDecoder().decode(header, b"".join(parts)))[0] == header


def fuzz(examples: list[AnyMessage], num_cases: int) -> None:
    large = Output(step_no=1, position=1, hidden=WireTensor("bfloat16", (3, 3000), bytes(18_000)))
    samples = [sample_of(message) for message in [*examples, large]]
    rng = random.Random(20)
    past_header: Counter[type] = Counter()
    done = 0
    tracemalloc.start()
    try:
        while done < num_cases:
            sample, damage = samples[done % len(samples)], rng.choice(DAMAGES)
            stream = damage(rng, sample, rng.choice(samples))
            if stream == sample.stream:
                continue
            done += 1
            messages = read(rng, stream)
            for message in messages:
                assert_valid(message)
            past_header.update({type(message) for message in messages[:1]})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * LIMITS.message_bytes
    assert past_header.total() >= num_cases / 5
    assert set(past_header) == set(get_args(AnyMessage))


def test_three_thousand_damaged_messages_break_nothing(examples: list[AnyMessage]) -> None:
    fuzz(examples, 3_000)


@pytest.mark.full
def test_a_hundred_thousand_damaged_messages_break_nothing(examples: list[AnyMessage]) -> None:
    fuzz(examples, 100_000)
