"""Steps and outputs that come twice, or once more much later, change nothing: everything is counted by `step_no`.

A stream never repeats bytes by itself; peers do, when a route changes under what they have sent already. Here they
do so without any need, all the time, in the middle of everything else that befalls a swarm.
"""

import random
from collections import defaultdict, deque

import pytest

from corolla.apps.sim.chaos import live
from corolla.net.channel import Channel
from corolla.wire.messages import AnyMessage, Output, Step

SEEDS = range(10_000, 10_040)
KEPT = 4
"""Fewer than a session's journal keeps: what is older would rightly be refused as gone."""


class Repeater:
    """Sends some steps and outputs twice, and some again after others."""

    def __init__(self, send: object, rng: random.Random) -> None:
        self.repeated = 0
        self._send = send
        self._rng = rng
        self._sent: dict[Channel, deque[AnyMessage]] = defaultdict(lambda: deque(maxlen=KEPT))

    def send(self, channel: Channel, message: AnyMessage) -> None:
        assert callable(self._send)
        self._send(channel, message)
        if not isinstance(message, Step | Output):
            return
        sent = self._sent[channel]
        sent.append(message)
        if self._rng.random() < 0.2:
            self.repeated += 1
            self._send(channel, self._rng.choice(sent))


def test_steps_and_outputs_that_come_again_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    repeater = Repeater(Channel.send, rng)
    monkeypatch.setattr(Channel, "send", lambda channel, message: repeater.send(channel, message))
    steps = 0
    for seed in SEEDS:
        rng.seed(seed)  # so that one seed, run alone, is the same life
        steps += live(seed).steps
    assert steps > 5 * len(SEEDS)
    assert repeater.repeated > steps
