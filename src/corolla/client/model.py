"""The blocking face: a `transformers` causal language model whose blocks are a swarm.

`load_distributed_model` makes an instance of a run-time class `(DistributedModelForCausalLM, <the family's class>)`.
The family's own forward runs as it always does; where its first block would be, `run_blocks` sends the hidden
states round the swarm and gives back what comes out of the last one. Everything else is transformers' own:
generate, sampling, beams, streamers, logits processors.
"""

import contextvars
import inspect
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from corolla.client.connection import Connection
from corolla.client.inference import InferenceSession, SessionCache
from corolla.client.router import ServedModel
from corolla.errors import BadInput
from corolla.models.checkpoint import Checkpoint
from corolla.models.fingerprint import fingerprint
from corolla.models.loading import resolve_dtype
from corolla.models.local_half import load_local_half
from corolla.wire.messages import Want

if TYPE_CHECKING:
    from transformers import GenerationMixin, PreTrainedModel

    class _Family(PreTrainedModel, GenerationMixin):
        """What the mixin may count on: the family's class stands behind it."""

else:
    _Family = object


@dataclass(frozen=True, slots=True)
class _Call:
    """What one forward tells the blocks beside the hidden states."""

    session: InferenceSession
    want: Want
    position_ids: Tensor | None
    left_padding: list[int] | None
    token_ids: Tensor | None


class DistributedModelForCausalLM(_Family):
    """A causal language model that holds embeddings, final norm and head; the blocks are servers of a swarm.

    Not for training in this version: what comes back from the servers carries no gradient.
    """

    connection: Connection
    served: ServedModel

    # --- sessions

    @contextmanager
    def inference_session(self, *, max_length: int) -> Generator[InferenceSession]:
        """One conversation of up to `max_length` tokens a row; `generate` and forward calls inside use it."""
        self._check_length(max_length)
        session = InferenceSession(self.connection, self.served, max_length=max_length)
        with session, self.use_session(session):
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

    # --- transformers' interface

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
        with InferenceSession(self.connection, self.served, max_length=None) as own:
            kwargs["past_key_values"] = SessionCache(self.config, own)
            return super().generate(inputs, *args, **kwargs)

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        """The family's forward. Without a session, one is opened for this call and closed after it."""
        _refuse_what_stays_remote(kwargs)
        cache = kwargs.get("past_key_values")
        if isinstance(cache, SessionCache):
            return self._forward_on(cache, input_ids, kwargs)
        if cache is not None and cache.get_seq_length() > 0:
            raise BadInput("past_key_values of another model: pass those of an inference session of this one")
        if (session := self.active_session) is not None:
            return self._forward_on(SessionCache(self.config, session), input_ids, kwargs)
        given = input_ids if input_ids is not None else kwargs.get("inputs_embeds")
        if given is None:
            raise BadInput("give input_ids or inputs_embeds")
        self._check_length(given.shape[1])
        with InferenceSession(self.connection, self.served, max_length=given.shape[1]) as own:
            output = self._forward_on(SessionCache(self.config, own), input_ids, kwargs)
        output["past_key_values"] = None  # the session that it stands for is closed
        return output

    def run_blocks(self, hidden: Tensor) -> Tensor:
        """All blocks, on the swarm; called by the family's forward where its first block would be."""
        call = _call.get()
        return call.session.run_blocks(
            hidden,
            want=call.want,
            position_ids=call.position_ids,
            left_padding=call.left_padding,
            token_ids=call.token_ids,
        )

    def _forward_on(self, cache: SessionCache, input_ids: Tensor | None, kwargs: dict[str, Any]) -> Any:
        kwargs["past_key_values"] = cache
        kwargs["use_cache"] = True
        new_tokens = (input_ids if input_ids is not None else kwargs["inputs_embeds"]).shape[1]
        token = _call.set(
            _Call(
                session=cache.session,
                want="last" if _keeps_one(kwargs.get("logits_to_keep")) else "all",
                position_ids=kwargs.get("position_ids"),
                left_padding=left_padding_of(kwargs.get("attention_mask"), cache.session.position + new_tokens),
                token_ids=input_ids,
            )
        )
        try:
            cache.set_length(cache.session.position)
            return super().forward(input_ids=input_ids, **kwargs)
        finally:
            cache.set_length(cache.session.position)
            _call.reset(token)

    # --- generation in a session

    def _generate_on(
        self, session: InferenceSession, inputs: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        inputs = kwargs.pop("input_ids", inputs)
        before = session.output_ids
        if before is None and inputs is None:
            raise BadInput("the session is empty: give it a prompt")
        mask = _joined_mask(session, inputs, kwargs.pop("attention_mask", None))
        full = inputs if before is None else before if inputs is None else torch.cat([before, inputs], dim=1)
        if mask is not None:
            kwargs["attention_mask"] = mask
        kwargs["past_key_values"] = SessionCache(self.config, session)
        if "max_length" in kwargs and before is not None:
            kwargs["max_length"] += before.shape[1]
        with self.use_session(None):
            result = super().generate(full, *args, **kwargs)
        sequences: Tensor = result if isinstance(result, Tensor) else result.sequences
        session.output_ids = sequences
        session.attention_mask = None if mask is None else _extended(mask, sequences.shape[1])
        new = sequences if before is None else sequences[:, before.shape[1] :]
        if isinstance(result, Tensor):
            return new
        result.sequences = new
        return result

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], mode: Any, batch_size: int, max_cache_length: int
    ) -> None:
        """transformers' hook that knows how long this generation may get: a session must say so when it opens."""
        cache = model_kwargs.get("past_key_values")
        if not isinstance(cache, SessionCache):
            raise BadInput("generate on a swarm uses the session's own cache; leave past_key_values out")
        if generation_config.use_cache is False:
            raise BadInput("use_cache=False would send the whole text again for every token; leave it out")
        wanted = max_cache_length + 1
        if cache.session.max_length is None:
            self._check_length(wanted)
            cache.session.max_length = wanted
        elif wanted > cache.session.max_length + 1:  # the last token is never fed back
            raise BadInput(
                f"this generation may reach {wanted} tokens; the session was opened for {cache.session.max_length}"
            )

    def _check_length(self, num_tokens: int) -> None:
        longest = self.max_positions
        if num_tokens < 1:
            raise BadInput(f"a session needs room for at least one token, not {num_tokens}")
        if longest is not None and num_tokens > longest:
            raise BadInput(f"{num_tokens} tokens; this model knows {longest} positions")

    max_positions: int | None = None


