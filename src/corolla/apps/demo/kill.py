"""`corolla demo --kill`: the same answer twice, and in the middle of the second one a server dies.

A replica of the middle server is up. What is killed is a process with its network daemon, by SIGKILL: nobody says
goodbye. The client notices, puts the replica in its place, has the hop before replay what it had sent, and the text
goes on as if nothing had been.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from corolla.apps.demo.demo import CHAT_TOKENS, LocalSwarm, Plan, Stage, join, started
from corolla.apps.demo.side_by_side import SideBySide
from corolla.errors import SwarmError

if TYPE_CHECKING:
    from corolla.apps.cli.conversation import Pace, ShouldStop, SwarmModel
    from corolla.client.inference import InferenceSession
    from corolla.client.session import RouteHop

KILLED_PLACE = 1
"""In the route; the others have no replica."""
KILL_AT_TOKEN = 16


@dataclass(slots=True)
class Answer:
    """One answer and how it came about."""

    text: str = ""
    pace: "Pace | None" = None
    route_before: "list[RouteHop]" = field(default_factory=list["RouteHop"])
    route_after: "list[RouteHop]" = field(default_factory=list["RouteHop"])
    killed_at: float | None = None
    """Of `time.perf_counter()`."""

    @property
    def stall_s(self) -> float | None:
        """The longest wait for a token from the kill on."""
        if self.killed_at is None or self.pace is None:
            return None
        times = [self.killed_at, *(at for at in self.pace.token_times if at > self.killed_at)]
        return max((later - earlier for earlier, later in pairwise(times)), default=None)


def show_kill(plan: Plan, stage: Stage) -> None:
    """Start a swarm, ask twice, kill once, compare. Raises SwarmError when the two texts differ."""
    with started(plan, stage) as swarm:
        model = join(plan, swarm, stage)
        try:
            stage.show_question(plan.question)
            with SideBySide(stage.out) as columns:
                columns.begin("undisturbed")
                calm = _ask(plan, model, columns, Answer(), swarm)
                columns.begin("a server is killed")
                struck = _ask(plan, model, columns, Answer(), swarm, kill_at=KILL_AT_TOKEN)
        finally:
            model.model.close()
        _show_routes(stage, swarm, struck)
        _judge(stage, calm, struck)


def _ask(
    plan: Plan, model: "SwarmModel", columns: SideBySide, answer: Answer, swarm: LocalSwarm, kill_at: int | None = None
) -> Answer:
    from corolla.apps.cli.conversation import Conversation, Sampling

    longest = min(CHAT_TOKENS, model.model.max_positions or CHAT_TOKENS)

    def write(part: str) -> None:
        answer.text += part
        columns.write(part)

    with model.model.inference_session(max_length=longest) as session:
        conversation = Conversation(model, session, Sampling(plan.max_new_tokens))
        strike = _killer(session, columns, answer, swarm, kill_at)
        answer.pace = conversation.ask(plan.question, write, should_stop=strike)
        answer.route_after = session.route
    return answer


def _killer(
    session: "InferenceSession", columns: SideBySide, answer: Answer, swarm: LocalSwarm, kill_at: int | None
) -> "ShouldStop":
    """Asked after each token whether to stop: never; but after some of them it kills."""
    tokens = 0

    def strike() -> bool:
        nonlocal tokens
        tokens += 1
        if tokens == kill_at:
            answer.route_before = session.route
            victim = swarm.servers[session.route[KILLED_PLACE].peer_id]
            victim.kill()
            answer.killed_at = time.perf_counter()
            columns.mark(f"{victim.name} killed")
        return False

    return strike


def _show_routes(stage: Stage, swarm: LocalSwarm, answer: Answer) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("blocks", "before", "after"):
        table.add_column(column)
    for before, after in zip(answer.route_before, answer.route_after, strict=False):
        is_new = before.peer_id != after.peer_id
        style = "bold green" if is_new else ""
        table.add_row(
            f"{after.start}:{after.end}", swarm.name_of(before.peer_id), Text(swarm.name_of(after.peer_id), style=style)
        )
    stage.out.print()
    stage.out.print(table)


def _judge(stage: Stage, calm: Answer, struck: Answer) -> None:
    if struck.killed_at is None:
        raise SwarmError(f"the answer was over before token {KILL_AT_TOKEN}: nothing was killed; ask for a longer one")
    if struck.stall_s is not None and calm.pace is not None and calm.pace.tokens_per_s is not None:
        stage.out.print(
            Text(
                f"the longest wait for a token after the kill was {struck.stall_s:.2f} s; undisturbed they come "
                f"every {1 / calm.pace.tokens_per_s:.2f} s",
                style="bold",
            )
        )
    if calm.text != struck.text:
        raise SwarmError(f"the texts differ from character {_first_difference(calm.text, struck.text)} on")
    stage.out.print(Text(f"the two texts are the same, all {len(calm.text)} characters", style="bold green"))


def _first_difference(one: Sequence[str], other: Sequence[str]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
