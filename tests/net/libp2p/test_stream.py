"""Byte streams on a socket: nothing lost, nothing overtaken, from any thread, and an end that is told once."""

import asyncio
import itertools
import os
import random
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvloop

from corolla.errors import LocalProtocolError
from corolla.ids import PeerId
from corolla.net.libp2p.control import RawStream
from corolla.net.libp2p.stream import SocketStream

SOON_S = 10.0
Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    return asyncio.run if request.param == "asyncio" else uvloop.run


class End:
    """One end of a pair of streams, and what it was told."""

    def __init__(self, sock: socket.socket, early: bytes = b"") -> None:
        self.received = bytearray()
        self.reasons: list[str] = []
        self.is_over = False
        self.stream = SocketStream(RawStream(sock, PeerId("peer"), "/test/1", early), self._on_end)

    def start(self) -> "End":
        self.stream.start(self._on_bytes, self.reasons.append)
        return self

    def _on_bytes(self, data: Any) -> None:
        assert not self.reasons
        self.received += data

    def _on_end(self, _stream: SocketStream) -> None:
        self.is_over = True


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        yield ours, theirs
    finally:
        ours.close()
        theirs.close()


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(SOON_S):
        while not is_so():  # noqa: ASYNC110 (what is waited for happens in the system and in threads)
            await asyncio.sleep(0.001)


async def in_threads(*works: Callable[[], None]) -> None:
    await asyncio.gather(*(asyncio.to_thread(work) for work in works))


def test_what_fits_is_sent_at_once_by_the_thread_that_writes(run: Run) -> None:
    async def scenario() -> None:
        with pair() as (ours, theirs):
            end = End(ours).start()
            end.stream.write([b"he", bytearray(b"ll"), memoryview(b"o"), b""])
            assert theirs.recv(100, socket.MSG_DONTWAIT) == b"hello"  # the loop has had no turn yet
            assert end.stream.pending_bytes == 0
            end.stream.close()

    run(scenario())


def test_order_holds_under_load_from_a_thread_and_the_loop(run: Run) -> None:
    """Small writes, which go directly, race with large ones, which wait in the queue, against a slow reader."""
    rng = random.Random(1)
    from_thread = [
        b"t" + number.to_bytes(4, "big") + rng.randbytes(rng.choice([3, 50, 70_000])) for number in range(400)
    ]
    from_loop = [b"l" + number.to_bytes(4, "big") + rng.randbytes(rng.choice([3, 50, 70_000])) for number in range(400)]

    async def scenario() -> None:
        with pair() as (ours, theirs):
            writer, reader = End(ours).start(), End(theirs).start()

            def write_all() -> None:
                for frame in from_thread:
                    writer.stream.write([len(frame).to_bytes(4, "big"), frame])

            async def write_slowly() -> None:
                for frame in from_loop:
                    writer.stream.write([len(frame).to_bytes(4, "big"), frame])
                    await asyncio.sleep(0)

            async def pause_and_resume() -> None:
                for _ in range(50):
                    reader.stream.pause_reading()
                    await asyncio.sleep(0.002)
                    reader.stream.resume_reading()
                    await asyncio.sleep(0.001)

            await asyncio.gather(in_threads(write_all), write_slowly(), pause_and_resume())
            num_bytes = sum(len(frame) + 4 for frame in from_thread + from_loop)
            await until(lambda: len(reader.received) >= num_bytes)
            assert len(reader.received) == num_bytes
            assert writer.stream.pending_bytes == 0
            frames = list(split(bytes(reader.received)))
            assert [frame for frame in frames if frame.startswith(b"t")] == from_thread
            assert [frame for frame in frames if frame.startswith(b"l")] == from_loop
            writer.stream.close()
            await until(lambda: reader.is_over)

    run(scenario())


def split(data: bytes) -> Iterator[bytes]:
    while data:
        length = int.from_bytes(data[:4], "big")
        yield data[4 : 4 + length]
        data = data[4 + length :]


def test_pending_bytes_are_those_that_the_system_has_not_taken(run: Run) -> None:
    async def scenario() -> None:
        with pair() as (ours, theirs):
            end = End(ours).start()
            end.stream.write([bytes(3_000_000)])
            held = end.stream.pending_bytes
            assert 1_000_000 < held < 3_000_000
            end.stream.write([b"tail"])
            assert end.stream.pending_bytes == held + 4
            reader = End(theirs).start()
            await until(lambda: len(reader.received) == 3_000_004)
            assert reader.received.endswith(b"tail")
            assert end.stream.pending_bytes == 0
            end.stream.close()
            await until(lambda: reader.is_over)

    run(scenario())


def test_many_small_parts_arrive_in_one_piece(run: Run) -> None:
    async def scenario() -> None:
        with pair() as (ours, theirs):
            writer, reader = End(ours).start(), End(theirs).start()
            parts = [bytes([number % 251]) * (number % 3) for number in range(5000)]
            writer.stream.write(parts)
            await until(lambda: len(reader.received) == len(b"".join(parts)))
            assert reader.received == b"".join(parts)
            writer.stream.close()
            await until(lambda: reader.is_over)

    run(scenario())


