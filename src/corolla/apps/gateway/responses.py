"""Answers in OpenAI's shapes: whole, or as chunks of a stream. Knows nothing of how they are written."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from corolla.apps.gateway.generation import Answer
from corolla.apps.gateway.models import GatewayModel
from corolla.apps.gateway.schema import ToolCall
from corolla.apps.gateway.tokens import TokenNames
from corolla.apps.gateway.writing import Piece

Json = dict[str, Any]


def model_entry(model: GatewayModel) -> Json:
    return {
        "id": model.name, "object": "model", "created": model.created, "owned_by": "corolla",
        "context_length": model.context_tokens, "fingerprint": model.served.fingerprint,
    }  # fmt: skip


def usage(answer: Answer) -> Json:
    prompt = len(answer.wanted.prompt)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": prompt + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def route_note(answer: Answer) -> Json:
    """Our own field: who computed this, how fast, and under which id its trace is kept."""
    route = answer.trace.route
    hops = [] if route is None else route.hops
    return {
        "trace_id": answer.trace.id,
        "route": [{"peer": hop.peer, "name": hop.name, "start": hop.start, "end": hop.end} for hop in hops],
        "tokens_per_s": answer.trace.tokens_per_s,
    }


def head(kind: str, id: str, answer: Answer, created: int) -> Json:
    return {
        "id": id, "object": kind, "created": created, "model": answer.model.name,
        "system_fingerprint": f"fp_{answer.model.served.fingerprint[:12]}",
    }  # fmt: skip


def chat_logprobs(pieces: Sequence[Piece], names: TokenNames) -> Json | None:
    """None when none were asked for."""
    entries = [
        {**_named(names, piece.pick.token, likely.logprob), "top_logprobs": [_named(names, *top) for top in likely.top]}
        for piece in pieces
        if (likely := piece.pick.likelihood) is not None
    ]
    return {"content": entries, "refusal": None} if entries else None


def _named(names: TokenNames, token: int, logprob: float) -> Json:
    return {"token": names.text(token), "logprob": logprob, "bytes": list(names.bytes(token))}


def completion_logprobs(pieces: Sequence[Piece], names: TokenNames, offset: int) -> Json | None:
    """As `/v1/completions` had them before chat. `offset`: characters before the first piece."""
    if not pieces or pieces[0].pick.likelihood is None:
        return None
    tokens, logprobs, tops, offsets = list[str](), list[float](), list[Mapping[str, float]](), list[int]()
    for piece in pieces:
        assert piece.pick.likelihood is not None
        tokens.append(names.text(piece.pick.token))
        logprobs.append(piece.pick.likelihood.logprob)
        tops.append({names.text(token): logprob for token, logprob in piece.pick.likelihood.top})
        offsets.append(offset)
        offset += len(piece.text)
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def calls_json(calls: Sequence[ToolCall], *, indexed: bool = False) -> list[Json]:
    entries: list[Json] = [msgspec.to_builtins(call) for call in calls]
    return [{"index": number, **entry} for number, entry in enumerate(entries)] if indexed else entries
