"""A silent peer is called dead in time; a slow one, and one that we were too busy to hear, is not."""

import asyncio
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from corolla.errors import HopFailed
from corolla.ids import PeerId
from corolla.net.channel import Channel
from corolla.net.liveness import Ask, Dead, Liveness, PeerLife, answered, begin, check, heard, keep_alive, sent
from corolla.net.memory.loop import run_virtual
from corolla.wire.messages import AnyMessage, Heartbeat, Output
from corolla.wire.tensors import Buffer

USUAL = Liveness()


# The pure part


def test_a_silent_peer_is_asked_each_interval_and_then_called_dead() -> None:
    pulse, events = begin(0.0), []
    while not events or not isinstance(events[-1][1], Dead):
        now = pulse.next_check
        pulse, action = check(USUAL, pulse, now)
        if action is not None:
            events.append((now, action))
    assert events == [(2.0, Ask(0)), (4.0, Ask(1)), (6.0, Dead(6.0))]


def test_traffic_both_ways_needs_no_heartbeats() -> None:
    pulse, now, actions = begin(0.0), 0.0, set[object]()
    while now < 600:
        pulse, action = check(USUAL, sent(heard(pulse, now), now), now)
        actions.add(action)
        now = min(pulse.next_check, now + 1.5)
    assert actions == {None}


@pytest.mark.parametrize("hears", [True, False])
def test_one_quiet_direction_is_enough_to_ask(hears: bool) -> None:
    pulse, now, asked_at = begin(0.0), 0.0, []
    while now < 5.9:
        pulse = heard(pulse, now) if hears else sent(pulse, now)
        pulse, action = check(USUAL, pulse, now)
        asked_at += [now] if action is not None else []
        now += 0.5
    assert asked_at == [2.0, 4.0]


def test_the_round_trip_is_measured_and_smoothed() -> None:
    pulse, action = check(USUAL, begin(0.0), 0.0)
    assert action is None
    for now, rtt_s in [(2.0, 0.8), (4.0, 0.0)]:
        pulse, action = check(USUAL, pulse, now)
        assert isinstance(action, Ask)
        pulse = heard(answered(pulse, action.nonce, now + rtt_s), now + rtt_s)
    assert pulse.rtt_s == pytest.approx(0.8 - 0.8 / 8)


def test_an_answer_to_nothing_changes_nothing() -> None:
    pulse = begin(0.0)
    assert answered(pulse, 7, 1.0) is pulse
    pulse, _ = check(USUAL, pulse, 0.0)
    pulse, action = check(USUAL, pulse, 2.0)
    assert action == Ask(0)
    pulse = answered(pulse, 0, 2.5)
    assert answered(pulse, 0, 9.0) is pulse


def test_time_in_which_our_own_loop_stood_still_is_not_silence() -> None:
    pulse, _ = check(USUAL, begin(0.0), 0.0)
    pulse, action = check(USUAL, pulse, 100.0)  # wanted at 2.0
    assert action == Ask(0)
    pulse, action = check(USUAL, pulse, pulse.next_check)
    assert action == Ask(1)
    pulse, action = check(USUAL, pulse, pulse.next_check)
    assert action == Dead(6.0)


def test_a_peer_that_speaks_after_it_was_called_dead_is_a_false_alarm() -> None:
    pulse, _ = check(USUAL, begin(0.0), 0.0)
    while pulse.died_at is None:
        pulse, _ = check(USUAL, pulse, pulse.next_check)
    assert heard(pulse, 5.0).false_alarms == 0  # heard before the verdict, read after it
    pulse = heard(pulse, 6.5)
    assert (pulse.false_alarms, pulse.died_at) == (1, None)
    assert heard(pulse, 7.0).false_alarms == 1
    assert not isinstance(check(USUAL, pulse, 7.0)[1], Dead)


@example(interval_s=2.0, factor=3.0, gaps=[1.0, 1.04, 100.0])  # 2.04 + 6 - 2.04 is below 6: once an endless loop
@given(
    interval_s=st.floats(0.01, 10),
    factor=st.floats(2, 10),
    gaps=st.lists(st.floats(0, 100), max_size=20),
)
def test_death_comes_neither_before_the_bound_nor_later_than_it(
    interval_s: float, factor: float, gaps: list[float]
) -> None:
    liveness = Liveness(interval_s=interval_s, dead_after_s=interval_s * factor)
    pulse, now, last = begin(0.0), 0.0, 0.0
    for gap in gaps:  # a peer that speaks after each gap, unless that gap is its end
        while pulse.next_check < last + gap:
            now = pulse.next_check
            pulse, action = check(liveness, pulse, now)
            assert pulse.next_check > now or isinstance(action, Dead)
            if isinstance(action, Dead):
                assert now - last == pytest.approx(liveness.dead_after_s)
                return
        assert gap < liveness.dead_after_s or gap == pytest.approx(liveness.dead_after_s)
        last += gap
        pulse = heard(pulse, last)
    assert len(pulse.asked) <= factor + 1


