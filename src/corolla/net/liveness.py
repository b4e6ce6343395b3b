"""Is that peer alive? A slow peer answers heartbeats while it computes; a silent one answers nothing.

`check`, `heard`, `sent` and `answered` are pure: `(pulse, …, now) -> pulse`, with `now` in loop time.

    what happens                                              what follows
    any byte on any stream of the peer                        it lives
    neither direction quiet for `interval_s`                  nothing: traffic is proof enough
    a direction quiet for `interval_s`                        `Ask`: one heartbeat per interval at most
    the answer to one                                         a sample of the round trip
    silence for `dead_after_s` while we listened              `Dead`
    a byte after that                                         a false alarm, counted

Time in which our own loop stood still is not silence: what the peer sent meanwhile lies unread.

`PeerLife` holds one peer's pulse, and the task `keep_alive` acts on it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NoReturn

import msgspec
from msgspec.structs import replace

from corolla.errors import HopFailed
from corolla.net.channel import Channel
from corolla.wire.messages import Heartbeat

_RTT_GAIN: Final = 1 / 8
"""Weight of a new sample in the smoothed round trip (RFC 6298 §2)."""


@dataclass(frozen=True, slots=True)
class Liveness:
    """When to ask, and when to give up; in seconds of loop time."""

    interval_s: float = 2.0
    dead_after_s: float = 6.0
    """Three questions unanswered. Left to itself, libp2p over TCP saw a pulled cable after 36 s (measured)."""

    def __post_init__(self) -> None:
        if not self.interval_s > 0:
            raise ValueError(f"interval_s={self.interval_s} must be above 0")
        if not self.dead_after_s >= 2 * self.interval_s:
            raise ValueError(f"dead_after_s={self.dead_after_s} must be at least twice interval_s={self.interval_s}")


class Pulse(msgspec.Struct, frozen=True):
    """What we know of one peer's life; times are loop times. (Not a dataclass: `replace` takes a tenth of the time.)"""

    last_heard: float
    last_sent: float
    next_check: float
    asked: tuple[tuple[int, float], ...] = ()
    """(nonce, when) of the questions still unanswered, oldest first."""
    next_nonce: int = 0
    last_asked: float = float("-inf")
    rtt_s: float | None = None
    """Smoothed round trip; None before the first answer."""
    died_at: float | None = None
    false_alarms: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """Send a heartbeat with this nonce."""

    nonce: int


@dataclass(frozen=True, slots=True)
class Dead:
    """Nothing was heard for this long although we listened."""

    silent_s: float


def begin(now: float) -> Pulse:
    """The pulse of a peer that was just heard of."""
    return Pulse(last_heard=now, last_sent=now, next_check=now)


def heard(pulse: Pulse, at: float) -> Pulse:
    """Bytes came from the peer at this time."""
    if at <= pulse.last_heard and pulse.died_at is None:
        return pulse
    if pulse.died_at is not None and at > pulse.died_at:
        pulse = replace(pulse, died_at=None, false_alarms=pulse.false_alarms + 1)
    return replace(pulse, last_heard=max(pulse.last_heard, at))


def sent(pulse: Pulse, at: float) -> Pulse:
    """Bytes went to the peer at this time."""
    return replace(pulse, last_sent=at) if at > pulse.last_sent else pulse


def answered(pulse: Pulse, nonce: int, now: float) -> Pulse:
    """The peer repeated this nonce; one that we do not wait for says nothing."""
    asked_at = dict(pulse.asked).get(nonce)
    if asked_at is None:
        return pulse
    sample = now - asked_at
    rtt_s = sample if pulse.rtt_s is None else pulse.rtt_s + _RTT_GAIN * (sample - pulse.rtt_s)
    return replace(pulse, rtt_s=rtt_s, asked=tuple(entry for entry in pulse.asked if entry[0] != nonce))


