"""A real tiny model behind a real gateway and HTTP server: its blocks in this process, over the in-memory network."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from corolla.apps.gateway.app import create_app
from corolla.apps.gateway.config import GatewayConfig
from corolla.apps.gateway.gateway import Gateway
from corolla.apps.gateway.http_server import bind, serving, url_of
from corolla.apps.gateway.lingering import Linger
from corolla.apps.gateway.models import GatewayModel, load_model
from corolla.apps.gateway.observer import Observer
from corolla.apps.gateway.pages import page_routes
from corolla.apps.gateway.serving import owner_of
from corolla.apps.gateway.state import state_routes
from corolla.apps.sim.swarm import MemorySwarm
from corolla.client.router import ServedModel
from corolla.models.checkpoint import open_checkpoint
from corolla.models.fingerprint import fingerprint
from corolla.models.loading import load_span
from corolla.models.testing import write_tiny
from corolla.net.libp2p.addresses import HostPort
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
    write_tiny(
        directory, "llama", vocab_size=VOCABULARY, eos_token_id=EOS, max_position_embeddings=1024,
        initializer_range=0.3, max_shard_size="1GB",
    )  # fmt: skip
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    _favour(directory, [alphabet.index(char) for char in "abcdefghijklmnopqrstuvwxyz"])
    vocabulary = {char: number for number, char in enumerate(alphabet)} | {"<eos>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=TEMPLATE)
    fast.save_pretrained(directory)
    return directory


def _favour(directory: Path, tokens: list[int]) -> None:
    """Make the model write these only, when it takes the likeliest: text that a test can read and cut."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    head = tensors["lm_head.weight"]
    others = torch.ones(len(head), dtype=torch.bool)
    others[tokens] = False
    head[others] = 0.0
    save_file(tensors, file, metadata={"format": "pt"})


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
    observer: Observer
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


@cache
def loaded_span(directory: Path, span: str) -> TorchSpanRunner:
    start, end = map(int, span.split(":"))
    return TorchSpanRunner(load_span(open_checkpoint(directory), start, end, dtype=torch.float32))


@cache
def loaded_model(directory: Path) -> GatewayModel:
    return load_model(open_checkpoint(directory), dtype=torch.float32, name="tiny")


@asynccontextmanager
async def open_front(
    directory: Path,
    *,
    spans: tuple[str, ...] = ("0:3", "3:6"),
    cache_tokens: int = 16384,
    head_timeout_s: float = 10.0,
    linger: Linger | None = None,
    **config: Any,
) -> AsyncIterator[Front]:
    checkpoint = open_checkpoint(directory)
    served = ServedModel("tiny", fingerprint(checkpoint), checkpoint.num_blocks)
    async with AsyncExitStack() as stack:
        swarm = await stack.enter_async_context(MemorySwarm(num_blocks=checkpoint.num_blocks))

        async def serve(name: str, span: str) -> Any:
            return await swarm.serve(
                name, span, cache_tokens=cache_tokens, model=served, runner=loaded_span(directory, span)
            )

        for number, span in enumerate(spans):
            await serve(f"server{number}", span)
        client = await swarm.client("gateway")
        gateway = Gateway(client, {"tiny": loaded_model(directory)}, GatewayConfig(**config))
        stack.push_async_callback(gateway.close)
        own = stack.enter_context(bind(HostPort("ip4", "127.0.0.1", 0)))
        observer = Observer(await swarm.join("observer", is_client=True))
        pages = [*page_routes(), *state_routes(observer, gateway.traces, owner_of)]
        app = create_app(gateway, pages, lambda: observer.silent)
        await stack.enter_async_context(serving(app, own, head_timeout_s=head_timeout_s, linger=linger or Linger()))
        url = url_of(own)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
        yield Front(
            url,
            gateway,
            swarm,
            http,
            serve,
            lambda: sum(len(handler.sessions) for handler in swarm.handlers.values()),
            observer,
        )


@pytest.fixture
def front(tiny_bytes: Path) -> Callable[..., Any]:
    """`async with front(**config) as it:`"""

    def make(**config: Any) -> Any:
        return open_front(tiny_bytes, **config)

    return make
