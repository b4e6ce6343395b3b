"""A call's positions cut into the steps of a session: what every server takes, and what keeps all of them at work."""

import torch

from corolla.client.session import Session, StepInput
from corolla.client.steps import share_of_window
from corolla.errors import BadInput
from corolla.models.tensors import to_wire
from corolla.wire.tensors import WireTensor

CHUNKS_PER_HOP = 4
LEAST_CHUNK_TOKENS = 128
"""Measured over 3 hops, 50 ms and 100 Mbit/s with 512 tokens: one chunk 2.1 s, of 256 1.44 s, of 128 1.14 s, of 64
1.1 s; smaller ones cost the servers more than the pipeline gains."""


def cut_into_steps(
    session: Session,
    hidden: torch.Tensor,
    *,
    max_chunk_tokens: int,
    position_ids: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
) -> list[StepInput]:
    """Steps that carry `hidden` [rows, new_tokens, hidden_size] in order.

    `max_chunk_tokens`: most positions × rows that the client sends at once; servers may ask for less. Raises BadInput
    when the model takes a prompt only whole and this one is too long for that, or needs token ids and has none.
    """
    num_tokens = hidden.shape[-2]
    chunk = _chunk_tokens(session, hidden, max_chunk_tokens)
    return [
        StepInput(
            to_wire(hidden[..., start : start + chunk, :]),
            min(chunk, num_tokens - start),
            None if position_ids is None else to_wire(position_ids[..., start : start + chunk]),
            _needed_ids(session, token_ids, start, start + chunk),
        )
        for start in range(0, num_tokens, chunk)
    ]


def _chunk_tokens(session: Session, hidden: torch.Tensor, max_chunk_tokens: int) -> int:
    """Positions per step: what every server takes, and what this client wants to send at once."""
    num_tokens = hidden.shape[-2]
    if session.position > 0 and not session.prefill_in_chunks:  # another turn: servers take no more onto what they hold
        return 1
    position_bytes = hidden.numel() // num_tokens * hidden.element_size()
    num_hops = len(session.route)
    if session.is_exact or not session.prefill_in_chunks:  # as one machine would, and whatever the route
        pipelined = num_tokens
    else:  # so that every hop has a chunk to work on while the others have theirs
        even = max(LEAST_CHUNK_TOKENS, num_tokens // (CHUNKS_PER_HOP * num_hops)) if num_hops > 1 else num_tokens
        pipelined = min(even, share_of_window(num_hops) // position_bytes)
    most = min(
        pipelined,
        session.max_chunk_tokens // hidden.shape[-3],
        max_chunk_tokens // hidden.shape[-3],
        session.max_chunk_bytes // position_bytes,
    )
    if num_tokens > most and not session.prefill_in_chunks:
        raise BadInput(
            f"this model takes a prompt only in one piece; {num_tokens} tokens are more than the {max(most, 0)} "
            "that the servers take at once"
        )
    return max(most, 1)


def _needed_ids(session: Session, token_ids: torch.Tensor | None, start: int, end: int) -> WireTensor | None:
    if not session.needs_token_ids:
        return None
    if token_ids is None:
        raise BadInput("this model's blocks need token ids: give input_ids, not inputs_embeds")
    return to_wire(token_ids[..., start:end])