def check(liveness: Liveness, pulse: Pulse, now: float) -> tuple[Pulse, Ask | Dead | None]:
    """What to do now; look again at the new pulse's `next_check`."""
    pulse = _excuse_our_delay(pulse, now)
    # Compared as `next_check` is computed: rounded otherwise, a check at that very time could find nothing to do and
    # want the next one at once, for ever.
    if now >= pulse.last_heard + liveness.dead_after_s:
        return replace(pulse, died_at=now, next_check=now), Dead(now - pulse.last_heard)
    action: Ask | None = None
    if now >= _next_question(liveness, pulse):
        action = Ask(pulse.next_nonce)
        pulse = _asked(liveness, pulse, now)
    next_check = min(_next_question(liveness, pulse), pulse.last_heard + liveness.dead_after_s)
    return replace(pulse, next_check=next_check), action


def _excuse_our_delay(pulse: Pulse, now: float) -> Pulse:
    """Shifts the last sign of life by how late this check comes: only time in which we listened is silence."""
    late_s = max(0.0, now - pulse.next_check)
    return replace(pulse, last_heard=min(now, pulse.last_heard + late_s))


def _next_question(liveness: Liveness, pulse: Pulse) -> float:
    quiet_since = min(pulse.last_heard, pulse.last_sent)
    return max(quiet_since, pulse.last_asked) + liveness.interval_s


def _asked(liveness: Liveness, pulse: Pulse, now: float) -> Pulse:
    waiting = tuple(entry for entry in pulse.asked if now - entry[1] < liveness.dead_after_s)
    return replace(pulse, asked=(*waiting, (pulse.next_nonce, now)), next_nonce=pulse.next_nonce + 1, last_asked=now)


class PeerLife:
    """One peer's pulse, fed by all channels to it; heartbeats go over the `control` channel.

    The owner routes `Heartbeat` messages of the control channel to `on_heartbeat`, names the peer's other channels
    with `include`, and runs `keep_alive` while the control channel is open.
    """

    def __init__(
        self, control: Channel, liveness: Liveness | None = None, *, queue_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        """`queue_s`: how long a step that arrives now would wait here; it rides on each heartbeat."""
        self.liveness: Final = liveness or Liveness()
        self.control: Final = control
        self.peer_queue_s = 0.0
        """What the peer last said of its own queue."""
        self._queue_s = queue_s
        self._channels = [control]
        self._pulse = begin(asyncio.get_running_loop().time())

    @property
    def rtt_s(self) -> float | None:
        """Smoothed round trip of heartbeats; None before the first answer."""
        return self._pulse.rtt_s

    @property
    def is_answering(self) -> bool:
        """Whether it was heard lately: not silent for so long that it may be dead."""
        self._listen()
        return asyncio.get_running_loop().time() - self._pulse.last_heard < self.liveness.dead_after_s / 2

    @property
    def false_alarms(self) -> int:
        """How often the peer was heard after it had been called dead."""
        self._listen()
        return self._pulse.false_alarms

    def include(self, channel: Channel) -> None:
        """Bytes on this channel, too, are signs of life, until it ends."""
        self._channels.append(channel)

    def on_heartbeat(self, message: Heartbeat) -> None:
        """Answers the peer's question, or takes the round trip from its answer."""
        self.peer_queue_s = message.queue_s
        if message.is_reply:
            self._pulse = answered(self._pulse, message.nonce, asyncio.get_running_loop().time())
        else:
            self.control.send(Heartbeat(nonce=message.nonce, is_reply=True, queue_s=self._queue_s()))

    def act(self, now: float) -> float:
        """Ask when it is time to; seconds until the next look. Raises HopFailed when the peer is dead."""
        self._listen()
        self._pulse, action = check(self.liveness, self._pulse, now)
        match action:
            case Ask(nonce):
                self.control.send(Heartbeat(nonce=nonce, queue_s=self._queue_s()))
            case Dead(silent_s):
                limit_s = self.liveness.dead_after_s
                raise HopFailed(self.control.peer, f"silent for {silent_s:.1f} s, called dead after {limit_s:.1f} s")
            case None:
                pass
        return self._pulse.next_check - now

    def _listen(self) -> None:
        for channel in self._channels:
            self._pulse = sent(heard(self._pulse, channel.last_heard), channel.last_sent)
        self._channels = [channel for channel in self._channels if channel.is_open or channel is self.control]


async def keep_alive(life: PeerLife) -> NoReturn:
    """Ask the peer for signs of life until cancelled. Raises HopFailed when it gives none."""
    loop = asyncio.get_running_loop()
    while True:
        pause_s = life.act(loop.time())
        await asyncio.sleep(pause_s)