def test_what_came_with_the_daemons_answer_is_delivered_first_even_when_paused_meanwhile(run: Run) -> None:
    async def scenario() -> None:
        with pair() as (ours, theirs):
            theirs.sendall(b" and late")
            end = End(ours, early=b"early")
            end.stream.pause_reading()
            end.start()
            await asyncio.sleep(0.01)
            assert end.received == b""
            end.stream.resume_reading()
            await until(lambda: len(end.received) == 14)
            assert end.received == b"early and late"
            end.stream.close()
            await until(lambda: end.is_over)

    run(scenario())


def test_a_close_from_a_thread_is_told_once_on_the_loop(run: Run) -> None:
    async def scenario() -> None:
        with pair() as (ours, theirs):
            end, other, told_in = End(ours), End(theirs).start(), []
            end.stream.start(lambda _data: None, lambda _reason: told_in.append(threading.get_ident()))
            await in_threads(end.stream.close, end.stream.close, end.stream.close)
            await until(lambda: other.is_over)
            assert told_in == [threading.get_ident()]
            assert other.reasons == ["closed by the peer"]
            end.stream.write([b"swallowed"])
            assert end.stream.pending_bytes == 0

    run(scenario())


def test_last_words_are_read_although_the_peer_takes_no_more(run: Run) -> None:
    async def scenario() -> None:
        with pair() as (ours, theirs):
            end = End(ours).start()
            theirs.sendall(b"refused: no room")
            theirs.close()
            end.stream.write([b"a step for you"])
            await until(lambda: end.reasons)
            assert end.received == b"refused: no room"
            assert len(end.reasons) == 1

    run(scenario())


def test_a_receivers_bug_ends_its_own_stream_only(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        with pair() as (ours, theirs):
            end, reasons = End(ours), list[str]()

            def fail(_data: Any) -> None:
                raise ZeroDivisionError

            end.stream.start(fail, reasons.append)
            theirs.sendall(b"x")
            await until(lambda: reasons)
            assert reasons == ["its receiver failed"]
            assert "ZeroDivisionError" in caplog.text

    run(scenario())


def test_a_late_write_never_lands_in_another_stream(run: Run) -> None:
    """The system gives a closed stream's number to the next one: a thread that still writes must not follow it."""

    async def scenario() -> None:
        current: list[SocketStream] = []
        is_over = threading.Event()

        def keep_writing() -> None:
            while not is_over.is_set():
                for stream in current[-2:]:
                    stream.write([b"!"])

        async def open_and_close() -> None:
            for _ in range(60):
                with pair() as (ours, theirs), pair() as (innocent, watcher):
                    watcher.setblocking(False)
                    end = End(ours).start()
                    current[:] = [*current[-1:], end.stream]
                    end.stream.close()
                    await asyncio.sleep(0)
                    reused = End(innocent).start()
                    await asyncio.sleep(0.0005)
                    with pytest.raises(BlockingIOError):
                        watcher.recv(1)
                    reused.stream.close()
                    await until(lambda over=reused: over.is_over)
                    theirs.close()
            is_over.set()

        await asyncio.gather(in_threads(keep_writing), open_and_close())

    run(scenario())


def test_no_descriptor_is_left_behind(run: Run) -> None:
    async def scenario() -> None:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            ours, theirs = socket.socketpair()
            ends = [End(ours).start(), End(theirs)]
            ends[0].stream.write([bytes(1_000_000)])
            ends[0].stream.close()
            ends[1].stream.close()
            await until(lambda pair=ends: all(end.is_over for end in pair))
        assert len(os.listdir("/proc/self/fd")) <= before + 1

    run(scenario())


def test_a_forked_process_cannot_write_into_its_parents_stream() -> None:
    async def scenario() -> None:
        with pair() as (ours, _theirs):
            end = End(ours).start()
            child = os.fork()
            if child == 0:
                try:
                    end.stream.write([b"from the child"])
                except LocalProtocolError:
                    os._exit(0)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0  # noqa: ASYNC222 (it ends at once)
            end.stream.close()

    asyncio.run(scenario())


def test_two_streams_share_no_bytes(run: Run) -> None:
    """They share the buffer that they read into."""

    async def scenario() -> None:
        with pair() as (a, b), pair() as (c, d):
            ends = [End(sock).start() for sock in (a, b, c, d)]
            for number in itertools.islice(itertools.count(), 100):
                ends[0].stream.write([b"a" * (number + 1)])
                ends[2].stream.write([b"c" * (number + 1)])
                await asyncio.sleep(0)
            await until(lambda: len(ends[1].received) == len(ends[3].received) == 5050)
            assert set(ends[1].received) == {ord("a")}
            assert set(ends[3].received) == {ord("c")}
            for end in ends:
                end.stream.close()

    run(scenario())
