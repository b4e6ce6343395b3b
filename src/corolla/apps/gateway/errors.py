"""Every way in which a request can fail, in the shape that OpenAI's clients know.

400 invalid_request_error     the request is wrong; `param` names what
401 invalid_api_key           no key, or not one of ours
404 model_not_found           with the models that are served
408 request_timeout           the body did not come in time
413 request_too_large
429 rate_limit_exceeded       the key's rate, its concurrency, or the queue is full; `Retry-After` says when
503 missing_blocks            nothing covers the model, `blocks` says what is missing; swarm_busy, swarm_failed;
                              too_many_connections
500 internal_error            ours: logged here, told to nobody
"""

import logging
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from starlette.responses import Response

from corolla.errors import BadInput, CacheFull, MissingBlocks, NoRoute, Overloaded, Refused, SwarmError, Unsupported

log = logging.getLogger(__name__)

RETRY_BUSY_S: Final = 5
RETRY_BROKEN_S: Final = 30
"""What `Retry-After` says when the swarm is full, and when it lacks servers."""


@dataclass(slots=True)
class ApiError(Exception):
    """Answers a request. `message` is for the caller: nothing of other people's requests belongs into it."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    headers: dict[str, str] = field(default_factory=dict[str, str])

    def __str__(self) -> str:
        return self.message

    @property
    def kind(self) -> str:
        """OpenAI's `type`."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code, **self.extra}
        return {"error": error}

    def response(self) -> Response:
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return Response(msgspec.json.encode(self.body()), self.status, headers, media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, code, param)


def as_api_error(error: Exception) -> ApiError:
    """What the caller hears of `error`. One that nobody expected is logged, and told as no more than that."""
    match error:
        case ApiError():
            return error
        case MissingBlocks():
            extra = {"blocks": error.blocks}
            return ApiError(503, str(error), "missing_blocks", retry_after_s=RETRY_BROKEN_S, extra=extra)
        case CacheFull() | Overloaded():
            return ApiError(503, f"the swarm is full: {error}", "swarm_busy", retry_after_s=RETRY_BUSY_S)
        case Unsupported():
            return bad_request(f"the servers cannot do this: {error}", code="unsupported")
        case BadInput():
            return bad_request(str(error))
        case NoRoute() | Refused() | SwarmError():
            return ApiError(503, str(error), "swarm_failed", retry_after_s=RETRY_BUSY_S)
        case _:
            log.error("a request failed unexpectedly", exc_info=error)
            return ApiError(500, "something unexpected happened here; it is in the gateway's log", "internal_error")
