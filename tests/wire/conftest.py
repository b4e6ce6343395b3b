"""Messages to test with: a strategy for any valid one, read off the message types themselves, and fixed examples."""

import math
from typing import get_args

import msgspec
import pytest
from hypothesis import strategies as st
from msgspec import inspect as kinds

from corolla.ids import Fingerprint, PeerId, SessionId
from corolla.wire.messages import (
    AnyMessage,
    Attach,
    Close,
    Drain,
    Heartbeat,
    HopLost,
    HopTiming,
    LinkDown,
    Open,
    Opened,
    Output,
    Refused,
    Replay,
    Step,
)
from corolla.wire.tensors import ITEM_BYTES, WireTensor

MAX_BODY = 6000


@st.composite
def tensors(draw: st.DrawFn) -> WireTensor:
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape: list[int] = []
    for _ in range(draw(st.integers(0, 8))):
        room = MAX_BODY // max(1, (ITEM_BYTES[dtype] * math.prod(side or 1 for side in shape)))
        shape.append(draw(st.integers(0, min(6, room))))
    num_bytes = ITEM_BYTES[dtype] * math.prod(shape)
    return WireTensor(dtype, tuple(shape), draw(st.binary(min_size=num_bytes, max_size=num_bytes)))


def values(kind: kinds.Type) -> st.SearchStrategy:
    """Any value that a field of this type may have."""
    match kind:
        case kinds.IntType(gt=None, ge=low, lt=below, le=high):
            return st.integers(low, high if below is None else below - 1)
        case kinds.FloatType(ge=low, le=high):
            return st.floats(low, high)
        case kinds.StrType(min_length=low, max_length=high):
            return st.text(min_size=low or 0, max_size=min(high, 40))
        case kinds.BytesType(min_length=low, max_length=high):
            return st.binary(min_size=low or 0, max_size=high)
        case kinds.LiteralType(values=choices):
            return st.sampled_from(choices)
        case kinds.BoolType():
            return st.booleans()
        case kinds.NoneType():
            return st.none()
        case kinds.ListType(item_type=item, max_length=high):
            return st.lists(values(item), max_size=min(high, 20))
        case kinds.UnionType(types=types):
            return st.one_of([values(each) for each in types])
        case kinds.CustomType(cls=cls) if cls is WireTensor:
            return tensors()
        case kinds.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: values(field.type) for field in fields})
    raise AssertionError(f"the strategy does not know {kind}")


@pytest.fixture(scope="session")
def messages() -> st.SearchStrategy[AnyMessage]:
    """Any valid message of any type."""
    return st.one_of([values(kinds.type_info(kind)) for kind in get_args(AnyMessage)])


@pytest.fixture(scope="session")
def examples() -> list[AnyMessage]:
    """At least one message of every type, with its optional fields set."""
    session, peer = SessionId(bytes(range(16))), PeerId("12D3KooWExample")
    hidden = WireTensor("bfloat16", (2, 3, 32), bytes(range(256)) + bytes(128))
    ids = WireTensor("int64", (2, 3), bytes(range(48)))
    found: list[AnyMessage] = [
        Open(
            session=session,
            route_version=1,
            fingerprint=Fingerprint("0123456789abcdef" * 2),
            start=4,
            end=9,
            max_tokens=4096,
            max_rows=2,
            upstream=peer,
            next=peer,
            want="all",
            wire_dtype="bfloat16",
            adapter="tuned",
            proof=bytes(32),
        ),
        Opened(
            session=session,
            route_version=1,
            cached_tokens=7,
            link_rtt_s=0.04,
            max_chunk_tokens=512,
            window_bytes=8 << 20,
        ),
        Refused(session=session, step_no=3, code="cache_full", text="no room", value="4096", bound="1024"),
        Attach(session=session, route_version=2),
        Step(
            step_no=9,
            route_version=2,
            position=40,
            trim_to=38,
            rows=[1, 0],
            left_padding=[2, 0],
            want="none",
            replay=True,
            hidden=hidden,
            position_ids=ids,
            token_ids=ids,
        ),
        Step(step_no=10, position=41, hidden=WireTensor("float32", (1, 1, 512), bytes(2048))),
        Output(
            step_no=9,
            route_version=2,
            position=43,
            hidden=hidden,
            timings=[HopTiming(queue_s=0.1, compute_s=0.2, send_s=0.3)],
        ),
        Heartbeat(nonce=77, is_reply=True, queue_s=0.5),
        Drain(deadline_s=30.0),
        Replay(session=session, route_version=2, from_position=5, from_step=3, live_from=4),
        HopLost(session=session, route_version=3, peer=peer, step_no=8),
        LinkDown(session=session, route_version=3, peer=peer, text="refused"),
        Close(session=session, text="done"),
    ]
    assert {type(message) for message in found} == set(get_args(AnyMessage))
    assert all(isinstance(message, msgspec.Struct) for message in found)
    return found
