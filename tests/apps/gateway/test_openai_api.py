"""`/v1/…` over HTTP: the model's own text, as OpenAI's clients expect it."""

import asyncio
import json
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import openai
import pytest
import torch
from huggingface_hub import AsyncInferenceClient

Fronts = Callable[..., Any]
GONE_WITHIN_S = 30.0
"""A second, on a machine that does nothing else: the test prints what it took."""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def run(work: Coroutine[Any, Any, None]) -> None:
    """On a loop of its own, within a bound that a busy machine keeps."""

    async def bounded() -> None:
        async with asyncio.timeout(250):
            await work

    asyncio.run(bounded())


def text_of(said: dict[str, Any], choice: int = 0) -> str:
    return said["choices"][choice]["message"]["content"]


def test_greedy_text_is_the_local_models_whole_and_streamed(front: Fronts, local: Any) -> None:
    messages = [{"role": "system", "content": "be brief"}, user("héllo 🌍")]
    prompt = local.prompt(*messages)
    expected = local.text(local.greedy(prompt, 40))

    async def told() -> None:
        async with front() as it:
            said = await it.chat(*messages, max_tokens=40)
            choice = said["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (expected, "length")
            assert said["usage"] == {
                "prompt_tokens": len(prompt), "completion_tokens": 40, "total_tokens": len(prompt) + 40,
                "prompt_tokens_details": {"cached_tokens": 0},
            }  # fmt: skip
            assert [(hop["start"], hop["end"]) for hop in said["corolla"]["route"]] == [(0, 3), (3, 6)]
            asked = it.asked(*messages, max_tokens=40, stream_options={"include_usage": True})
            chunks = await it.stream("/v1/chat/completions", asked)
            assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == expected
            assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
            assert chunks[-1]["choices"] == []
            assert chunks[-1]["usage"]["completion_tokens"] == 40
            trace = (await it.http.get(f"/api/v1/traces/{chunks[-1]['corolla']['trace_id']}")).json()
            assert [step["kind"] for step in trace["steps"]] == ["prefill"] + ["decode"] * 39
            for step in trace["steps"][:-1]:
                parts = [sum(filter(None, hop.values())) for hop in step["hops"]]
                assert all(hop["send_s"] > 0 for hop in step["hops"])
                whole = step["local_s"] + sum(parts) + (step["return_s"] or 0.0) + step["rest_s"]
                assert whole == pytest.approx(step["total_s"])

    run(told())


def test_a_conversation_goes_on_where_its_history_agrees(front: Fronts, local: Any) -> None:
    """The next message, an edit and a second answer: each is the local model's, and only what is new is computed."""

    async def told() -> None:
        async with front() as it:
            first = [user("one two three")]
            said = await it.chat(*first)
            history = [*first, {"role": "assistant", "content": text_of(said)}, user("four")]
            edited = [*history[:-1], user("five")]
            for messages in (history, history, edited):
                prompt = local.prompt(*messages)
                said = await it.chat(*messages)
                assert text_of(said) == local.text(local.greedy(prompt, 12))
                assert 0 < said["usage"]["prompt_tokens_details"]["cached_tokens"] < len(prompt)
            assert it.gateway.conversations.counters.opened == 1
            assert it.sessions() == 2  # one kept session, on two servers
            [kept] = it.gateway.conversations._kept  # pyright: ignore[reportPrivateUsage]
            kept.session.give_up_journal()  # a lost server would end its next answer
            assert text_of(await it.chat(*history)) == local.text(local.greedy(local.prompt(*history), 12))
            assert it.gateway.conversations.counters.opened == 2
            assert it.sessions() == 2

    run(told())


def test_a_kept_session_is_given_back_in_time_and_makes_room_when_the_cache_is_full(front: Fronts) -> None:
    async def told() -> None:
        async with front(cache_tokens=1024, keep_s=0.3) as it:
            stop = list("aeio")
            await it.chat(user("a" * 50), max_tokens=600, stop=stop)
            await it.chat(user("b" * 50), max_tokens=600, stop=stop)  # has no room beside the first
            assert it.sessions() == 2
            async with asyncio.timeout(30):
                while it.sessions():  # noqa: ASYNC110 - the servers' own tables
                    await asyncio.sleep(0.01)

    run(told())


def test_many_at_once_write_what_each_would_write_alone(front: Fronts, local: Any) -> None:
    async def told() -> None:
        async with front(keep_s=0) as it:
            texts = [f"number {number} of many" for number in range(12)]
            said = await asyncio.gather(*(it.chat(user(text), max_tokens=16) for text in texts))
            for text, answer in zip(texts, said, strict=True):
                assert text_of(answer) == local.text(local.greedy(local.prompt(user(text)), 16))
            async with asyncio.timeout(GONE_WITHIN_S):
                while it.sessions() or it.gateway.limits.active:  # noqa: ASYNC110 - the servers' own tables
                    await asyncio.sleep(0.01)

    run(told())


@pytest.mark.parametrize("is_stream", [True, False])
def test_hanging_up_frees_the_servers_cache_within_a_second(front: Fronts, is_stream: bool) -> None:
    async def told() -> None:
        async with front() as it:
            body = {**it.asked(user("go on for ever"), max_tokens=900), "stream": is_stream}
            asking = asyncio.create_task(hang_up_later(it, body))
            async with asyncio.timeout(60):
                while it.sessions() < 2:  # noqa: ASYNC110 - the servers' own tables
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            asking.cancel()
            hung_up = time.perf_counter()
            async with asyncio.timeout(GONE_WITHIN_S):
                while it.sessions() or it.gateway.limits.active:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            print(f"the servers' cache was free after {time.perf_counter() - hung_up:.3f} s")

    async def hang_up_later(it: Any, body: dict[str, Any]) -> None:
        async with (
            httpx.AsyncClient(base_url=it.url, timeout=60) as own,
            own.stream("POST", "/v1/chat/completions", json=body) as answer,
        ):
            async for _ in answer.aiter_lines():
                pass
        pytest.fail("the whole answer came")

    run(told())


def test_stop_strings_end_the_text_before_them(front: Fronts, local: Any) -> None:
    expected = local.text(local.greedy(local.prompt(user("stop it")), 40))
    stop = expected[7:10]
    assert expected.index(stop) == 7

    async def told() -> None:
        async with front() as it:
            said = await it.chat(user("stop it"), max_tokens=40, stop=["never comes", stop])
            assert (text_of(said), said["choices"][0]["finish_reason"]) == (expected[:7], "stop")
            chunks = await it.stream("/v1/chat/completions", it.asked(user("stop it"), max_tokens=40, stop=stop))
            assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected[:7]

    run(told())


def test_a_seed_makes_sampling_repeatable_and_choices_differ(front: Fronts) -> None:
    async def told() -> None:
        async with front() as it:
            asked: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "n": 3, "max_tokens": 20}
            once, again, other = [
                [text_of(said, number) for number in range(3)]
                for said in [await it.chat(user("dice"), seed=seed, **asked) for seed in (7, 7, 8)]
            ]
            assert once == again
            assert len(set(once)) == 3
            assert set(once).isdisjoint(other)
            alone = await it.chat(user("dice"), **{**asked, "seed": 8, "n": 1})
            assert text_of(alone) == other[0]

    run(told())


