"""The blocking face: a `transformers` causal language model whose blocks are a swarm.

`load_distributed_model` makes an instance of a run-time class `(DistributedModelForCausalLM, <the family's class>)`.
The family's own forward runs as it always does; where its first block would be, `run_blocks` sends the hidden
states round the swarm and gives back what comes out of the last one (`models/local_half.py`). Everything else is
transformers' own: generate, sampling, beams, streamers, logits processors.
"""

import contextvars
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from corolla.client.connection import Connection
from corolla.client.inference import InferenceSession, SessionCache
from corolla.client.router import ServedModel
from corolla.errors import BadInput
from corolla.models.checkpoint import Checkpoint
from corolla.models.local_half import BlocksCall, LocalHalf, load_local_half
from corolla.models.tensors import TORCH_DTYPES

if TYPE_CHECKING:
    from transformers import GenerationMixin, PreTrainedModel

    class _Base(LocalHalf, PreTrainedModel, GenerationMixin):  # pyright: ignore[reportIncompatibleMethodOverride]
        """What stands behind the mixin at run time: the family's class."""

else:
    _Base = LocalHalf


class DistributedModelForCausalLM(_Base):
    """A causal language model that holds embeddings, final norm and head; the blocks are servers of a swarm.

    Not for training in this version: what comes back from the servers carries no gradient.
    """

    connection: Connection
    served: ServedModel
    checkpoint: Checkpoint
    max_positions: int | None
    """Positions the model knows; None: its config does not say."""

    @contextmanager
    def inference_session(self, *, max_length: int) -> Generator[InferenceSession]:
        """One conversation of up to `max_length` tokens a row; `generate` and forward calls inside use it."""
        self._check_length(max_length)
        with self._new_session(max_length) as session, self.use_session(session):
            yield session

    @contextmanager
    def use_session(self, session: InferenceSession | None) -> Generator[None]:
        """Make this the session of calls inside the block; None: each call takes one of its own."""
        token = _active_session.set(session)
        try:
            yield
        finally:
            _active_session.reset(token)

    @property
    def active_session(self) -> InferenceSession | None:
        """The session that calls use now."""
        return _active_session.get()

    def close(self) -> None:
        """Leave the swarm. The process's end does it too."""
        self.connection.close()

    @torch.no_grad()
    def generate(
        self, inputs: Tensor | None = None, *args: Any, session: InferenceSession | None = None, **kwargs: Any
    ) -> Any:
        """As in transformers. In a session the inputs are the new tokens only: what came before is still held.

        The result then has the new inputs and what was generated. Raises NoRoute, Refused, HopFailed, BadInput.
        """
        session = session or self.active_session
        if session is not None:
            return self._generate_on(session, inputs, args, kwargs)
        with self._new_session(None) as own:
            return _generate(super())(
                inputs, *args, **kwargs, **{self.structure.cache_argument: SessionCache(self.config, own)}
            )

    def run_blocks(self, call: BlocksCall) -> Tensor:
        """All blocks, on the swarm; called by the family's forward where its first block would be."""
        assert isinstance(call.cache, SessionCache)
        session = call.cache.session
        is_own = session.max_length is None and session is not self.active_session
        if is_own:
            session.max_length = call.hidden.shape[1]
            self._check_length(session.max_length)
        try:
            return session.run_blocks(
                call.hidden,
                want="last" if call.last_only else "all",
                position_ids=call.position_ids,
                left_padding=call.left_padding,
                token_ids=call.token_ids,
            )
        finally:
            if is_own:
                session.close()

    def new_local_cache(self) -> SessionCache:
        """For a forward call without a cache: of the active session, else of one for this call alone."""
        return SessionCache(self.config, self.active_session or self._new_session(None))

    def _generate_on(
        self, session: InferenceSession, inputs: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        inputs = kwargs.pop("input_ids", inputs)
        before = session.output_ids
        if before is None and inputs is None:
            raise BadInput("the session is empty: give it a prompt")
        full = torch.cat([ids for ids in (before, inputs) if ids is not None], dim=1)
        mask = _joined_mask(session, full, kwargs.pop("attention_mask", None))
        if mask is not None:
            kwargs["attention_mask"] = mask
        num_before = 0 if before is None else before.shape[1]
        if kwargs.get("max_length") is not None:
            kwargs["max_length"] += num_before
        held = session.position
        try:
            result = _generate(super())(
                full, *args, **kwargs, **{self.structure.cache_argument: SessionCache(self.config, session)}
            )
        except BaseException:
            session.position = min(session.position, held)  # of an answer that was broken off, nothing is kept
            raise
        sequences = cast("Tensor", result if isinstance(result, Tensor) else result.sequences)
        session.output_ids = sequences
        session.attention_mask = None if mask is None else _extended(mask, sequences.shape[1])
        if isinstance(result, Tensor):
            return sequences[:, num_before:]
        result.sequences = sequences[:, num_before:]
        return result

    def _prepare_cache_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride] - a private hook of theirs
        self, generation_config: Any, model_kwargs: Any, mode: Any, batch_size: int, max_cache_length: int
    ) -> None:
        """transformers' hook that knows how long this generation may get: a session must say so when it opens."""
        cache = model_kwargs.get(self.structure.cache_argument)
        if not isinstance(cache, SessionCache):
            raise BadInput("generate on a swarm uses the session's own cache; leave past_key_values out")
        if generation_config.use_cache is False:
            raise BadInput("use_cache=False would send the whole text again for every token; leave it out")
        # The last token is never fed back: a text of n tokens needs room for n - 1.
        if cache.session.max_length is None:
            self._check_length(max_cache_length + 1)
            cache.session.max_length = max(max_cache_length, 1)
        elif max_cache_length > cache.session.max_length:
            raise BadInput(
                f"this generation may reach {max_cache_length + 1} tokens; the session was opened for "
                f"{cache.session.max_length}"
            )

    def _new_session(self, max_length: int | None) -> InferenceSession:
        return InferenceSession(self.connection, self.served, max_length=max_length)

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens < 1:
            raise BadInput(f"a session needs room for at least one token, not {num_tokens}")
        if self.max_positions is not None and num_tokens > self.max_positions:
            raise BadInput(f"{num_tokens} tokens are too many: this model knows {self.max_positions} positions")


