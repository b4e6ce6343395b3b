"""`/v1/…`: requests in, answers out, as OpenAI's clients know them."""

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from corolla.apps.gateway.connections import EventStream, run_until_gone
from corolla.apps.gateway.errors import ApiError
from corolla.apps.gateway.gateway import Gateway, Prepare
from corolla.apps.gateway.generation import Answer
from corolla.apps.gateway.keys import ApiKey
from corolla.apps.gateway.models import GatewayModel
from corolla.apps.gateway.prompts import Prepared
from corolla.apps.gateway.responses import Json, model_entry
from corolla.apps.gateway.schema import ChatRequest, CompletionRequest, read
from corolla.apps.gateway.shapes import ChatShape, CompletionShape, Shape

NewShape = Callable[[Answer, Prepared], Shape]


class OpenAiApi:
    """The endpoints of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._model, methods=["GET"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._completion, methods=["POST"]),
        ]

    async def _models(self, _request: Request) -> Response:
        return _json({"object": "list", "data": [model_entry(model) for model in self._gateway.models.values()]})

    async def _model(self, request: Request) -> Response:
        return _json(model_entry(self._gateway.find_model(request.path_params["name"])))

    async def _chat(self, request: Request) -> Response:
        asked = read(await _body(request), ChatRequest)
        model = self._gateway.find_model(asked.model)
        has_usage = asked.stream_options is not None and asked.stream_options.include_usage

        def shape(answer: Answer, prepared: Prepared) -> ChatShape:
            return ChatShape(answer, prepared, self._gateway.names[model.name], has_usage)

        return await self._respond(
            request, model, lambda maker, most: maker.chat(asked, most), shape, is_stream=bool(asked.stream)
        )

    async def _completion(self, request: Request) -> Response:
        asked = read(await _body(request), CompletionRequest)
        model = self._gateway.find_model(asked.model)
        has_usage = asked.stream_options is not None and asked.stream_options.include_usage

        def shape(answer: Answer, prepared: Prepared) -> CompletionShape:
            return CompletionShape(answer, prepared, self._gateway.names[model.name], has_usage)

        return await self._respond(
            request, model, lambda maker, most: maker.completion(asked, most), shape, is_stream=bool(asked.stream)
        )

    async def _respond(
        self, request: Request, model: GatewayModel, prepare: Prepare, new_shape: NewShape, *, is_stream: bool
    ) -> Response:
        key: ApiKey = request.state.key
        if not is_stream:
            return _json(await run_until_gone(request.receive, self._whole(key, model, prepare, new_shape)))
        chunks = self._chunks(key, model, prepare, new_shape)
        # Whatever is wrong comes out before the first chunk, while there still is a status to say it with.
        first = await run_until_gone(request.receive, anext(chunks))
        return EventStream(first, chunks, send_timeout_s=self._gateway.config.send_timeout_s)

    async def _whole(self, key: ApiKey, model: GatewayModel, prepare: Prepare, new_shape: NewShape) -> Json:
        shape: Shape | None = None
        async with aclosing(self._gateway.answer(key, model, prepare)) as answered:
            async for answer, prepared, pieces in answered:
                shape = shape or new_shape(answer, prepared)
                shape.add(pieces)
        assert shape is not None, "an answer has a token at least"
        return shape.whole()

    async def _chunks(
        self, key: ApiKey, model: GatewayModel, prepare: Prepare, new_shape: NewShape
    ) -> AsyncGenerator[dict[str, Any]]:
        shape: Shape | None = None
        async with aclosing(self._gateway.answer(key, model, prepare)) as answered:
            async for answer, prepared, pieces in answered:
                shape = shape or new_shape(answer, prepared)
                for chunk in shape.chunks(pieces):
                    yield chunk


async def _body(request: Request) -> bytes:
    """The body, where it says that it is JSON: a page of another origin cannot say so without asking first."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the body must be application/json, not {json.dumps(kind[:64])}", "unsupported_media_type")
    return await request.body()


def _json(content: Json) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
