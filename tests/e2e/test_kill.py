"""Servers die at every moment and in every way, and the text is the local model's.

Real processes over libp2p, S in three spans, a replica of each always up. Each server's cache holds one session and
no second: a session that is left behind anywhere would refuse the next one there.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from corolla import AutoDistributedModelForCausalLM
from corolla.apps.bench.fleet import Blow, Fleet, Member, ask_to_leave, freeze, kill_daemon, kill_family, kill_python
from corolla.apps.bench.setup import ONE_THREAD
from corolla.apps.processes import Processes
from corolla.apps.warm import WarmStart
from corolla.client.config import ClientConfig
from corolla.client.hop import Hop
from corolla.client.inference import InferenceSession
from corolla.client.mending import Mender
from corolla.client.model import DistributedModelForCausalLM
from corolla.errors import SwarmError
from corolla.ids import PeerId
from corolla.net.liveness import Liveness
from corolla.swarm.watch import Watcher
from corolla.wire import messages as wire

pytestmark = pytest.mark.slow

SPANS = ("0:3", "3:6", "6:8")
START_TIMEOUT_S = 100.0
GONE_WITHIN_S = 60.0
MAX_LENGTH = 1600
"""Of every session, and the whole cache of every server."""
NEW_TOKENS = 20
LOST_AT = 6
SHORT = torch.arange(3, 19)[None]
LONG = (torch.arange(1500)[None] * 7 + 3) % 32000
"""Takes each server a good part of a second."""
ATTEMPTS = 5
"""At a blow in the middle of that: a busy machine may hold this process up until it is over."""
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
CONFIG = ClientConfig(liveness=Liveness(interval_s=0.3, dead_after_s=1.2))
"""Short heartbeats, so that frozen servers are found soon. A false alarm on a busy machine costs time, never text."""

PATIENT = Liveness(interval_s=2.0, dead_after_s=60.0)
"""Where a false alarm would be a fault."""


@pytest.fixture(scope="module")
def all_servers(model_s: Path, warm: WarmStart) -> Iterator[Fleet]:
    with Processes(ONE_THREAD, popen=warm.popen) as processes:
        fleet = Fleet(processes, model_s, SPANS, ("--cache-tokens", str(MAX_LENGTH)))
        fleet.launch()
        yield fleet
        fleet.wait_all()
        family = [pid for member in (*fleet.up.values(), *fleet.lost) for pid in member.pids]
    assert_gone(family)


@pytest.fixture
def fleet(all_servers: Fleet) -> Fleet:
    """Two servers of each span are up; more may be on the way."""
    all_servers.replace_lost()
    all_servers.gather()
    return all_servers


@pytest.fixture
def survivors(all_servers: Fleet) -> Fleet:
    """Those that are left, the frozen thawed: nobody starts in the place of the lost any more."""
    all_servers.gather()
    return all_servers


@pytest.fixture(scope="module")
def swarm(all_servers: Fleet) -> Iterator[DistributedModelForCausalLM]:
    all_servers.gather()
    model = AutoDistributedModelForCausalLM.from_pretrained(
        all_servers.model, initial_peers=[all_servers.address], config=CONFIG
    )
    yield model
    model.close()


@pytest.fixture(scope="module")
def texts(local_s: PreTrainedModel) -> dict[int, torch.Tensor]:
    """What plain transformers writes after each prompt, by the prompt's length."""
    return {
        prompt.shape[1]: local_s.generate(prompt, max_new_tokens=2 * NEW_TOKENS, **GREEDY)[:, prompt.shape[1] :]
        for prompt in (SHORT, LONG)
    }


