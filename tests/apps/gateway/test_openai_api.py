"""`/v1/…` over HTTP: the model's own text, as OpenAI's clients expect it."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

Fronts = Callable[..., Any]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def run(work: Any) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(bounded())


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
            assert chunks[-1]["corolla"]["trace_id"].startswith("trace-")

    run(told())
