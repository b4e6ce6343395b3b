"""What is wrong with a request is said in OpenAI's shape, with the field's name; and costs nothing."""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest

from corolla.apps.gateway.keys import KeyRing, line_for, load_keys, new_key
from corolla.apps.gateway.lingering import Linger
from corolla.errors import BadInput

Fronts = Callable[..., Any]
CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(250):
            await work

    asyncio.run(bounded())


async def refused(it: Any, path: str, status: int, *, param: str | None = None, **sent: Any) -> dict[str, Any]:
    answer = await it.http.post(path, **sent)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert error["message"]
    assert "Traceback" not in answer.text
    return error


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"n": 1.5}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_completion_tokens": 10**30}, "max_completion_tokens"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"seed": 2**70}, "seed"),
    ({"stop": ["x"] * 5000}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": "x" * 5000}, "stop"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": "much"}, "frequency_penalty"),
    ({"logit_bias": {"9999": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"tempurature": 1}, "tempurature"),
    ({"x" * 5000: 1}, "x" * 64 + "…"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 70000]}}}},
        "response_format.json_schema.schema",
    ),
    ({"modalities": ["audio"]}, "modalities[0]"),
]  # fmt: skip


def test_a_wrong_field_is_named(front: Fronts) -> None:
    async def told() -> None:
        async with front() as it:
            for changes, param in WRONG:
                await refused(it, CHAT, 400, param=param, json=ASKED | changes)
            await refused(it, CHAT, 400, param="model", json={"messages": ASKED["messages"]})
            for prompt in (5, [], [[]], [1.5], ["a", "b"], [999999], [-1], {"a": 1}, None, True):
                await refused(it, "/v1/completions", 400, param="prompt", json={"model": "tiny", "prompt": prompt})
            assert (it.sessions(), it.gateway.conversations.counters.opened) == (0, 0)

    run(told())


HOSTILE: list[bytes] = [
    b"",
    b"{",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"model": "tiny", "messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"model": "\xff\xfe", "messages": []}',
    b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}',
    b"null",
    b"[]",
    b'"text"',
    b"NaN",
    b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    b"\x00" * 1000,
]


def test_bodies_that_are_no_requests_are_refused_in_one_shape(front: Fronts) -> None:
    async def told() -> None:
        async with front() as it:
            for body in HOSTILE:
                answer = await it.http.post(CHAT, content=body, headers={"content-type": "application/json"})
                assert 400 <= answer.status_code < 500, (body[:40], answer.text)
                assert answer.json()["error"]["type"] == "invalid_request_error"
                assert len(answer.text) < 1000
            deep = '{"type": "array", "items": ' * 5000 + "{}" + "}" * 5000
            body = json.dumps(ASKED | {"response_format": {"type": "json_schema", "json_schema": {"schema": "S"}}})
            answer = await it.http.post(
                CHAT, content=body.replace('"S"', deep), headers={"content-type": "application/json"}
            )
            assert answer.status_code == 400, answer.text
            for depth in (400, 900, 990, 1100):  # about where Python's own limit lies
                tool = json.dumps(
                    ASKED | {"tools": [{"type": "function", "function": {"name": "f", "parameters": "S"}}]}
                )
                deep = '{"items": ' * depth + "{}" + "}" * depth
                answer = await it.http.post(
                    CHAT, content=tool.replace('"S"', deep), headers={"content-type": "application/json"}
                )
                assert answer.status_code in (200, 400), (depth, answer.text)
            for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
                answer = await it.http.post(CHAT, content=json.dumps(ASKED), headers={"content-type": kind})
                assert answer.status_code == 415
            lone = "\ud800".encode("utf-16", "surrogatepass")
            await refused(it, CHAT, 400, content=lone, headers={"content-type": "application/json"})
            # a lone surrogate, escaped, is JSON all right; it must not end a thread
            said = await it.http.post(
                CHAT,
                content=json.dumps(ASKED).replace("hi", "\\ud800").encode(),
                headers={"content-type": "application/json"},
            )
            assert said.status_code in (200, 400)
            assert (await it.chat({"role": "user", "content": "still there?"}))["choices"]

    run(told())


def test_a_body_too_large_or_too_slow_is_ended(front: Fronts) -> None:
    async def endless() -> Any:
        while True:
            yield b" " * 65536

    async def told() -> None:
        async with front(max_body_bytes=1 << 20, body_timeout_s=0.5, linger=Linger(max_bytes=80 << 20)) as it:
            kind = {"content-type": "application/json"}
            for size in (2, 50):
                error = await refused(it, CHAT, 413, content=b" " * (size << 20), headers=kind)
                assert error["code"] == "request_too_large"
            with pytest.raises(httpx.HTTPError):
                await it.http.post(CHAT, content=endless(), headers=kind)
            host, port = it.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
            writer.write(b'Content-Length: 100\r\n\r\n{"model":')
            async with asyncio.timeout(30):
                answer = await reader.read()
            writer.close()
            assert b"408" in answer.splitlines()[0]
            assert b"request_timeout" in answer

    run(told())


