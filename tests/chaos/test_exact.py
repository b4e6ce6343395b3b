"""`exact`: in bf16 too, a session whose servers are killed gives bit for bit what it gives over servers that live.

Kernels round differently with a step's shape, so a cache that is rebuilt by one long prefill is not the cache that
was lost. An exact session repeats every step as it was.
"""

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from corolla.apps.sim import chaos
from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import hidden_of, numbers_of, whole_model
from corolla.client.chunks import cut_into_steps
from corolla.client.config import ClientConfig
from corolla.client.session import Session, StepInput
from corolla.models.checkpoint import open_checkpoint
from corolla.models.loading import load_span
from corolla.models.tensors import to_torch, to_wire
from corolla.models.testing import write_tiny
from corolla.net.memory.loop import run_virtual
from corolla.server.config import SessionLimits
from corolla.server.runner import SpanRunner
from corolla.server.span import TorchSpanRunner
from corolla.wire.messages import Step
from corolla.wire.tensors import WireTensor

SPANS = ("0:2", "2:4", "4:6")
NUM_BLOCKS = 6
PROMPT_CHUNKS = (9, 7)
NUM_STEPS = 24
SEEDS = range(5)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("exact"), "llama", hidden_size=256, intermediate_size=512)


@dataclass(frozen=True, slots=True)
class Deed:
    """What one step does before it runs."""

    kills: Sequence[int] = ()
    """Places whose servers die."""
    trim: int = 0
    gather: bool = False


def deeds_of(seed: int, *, rewrites: bool) -> list[Deed]:
    rng = random.Random(seed)
    deeds = [
        Deed(
            kills=rng.sample(range(len(SPANS)), rng.randint(1, len(SPANS))) if rng.random() < 0.12 else (),
            trim=rng.randint(1, 4) if rewrites and rng.random() < 0.15 else 0,
            gather=rewrites and rng.random() < 0.15,
        )
        for _ in range(NUM_STEPS)
    ]
    deeds[NUM_STEPS // 2] = Deed(kills=[seed % len(SPANS)])  # in any case one
    return deeds


async def write(swarm: MemorySwarm, session: Session, deeds: Sequence[Deed], lives: bool) -> list[bytes]:
    """Two rows: a prompt in chunks, then single positions, each made of what came back for the one before."""
    inputs = [StepInput(to_wire(chunk), chunk.shape[1]) for chunk in prompt_chunks()]
    answers = await session.run(inputs, want="last")
    outputs: list[bytes] = []
    for number, deed in enumerate(deeds):
        last = answers[-1]
        assert last is not None
        outputs.append(bytes(last.data))
        if not lives:
            for place in deed.kills:
                await replace_server(swarm, session, place, f"{number}.{place}")
        if deed.trim:
            session.trim(session.position - deed.trim)
        if deed.gather:
            session.gather([1, 0])
        answers = [await session.step(to_wire(next_entry(last)), num_tokens=1, want="last")]
    return outputs


def prompt_chunks() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, size, 256, generator=generator).bfloat16() for size in PROMPT_CHUNKS]


def next_entry(output: WireTensor) -> torch.Tensor:
    return torch.tanh(to_torch(output).float()).bfloat16()


async def replace_server(swarm: MemorySwarm, session: Session, place: int, name: str) -> None:
    hop = session.route[place]
    await swarm.serve(name, SPANS[place], runner=RUNNERS[SPANS[place]])
    swarm.network.kill(hop.peer_id)


RUNNERS: dict[str, SpanRunner] = {}


@pytest.fixture(scope="module", autouse=True)
def runners(checkpoint: Path) -> None:
    opened = open_checkpoint(checkpoint)
    for span in SPANS:
        start, end = map(int, span.split(":"))
        RUNNERS[span] = TorchSpanRunner(load_span(opened, start, end, dtype=torch.bfloat16))


def run(deeds: Sequence[Deed], *, exact: bool, lives: bool = False) -> list[bytes]:
    async def told() -> list[bytes]:
        async with MemorySwarm(num_blocks=NUM_BLOCKS) as swarm:
            for span in SPANS:
                await swarm.serve(span, span, runner=RUNNERS[span])
            client = await swarm.client("client", ClientConfig(exact=exact))
            session = await client.start_session(swarm.model, max_tokens=64, max_rows=2, wire_dtype="bfloat16")
            try:
                outputs = await write(swarm, session, deeds, lives)
                assert lives or session.recoveries > 0
                return outputs
            finally:
                session.close()

    return run_virtual(told())