def test_logprobs_are_the_models_own(front: Fronts, local: Any) -> None:
    prompt = local.prompt(user("how likely"))
    with torch.no_grad():
        expected = local.model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)

    async def told() -> None:
        async with front() as it:
            said = await it.chat(user("how likely"), logprobs=True, top_logprobs=3, max_tokens=4)
            first, *others = said["choices"][0]["logprobs"]["content"]
            assert len(others) == 3
            best = expected.topk(3)
            assert [top["logprob"] for top in first["top_logprobs"]] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert first["logprob"] == pytest.approx(float(expected.max()), abs=1e-4)
            assert first["bytes"] == list(local.tokenizer.decode([int(expected.argmax())]).encode())

    run(told())


def test_penalties_and_bias_change_what_is_written(front: Fronts, local: Any) -> None:
    prompt = local.prompt(user("again"))
    first = local.greedy(prompt, 1)[0]

    async def told() -> None:
        async with front() as it:
            said = await it.chat(user("again"), logit_bias={str(ord("z")): 100}, max_tokens=5)
            z = local.tokenizer.decode([ord("z")])
            assert text_of(said) == z * 5
            banned = await it.chat(user("again"), logit_bias={str(first): -100}, max_tokens=1)
            assert text_of(banned) != local.tokenizer.decode([first])
            bias = {str(ord("x")): 90, str(ord("y")): 89}
            x, y = (local.tokenizer.decode([ord(letter)]) for letter in "xy")
            plain = await it.chat(user("again"), logit_bias=bias, max_tokens=4)
            assert text_of(plain) == x * 4
            varied = await it.chat(user("again"), logit_bias=bias, max_tokens=4, frequency_penalty=0.6)
            assert text_of(varied) in (x + x + y + x, x + x + y + y, x + x + x + y, x + y + x + y)

    run(told())


