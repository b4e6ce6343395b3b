"""Messages survive their encoding; what a peer says wrongly is its fault, what we say wrongly is ours."""

import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.errors import LocalProtocolError, RemoteProtocolError
from corolla.ids import SessionId
from corolla.wire.codec import MessageDecoder, encode
from corolla.wire.messages import Attach, Heartbeat, HopTiming, Output, Step
from corolla.wire.tensors import WireTensor

ONE = WireTensor("float32", (1,), b"\x00\x00\x80\x3f")


def header(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


def step_header(hidden: Any) -> bytes:
    return header(t="step", step_no=1, position=0, hidden=hidden)


@given(data=st.data())
def test_any_message_comes_back_equal(data: st.DataObject, messages: st.SearchStrategy[Any]) -> None:
    message = data.draw(messages)
    head, parts = encode(message)
    assert MessageDecoder().decode(head, b"".join(parts)) == message


def test_an_encoded_tensor_is_not_copied() -> None:
    data = bytearray(4096)
    _, parts = encode(Step(step_no=0, position=0, hidden=WireTensor("float16", (1, 2, 1024), data)))
    assert [part.obj is data for part in parts] == [True]


def test_decoded_tensors_are_views_of_the_body() -> None:
    step = Step(step_no=0, position=0, hidden=ONE, token_ids=WireTensor("int64", (1, 1), bytes(8)))
    head, parts = encode(step)
    body = bytearray(b"".join(parts))
    decoded = MessageDecoder().decode(head, body)
    assert isinstance(decoded, Step)
    assert decoded.token_ids is not None
    assert memoryview(decoded.hidden.data).obj is body
    assert memoryview(decoded.token_ids.data).obj is body


def test_an_array_of_wider_items_travels_as_its_bytes() -> None:
    data = array.array("f", [1.0, 2.0])
    head, parts = encode(Output(step_no=0, position=0, hidden=WireTensor("float32", (2,), memoryview(data))))
    assert [bytes(part) for part in parts] == [data.tobytes()]
    assert MessageDecoder().decode(head, parts[0]).hidden.data == data.tobytes()


def test_tensors_are_cut_in_the_order_in_which_the_header_mentions_them() -> None:
    head = header(
        token_ids=["int64", [1, 1]],
        t="step",
        hidden=["float32", [1]],
        step_no=1,
        position=0,
        position_ids=["int64", [1]],
    )
    decoded = MessageDecoder().decode(head, b"a" * 8 + b"b" * 4 + b"c" * 8)
    assert decoded.token_ids.data == b"a" * 8
    assert decoded.hidden.data == b"b" * 4
    assert decoded.position_ids.data == b"c" * 8


def test_fields_of_a_newer_minor_version_are_ignored() -> None:
    head = header(t="heartbeat", nonce=5, mood={"deep": [1, 2, {"x": None}]})
    assert MessageDecoder().decode(head, b"") == Heartbeat(nonce=5)


def test_a_repr_shows_no_activations() -> None:
    step = Step(step_no=0, position=0, hidden=WireTensor("int64", (1,), b"SECRETS!"))
    assert "SECRETS" not in repr(step)
    assert "int64" in repr(step)


def test_the_fullest_messages_within_their_bounds_fit_the_header() -> None:
    full = WireTensor("bfloat16", (1,) * 8, bytes(2))
    most = (1 << 24) - 1
    step = Step(
        step_no=1 << 62,
        route_version=1 << 62,
        position=most,
        trim_to=most,
        rows=[1023] * 1024,
        left_padding=[most] * 1024,
        want="last",
        replay=True,
        hidden=full,
        position_ids=full,
        token_ids=full,
    )
    timings = [HopTiming(queue_s=0.1, compute_s=0.1, send_s=0.1)] * 256
    output = Output(step_no=1 << 62, route_version=1 << 62, position=most, hidden=full, timings=timings)
    assert max(len(encode(step)[0]), len(encode(output)[0])) <= 16 << 10


@pytest.mark.parametrize(
    ("head", "body", "says"),
    [
        pytest.param(b"", b"", "truncated", id="empty header"),
        pytest.param(b"\xc1", b"", "malformed", id="not msgpack"),
        pytest.param(header(t="heartbeat", nonce=1) + b"\x00", b"", "trailing", id="bytes after the message"),
        pytest.param(b"[1, 2]", b"", "Expected `object`", id="not a map"),
        pytest.param(header(nonce=1), b"", "missing required field `t`", id="no message type"),
        pytest.param(header(t="hello", nonce=1), b"", "Invalid value 'hello'", id="unknown message type"),
        pytest.param(header(t="heartbeat"), b"", "`nonce`", id="a field is missing"),
        pytest.param(header(t="heartbeat", nonce=-1), b"", ">= 0", id="below the bound"),
        pytest.param(header(t="heartbeat", nonce=1 << 63), b"", "<= 4611686018427387904", id="above the bound"),
        pytest.param(header(t="heartbeat", nonce=1, queue_s=float("nan")), b"", ">= 0.0", id="nan"),
        pytest.param(header(t="heartbeat", nonce=1, queue_s=float("inf")), b"", "<= 1000000000", id="infinity"),
        pytest.param(header(t="heartbeat", nonce="1"), b"", "got `str`", id="another type"),
        pytest.param(header(t="attach", session=bytes(15)), b"", "length >= 16", id="a short session id"),
        pytest.param(header(t="step", step_no=1, position=0), b"", "`hidden`", id="no tensor"),
        pytest.param(step_header(None), b"", "a tensor is [dtype, shape]", id="nil for a tensor"),
        pytest.param(step_header(["float32"]), b"", "a tensor is [dtype, shape]", id="no shape"),
        pytest.param(step_header(["float64", [1]]), bytes(8), "unknown dtype 'float64'", id="unknown dtype"),
        pytest.param(step_header([["float32"], [1]]), bytes(4), "unknown dtype", id="dtype of another type"),
        pytest.param(step_header(["float32", "1"]), bytes(4), "a list of at most 8", id="shape of another type"),
        pytest.param(step_header(["float32", [1] * 9]), bytes(4), "at most 8 sides", id="rank 9"),
        pytest.param(step_header(["float32", [-1]]), bytes(4), "side -1", id="negative side"),
        pytest.param(step_header(["float32", [-2, -2]]), bytes(16), "side -2", id="two negative sides"),
        pytest.param(step_header(["float32", [1.0]]), bytes(4), "side 1.0", id="fractional side"),
        pytest.param(step_header(["float32", [True]]), bytes(4), "side True", id="a boolean side"),
        pytest.param(step_header(["float32", [1 << 62, 1 << 62]]), bytes(4), "at most 67108864", id="huge product"),
        pytest.param(step_header(["float32", [0, 1 << 62]]), b"", "at most 67108864", id="huge but empty"),
        pytest.param(step_header(["int64", [65536] * 8]), b"", "at most 67108864", id="a product of 2^128"),
        pytest.param(step_header(["float32", [3]]), bytes(8), "takes 12 bytes, 8 of the body", id="short body"),
        pytest.param(step_header(["float32", [3]]), bytes(13), "has 1 bytes more than the tensors", id="long body"),
        pytest.param(header(t="heartbeat", nonce=1), b"x", "has 1 bytes more", id="a body nobody mentions"),
        pytest.param(b"\x82\xa1t\xa9heartbeat\xa1x" + b"\x91" * 15000, b"", "recursion", id="deep unknown field"),
        pytest.param(
            b"\x84\xa1t\xa4step\xa7step_no\x01\xa8position\x01\xa6hidden" + b"\x91" * 15000, b"", "recursion", id="deep"
        ),
        pytest.param(
            b"\x84\xa1t\xa4step\xa7step_no\x01\xa8position\x01\xa4rows\xdd\xff\xff\xff\xff\x01",
            b"",
            "length <= 1024",
            id="a list that claims 4 billion entries",
        ),
        pytest.param(
            header(t="step", step_no=1, position=0, rows=[0] * 1025, hidden=["float32", [0]]), b"", "<= 1024", id="rows"
        ),
    ],
)
def test_what_a_peer_says_wrongly_is_its_fault(head: bytes, body: bytes, says: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        MessageDecoder().decode(head, body)
    assert says in str(caught.value)


def test_a_peers_words_are_cleaned_before_they_reach_a_terminal() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        MessageDecoder().decode(header(t="\x1b[2J\n" + "x" * 5000), b"")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_a_decoder_lives_on_after_a_malformed_message() -> None:
    decoder = MessageDecoder()
    with pytest.raises(RemoteProtocolError):
        decoder.decode(step_header(["float32", [1]]), b"")
    assert decoder.decode(step_header(["float32", [1]]), ONE.data) == Step(step_no=1, position=0, hidden=ONE)


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(Heartbeat(nonce=-1), id="out of bounds"),
        pytest.param(Heartbeat(nonce=1 << 70), id="beyond 64 bits"),
        pytest.param(Attach(session=SessionId(b"short")), id="a short session id"),
        pytest.param(Attach(session="text"), id="another type"),
        pytest.param(Output(step_no=0, position=0, hidden=object()), id="not a tensor"),
        pytest.param(Output(step_no=0, position=0, hidden=WireTensor("float64", (1,), bytes(8))), id="unknown dtype"),
        pytest.param(Output(step_no=0, position=0, hidden=WireTensor("float32", (-1,), b"")), id="negative side"),
        pytest.param(Output(step_no=0, position=0, hidden=WireTensor("float32", (2,), bytes(4))), id="short data"),
        pytest.param(Output(step_no=0, position=0, hidden=WireTensor("float32", (2,), bytes(9))), id="long data"),
        pytest.param(
            Output(step_no=0, position=0, hidden=WireTensor("float16", (1, 2), memoryview(bytes(8))[::2])), id="strided"
        ),
    ],
)
def test_what_we_say_wrongly_fails_here_before_it_is_sent(message: Any) -> None:
    with pytest.raises(LocalProtocolError):
        encode(message)