@pytest.mark.full
@pytest.mark.parametrize("rewrites", [False, True], ids=["plain", "trims and gathers"])
def test_an_exact_session_in_bf16_is_bitwise_the_same_through_every_kill(rewrites: bool) -> None:
    differ = []
    for seed in SEEDS:
        deeds = deeds_of(seed, rewrites=rewrites)
        if run(deeds, exact=True) != run(deeds, exact=True, lives=True):
            differ.append(seed)
    assert differ == []


def test_a_server_that_takes_only_shorter_steps_takes_no_place_in_an_exact_session() -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=2) as swarm:
            first = await swarm.serve("first", "0:2")
            client = await swarm.client("client", ClientConfig(exact=True, wait_for_servers_s=300))
            session = await client.start_session(swarm.model, max_tokens=64, max_rows=1)
            prompt = list(range(8))
            assert await feed(session, prompt) == whole_model(2, prompt)
            await swarm.serve("short", "0:2", limits=SessionLimits(max_chunk_tokens=4))
            swarm.network.kill(first.transport.peer)
            going_on = asyncio.create_task(feed(session, [9]))
            await asyncio.sleep(10)
            assert not going_on.done()
            await swarm.serve("long", "0:2")
            assert await going_on == whole_model(2, [*prompt, 9])[-1:]
            assert session.route[0].peer_id == swarm.handlers["long"].transport.peer
            session.close()

    run_virtual(told())


async def feed(session: Session, numbers: list[int]) -> list[int]:
    output = await session.step(hidden_of([numbers]), num_tokens=len(numbers), want="all")
    assert output is not None
    return numbers_of(output)


@pytest.mark.full
def test_every_kind_of_life_goes_well_in_exact_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freezes, cuts, drains and joins too, with trims and gathers, on spans of hashes."""
    monkeypatch.setattr(chaos, "CONFIG", replace(chaos.CONFIG, exact=True))
    lives = [chaos.live(seed) for seed in range(20_000, 20_020)]
    assert sum(life.recoveries for life in lives) > len(lives)


def test_one_span_in_one_process_gives_the_same_bits(checkpoint: Path) -> None:
    deeds = deeds_of(0, rewrites=False)
    whole = TorchSpanRunner(load_span(open_checkpoint(checkpoint), 0, NUM_BLOCKS, dtype=torch.bfloat16))
    held = whole.new_cache(0, NUM_BLOCKS, 64)
    position, outputs = 0, list[bytes]()

    def forward(hidden: torch.Tensor) -> WireTensor:
        nonlocal position
        answer = whole.run(held, Step(step_no=0, position=position, hidden=to_wire(hidden)), "last", "bfloat16")
        position += hidden.shape[1]
        assert answer is not None
        return answer

    last = [forward(chunk) for chunk in prompt_chunks()][-1]
    for _ in deeds:
        outputs.append(bytes(last.data))
        last = forward(next_entry(last))
    assert run(deeds, exact=True) == outputs


@pytest.mark.parametrize(("exact", "in_one"), [(True, True), (False, False)])
def test_a_prompt_is_not_cut_to_suit_the_route(exact: bool, in_one: bool) -> None:
    async def told() -> int:
        async with MemorySwarm(num_blocks=2) as swarm:
            for block in ("0:1", "1:2"):
                await swarm.serve(block, block)
            client = await swarm.client("client", ClientConfig(exact=exact))
            async with client.open_session(swarm.model, max_tokens=2048) as session:
                return len(cut_into_steps(session, torch.zeros(1, 1500, 2), max_chunk_tokens=2048))

    assert (run_virtual(told()) == 1) is in_one


def test_without_it_some_differ() -> None:
    """Else the test above would prove nothing."""
    deeds = [deeds_of(seed, rewrites=False) for seed in SEEDS]
    assert any(run(each, exact=False) != run(each, exact=False, lives=True) for each in deeds)
