"""A real tiny model behind a real gateway and HTTP server: its blocks in this process, over the in-memory network."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from corolla.apps.gateway.app import create_app
from corolla.apps.gateway.config import GatewayConfig
from corolla.apps.gateway.gateway import Gateway
from corolla.apps.gateway.models import load_model
from corolla.apps.sim.swarm import MemorySwarm
from corolla.client.router import ServedModel
from corolla.models.checkpoint import open_checkpoint
from corolla.models.fingerprint import fingerprint
from corolla.models.loading import load_span
from corolla.models.testing import write_tiny
from corolla.server.span import TorchSpanRunner

torch.set_num_threads(1)

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
VOCABULARY = 264
"""Every byte, and some special tokens."""
EOS = 256


@pytest.fixture(scope="session")
def tiny_bytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of six blocks whose tokens are bytes: it can write anything, JSON too."""
    directory = tmp_path_factory.mktemp("gateway") / "tiny"
    write_tiny(directory, "llama", vocab_size=VOCABULARY, eos_token_id=EOS, max_position_embeddings=1024)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: number for number, char in enumerate(alphabet)} | {"<eos>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=TEMPLATE)
    fast.save_pretrained(directory)
    return directory


@dataclass(slots=True)
class Local:
    """The same model, whole and here: what every answer must equal."""

    model: Any
    tokenizer: PreTrainedTokenizerFast

    def prompt(self, *messages: dict[str, str]) -> list[int]:
        return self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]

    def greedy(self, prompt: list[int], max_new_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        done = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
        )
        return done[0, len(prompt) :].tolist()

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.fixture(scope="session")
def local(tiny_bytes: Path) -> Local:
    return Local(
        AutoModelForCausalLM.from_pretrained(tiny_bytes, dtype=torch.float32),
        PreTrainedTokenizerFast.from_pretrained(tiny_bytes),
    )


@dataclass(slots=True)
class Front:
    """A gateway that answers at `url`, and the swarm behind it."""

    url: str
    gateway: Gateway
    swarm: MemorySwarm
    http: httpx.AsyncClient
    serve: Callable[..., Awaitable[Any]]
    sessions: Callable[[], int]
    """Held by all servers together."""
    model: str = "tiny"

    async def chat(self, *messages: dict[str, Any], **asked: Any) -> dict[str, Any]:
        answer = await self.http.post("/v1/chat/completions", json=self.asked(*messages, **asked))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def asked(self, *messages: dict[str, Any], **asked: Any) -> dict[str, Any]:
        return {"model": self.model, "messages": list(messages), "temperature": 0, "max_tokens": 12, **asked}

    async def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All chunks; the stream must end with [DONE]."""
        async with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, await answer.aread()
            lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


Fronts = Callable[..., Any]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@asynccontextmanager
async def open_front(
    directory: Path, *, spans: tuple[str, ...] = ("0:3", "3:6"), cache_tokens: int = 16384, **config: Any
) -> AsyncIterator[Front]:
    checkpoint = open_checkpoint(directory)
    served = ServedModel("tiny", fingerprint(checkpoint), checkpoint.num_blocks)
    async with AsyncExitStack() as stack:
        swarm = await stack.enter_async_context(MemorySwarm(num_blocks=checkpoint.num_blocks))

        async def serve(name: str, span: str) -> Any:
            start, end = map(int, span.split(":"))
            runner = TorchSpanRunner(load_span(checkpoint, start, end, dtype=torch.float32))
            return await swarm.serve(name, span, cache_tokens=cache_tokens, model=served, runner=runner)

        for number, span in enumerate(spans):
            await serve(f"server{number}", span)
        client = await swarm.client("gateway")
        model = load_model(checkpoint, dtype=torch.float32, name="tiny")
        gateway = Gateway(client, {"tiny": model}, GatewayConfig(**config))
        stack.push_async_callback(gateway.close)
        url = await stack.enter_async_context(listening(create_app(gateway)))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
        yield Front(
            url, gateway, swarm, http, serve, lambda: sum(len(handler.sessions) for handler in swarm.handlers.values())
        )


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """The application on a free port of this machine, on this event loop."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        serving = asyncio.create_task(server.serve(sockets=[own]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{own.getsockname()[1]}"
        server.should_exit = True
        await serving


@pytest.fixture
def front(tiny_bytes: Path) -> Callable[..., Any]:
    """`async with front(**config) as it:`"""

    def make(**config: Any) -> Any:
        return open_front(tiny_bytes, **config)

    return make


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """On a loop of its own, within a minute."""

    async def bounded() -> Any:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(bounded())