def test_a_request_head_in_drips_is_hung_up_on(front: Fronts) -> None:
    async def told() -> None:
        async with front(head_timeout_s=0.3) as it:
            host, port = it.url.removeprefix("http://").split(":")
            for head in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Slow: "):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(head)
                async with asyncio.timeout(30):
                    assert await reader.read() == b""
                writer.close()
            # and between two requests of one connection
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b'"ok"}')
            writer.write(b"GET /health HT")
            async with asyncio.timeout(30):
                assert await reader.read() == b""
            writer.close()

    run(told())


def test_a_text_that_is_far_too_long_is_refused_by_its_beginning(front: Fronts) -> None:
    """To tokenise 4 MB takes seconds, in the one thread that makes everybody's prompts."""

    async def told() -> None:
        async with front() as it:
            messages = [{"role": "user", "content": "hello " * 600_000}]
            for path, param, said in ((CHAT, "messages", messages), ("/v1/completions", "prompt", "a" * 3_000_000)):
                error = await refused(it, path, 400, param=param, json={"model": "tiny", param: said})
                assert error["code"] == "context_length_exceeded"
                assert "the first 16384 are 16384 already" in error["message"]

    run(told())


def test_unknown_models_paths_and_methods_say_what_there_is(front: Fronts) -> None:
    async def told() -> None:
        async with front() as it:
            error = await refused(it, CHAT, 404, param="model", json=ASKED | {"model": "gpt-4"})
            assert error["code"] == "model_not_found"
            assert "served: tiny" in error["message"]
            assert (await it.http.get("/v1/models/gpt-4")).status_code == 404
            assert (await it.http.get("/v1/models/tiny")).json()["id"] == "tiny"
            error = (await it.http.get("/v1/nothing")).json()["error"]
            assert (error["code"], error["message"]) == ("not_found", "there is no GET /v1/nothing here")
            error = (await it.http.get("/api/v1/traces/trace-0")).json()["error"]
            assert error["message"] == "no such trace; the latest 64 answers are kept, for their callers"
            answer = await it.http.get(CHAT)
            assert (answer.status_code, answer.headers["allow"]) == (405, "POST")

    run(told())


def test_missing_blocks_are_named_and_the_gateway_says_it_is_not_ready(front: Fronts) -> None:
    async def told() -> None:
        async with front(spans=("0:3",), keep_s=0) as it:
            answer = await it.http.post(CHAT, json=ASKED)
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0
            error = answer.json()["error"]
            assert (error["code"], error["blocks"]) == ("missing_blocks", [3, 4, 5])
            assert (await it.http.get("/health")).status_code == 200
            ready = await it.http.get("/ready")
            assert ready.status_code == 503
            assert "3:6" in ready.json()["lacking"]["tiny"]
            await it.serve("late", "3:6")
            assert (await it.http.get("/ready")).status_code == 200
            assert (await it.http.post(CHAT, json=ASKED)).status_code == 200

    run(told())


def test_servers_that_do_not_answer_are_not_counted_on_by_ready(front: Fronts) -> None:
    async def told() -> None:
        async with front(spans=("0:3", "3:6"), keep_s=0) as it:
            assert (await it.http.get("/ready")).status_code == 200
            view = it.gateway.swarm.router(it.gateway.models["tiny"].served).view
            [last] = [server.peer for server in view.servers.values() if server.start == 3]
            it.swarm.network.kill(last)
            await it.observer.look()
            await it.observer.look()
            ready = await it.http.get("/ready")
            assert ready.status_code == 503
            assert "3:6" in ready.json()["lacking"]["tiny"]

    run(told())


def test_a_session_that_no_server_has_room_for_is_answered_with_the_numbers(front: Fronts) -> None:
    async def told() -> None:
        async with front(cache_tokens=64) as it:
            answer = await it.http.post(CHAT, json=ASKED | {"max_tokens": 300})
            assert answer.status_code in (400, 503), answer.text
            assert "64" in answer.json()["error"]["message"]

    run(told())


# --- keys and limits


