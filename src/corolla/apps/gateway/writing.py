"""One answer's choices, between two passes through the swarm: logits to tokens to text. On the torch thread."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from corolla.apps.gateway.half import Stride
from corolla.apps.gateway.models import GatewayModel
from corolla.apps.gateway.sampling import Grammar, Pick, Sampler, Sampling, make_samplers
from corolla.apps.gateway.text import StopFinder, TextPieces
from corolla.models.local_half import LocalCache

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to write: all that does not change while it is written."""

    prompt: Sequence[int]
    max_new_tokens: int
    num_choices: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    grammar: Callable[[], Grammar] | None = None
    """Makes one for each choice."""
    keeps_special: bool = False
    """Special tokens stay in the text: tool calls are marked with them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token added to one choice."""

    choice: int
    text: str
    pick: Pick
    finish: FinishReason | None = None


class Choice:
    """One of an answer's texts."""

    def __init__(self, number: int, model: GatewayModel, wanted: Wanted, sampler: Sampler) -> None:
        self.number = number
        self.tokens: list[int] = []
        self.is_complete = False
        self._end_tokens = model.end_tokens
        self._max_tokens = wanted.max_new_tokens
        self._sampler = sampler
        self._pieces = TextPieces(model.tokenizer, keeps_special=wanted.keeps_special)
        self._stops = StopFinder(wanted.stops)

    def push(self, logits: Tensor) -> Piece:
        """Choose a token from `logits` [vocabulary]."""
        piece = self._push(logits)
        self.is_complete = piece.finish is not None
        return piece

    def _push(self, logits: Tensor) -> Piece:
        pick = self._sampler.pick(logits)
        self.tokens.append(pick.token)
        if pick.token in self._end_tokens:
            return Piece(self.number, self._rest(), pick, "stop")
        text = self._stops.push(self._pieces.push(pick.token))
        if self._stops.has_stopped:
            return Piece(self.number, text, pick, "stop")
        if len(self.tokens) >= self._max_tokens:
            text += self._rest()
            return Piece(self.number, text, pick, "stop" if self._stops.has_stopped else "length")
        return Piece(self.number, text, pick)

    def _rest(self) -> str:
        return self._stops.push(self._pieces.finish()) + self._stops.finish()


@dataclass(frozen=True, slots=True)
class Next:
    """What to show now, and what goes round the swarm next."""

    pieces: list[Piece]
    stride: Stride | None
    """None: all choices are complete."""
    gather: list[int] | None
    """The rows of the next step, as rows of this one; None: they stay."""


class Writing:
    """From prompt to the last token. `begin`, then `go_on` with the logits of each pass."""

    def __init__(self, model: GatewayModel, wanted: Wanted, cache: LocalCache) -> None:
        self.choices = [
            Choice(number, model, wanted, sampler)
            for number, sampler in enumerate(make_samplers(wanted.sampling, wanted.num_choices, wanted.grammar))
        ]
        self.half = model.half
        self._prompt = wanted.prompt
        self._cache = cache
        self._rows: list[Choice] = []
        """The choice of each row held by the swarm; empty before the prompt has passed."""

    @property
    def is_complete(self) -> bool:
        return all(choice.is_complete for choice in self.choices)

    def begin(self) -> Stride:
        """The prompt, but for what the cache holds of it."""
        return self.half.to_blocks(self._cache, torch.tensor([list(self._prompt[self._cache.num_tokens :])]))

    @torch.inference_mode()
    def go_on(self, logits: Tensor) -> Next:
        """Choose the next tokens, from `logits` [rows, vocabulary] of the last step."""
        is_prompt = not self._rows
        rows = self.choices if is_prompt else self._rows
        pieces = [choice.push(logits[0 if is_prompt else row]) for row, choice in enumerate(rows)]
        alive = [row for row, piece in enumerate(pieces) if piece.finish is None]
        self._rows = [rows[row] for row in alive]
        if not alive:
            return Next(pieces, None, None)
        gather = [0] * len(alive) if is_prompt else alive
        is_same = gather == list(range(logits.shape[0]))
        if not is_same:
            self._cache.gather(gather)
        newest = torch.tensor([[choice.tokens[-1]] for choice in self._rows])
        return Next(pieces, self.half.to_blocks(self._cache, newest), None if is_same else gather)
