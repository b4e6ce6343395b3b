"""A channel carries messages, ends once with an error that says whose fault it was, and never blocks its sender."""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from corolla.errors import HopFailed, LocalProtocolError, RemoteProtocolError, SwarmError, Unsupported
from corolla.ids import PeerId, SessionId
from corolla.net.channel import Channel
from corolla.net.memory.loop import run_virtual
from corolla.wire.frames import MessageReader, frame_message
from corolla.wire.messages import AnyMessage, Attach, Heartbeat, Output
from corolla.wire.tensors import Buffer, WireTensor

PEER = PeerId("12D3KooWPeer")
ATTACH = Attach(session=SessionId(bytes(16)))


def output(num_bytes: int) -> Output:
    return Output(step_no=1, position=1, hidden=WireTensor("float16", (num_bytes // 2,), bytes(num_bytes)))


def framed(*messages: AnyMessage) -> bytes:
    return b"".join(bytes(part) for message in messages for part in frame_message(message))


class FakeStream:
    """A byte stream in the test's hand: it records what was written and delivers what it is told to."""

    peer = PEER

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.pending_bytes = 0
        self.is_paused = False
        self.is_closed = False
        self._on_bytes: Callable[[Buffer], None] | None = None
        self._on_closed: Callable[[str], None] | None = None

    def start(self, on_bytes: Callable[[Buffer], None], on_closed: Callable[[str], None]) -> None:
        assert not self.is_closed
        self._on_bytes, self._on_closed = on_bytes, on_closed

    def write(self, parts: Sequence[Buffer]) -> None:
        self.written.append(b"".join(parts))

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def report_nonsense(self) -> None: ...

    def close(self) -> None:
        self.end("closed here")

    def deliver(self, data: bytes) -> None:
        assert self._on_bytes is not None
        self._on_bytes(data)

    def end(self, reason: str) -> None:
        if not self.is_closed:
            self.is_closed = True
            if self._on_closed is not None:
                asyncio.get_running_loop().call_soon(self._on_closed, reason)


class Ends:
    """A channel over a fake stream, and all that came out of it."""

    def __init__(self, *, we_dialed: bool = True, **options: Any) -> None:
        self.stream = FakeStream()
        self.messages: list[AnyMessage] = []
        self.endings: list[SwarmError | None] = []
        self.handle: Callable[[AnyMessage], None] = self.messages.append
        self.channel = Channel(
            self.stream,
            we_dialed=we_dialed,
            on_message=lambda message: self.handle(message),
            on_closed=self.endings.append,
            **options,
        )

    def said(self) -> list[AnyMessage]:
        return list(MessageReader(is_stranger=False).feed(b"".join(self.stream.written)))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_messages_go_both_ways() -> None:
    async def main() -> None:
        ends = Ends()
        ends.channel.send(ATTACH)
        ends.channel.send(output(1_000_000))
        await settle()
        data = framed(Heartbeat(nonce=1), output(300_000), Heartbeat(nonce=2))
        ends.stream.deliver(data[:100_000])
        ends.stream.deliver(data[100_000:])
        assert ends.said() == [ATTACH, output(1_000_000)]
        assert ends.messages == [Heartbeat(nonce=1), output(300_000), Heartbeat(nonce=2)]
        assert (ends.endings, ends.channel.is_open, ends.channel.peer) == ([], True, PEER)

    run_virtual(main())


def test_an_ended_stream_is_a_failed_hop_with_the_streams_reason() -> None:
    async def main() -> None:
        ends = Ends()
        await settle()
        ends.stream.end("connection reset")
        await settle()
        (error,) = ends.endings
        assert isinstance(error, HopFailed)
        assert (error.peer, error.reason) == (PEER, "connection reset")
        assert not ends.channel.is_open

    run_virtual(main())


def test_a_peer_that_dies_while_writing_is_a_failed_hop_too() -> None:
    async def main() -> None:
        ends = Ends()
        await settle()
        ends.stream.deliver(framed(output(500_000))[:300_000])
        ends.stream.end("connection reset")
        await settle()
        (error,) = ends.endings
        assert isinstance(error, HopFailed)
        assert "connection reset (the stream ended inside a message" in error.reason
        assert isinstance(error.__cause__, RemoteProtocolError)

    run_virtual(main())


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        pytest.param(bytes(100), Unsupported, id="version 0"),
        pytest.param(b"\xff\xff\xff\xff\x01\x01", RemoteProtocolError, id="a frame of 4 GB"),
    ],
)
def test_broken_bytes_end_this_stream_with_the_peers_fault_after_what_came_before(
    data: bytes, kind: type[SwarmError]
) -> None:
    async def main() -> None:
        ends, neighbour = Ends(), Ends()
        await settle()
        ends.stream.deliver(framed(Heartbeat(nonce=1)) + data)
        await settle()
        assert ends.messages == [Heartbeat(nonce=1)]
        assert [type(error) for error in ends.endings] == [kind]
        assert ends.stream.is_closed
        neighbour.stream.deliver(framed(Heartbeat(nonce=2)))
        assert (neighbour.messages, neighbour.endings) == ([Heartbeat(nonce=2)], [])

    run_virtual(main())


def test_our_own_close_is_no_error_and_stops_messages_at_once() -> None:
    async def main() -> None:
        ends = Ends()

        def close_on_first(message: AnyMessage) -> None:
            ends.messages.append(message)
            ends.channel.close()

        ends.handle = close_on_first
        await settle()
        ends.stream.deliver(framed(Heartbeat(nonce=1), Heartbeat(nonce=2)))
        ends.stream.deliver(framed(Heartbeat(nonce=3)))
        ends.channel.send(Heartbeat(nonce=4))
        ends.channel.close()
        await settle()
        assert (ends.messages, ends.endings, ends.stream.written) == ([Heartbeat(nonce=1)], [None], [])

    run_virtual(main())


def test_a_channel_closed_before_it_began_still_says_so_once() -> None:
    async def main() -> None:
        ends = Ends()
        ends.channel.close()
        assert ends.endings == []
        await settle()
        assert (ends.endings, ends.stream.is_closed) == ([None], True)

    run_virtual(main())


def test_nothing_is_called_inside_the_constructor() -> None:
    class Eager(FakeStream):
        def start(self, on_bytes: Callable[[Buffer], None], on_closed: Callable[[str], None]) -> None:
            super().start(on_bytes, on_closed)
            self.deliver(framed(Heartbeat(nonce=1)))

    async def main() -> None:
        messages: list[AnyMessage] = []
        Channel(Eager(), we_dialed=True, on_message=messages.append, on_closed=lambda error: None)
        assert messages == []
        await settle()
        assert messages == [Heartbeat(nonce=1)]

    run_virtual(main())


def test_our_mistake_is_raised_to_the_sender_and_the_channel_lives_on() -> None:
    async def main() -> None:
        ends = Ends()
        await settle()
        with pytest.raises(LocalProtocolError):
            ends.channel.send(Heartbeat(nonce=-1))
        with pytest.raises(LocalProtocolError, match="travel in one message"):
            ends.channel.send(output(65 << 20))
        ends.channel.send(Heartbeat(nonce=1))
        assert (ends.said(), ends.endings, ends.channel.is_open) == ([Heartbeat(nonce=1)], [], True)

    run_virtual(main())


def test_who_dialed_must_begin_small_and_who_was_dialed_need_not() -> None:
    async def main() -> None:
        dialer, listener = Ends(we_dialed=True), Ends(we_dialed=False)
        with pytest.raises(LocalProtocolError, match="first message"):
            dialer.channel.send(output(100_000))
        dialer.channel.send(ATTACH)
        dialer.channel.send(output(100_000))
        listener.channel.send(output(100_000))
        await settle()
        dialer.stream.deliver(framed(output(100_000)))
        assert dialer.messages == [output(100_000)]
        listener.stream.deliver(framed(output(100_000)))
        await settle()
        assert listener.messages == []
        assert [type(error) for error in listener.endings] == [RemoteProtocolError]

    run_virtual(main())


def test_a_peer_that_does_not_read_loses_its_stream_and_no_message_follows_a_dropped_one() -> None:
    async def main() -> None:
        ends = Ends(max_pending_bytes=10_000)
        await settle()
        ends.channel.send(output(50_000 - 1000))  # one message may be larger than the bound
        ends.stream.pending_bytes = 49_000
        ends.channel.send(Heartbeat(nonce=1))
        ends.stream.pending_bytes = 0
        ends.channel.send(Heartbeat(nonce=2))
        await settle()
        assert ends.said() == [output(49_000)]
        (error,) = ends.endings
        assert isinstance(error, HopFailed)
        assert "49000 bytes wait for it, at most 10000" in error.reason

    run_virtual(main())


def test_any_thread_may_send_and_find_out_that_the_peer_does_not_read() -> None:
    async def main() -> None:
        ends = Ends(max_pending_bytes=100)
        await asyncio.to_thread(ends.channel.send, Heartbeat(nonce=1))
        ends.stream.pending_bytes = 101
        await asyncio.to_thread(ends.channel.send, Heartbeat(nonce=2))
        await settle()
        assert ends.said() == [Heartbeat(nonce=1)]
        assert [type(error) for error in ends.endings] == [HopFailed]

    asyncio.run(main())


def test_the_closing_callback_runs_on_the_loop_whoever_sent() -> None:
    async def main() -> None:
        stream, seen = FakeStream(), []
        channel = Channel(
            stream,
            we_dialed=True,
            on_message=lambda message: None,
            on_closed=lambda error: seen.append(threading.current_thread()),
            max_pending_bytes=0,
        )
        stream.pending_bytes = 1
        await settle()
        await asyncio.to_thread(channel.send, Heartbeat(nonce=1))
        await settle()
        assert seen == [threading.current_thread()]

    asyncio.run(main())


def test_a_handler_that_fails_ends_its_own_channel_and_logs_no_payload(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        ends = Ends()

        def fail(message: AnyMessage) -> None:
            raise KeyError("a bug of ours")

        ends.handle = fail
        await settle()
        ends.stream.deliver(framed(Output(step_no=1, position=1, hidden=WireTensor("int64", (1,), b"SECRETS!"))))
        await settle()
        assert [type(error) for error in ends.endings] == [LocalProtocolError]

    with caplog.at_level(logging.DEBUG):
        run_virtual(main())
    assert "message handler failed" in caplog.text
    assert "SECRETS" not in caplog.text


def test_a_handler_may_judge_the_peer() -> None:
    async def main() -> None:
        ends = Ends()
        verdict = RemoteProtocolError("an output that nobody asked for")

        def judge(message: AnyMessage) -> None:
            raise verdict

        ends.handle = judge
        await settle()
        ends.stream.deliver(framed(output(2)))
        await settle()
        assert ends.endings == [verdict]

    run_virtual(main())


def test_pausing_reaches_the_stream_and_times_are_loop_times() -> None:
    async def main() -> None:
        ends = Ends()
        await asyncio.sleep(1)
        ends.channel.send(ATTACH)
        await asyncio.sleep(1)
        ends.stream.deliver(framed(Heartbeat(nonce=1))[:3])
        assert (ends.channel.last_sent, ends.channel.last_heard) == (1, 2)
        ends.channel.pause()
        assert ends.stream.is_paused
        ends.channel.resume()
        assert not ends.stream.is_paused

    run_virtual(main())