def test_without_one_of_the_keys_there_is_no_answer(front: Fronts, caplog: pytest.LogCaptureFixture) -> None:
    alice, bob = new_key(), new_key()
    caplog.set_level(logging.DEBUG, "corolla")

    async def told() -> None:
        async with front(keys=load_keys(None, f"{alice}, {bob}")) as it:
            for headers in ({}, {"authorization": "Bearer no"}, {"authorization": alice}, {"authorization": "Bearer"}):
                answer = await it.http.post(CHAT, json=ASKED, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
            for path in ("/v1/models", "/metrics", "/api/v1/state"):
                assert (await it.http.get(path)).status_code == 401
            for path in ("/health", "/ready"):
                assert (await it.http.get(path)).status_code == 200
            secret = ASKED | {"messages": [{"role": "user", "content": "my secret wish"}]}
            answers = [
                (await it.http.post(CHAT, json=secret, headers={"authorization": f"Bearer {key}"})).json()
                for key in (alice, alice, bob)
            ]
            held = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
            assert held[1] > 0
            assert held[2] == 0  # what alice has asked is not to be told from how fast bob is answered
            assert it.gateway.traces.latest("environment-2")
            said = answers[0]["choices"][0]["message"]["content"]
            assert said not in caplog.text

    run(told())
    for secret in ("secret wish", alice, bob):
        assert secret not in caplog.text
    assert "path=/v1" in caplog.text or "request" in caplog.text


def test_a_keys_rate_and_concurrency_are_held(front: Fronts, tmp_path: Any) -> None:
    key = new_key()
    file = tmp_path / "api.keys"
    file.write_text(f"{line_for('alice', key)} requests_per_minute=2 concurrent=1\n")

    async def told() -> None:
        async with front(keys=load_keys(file)) as it:
            sent = {"json": ASKED | {"max_tokens": 60, "temperature": 0}, "headers": {"authorization": f"Bearer {key}"}}
            two = await asyncio.gather(*(it.http.post(CHAT, **sent) for _ in range(2)))
            assert sorted(answer.status_code for answer in two) == [200, 429]
            last = await it.http.post(CHAT, **sent)
            assert last.status_code == 429
            assert 1 <= int(last.headers["retry-after"]) <= 30
            assert "2 requests a minute" in last.json()["error"]["message"]

    run(told())


def test_the_line_has_an_end_and_waiting_a_bound(front: Fronts) -> None:
    async def told() -> None:
        async with front(max_active=1, max_waiting=1, wait_s=0.3) as it:
            long = asyncio.create_task(it.http.post(CHAT, json=ASKED | {"max_tokens": 900, "temperature": 0}))
            async with asyncio.timeout(60):
                while not it.gateway.limits.active:  # noqa: ASYNC110 - the gateway's own count
                    await asyncio.sleep(0.01)
            answers = await asyncio.gather(*(it.http.post(CHAT, json=ASKED) for _ in range(3)))
            assert [answer.status_code for answer in answers] == [429] * 3
            said = " ".join(answer.json()["error"]["message"] for answer in answers)
            assert "in line already" in said
            assert "within 0.3 s" in said
            long.cancel()

    run(told())


def test_pages_of_other_origins_stay_out_unless_named(front: Fronts) -> None:
    async def told() -> None:
        asking = {"origin": "https://a.example", "access-control-request-method": "POST"}
        async with front(hosts=("127.0.0.1", "localhost")) as it:
            assert "access-control-allow-origin" not in (await it.http.options(CHAT, headers=asking)).headers
            answer = await it.http.post(CHAT, json=ASKED, headers={"origin": "https://a.example"})
            assert "access-control-allow-origin" not in answer.headers
            rebound = await it.http.get("/v1/models", headers={"host": "evil.example:80"})
            assert (rebound.status_code, rebound.json()["error"]["code"]) == (421, "wrong_host")
        async with front(cors_origins=("https://a.example",)) as it:
            for answer in (
                await it.http.options(CHAT, headers=asking),
                await it.http.post(CHAT, json=ASKED | {"n": 0}, headers={"origin": "https://a.example"}),
            ):
                assert answer.headers["access-control-allow-origin"] == "https://a.example"
            other = await it.http.get("/v1/models", headers={"origin": "https://b.example"})
            assert "access-control-allow-origin" not in other.headers

    run(told())


def test_key_files_are_read_strictly_and_errors_do_not_quote_keys(tmp_path: Any) -> None:
    file, key = tmp_path / "api.keys", new_key()
    file.write_text(f"# callers\n\n{line_for('alice', key)} requests_per_minute=60 concurrent=4 # a comment\n")
    found = load_keys(file).find(key)
    assert found is not None
    assert (found.id, found.requests_per_minute, found.concurrent) == ("alice", 60, 4)
    assert load_keys(file).find(key + "x") is None
    assert KeyRing().find(None) is not None  # no keys: anybody
    for line in (
        "alice", f"alice {key}", f"alice sha256:{'0' * 63}", f"{line_for('alice', key)} speed=9",
        f"{line_for('alice', key)} concurrent=0", f"{line_for('a', key)}\n{line_for('a', new_key())}", "",
    ):  # fmt: skip
        file.write_text(line)
        with pytest.raises(BadInput) as wrong:
            load_keys(file)
        assert key not in str(wrong.value)
    with pytest.raises(BadInput, match="too short"):
        load_keys(None, "secret")
    with pytest.raises(BadInput, match="cannot read"):
        load_keys(tmp_path / "none")