class AtToken(BaseStreamer):
    """Does something between two steps."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        self._left = number
        self._act = act

    def put(self, value: torch.Tensor) -> None:
        if self._left == 0:  # the prompt was the first
            self._act()
        self._left -= 1

    def end(self) -> None:
        return


def route_of(session: InferenceSession) -> list[PeerId]:
    return [hop.peer_id for hop in session.route]


# --- in the middle of decoding


@pytest.mark.parametrize(
    ("blow", "places"),
    [
        (kill_family, [1]),
        (kill_python, [0]),
        (kill_daemon, [2]),
        (freeze, [1]),
        (kill_family, [0, 1, 2]),
        (freeze, [0, 1, 2]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "+".join(map(str, value)),
)
def test_lost_between_two_tokens(
    fleet: Fleet, swarm: DistributedModelForCausalLM, texts: dict[int, torch.Tensor], blow: Blow, places: list[int]
) -> None:
    with swarm.inference_session(max_length=MAX_LENGTH) as session:
        before: list[PeerId] = []

        def strike() -> None:
            before.extend(route_of(session))
            fleet.strike(blow, [before[place] for place in places])

        tokens = swarm.generate(SHORT, max_new_tokens=NEW_TOKENS, streamer=AtToken(LOST_AT, strike), **GREEDY)
        after = route_of(session)
    assert torch.equal(tokens[:, SHORT.shape[1] :], texts[SHORT.shape[1]][:, :NEW_TOKENS])
    assert not {before[place] for place in places} & set(after)


# --- in a long prefill


@pytest.mark.parametrize(
    ("blow", "place"),
    [(kill_family, 0), (kill_python, 2), (kill_daemon, 1), (freeze, 0)],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_lost_in_a_long_prefill(
    fleet: Fleet, swarm: DistributedModelForCausalLM, texts: dict[int, torch.Tensor], blow: Blow, place: int
) -> None:
    for _ in range(ATTEMPTS):
        with swarm.inference_session(max_length=MAX_LENGTH) as session, ThreadPoolExecutor(1) as pool:
            answer = pool.submit(swarm.generate, LONG, max_new_tokens=NEW_TOKENS, session=session, **GREEDY)
            victim = wait_for_route(session)[place]
            time.sleep(0.15)
            is_in_time = session.position == 0
            if is_in_time:
                fleet.strike(blow, [victim])
            tokens = answer.result(timeout=100)
            assert not is_in_time or victim not in route_of(session)
        assert torch.equal(tokens[:, LONG.shape[1] :], texts[LONG.shape[1]][:, :NEW_TOKENS])
        if is_in_time:
            return
    pytest.fail("each time the prefill was over before the blow")


def wait_for_route(session: InferenceSession) -> list[PeerId]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (route := route_of(session)):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return route


# --- at rest


@pytest.mark.parametrize(
    ("blow", "places"),
    [(kill_family, [2]), (freeze, [0]), (kill_daemon, [1]), (kill_python, [2])],
    ids=lambda value: value.__name__ if callable(value) else "+".join(map(str, value)),
)
def test_lost_between_two_answers(
    fleet: Fleet, swarm: DistributedModelForCausalLM, texts: dict[int, torch.Tensor], blow: Blow, places: list[int]
) -> None:
    with swarm.inference_session(max_length=MAX_LENGTH) as session:
        first = swarm.generate(SHORT, max_new_tokens=NEW_TOKENS, **GREEDY)[:, SHORT.shape[1] :]
        fleet.strike(blow, [route_of(session)[place] for place in places])
        second = swarm.generate(None, max_new_tokens=NEW_TOKENS, **GREEDY)
    assert torch.equal(torch.cat([first, second], dim=1), texts[SHORT.shape[1]])


@pytest.mark.parametrize(
    ("blow", "places"),
    [(kill_daemon, [0, 1, 2]), (kill_python, [0]), (kill_family, [2]), (freeze, [1])],
    ids=lambda value: value.__name__ if callable(value) else "+".join(map(str, value)),
)
def test_lost_before_the_first_token(
    fleet: Fleet, swarm: DistributedModelForCausalLM, texts: dict[int, torch.Tensor], blow: Blow, places: list[int]
) -> None:
    """The client still believes in servers that are gone when it first asks them."""
    with swarm.inference_session(max_length=MAX_LENGTH) as session:
        swarm.generate(SHORT, max_new_tokens=1, **GREEDY)
        favourites = route_of(session)
    fleet.strike(blow, [favourites[place] for place in places])
    with swarm.inference_session(max_length=MAX_LENGTH):
        tokens = swarm.generate(SHORT, max_new_tokens=NEW_TOKENS, **GREEDY)
    assert torch.equal(tokens[:, SHORT.shape[1] :], texts[SHORT.shape[1]][:, :NEW_TOKENS])


@pytest.mark.parametrize(
    ("blow", "place"),
    [(kill_family, 1), (kill_python, 0), (kill_daemon, 2), (freeze, 2)],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_lost_while_the_session_is_being_opened(
    fleet: Fleet, swarm: DistributedModelForCausalLM, texts: dict[int, torch.Tensor], blow: Blow, place: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Asked, and gone before it answers."""
    open_hop, struck = Hop.open, list[PeerId]()

    async def open_and_strike(hop: Hop, ask: wire.Open) -> wire.Opened:
        if ask.start == int(SPANS[place].partition(":")[0]) and not struck:
            struck.append(hop.peer)
            asyncio.get_running_loop().call_soon(fleet.strike, blow, [hop.peer])  # when `Open` is on its way
        return await open_hop(hop, ask)

    monkeypatch.setattr(Hop, "open", open_and_strike)
    with swarm.inference_session(max_length=MAX_LENGTH) as session:
        tokens = swarm.generate(SHORT, max_new_tokens=NEW_TOKENS, **GREEDY)
        assert not set(struck) & set(route_of(session))
    assert len(struck) == 1
    assert torch.equal(tokens[:, SHORT.shape[1] :], texts[SHORT.shape[1]][:, :NEW_TOKENS])


# --- in the middle of a recovery


