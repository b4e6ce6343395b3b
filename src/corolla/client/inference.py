"""`InferenceSession`: one conversation with the swarm, for blocking callers who hold torch tensors."""

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType

import torch
from torch import Tensor
from transformers import PretrainedConfig

from corolla.client.chunks import cut_into_steps
from corolla.client.connection import Connection
from corolla.client.router import ServedModel
from corolla.client.session import RouteHop, Session
from corolla.client.steps import StepInput
from corolla.errors import BadInput
from corolla.models.local_half import LocalCache
from corolla.models.tensors import to_torch, wire_dtype
from corolla.wire.messages import HopTiming, Want
from corolla.wire.tensors import WireTensor


class InferenceSession:
    """Tokens held on servers, to which several `generate` calls may add.

    The route is chosen when the first tokens come: only then the number of rows and the prompt's length are known.
    """

    def __init__(self, connection: Connection, model: ServedModel, *, max_length: int | None) -> None:
        self.max_length = max_length
        """Most tokens per row; None until the first generation says."""
        self.output_ids: Tensor | None = None
        """All tokens of the conversation so far, [rows, tokens], as `generate` has seen them."""
        self.attention_mask: Tensor | None = None
        self._connection = connection
        self._model = model
        self._session: Session | None = None
        self._is_closed = False

    @property
    def route(self) -> list[RouteHop]:
        """The servers in use, in order; empty before the first step."""
        return [] if self._session is None else self._session.route

    @property
    def position(self) -> int:
        """Tokens held by the servers. Set it lower to forget the rest: that rides on the next step."""
        return 0 if self._session is None else self._session.position

    @position.setter
    def position(self, num_tokens: int) -> None:
        if self._session is not None:
            self._session.trim(num_tokens)
        elif num_tokens != 0:
            raise BadInput(f"cannot go to position {num_tokens}: the session holds no tokens yet")

    @property
    def rows(self) -> int:
        """Sequences held; 0 before the first step."""
        return 0 if self._session is None else self._session.rows

    @property
    def timings(self) -> list[HopTiming]:
        """Queue and compute seconds of each hop in the last step."""
        return [] if self._session is None else self._session.timings

    def gather(self, rows: Sequence[int]) -> None:
        """Before the next step, row i becomes the present row `rows[i]`."""
        if self._session is not None:
            self._session.gather(rows)

    def run_blocks(
        self,
        hidden: Tensor,
        *,
        want: Want,
        position_ids: Tensor | None = None,
        left_padding: list[int] | None = None,
        token_ids: Tensor | None = None,
    ) -> Tensor:
        """`hidden` [rows, new_tokens, hidden_size] after the last block; one position when `want` is "last"."""
        if self._is_closed:
            raise BadInput("this inference session is closed; open another")

        def cut(session: Session) -> list[StepInput]:
            return cut_into_steps(
                session, hidden, max_chunk_tokens=self._connection.config.max_chunk_tokens,
                position_ids=position_ids, token_ids=token_ids,
            )  # fmt: skip

        session = self._session
        if session is None:
            answers = self._connection.run(self._begin(hidden, cut, want, left_padding))
        else:
            answers = self._connection.run(session.run(cut(session), want=want, left_padding=left_padding))
        outputs = [to_torch(answer, hidden.device) for answer in answers if answer is not None]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-2)

    def close(self) -> None:
        """Give the places on the servers back. May be called twice."""
        self._is_closed = True
        if self._session is not None:
            self._connection.call_soon(partial(self._session.close))

    def __enter__(self) -> "InferenceSession":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _begin(
        self, hidden: Tensor, cut: Callable[[Session], list[StepInput]], want: Want, left_padding: list[int] | None
    ) -> list[WireTensor | None]:
        """Kept here, on the loop: a user who gives up at this very moment must not leave it to the servers."""
        if self.max_length is None:
            raise BadInput("the session does not know its max_length yet")
        session = self._session = self._connection.swarm.new_session(
            self._model, max_tokens=self.max_length, max_rows=hidden.shape[-3], prompt_tokens=hidden.shape[-2],
            wire_dtype=wire_dtype(hidden.dtype),
        )  # fmt: skip
        try:
            return await session.begin(partial(cut, session), want=want, left_padding=left_padding)
        finally:
            if session.is_closed:  # it could not start: the next call begins anew
                self._session = None


class SessionCache(LocalCache):
    """What `generate` takes for its KV cache: a counter here, the keys and values on the servers.

    What transformers does to a cache becomes what the protocol says: crop → trim, reorder → row gather.
    """

    def __init__(self, config: PretrainedConfig, session: InferenceSession) -> None:
        super().__init__(config)
        self.session = session
        self.position.num_tokens = session.position
        self.rows = session.rows

    def trim(self, num_tokens: int) -> None:
        self.session.position = num_tokens
        super().trim(num_tokens)

    def gather(self, rows: Sequence[int]) -> None:
        self.session.gather(rows)
        super().gather(rows)
