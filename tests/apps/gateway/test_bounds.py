"""What many callers at a time may take of a gateway, and that they do not get in each other's way."""

import asyncio
import contextlib
from typing import Any, cast

from corolla.apps.gateway.conversations import Conversations
from corolla.apps.gateway.http_server import bind, serving
from corolla.apps.gateway.models import GatewayModel
from corolla.apps.gateway.prompts import _called_names, _for_template
from corolla.apps.gateway.schema import CalledFunction, Message, ToolCall
from corolla.errors import CacheFull
from corolla.net.libp2p.addresses import HostPort


class FakeSession:
    rows, position = 1, 0

    def close(self) -> None:
        pass


class FakeModel:
    served, context_tokens = None, 100

    @property
    def half(self) -> Any:
        return self

    def new_cache(self) -> None:
        return None


class CrowdedSwarm:
    """Refuses its second session, after another has ended."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.until_refused = asyncio.Event()

    async def start_session(self, _model: object, **_bounds: object) -> FakeSession:
        self.num_asked += 1
        if self.num_asked == 2:
            await self.until_refused.wait()
            raise CacheFull("no room")
        return FakeSession()


def test_an_answer_that_ends_while_another_is_refused_makes_room_for_it() -> None:
    async def story() -> None:
        swarm, model = CrowdedSwarm(), cast("GatewayModel", FakeModel())
        conversations = Conversations(cast("Any", swarm), keep_s=0, max_kept=0, wait_s=30)
        bounds: dict[str, Any] = {"room": 10, "rows": 1, "wire_dtype": "float32"}
        first = await conversations.take(model, "", [1], **bounds)
        waiting = asyncio.create_task(conversations.take(model, "", [1], **bounds))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        conversations.drop(first)
        swarm.until_refused.set()
        conversations.drop(await asyncio.wait_for(waiting, 20))

    asyncio.run(story())


async def _hello(_scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def test_connections_beyond_the_bound_are_told_so_and_far_beyond_it_hung_up_though_they_say_nothing() -> None:
    async def story() -> None:
        with bind(HostPort("ip4", "127.0.0.1", 0)) as own:
            async with serving(_hello, own, most=2):
                callers = [await asyncio.open_connection(*own.getsockname()) for _ in range(5)]
                refused, _ = callers.pop()
                with contextlib.suppress(ConnectionResetError):  # so it may look, too
                    assert await asyncio.wait_for(refused.read(), 20) == b""
                for status in (b"503 Service Unavailable", b"503 Service Unavailable", b"200 OK"):  # 4, 3, 2
                    reader, writer = callers.pop()
                    writer.write(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
                    answer = await asyncio.wait_for(reader.read(), 20)
                    assert answer.startswith(b"HTTP/1.1 " + status)
                    if status.startswith(b"503"):
                        assert b'"code":"too_many_connections"' in answer
                        assert b"retry-after: " in answer
                    writer.close()
                for _, other in callers:
                    other.close()

    asyncio.run(story())


def test_a_tools_result_tells_the_name_of_its_call_however_many_there_are() -> None:
    """Looked for in all calls for each result, 4 MB of them held everybody's prompts up for ten seconds."""
    calls = [ToolCall(f"c{number}", CalledFunction(f"f{number}", "{}")) for number in range(3)]
    calls.append(ToolCall("c1", CalledFunction("another", "{}")))
    names = _called_names([Message("user", "hi"), Message("assistant", tool_calls=calls)])
    told = [_for_template(Message("tool", "", name="own", tool_call_id=id), names)["name"] for id in ("c1", "c9", None)]
    assert told == ["f1", "own", "own"]