@pytest.mark.parametrize(
    ("blow", "pause_s"),
    [(kill_python, 0.0), (kill_daemon, 0.05), (freeze, 0.2)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_another_is_lost_while_the_first_is_being_replaced(
    fleet: Fleet, swarm: DistributedModelForCausalLM, texts: dict[int, torch.Tensor], blow: Blow, pause_s: float
) -> None:
    """Behind a long prompt, whose replay takes a while."""
    with swarm.inference_session(max_length=MAX_LENGTH) as session:
        threads: list[threading.Thread] = []

        def strike_twice() -> None:
            head, _, tail = route_of(session)
            fleet.strike(kill_family, [tail])
            threads.append(threading.Thread(target=strike_later, args=(head,)))
            threads[0].start()

        def strike_later(peer: PeerId) -> None:
            time.sleep(pause_s)
            fleet.strike(blow, [peer])

        tokens = swarm.generate(LONG, max_new_tokens=NEW_TOKENS, streamer=AtToken(LOST_AT, strike_twice), **GREEDY)
        threads[0].join()
    assert torch.equal(tokens[:, LONG.shape[1] :], texts[LONG.shape[1]][:, :NEW_TOKENS])


@pytest.mark.parametrize("blow", [kill_python, kill_daemon, freeze], ids=lambda blow: blow.__name__)
def test_the_substitute_is_lost_while_it_is_being_built(
    fleet: Fleet, swarm: DistributedModelForCausalLM, texts: dict[int, torch.Tensor], blow: Blow
) -> None:
    """A third server of its blocks is up, or will be soon."""
    with swarm.inference_session(max_length=MAX_LENGTH) as session, ThreadPoolExecutor(1) as pool:
        lost: list[PeerId] = []

        def strike() -> None:
            lost.append(route_of(session)[1])
            fleet.strike(kill_family, lost)
            striking.append(pool.submit(strike_substitute))

        def strike_substitute() -> None:
            deadline = time.monotonic() + START_TIMEOUT_S
            while (taken := route_of(session)[1]) in lost:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            lost.append(taken)
            fleet.strike(blow, [taken])

        striking: list[Future[None]] = []
        tokens = swarm.generate(LONG, max_new_tokens=NEW_TOKENS, streamer=AtToken(LOST_AT, strike), **GREEDY)
        striking[0].result()
        assert len(set(lost)) == 2
        assert not set(lost) & set(route_of(session))
    assert torch.equal(tokens[:, LONG.shape[1] :], texts[LONG.shape[1]][:, :NEW_TOKENS])


# --- leaving well


def test_told_to_leave_in_the_middle_of_a_text_a_server_is_replaced_without_a_failed_step_and_ends_well(
    fleet: Fleet, local_s: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is lost while one leaves is in `tests/client/test_drains.py`, on the virtual clock."""
    faults, on_fault = list[SwarmError](), Mender.on_fault

    def note(mender: Mender, hop: Hop, error: SwarmError) -> None:
        faults.append(error)
        on_fault(mender, hop, error)

    monkeypatch.setattr(Mender, "on_fault", note)
    model = AutoDistributedModelForCausalLM.from_pretrained(
        fleet.model, initial_peers=[fleet.address], config=ClientConfig(liveness=PATIENT)
    )
    try:
        with model.inference_session(max_length=MAX_LENGTH) as session:
            leaving: list[Member] = []

            def tell_to_leave() -> None:
                fleet.strike(ask_to_leave, [route_of(session)[1]])
                leaving.append(fleet.lost[-1])

            streamer = AtToken(LOST_AT, tell_to_leave)
            text = model.generate(SHORT, max_new_tokens=NEW_TOKENS, streamer=streamer, **GREEDY)[:, SHORT.shape[1] :]
            while leaving[0].peer in route_of(session):
                assert session.position < MAX_LENGTH - NEW_TOKENS, "it was never left"
                text = torch.cat([text, model.generate(None, max_new_tokens=NEW_TOKENS, **GREEDY)], dim=1)
        assert leaving[0].child.process.wait(timeout=GONE_WITHIN_S) == 0
        assert faults == []
        assert leaving[0].peer not in model.connection.swarm.router(model.served).book.banned(time.monotonic())
    finally:
        model.close()
    expected = local_s.generate(SHORT, max_new_tokens=text.shape[1], **GREEDY)[:, SHORT.shape[1] :]
    assert torch.equal(text, expected)


# --- afterwards


def test_no_survivor_holds_anything(survivors: Fleet, swarm: DistributedModelForCausalLM) -> None:
    watcher = Watcher(swarm.connection.swarm.transport, swarm.served.fingerprint)
    deadline = time.monotonic() + GONE_WITHIN_S
    while True:
        view = swarm.connection.run(watcher.refresh())
        free = {
            peer: view.servers[peer].announcement.free_cache_tokens for peer in survivors.up if peer in view.servers
        }
        if free.keys() == survivors.up.keys() and set(free.values()) == {MAX_LENGTH}:
            return
        assert time.monotonic() < deadline, free
        time.sleep(0.5)


def test_the_lost_leave_no_process(survivors: Fleet) -> None:
    """Each half of a server ends when the other is killed."""
    assert len(survivors.lost) > len(SPANS)
    assert_gone([pid for member in survivors.lost for pid in member.pids])


def assert_gone(pids: Sequence[int]) -> None:
    deadline = time.monotonic() + GONE_WITHIN_S
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """A zombie is not: it only waits for whoever started it to ask."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
