"""Servers that come, place themselves, move and die: no network and no blocks, but the very functions of a server.

`server/placing.py` runs unchanged over a board where each announcement is seen a moment later and a dead server's
stays until it expires. What is recorded every two minutes is what the living servers really put through, beside the
best that a search finds for the same servers with a free hand. For `run_virtual`.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from corolla.clock import loop_time
from corolla.ids import Fingerprint, PeerId
from corolla.server.placing import PlacingConfig, claim_span, keep_placed, without_silent
from corolla.swarm.announcement import Announcement, State
from corolla.swarm.cost import CostModel
from corolla.swarm.placement import Placed, block_rates, choose_span
from corolla.swarm.rebalance import Model, plan
from corolla.swarm.view import ServerView, View

MODEL = Fingerprint("0" * 32)
COST = CostModel()
RECORD_LIFE_S = 180.0
RENEWED_S = 45.0
REPLACED_S = 600.0
"""From a death until somebody else joins, in the mean."""
SAMPLE_S = 120.0


@dataclass(frozen=True, slots=True)
class Churn:
    """How a simulated swarm lives. Rates are tokens a second through one block, times blocks."""

    num_blocks: int = 40
    num_servers: int = 30
    lengths: tuple[int, int] = (3, 10)
    block_rates: tuple[float, float] = (40.0, 200.0)
    leave_share_per_hour: float = 0.1
    hours: float = 8.0
    load_s: float = 60.0
    """To have another span loaded."""
    seen_after_s: float = 0.3
    """Until others read an announcement, at most."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """The swarm at one moment: tokens a second through its weakest block."""

    at_s: float
    actual: float
    best: float
    """What these servers could do if they were placed anew."""
    num_servers: int


@dataclass(slots=True)
class History:
    """What happened; times in seconds since the start."""

    samples: list[Sample] = field(default_factory=list[Sample])
    deaths: list[float] = field(default_factory=list[float])
    moves: list[float] = field(default_factory=list[float])

    def quality(self, after_s: float = 0.0) -> float:
        """Mean share of the best that was reached."""
        shares = [min(s.actual / s.best, 1.0) for s in self.samples if s.at_s >= after_s and s.best > 0]
        return sum(shares) / len(shares)

    def uncovered(self, after_s: float = 0.0) -> list[Sample]:
        """Moments at which a block was on no server although these servers could have covered all."""
        return [s for s in self.samples if s.at_s >= after_s and s.actual == 0 and s.best > 0]


class Board:
    """Announcements as others see them: each a moment late, a dead server's until it expires."""

    def __init__(self, rng: random.Random, seen_after_s: float) -> None:
        self._rng = rng
        self._seen_after_s = seen_after_s
        self._posts: dict[PeerId, list[tuple[float, Announcement]]] = {}
        self._renewed_at: dict[PeerId, float] = {}
        """When a dead server last renewed its record."""

    def post(self, peer: PeerId, said: Announcement) -> None:
        """Take the place of what this peer said before, once others have seen this."""
        now = loop_time()
        seen = [post for post in self._posts.get(peer, []) if post[0] <= now][-1:]
        coming = [post for post in self._posts.get(peer, []) if post[0] > now]
        latest = max([now, *(seen_at for seen_at, _ in coming)])
        self._posts[peer] = [*seen, *coming, (latest + self._rng.uniform(0, self._seen_after_s), said)]

    def abandon(self, peer: PeerId) -> None:
        """The server died: nobody renews its record."""
        self._renewed_at[peer] = loop_time() - self._rng.uniform(0, RENEWED_S)

    def is_alive(self, peer: PeerId) -> bool:
        return peer not in self._renewed_at

    def view(self) -> View:
        now = loop_time()
        seen: list[ServerView] = []
        for peer, posts in self._posts.items():
            visible = [said for seen_at, said in posts if seen_at <= now]
            expires_at = self._renewed_at.get(peer, now) + RECORD_LIFE_S
            if visible and expires_at > now:
                seen.append(ServerView(peer, visible[-1], expires_at))
        return View.of(seen)