_active_session: contextvars.ContextVar[InferenceSession | None] = contextvars.ContextVar("session", default=None)
_call: contextvars.ContextVar[_Call] = contextvars.ContextVar("call")


def load_distributed_model(
    checkpoint: Checkpoint, connection: Connection, *, dtype: "torch.dtype | str | None", model_name: str | None
) -> DistributedModelForCausalLM:
    """The local half of the checkpoint on a joined swarm. Raises BadInput or what joining raised."""
    served = ServedModel(model_name or checkpoint.name, fingerprint(checkpoint), checkpoint.num_blocks)
    model = load_local_half(checkpoint, dtype=resolve_dtype(dtype), mixin=DistributedModelForCausalLM)
    _show_family_signature(model)
    model.connection = connection
    model.served = served
    model.max_positions = checkpoint.max_positions
    _ = connection.swarm  # whatever went wrong while joining comes out here
    return model.eval()


def left_padding_of(mask: Tensor | None, num_tokens: int) -> list[int] | None:
    """Padding positions at the left of each row, None when no row has any.

    `mask` [rows, num_tokens]: 1 where a token stands. Raises BadInput for anything but left padding.
    """
    if mask is None:
        return None
    if mask.dim() != 2:
        raise BadInput(f"attention_mask of shape {list(mask.shape)}; wanted [rows, {num_tokens}]")
    if mask.shape[1] != num_tokens:
        raise BadInput(f"attention_mask covers {mask.shape[1]} tokens, the session then holds {num_tokens}")
    if bool((mask[:, 1:] < mask[:, :-1]).any()) or bool((mask[:, -1] == 0).any()):
        raise BadInput(
            "attention_mask hides tokens in the middle or at the right; only padding at the left is possible"
        )
    padding = (mask == 0).sum(dim=1)
    return padding.tolist() if bool(padding.any()) else None


def _keeps_one(logits_to_keep: object) -> bool:
    return isinstance(logits_to_keep, int) and logits_to_keep == 1


def _refuse_what_stays_remote(kwargs: dict[str, Any]) -> None:
    for name in ("output_attentions", "output_hidden_states"):
        if kwargs.get(name):
            raise BadInput(f"{name} is not possible: what happens inside the blocks stays on the servers")


def _joined_mask(session: InferenceSession, inputs: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """The attention mask of the whole conversation, from the session's own and the new tokens'."""
    before = session.output_ids
    if before is None or inputs is None:
        return mask if before is None else session.attention_mask
    if mask is None and session.attention_mask is None:
        return None
    if mask is not None and mask.shape[1] == before.shape[1] + inputs.shape[1]:
        return mask
    old = session.attention_mask if session.attention_mask is not None else torch.ones_like(before)
    return torch.cat([old, mask if mask is not None else torch.ones_like(inputs)], dim=1)


def _extended(mask: Tensor, num_tokens: int) -> Tensor:
    return torch.cat([mask, mask.new_ones(mask.shape[0], num_tokens - mask.shape[1])], dim=1)


def _show_family_signature(model: DistributedModelForCausalLM) -> None:
    """transformers asks `forward` for its parameters: it must see the family's, not the mixin's `**kwargs`."""
    family_forward = next(vars(kind)["forward"] for kind in type(model).__mro__ if _is_family(kind))

    def forward(self: DistributedModelForCausalLM, *args: Any, **kwargs: Any) -> Any:
        names = iter(inspect.signature(family_forward).parameters)
        next(names)
        return DistributedModelForCausalLM.forward(self, **dict(zip(names, args, strict=False)), **kwargs)

    forward.__signature__ = inspect.signature(family_forward)  # pyright: ignore[reportFunctionMemberAccess]
    forward.__doc__ = family_forward.__doc__
    type(model).forward = forward


def _is_family(kind: type) -> bool:
    return "forward" in vars(kind) and kind.__module__.startswith("transformers.")