_active_session: contextvars.ContextVar[InferenceSession | None] = contextvars.ContextVar("session", default=None)


def load_distributed_model(
    checkpoint: Checkpoint, connection: Connection, *, dtype: "torch.dtype | str | None", model_name: str | None
) -> DistributedModelForCausalLM:
    """The local half of the checkpoint on a joined swarm. Raises BadInput or what joining raised."""
    served = ServedModel.of(checkpoint, name=model_name)
    model = load_local_half(checkpoint, DistributedModelForCausalLM, dtype=_dtype(dtype))
    model.connection = connection
    model.served = replace(served, hidden_size=model.structure.width)
    model.checkpoint = checkpoint
    model.max_positions = checkpoint.max_positions
    _ = connection.swarm  # whatever went wrong while joining comes out here
    return model


def _generate(family: object) -> Callable[..., Any]:
    """The family's own `generate`; its stub asks for more of a model than any model has."""
    return cast("Any", family).generate


def _dtype(dtype: "torch.dtype | str | None") -> torch.dtype | None:
    if dtype is None or dtype == "auto":
        return None
    dtypes = {name: known for name, known in TORCH_DTYPES.items() if known.is_floating_point}
    if isinstance(dtype, str):
        dtype = dtypes.get(dtype.removeprefix("torch."), dtype)
    if dtype not in dtypes.values():
        raise BadInput(f"dtype {dtype}: it must be one of auto, {', '.join(dtypes)}")
    return cast("torch.dtype", dtype)


def _joined_mask(session: InferenceSession, full: Tensor, mask: Tensor | None) -> Tensor | None:
    """The attention mask of the whole conversation: the session's own, then that of the new tokens."""
    if mask is None and session.attention_mask is None:
        return None
    if mask is not None and mask.shape == full.shape:
        return mask
    before = session.attention_mask
    num_before = 0 if session.output_ids is None else session.output_ids.shape[1]
    if before is None:
        before = full.new_ones(full.shape[0], num_before)
    return _extended(before if mask is None else torch.cat([before, mask.to(before)], dim=1), full.shape[1])


def _extended(mask: Tensor, num_tokens: int) -> Tensor:
    return torch.cat([mask, mask.new_ones(mask.shape[0], num_tokens - mask.shape[1])], dim=1)