@pytest.mark.parametrize(("interval_s", "dead_after_s"), [(0, 6), (-1, 6), (float("nan"), 6), (2, 3.9), (2, 0)])
def test_a_liveness_that_cannot_work_is_refused(interval_s: float, dead_after_s: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        Liveness(interval_s=interval_s, dead_after_s=dead_after_s)


# Two peers over a link


class Wire:
    """One end of a link with a delay; a frozen end neither sends nor delivers."""

    def __init__(self, name: str, delay_s: float) -> None:
        self.peer = PeerId(name)
        self.pending_bytes = 0
        self.is_frozen = False
        self.num_writes = 0
        self.other: Wire = self
        self._delay_s = delay_s
        self._on_bytes: Callable[[Buffer], None] = lambda data: None

    def start(self, on_bytes: Callable[[Buffer], None], on_closed: Callable[[str], None]) -> None:
        self._on_bytes = on_bytes

    def write(self, parts: Sequence[Buffer]) -> None:
        self.num_writes += 1
        if not self.is_frozen:
            asyncio.get_running_loop().call_later(self._delay_s, self.other.deliver, b"".join(parts))

    def deliver(self, data: bytes) -> None:
        if not self.is_frozen:
            self._on_bytes(data)

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def report_nonsense(self) -> None: ...

    def close(self) -> None: ...


class Side:
    """A peer's end of a control channel, kept alive."""

    def __init__(self, wire: Wire, *, we_dialed: bool, queue_s: float = 0.0) -> None:
        self.wire = wire
        self.channel = Channel(wire, we_dialed=we_dialed, on_message=self._on_message, on_closed=lambda error: None)
        self.life = PeerLife(self.channel, queue_s=lambda: queue_s)
        self.task = asyncio.get_running_loop().create_task(keep_alive(self.life))

    def _on_message(self, message: AnyMessage) -> None:
        if isinstance(message, Heartbeat):
            self.life.on_heartbeat(message)

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def link(delay_s: float = 0.05) -> tuple[Wire, Wire]:
    """Two wires: what is written on one arrives at the other."""
    near, far = Wire("server", delay_s), Wire("client", delay_s)
    near.other, far.other = far, near
    return near, far


def test_a_slow_peer_lives_through_minutes_of_computing_and_a_silent_one_dies_in_six_seconds() -> None:
    async def main() -> None:
        near, far = link()
        client = Side(near, we_dialed=True)
        server = Side(far, we_dialed=False, queue_s=42.0)
        await asyncio.sleep(600)  # the server computes: nothing but heartbeats passes
        assert not client.task.done()
        assert not server.task.done()
        assert client.life.peer_queue_s == 42.0
        far.is_frozen = True
        frozen_at = asyncio.get_running_loop().time()
        with pytest.raises(HopFailed, match=r"silent for 6\.0 s") as caught:
            await client.task
        assert caught.value.peer == "server"
        assert 4.0 <= asyncio.get_running_loop().time() - frozen_at <= 6.1
        await server.end()

    run_virtual(main())


def test_the_round_trip_of_a_quiet_link_is_known_to_a_peer_that_asks() -> None:
    async def main() -> None:
        near, far = link(0.15)
        client, server = Side(near, we_dialed=True), Side(far, we_dialed=False)
        await asyncio.sleep(60)
        assert (client.life.rtt_s or server.life.rtt_s) == pytest.approx(0.3)
        await client.end()
        await server.end()

    run_virtual(main())


def test_bytes_on_a_data_stream_are_life_and_spare_the_questions() -> None:
    async def main() -> None:
        control, far_control = link()
        data, far_data = link()
        far_control.is_frozen = True  # only the data stream gets through
        client = Side(control, we_dialed=True)
        stream = Channel(data, we_dialed=True, on_message=lambda message: None, on_closed=lambda error: None)
        client.life.include(stream)
        tokens = Channel(far_data, we_dialed=False, on_message=lambda message: None, on_closed=lambda error: None)
        for step_no in range(60):
            stream.send(Output(step_no=step_no, position=step_no))
            tokens.send(Output(step_no=step_no, position=step_no))
            await asyncio.sleep(1)
        assert not client.task.done()
        assert control.num_writes == 0
        stream.close()  # an ended channel no longer speaks for the peer
        with pytest.raises(HopFailed):
            await client.task

    run_virtual(main())


def test_a_late_sign_of_life_is_counted_as_a_false_alarm_and_watching_can_go_on() -> None:
    async def main() -> None:
        near, far = link()
        client, server = Side(near, we_dialed=True), Side(far, we_dialed=False)
        await asyncio.sleep(10)
        near.is_frozen = True
        with pytest.raises(HopFailed):
            await client.task
        with pytest.raises(HopFailed):
            await server.task
        near.is_frozen = False
        server.channel.send(Heartbeat(nonce=1))
        await asyncio.sleep(0.2)
        assert client.life.false_alarms == 1
        again = asyncio.get_running_loop().create_task(keep_alive(client.life))
        await asyncio.sleep(60)
        assert not again.done()
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)

    run_virtual(main())


def test_an_idle_pair_of_peers_exchanges_one_question_per_interval() -> None:
    async def main() -> None:
        near, far = link()
        client, server = Side(near, we_dialed=True), Side(far, we_dialed=False)
        await asyncio.sleep(600)
        assert near.num_writes + far.num_writes <= 2 * 2 * 600 / 2
        await client.end()
        await server.end()

    run_virtual(main())
