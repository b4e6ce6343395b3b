"""The JSON behind the pages: `corolla status` and more, and answers for their owners only."""

import asyncio
import json

import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.testclient import TestClient
from starlette.types import Message

from corolla.apps.gateway.observer import Observer, ObserverConfig
from corolla.apps.gateway.state import SEND_TIMEOUT_S, StateStream, state_as_json, state_routes, told
from corolla.apps.gateway.traces import TracedHop, TracedRoute, TraceStore
from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.status.facts import as_json
from corolla.ids import PeerId
from corolla.net.memory.loop import run_virtual
from corolla.wire.messages import HopTiming

ROUTE = TracedRoute((TracedHop(PeerId("a"), "attic", 0, 8),), (0.01, 0.01), 0.05)


async def owner_by_key(request: Request) -> str:
    key = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not key:
        raise HTTPException(401, "no key")
    return key


@pytest.fixture
def traces() -> TraceStore:
    store = TraceStore()
    for number, owner in enumerate(("me", "you", "me")):
        trace = store.begin(model=f"model {number}", owner=owner, now=1000.0)
        trace.took_route(ROUTE)
        trace.saw_step("prefill", tokens=9, total_s=0.5, local_s=0.1, chunks=[[HopTiming(0.1, 0.2, 0.0)]])
        trace.saw_step("decode", tokens=1, total_s=0.1, local_s=0.01, chunks=[[HopTiming(0.0, 0.05, 0.0)]])
        trace.finish("stop")
    return store


@pytest.fixture
def client(traces: TraceStore) -> TestClient:
    async def unobserved() -> Observer:
        async with MemorySwarm(num_blocks=8) as swarm:
            return Observer(await swarm.join("gateway", is_client=True))

    return TestClient(Starlette(routes=state_routes(run_virtual(unobserved()), traces, owner_by_key)))


@pytest.mark.parametrize("path", ["state", "events", "traces", "traces/trace-0"])
def test_who_has_no_key_sees_nothing(client: TestClient, path: str) -> None:
    assert client.get(f"/api/v1/{path}").status_code == 401


def test_a_caller_sees_its_own_answers_the_newest_first(client: TestClient, traces: TraceStore) -> None:
    said = client.get("/api/v1/traces", headers={"Authorization": "Bearer me"}).json()
    assert [trace["model"] for trace in said["traces"]] == ["model 2", "model 0"]
    [yours] = traces.latest("you")
    assert client.get(f"/api/v1/traces/{yours.id}", headers={"Authorization": "Bearer me"}).status_code == 404


def test_an_answer_is_told_step_by_step(client: TestClient, traces: TraceStore) -> None:
    mine = traces.latest("me")[0]
    said = client.get(f"/api/v1/traces/{mine.id}", headers={"Authorization": "Bearer me"}).json()
    assert [step["kind"] for step in said["steps"]] == ["prefill", "decode"]
    assert said["routes"] == [
        {"hops": [{"peer": "a", "name": "attic", "blocks": "0:8"}], "links_s": [0.01, 0.01], "expected_s": 0.05}
    ]
    assert said["tokens_per_s"] == pytest.approx(10.0)
    assert said["finish_reason"] == "stop"


@pytest.mark.parametrize("count", ["1", "0001", "-1", "x", "9" * 30, "²", ""])
def test_any_count_is_survived(client: TestClient, count: str) -> None:
    answer = client.get("/api/v1/traces", params={"count": count}, headers={"Authorization": "Bearer me"})
    assert len(answer.json()["traces"]) == (1 if count in ("1", "0001") else 2)


def test_the_state_is_what_corolla_status_says_and_who_is_silent() -> None:
    async def live() -> None:
        async with MemorySwarm(num_blocks=8) as swarm:
            await swarm.serve("attic", "0:5")
            observer = Observer(await swarm.join("gateway", is_client=True))
            state = await observer.look()
            [model] = state_as_json(state)["models"]
            expected = as_json(state.models[0])
            expected["servers"][0]["is_silent"] = False
            assert model == expected
            assert model["missing_blocks"] == [5, 6, 7]

    run_virtual(live())


def test_events_tell_the_state_now_and_every_look_after() -> None:
    async def live() -> None:
        async with MemorySwarm(num_blocks=8) as swarm:
            observer = Observer(await swarm.join("gateway", is_client=True))
            events = told(observer)
            assert healths(await anext(events)) == []
            await swarm.serve("attic", "0:8")
            await observer.look()
            assert healths(await anext(events)) == ["fragile"]
            assert await anext(events) == ": nothing new\n\n"
            await events.aclose()

    run_virtual(live())


@pytest.mark.parametrize("reads", [True, False])
def test_a_reader_that_hangs_up_or_reads_nothing_gives_its_place_back(reads: bool) -> None:
    async def live() -> None:
        async with MemorySwarm(num_blocks=8) as swarm:
            observer = Observer(await swarm.join("gateway", is_client=True), config=ObserverConfig(max_watchers=1))
            began, sent = asyncio.get_running_loop().time(), asyncio.Event()

            async def send(message: Message) -> None:
                if message["type"] == "http.response.body":
                    sent.set()
                    assert observer.is_crowded
                    if not reads:
                        await asyncio.sleep(3600)

            async def receive() -> Message:
                await sent.wait()
                if not reads:
                    await asyncio.sleep(3600)
                return {"type": "http.disconnect"}

            await StateStream(observer)({"type": "http"}, receive, send)
            assert not observer.is_crowded
            waited_s = asyncio.get_running_loop().time() - began
            assert waited_s == pytest.approx(0 if reads else SEND_TIMEOUT_S, abs=1)

    run_virtual(live())


def healths(event: str) -> list[str]:
    kind, data = event.removesuffix("\n\n").split("\n")
    assert kind == "event: state"
    return [model["health"] for model in json.loads(data.removeprefix("data: "))["models"]]
