"""The blocking face, without processes: a tiny model over an in-memory swarm, in the network's own thread."""

import _thread
import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from corolla.apps.sim.swarm import MemorySwarm
from corolla.client import connection
from corolla.client.background import background_loop
from corolla.client.config import ClientConfig
from corolla.client.connection import Connection
from corolla.client.model import DistributedModelForCausalLM, load_distributed_model
from corolla.client.router import ServedModel
from corolla.client.swarm import Swarm
from corolla.models.checkpoint import Checkpoint, open_checkpoint
from corolla.models.loading import load_span
from corolla.models.testing import write_tiny
from corolla.net.libp2p.config import NetworkConfig
from corolla.server.span import TorchSpanRunner
from corolla.swarm.cost import CostModel
from corolla.swarm.route import Route

T = TypeVar("T")
PROMPT = torch.tensor([[5, 6, 7, 8, 9, 10]])
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 1}


class MemoryConnection(Connection):
    """In the place of a daemon: servers and client in one thread."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = ClientConfig()
        self.servers: MemorySwarm | None = None
        self._loop = background_loop()
        self._client = self.run(self._serve(checkpoint))

    @property
    def swarm(self) -> Swarm:
        return self._client

    def close(self) -> None:
        assert self.servers is not None
        self.run(self.servers.__aexit__(None, None, None))

    async def _serve(self, checkpoint: Checkpoint) -> Swarm:
        model = ServedModel.of(checkpoint)
        self.servers = await MemorySwarm(num_blocks=checkpoint.num_blocks).__aenter__()
        for start, end in ((0, 3), (3, checkpoint.num_blocks)):
            runner = TorchSpanRunner(load_span(checkpoint, start, end))
            await self.servers.serve(f"s{start}", f"{start}:{end}", model=model, runner=runner)
        return await self.servers.client("client", self.config)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny(directory, "llama")
    return directory


@pytest.fixture(scope="module")
def local(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.fixture(scope="module")
def model(directory: Path) -> Iterator[DistributedModelForCausalLM]:
    checkpoint = open_checkpoint(directory)
    connection = MemoryConnection(checkpoint)
    yield load_distributed_model(checkpoint, connection, dtype=None, model_name=None)
    connection.close()


class Impatient:
    """A user who stops an answer at its third token."""

    def __init__(self) -> None:
        self.num_heard = 0

    def put(self, _value: torch.Tensor) -> None:
        self.num_heard += 1
        if self.num_heard > 3:
            raise KeyboardInterrupt

    def end(self) -> None:
        pass


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_answer_that_is_broken_off_leaves_the_conversation_as_it_was(
    model: DistributedModelForCausalLM, local: PreTrainedModel, *, has_begun: bool
) -> None:
    more, other, text = torch.tensor([[15, 16, 17]]), torch.tensor([[21, 22]]), PROMPT[:, :0]
    with model.inference_session(max_length=64) as session:
        if has_begun:
            text = model.generate(PROMPT, max_new_tokens=6, **GREEDY)
        held = session.position
        with pytest.raises(KeyboardInterrupt):
            model.generate(more, max_new_tokens=12, streamer=Impatient(), **GREEDY)
        assert session.position == held
        answer = model.generate(other, max_new_tokens=6, **GREEDY)
    text = torch.cat([text, other], dim=1)
    assert torch.equal(answer[:, 2:], local.generate(text, max_new_tokens=6, **GREEDY)[:, text.shape[1] :])


def test_a_session_that_opens_as_the_user_gives_up_is_closed(
    model: DistributedModelForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = model.connection.run

    def give_up(work: Coroutine[Any, Any, T]) -> T:
        run(work)
        raise KeyboardInterrupt

    monkeypatch.setattr(model.connection, "run", give_up)
    with pytest.raises(KeyboardInterrupt):
        model.generate(PROMPT, max_new_tokens=4, **GREEDY)
    monkeypatch.undo()
    run(asyncio.wait_for(all_sessions_over(model), 20))


def test_the_route_is_chosen_for_the_prompt_that_the_generation_begins_with(
    model: DistributedModelForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm, asked = model.connection.swarm, list[float]()
    find_route = swarm.find_route

    async def noted(*args: Any, cost: CostModel, **kwargs: Any) -> Route:
        asked.append(cost.positions_per_step)
        return await find_route(*args, cost=cost, **kwargs)

    monkeypatch.setattr(swarm, "find_route", noted)
    model.generate(PROMPT, max_new_tokens=4, **GREEDY)
    model.generate(PROMPT[:, :1], max_new_tokens=4, **GREEDY)
    assert asked == [pytest.approx((PROMPT.shape[1] + 3) / 4), 1.0]


async def all_sessions_over(model: DistributedModelForCausalLM) -> None:
    connection = model.connection
    assert isinstance(connection, MemoryConnection)
    assert connection.servers is not None
    for handler in connection.servers.handlers.values():
        while handler.sessions:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "interrupt",
    [
        pytest.param(lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT), id="wakes"),
        pytest.param(_thread.interrupt_main, id="does-not-wake"),  # as when it comes just before the wait
    ],
)
def test_ctrl_c_returns_when_what_it_ended_has_ended(interrupt: Callable[[], None]) -> None:
    has_ended = False

    async def wait_for_ever() -> None:
        nonlocal has_ended
        try:
            await asyncio.sleep(0.2)  # until the user's thread waits
            interrupt()
            await asyncio.Event().wait()
        finally:
            has_ended = True

    with pytest.raises(KeyboardInterrupt):
        background_loop().run(wait_for_ever())
    assert has_ended


def test_who_leaves_while_joining_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    is_gone = False

    @asynccontextmanager
    async def slow_to_come_and_go(_network: NetworkConfig) -> AsyncIterator[None]:
        nonlocal is_gone
        try:
            await asyncio.Event().wait()
            yield
        finally:
            await asyncio.sleep(0.2)
            is_gone = True

    monkeypatch.setattr(connection, "open_transport", slow_to_come_and_go)
    Connection(NetworkConfig(is_client=True), ClientConfig(), ["nobody"]).close()
    assert is_gone
