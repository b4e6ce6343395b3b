"""Slow readers and lost servers: no error, and nothing is held afterwards. (Many at once: `tests/e2e/`.)"""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

Fronts = Callable[..., Any]
CHAT = "/v1/chat/completions"


def run(work: Coroutine[Any, Any, None], *, within_s: float = 100) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(within_s):
            await work

    asyncio.run(bounded())


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "temperature": 0, "stream": True, **more}


async def read(it: Any, body: dict[str, Any]) -> str:
    """The text of a whole stream."""
    async with it.http.stream("POST", CHAT, json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert lines[-1] == "[DONE]", lines[-1]
    return "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines[:-1])


async def nothing_is_held(it: Any) -> None:
    async with asyncio.timeout(30):
        while it.sessions() or it.gateway.limits.active or it.gateway.limits.waiting:  # noqa: ASYNC110 - their tables
            await asyncio.sleep(0.01)


def answers(it: Any, finish: str) -> float | None:
    labels = {"model": "tiny", "finish": finish}
    return it.gateway.metrics.registry.get_sample_value("corolla_gateway_answers_total", labels)


@pytest.mark.slow
def test_a_reader_that_takes_nothing_delays_nobody_and_is_let_go(front: Fronts) -> None:
    async def told() -> None:
        async with front(keep_s=0, send_timeout_s=1.0, cache_tokens=65536) as it:
            # So much for each token that no buffer holds it: log probabilities of 20 alternatives, 16 choices.
            body = json.dumps(asked("slow", max_tokens=900, n=16, logprobs=True, top_logprobs=20)).encode()
            host, port = it.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert b"200" in await reader.readline()  # and no more is read
            for number in range(3):
                assert await read(it, asked(f"quick {number}", max_tokens=8))
            async with asyncio.timeout(60):
                while it.gateway.limits.active:  # noqa: ASYNC110 - the gateway's own count
                    await asyncio.sleep(0.05)
            await nothing_is_held(it)
            assert answers(it, "cancelled") == 1
            writer.close()

    run(told())


def test_a_lost_server_is_not_noticed_by_who_reads(front: Fronts, local: Any) -> None:
    prompt = local.prompt({"role": "user", "content": "go on"})
    expected = local.text(local.greedy(prompt, 60))

    async def told() -> None:
        async with front(spans=("0:3", "3:6", "3:6")) as it:
            text, lost = "", None
            async with it.http.stream("POST", CHAT, json=asked("go on", max_tokens=60)) as answer:
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
                    if len(text) > 10 and lost is None:
                        [lost] = [n for n in ("server1", "server2") if it.swarm.handlers[n].sessions]
                        it.swarm.network.kill(it.swarm.handlers[lost].transport.peer)
            assert lost is not None
            assert text == expected
            value = it.gateway.metrics.registry.get_sample_value("corolla_gateway_recoveries_total", {"model": "tiny"})
            assert value == 1

    run(told())