def test_json_answers_fit_their_schema(front: Fronts) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["ann", "bob"]}, "old": {"type": "boolean"}},
        "required": ["name", "old"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}

    async def told() -> None:
        async with front() as it:
            for temperature in (0, 1.5):
                said = await it.chat(
                    user("who?"), response_format=form, max_tokens=60, temperature=temperature, n=2, seed=1
                )
                for number in range(2):
                    person = json.loads(text_of(said, number))
                    assert person["name"] in ("ann", "bob")
                    assert type(person["old"]) is bool
                    assert said["choices"][number]["finish_reason"] == "stop"
            cut = await it.chat(user("who?"), response_format={"type": "json_object"}, max_tokens=3)
            assert (cut["choices"][0]["finish_reason"], text_of(cut)[0]) == ("length", "{")

    run(told())


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather somewhere.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def test_a_forced_tool_call_fits_the_tools_schema_and_its_result_goes_back(front: Fronts) -> None:
    async def told() -> None:
        async with front() as it:
            asked = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 80}
            said = await it.chat(user("rain?"), **asked)
            choice = said["choices"][0]
            assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
            [call] = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "weather"
            assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
            chunks = await it.stream("/v1/chat/completions", it.asked(user("rain?"), **asked))
            [delta] = [c["choices"][0]["delta"] for c in chunks if "tool_calls" in c["choices"][0]["delta"]]
            assert delta["tool_calls"][0]["function"] == call["function"]
            assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
            result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
            after = await it.chat(user("rain?"), choice["message"], result, tools=TOOLS)
            assert text_of(after)

    run(told())


def test_completions_continue_a_text_or_token_ids(front: Fronts, local: Any) -> None:
    prompt = local.tokenizer("once upon")["input_ids"]
    expected = local.text(local.greedy(prompt, 8))

    async def told() -> None:
        async with front() as it:
            for given in ("once upon", prompt, ["once upon"], [prompt]):
                body = {"model": "tiny", "prompt": given, "max_tokens": 8, "temperature": 0, "logprobs": 2}
                answer = await it.http.post("/v1/completions", json=body)
                [choice] = answer.json()["choices"]
                assert choice["text"] == expected
                assert len(choice["logprobs"]["token_logprobs"]) == 8
            body = {"model": "tiny", "prompt": "once upon", "max_tokens": 8, "temperature": 0, "echo": True}
            chunks = await it.stream("/v1/completions", body)
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == f"once upon{expected}"

    run(told())


def test_the_openai_package_is_at_home(front: Fronts, local: Any) -> None:
    expected = local.text(local.greedy(local.prompt(user("hi")), 12))

    async def told() -> None:
        async with front() as it, openai.AsyncOpenAI(base_url=f"{it.url}/v1", api_key="none") as client:
            assert [model.id async for model in client.models.list()] == ["tiny"]
            asked: dict[str, Any] = {"model": "tiny", "messages": [user("hi")], "temperature": 0}
            said = await client.chat.completions.create(**asked, max_completion_tokens=12)
            assert (said.choices[0].message.content, said.choices[0].finish_reason) == (expected, "length")
            stream = await client.chat.completions.create(
                **asked, max_completion_tokens=12, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
            assert chunks[-1].usage.completion_tokens == 12
            async with client.chat.completions.stream(**asked, max_tokens=12, stop=expected[5:7]) as events:
                done = await events.get_final_completion()
            assert done.choices[0].message.content == expected[:5]
            text = await client.completions.create(model="tiny", prompt="once", max_tokens=4, temperature=0)
            assert len(text.choices[0].text) > 0
            with pytest.raises(openai.NotFoundError, match="served: tiny"):
                await client.chat.completions.create(model="other", messages=[user("hi")])
            with pytest.raises(openai.BadRequestError) as wrong:
                await client.chat.completions.create(**{**asked, "temperature": 9})
            assert wrong.value.param == "temperature"

    run(told())


def test_hugging_faces_client_is_at_home(front: Fronts, local: Any) -> None:
    """Another client of the same API, that shares no code with OpenAI's."""
    expected = local.text(local.greedy(local.prompt(user("hi")), 12))

    async def told() -> None:
        async with front() as it:
            client = AsyncInferenceClient(base_url=f"{it.url}/v1", api_key="none")
            asked: dict[str, Any] = {"model": "tiny", "messages": [user("hi")], "temperature": 0, "max_tokens": 12}
            said = await client.chat_completion(**asked)
            assert (said.choices[0].message.content, said.usage.completion_tokens) == (expected, 12)
            parts = [part async for part in await client.chat_completion(**asked, stream=True)]
            assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == expected
            assert math.isclose(parts[-1].created, said.created, abs_tol=60)

    run(told())