class SimServer:
    """One server's life; a `Publisher`."""

    def __init__(self, board: Board, peer: PeerId, length: int, block_rate: float, churn: Churn) -> None:
        self.peer = peer
        self.span: range | None = None
        """What it serves; None while it serves nothing."""
        self._board = board
        self._length = length
        self._block_rate = block_rate
        self._churn = churn

    async def live(self, rng: random.Random, on_move: Callable[[], None]) -> None:
        """Join, serve, and move when that is better; until cancelled."""
        config = PlacingConfig()
        span = await claim_span(self, self.peer, self._choose, rng=rng, config=config)
        await asyncio.sleep(self._churn.load_s)
        self._serve(span)

        async def move(span: range) -> None:
            on_move()
            await asyncio.sleep(self._churn.load_s)  # loaded beside the old blocks, which serve on
            self._serve(span)

        await keep_placed(self, self.peer, move, cuts=None, cost=COST, rng=rng, config=config)

    async def read(self) -> View:
        await asyncio.sleep(0.1)
        return await without_silent(
            self._board.view(), self._answers, wall_now=loop_time(), lifetime_s=RECORD_LIFE_S, period_s=RENEWED_S
        )

    async def _answers(self, peer: PeerId) -> bool:
        return self._board.is_alive(peer)

    async def claim(self, span: range) -> None:
        if self.span is None:
            self._board.post(self.peer, self._announcement("joining", span))
        else:
            self._board.post(self.peer, self._announcement("online", self.span, moving_to=(span.start, span.stop)))

    async def stay(self) -> None:
        if self.span is not None:
            self._serve(self.span)

    def placed(self) -> Placed | None:
        """Where it really serves."""
        return None if self.span is None else Placed(self.peer, self.span.start, self.span.stop, self._rate(self.span))

    def placed_or_not(self) -> Placed:
        """Itself, anywhere: what a planner with a free hand may place."""
        return Placed(self.peer, 0, self._length, self._block_rate / self._length)

    def _serve(self, span: range) -> None:
        self.span = span
        self._board.post(self.peer, self._announcement("online", span))

    def _choose(self, view: View) -> range:
        joining = self._announcement("joining", range(self._length))
        return choose_span(view, self._length, joining=joining, peer=self.peer, cost=COST)

    def _announcement(self, state: State, span: range, *, moving_to: tuple[int, int] | None = None) -> Announcement:
        return Announcement(
            state=state, start=span.start, end=span.stop, num_blocks=self._churn.num_blocks, fingerprint=MODEL,
            model_name="model", dtype="bfloat16", decode_tokens_per_s=self._rate(span), free_cache_tokens=1 << 16,
            is_movable=True, moving_to=moving_to,
        )  # fmt: skip

    def _rate(self, span: range) -> float:
        return self._block_rate / len(span)


class _Life:
    """The running simulation: who lives, and what is recorded."""

    def __init__(self, churn: Churn) -> None:
        self.churn = churn
        self.rng = random.Random(churn.seed)  # noqa: S311 - reproducible on purpose
        self.board = Board(self.rng, churn.seen_after_s)
        self.history = History()
        self.living: dict[PeerId, tuple[SimServer, asyncio.Task[None]]] = {}
        self._num_born = 0

    def be_born(self) -> None:
        churn = self.churn
        peer = PeerId(f"{self.rng.randrange(1 << 40):010x}-{self._num_born}")
        self._num_born += 1
        server = SimServer(
            self.board, peer, self.rng.randint(*churn.lengths), self.rng.uniform(*churn.block_rates), churn
        )
        task = asyncio.create_task(server.live(self.rng, lambda: self.history.moves.append(loop_time())))
        self.living[peer] = server, task

    def die(self) -> None:
        peer = self.rng.choice(sorted(self.living))
        _, task = self.living.pop(peer)
        assert not task.done(), f"a server ended by itself: {task}"
        task.cancel()
        self.board.abandon(peer)
        self.history.deaths.append(loop_time())

    async def die_now_and_then(self, per_second: float) -> None:
        """At random moments, this often in the mean; a new server comes a while after each."""
        loop = asyncio.get_running_loop()
        while per_second > 0:
            await asyncio.sleep(self.rng.expovariate(per_second))
            self.die()
            loop.call_later(self.rng.expovariate(1 / REPLACED_S), self.be_born)

    def sample(self) -> None:
        servers = [server for server, _ in self.living.values()]
        actual = [placed for server in servers if (placed := server.placed()) is not None]
        best = max(
            _weakest(plan(places, Model(self.churn.num_blocks)), self.churn.num_blocks)
            for places in (actual, [server.placed_or_not() for server in servers])
        )
        self.history.samples.append(
            Sample(loop_time(), _weakest(actual, self.churn.num_blocks), best, len(self.living))
        )


def _weakest(placed: Iterable[Placed], num_blocks: int) -> float:
    return min(block_rates(placed, num_blocks))


async def simulate(churn: Churn, *, deaths_at: Sequence[float] = ()) -> History:
    """Servers join within ten minutes; then some die without a word, each followed by a new one, for `hours`.

    `deaths_at`: seconds at which one more dies.
    """
    life = _Life(churn)
    for _ in range(churn.num_servers):
        life.be_born()
        await asyncio.sleep(life.rng.uniform(0, 600 / churn.num_servers))
    per_second = churn.leave_share_per_hour * churn.num_servers / 3600
    dying = asyncio.create_task(life.die_now_and_then(per_second))
    for at_s in deaths_at:
        asyncio.get_running_loop().call_at(at_s, life.die)
    while loop_time() < 3600 * churn.hours:
        await asyncio.sleep(SAMPLE_S)
        life.sample()
    for task in (dying, *(task for _, task in life.living.values())):
        task.cancel()
    return life.history
