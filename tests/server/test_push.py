"""The way out of a session: nothing is lost or sent twice, however late the way to the next hop is there."""

from typing import cast

import pytest

from corolla.net.channel import Channel
from corolla.server.push import Push
from corolla.wire.messages import AnyMessage, Output, Step
from corolla.wire.tensors import WireTensor

HIDDEN = WireTensor("float32", (1, 1, 4), bytes(16))


class Sent:
    """As much of a channel as a push needs."""

    pending_bytes = 0

    def __init__(self) -> None:
        self.steps: list[tuple[int, bool]] = []
        """(step_no, replay)"""

    def send(self, message: AnyMessage) -> None:
        assert isinstance(message, Step | Output)
        self.steps.append((message.step_no, message.replay))


def step(number: int, *, replay: bool) -> Step:
    return Step(step_no=number, position=number, replay=replay, hidden=HIDDEN)


def onward_to_a_fresh_hop(*, exact: bool) -> Push:
    push = Push()
    push.reset(exact=exact)
    push.is_tail, push.replay_on = False, True
    return push


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("before", range(5), ids="way after {}".format)
def test_replays_that_come_before_there_is_a_way_on_go_out_with_the_rest(before: int, *, exact: bool) -> None:
    push, sent = onward_to_a_fresh_hop(exact=exact), Sent()
    replays = [True, True, False, False]
    for number, replay in enumerate(replays):
        if number == before:
            push.channel = cast(Channel, sent)
            push.release()
        push.onward(step(number, replay=replay))
    if before == len(replays):
        push.channel = cast(Channel, sent)
        push.release()
    assert sent.steps == list(enumerate(replays))
    assert push.unsent_bytes == 0


def test_what_waits_for_a_way_on_counts_as_unsent() -> None:
    push = onward_to_a_fresh_hop(exact=False)
    push.onward(step(0, replay=True))
    push.onward(step(1, replay=True))
    assert push.unsent_bytes == 2 * HIDDEN.nbytes


def test_a_replay_from_the_journal_takes_the_place_of_those_that_waited() -> None:
    push, sent = onward_to_a_fresh_hop(exact=False), Sent()
    push.onward(step(0, replay=True))
    push.onward(step(1, replay=False))
    push.channel = cast(Channel, sent)
    replay = push.snapshot(0, 8, 1 << 20, live_from=1, in_chunks=True)
    push.release()
    assert [(entry.step_no, entry.replay) for entry in replay] == [(0, True), (1, False)]
    assert sent.steps == []
    assert push.unsent_bytes == 0
