"""Where a session's outputs go: on to the next hop as steps, or back to the client as outputs.

The device thread pushes, keeps the journal and the last replies; the event loop only changes where they go. Holding
back keeps the order: while the way is not there, or a replay is being sent, new outputs stay in the journal, and
`release` sends them in turn.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from corolla.net.channel import Channel
from corolla.wire.journal import MAX_RECENT, Journal
from corolla.wire.messages import Output, Step
from corolla.wire.verbatim import VerbatimJournal

MAX_JOURNAL_BYTES = 256 << 20
PACED_BYTES = 4 << 20
"""A replay waits while more than this is unsent: the stream's own bound is for what nobody paces."""
PACE_S = 0.002


class Push:
    """The way out of one session on one server."""

    def __init__(self, max_journal_bytes: int = MAX_JOURNAL_BYTES) -> None:
        self.channel: Channel | None = None
        """Set by the loop. None: there is no way yet."""
        self.is_tail = True
        self.route_version = 0
        self.replay_on = False
        self.is_over = False
        """Set by the loop: the session has ended, and what it still computes counts nowhere."""
        self.send_s = 0.0
        """How long it took to get the latest step's result away; the step after it tells. The device thread's."""
        self._journal = Journal(max_journal_bytes)
        self._replies: deque[Output] = deque(maxlen=MAX_RECENT)
        self._held_from: int | None = None
        self._passed_back: list[Output] = []
        self._held_replays: list[Step] = []
        """Replayed steps for a next hop that is built anew too, which came before there was a way to it. The journal
        has them as history only, and what is held back is otherwise sent from its newest steps."""
        self._held_replay_bytes = 0

    @property
    def unsent_bytes(self) -> int:
        """What has been given away and is still here, besides the journal."""
        if self.channel is not None:
            return self.channel.pending_bytes + self._held_replay_bytes
        passed_back = sum(output.hidden.nbytes for output in self._passed_back if output.hidden is not None)
        return passed_back + self._held_replay_bytes

    # --- on the device thread

    @property
    def journal_from(self) -> int:
        return self._journal.first_position

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the journal and the last replies hold."""
        return self._journal.nbytes + sum(reply.hidden.nbytes for reply in self._replies if reply.hidden is not None)

    @property
    def has_history(self) -> bool:
        """Whether it keeps more than the newest steps and replies, which could be sent again as they were."""
        return self._journal.nbytes > self._journal.recent_nbytes

    @property
    def has_gap(self) -> bool:
        return self._journal.first_position > 0

    @property
    def can_shed(self) -> bool:
        """Whether it keeps more than its newest step and reply."""
        return self._journal.num_pieces > 1 or len(self._replies) > 1

    def shed(self) -> None:
        """Give up the history; where there is none, all but the newest step and reply."""
        if self.has_history and self._journal.num_pieces > 1:
            self._journal.shed(self._journal.recent_nbytes)
            return
        self._journal.shed(0)
        while len(self._replies) > 1:
            self._replies.popleft()

    def reset(self, *, exact: bool = False) -> None:
        """Forget everything: the session begins anew. `exact`: keep steps as they were."""
        self._journal = (VerbatimJournal if exact else Journal)(self._journal.max_bytes)
        self._replies.clear()
        self._held_from = None
        self._passed_back.clear()
        self.drop_held_replays()
        self.send_s = 0.0

    def drop_held_replays(self) -> None:
        """Who goes on has them, or will be sent the history."""
        self._held_replays.clear()
        self._held_replay_bytes = 0

    def hold(self) -> None:
        """Keep what comes from now on, until `release`."""
        if self._held_from is None:
            self._held_from = self._last_step_no + 1

    def stop_holding(self) -> None:
        """Go on, if nothing has been kept back so far; else a replay says from where."""
        if self._held_from == self._last_step_no + 1:
            self._held_from = None

    def onward(self, step: Step) -> None:
        """Push a step on to the next hop. Replayed ones only when that is rebuilt too."""
        if step.replay:
            self._journal.add_history(step)
            if self.replay_on:
                self._pass_replay_on(step)
        else:
            self._send(step)  # first: the next server computes while this one files
            self._journal.add(replace(step, timings=[]))

    def answer(self, output: Output) -> None:
        """Give the client its output."""
        self._replies.append(output)
        self._send(output)

    def pass_back(self, output: Output) -> None:
        """What a replayed step gave, for the client to pass on. Kept only until there is a way to it."""
        if self.channel is None:
            self._passed_back.append(output)
        else:
            self._transmit(output)

    def skip(self, num_tokens: int) -> None:
        """These positions were not pushed on: the journal has a gap up to here."""
        self._journal.skip(num_tokens)

    def again(self, step_no: int) -> bool:
        """Send what this step gave once more. False: it is no longer kept."""
        if self._held_from is not None and step_no >= self._held_from:
            return True  # it goes out with the rest
        kept = [message for message in self._kept(step_no) if message.step_no == step_no]
        for message in kept[:1]:
            self._send(message)
        return bool(kept)

    def resend(self, from_step: int, live_from: int) -> None:
        """Send everything kept from this step on again, those before `live_from` as replays."""
        for message in self._kept(from_step):
            if isinstance(message, Step):
                message = replace(message, replay=message.step_no < live_from)
            self._transmit(message)

    def snapshot(
        self, from_position: int, max_tokens: int, max_bytes: int, live_from: int, *, in_chunks: bool
    ) -> list[Step]:
        """All that is kept, as steps for `send_paced`: the history, then the newest, live from `live_from` on.

        What comes meanwhile is held back until `release`.
        """
        self._held_from = self._last_step_no + 1
        self.drop_held_replays()
        return self.copy(from_position, max_tokens, max_bytes, live_from, in_chunks=in_chunks)

    def copy(
        self, from_position: int, max_tokens: int, max_bytes: int, live_from: int, *, in_chunks: bool
    ) -> list[Step]:
        """The same, for somebody beside the route: nothing is held back."""
        self._journal.compact()
        newest = [
            replace(step, replay=step.step_no < live_from)
            for step in self._journal.recent(0)
            if step.position + step.hidden.shape[1] > from_position
        ]
        return [*self._journal.replay(from_position, max_tokens, max_bytes, in_chunks=in_chunks), *newest]

    def release(self, from_step: int | None = None, live_from: int = 0) -> None:
        """Send what was held back (or all from `from_step` on, sent or not), and hold no longer."""
        passed_back, self._passed_back = self._passed_back, []
        for output in passed_back:
            self._transmit(output)
        replays = list(self._held_replays)
        self.drop_held_replays()
        if from_step is None:
            for step in replays:
                self._transmit(step)
        held_from, self._held_from = self._held_from, None
        first = held_from if from_step is None else from_step
        if first is not None:
            self.resend(first, live_from)

    def _pass_replay_on(self, step: Step) -> None:
        self._send(step)
        if self._held_from is not None:
            self._held_replays.append(step)
            self._held_replay_bytes += step.hidden.nbytes

    def _send(self, message: Step | Output) -> None:
        if self.channel is None and self._held_from is None:
            self._held_from = message.step_no
        if self._held_from is None:
            self._transmit(message)

    def _transmit(self, message: Step | Output) -> None:
        channel = self.channel
        if channel is None:
            self._held_from = message.step_no if self._held_from is None else min(self._held_from, message.step_no)
        else:
            is_as_it_goes = message.route_version == self.route_version  # nearly every step: one copy less
            channel.send(message if is_as_it_goes else replace(message, route_version=self.route_version))

    def _kept(self, from_step: int) -> Sequence[Step | Output]:
        if not self.is_tail:
            return self._journal.recent(from_step)
        replies = [output for output in self._replies if output.step_no >= from_step]
        answered = {output.step_no for output in replies}
        pushed = (step for step in self._journal.recent(from_step) if step.step_no not in answered)
        return sorted((*map(_as_output, pushed), *replies), key=lambda output: output.step_no)

    @property
    def _last_step_no(self) -> int:
        if self.is_tail:
            return self._replies[-1].step_no if self._replies else self._journal.last_step_no
        return self._journal.last_step_no


def _as_output(step: Step) -> Output:
    """A step that was pushed on to a server, for the client that now stands in between."""
    return Output(step_no=step.step_no, position=step.position + step.hidden.shape[1], hidden=step.hidden)


async def send_paced(
    channel: Channel, steps: Sequence[Step], route_version: int, *, is_wanted: Callable[[], bool]
) -> None:
    """Send a replay without piling it up in the stream's buffer. Ends early when the channel does, or another is
    wanted instead."""
    for step in steps:
        while channel.is_open and is_wanted() and channel.pending_bytes > PACED_BYTES:  # noqa: ASYNC110 - as nobody
            await asyncio.sleep(PACE_S)  # tells us of room
        if not channel.is_open or not is_wanted():
            return
        channel.send(replace(step, route_version=route_version))
