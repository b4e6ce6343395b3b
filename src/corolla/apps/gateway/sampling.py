"""Which token comes next: penalties, bias and grammar, then temperature and top_p, then chance. On the torch thread.

Greedy (temperature 0) takes the likeliest, as `generate(do_sample=False)` does. What is reported as log probability
is the model's own, before any of this.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch
from torch import Tensor

LEAST_TEMPERATURE: Final = 1e-4
"""Below it logits divided by it overflow, and the likeliest token is all that is left anyway."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Only among so many; 0: all."""
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: dict[int, float] = field(default_factory=dict[int, float])
    top_logprobs: int | None = None
    """Alternatives to report beside each token; None: no log probabilities at all."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The log probability of a token, and of the likeliest ones, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Pick:
    """The token that comes next."""

    token: int
    likelihood: Likelihood | None = None


class Grammar(Protocol):
    """What may come next (`grammar.py`)."""

    def allowed(self) -> Tensor:
        """bool [vocabulary]."""
        ...

    def took(self, token: int) -> None: ...


class Sampler:
    """Chooses the tokens of one choice."""

    def __init__(self, sampling: Sampling, *, number: int = 0, grammar: Grammar | None = None) -> None:
        self.sampling = sampling
        self._grammar = grammar
        self._counts: Counter[int] = Counter()
        self._chance: torch.Generator | None = None
        if sampling.temperature >= LEAST_TEMPERATURE:
            self._chance = torch.Generator()
            if sampling.seed is None:
                self._chance.seed()
            else:
                self._chance.manual_seed(_seed_of(sampling.seed, number))

    def pick(self, logits: Tensor) -> Pick:
        """The next token, from `logits` [vocabulary]."""
        raw = logits.float()
        token = self._choose(self._shaped(raw))
        self._counts[token] += 1
        if self._grammar is not None:
            self._grammar.took(token)
        return Pick(token, self._likelihood(raw, token))

    def _shaped(self, raw: Tensor) -> Tensor:
        asked = self.sampling
        if not (asked.bias or self._grammar or asked.presence_penalty or asked.frequency_penalty):
            return raw
        scores = raw.clone()
        for token, count in self._counts.items() if asked.presence_penalty or asked.frequency_penalty else ():
            scores[token] -= asked.presence_penalty + asked.frequency_penalty * count
        for token, bias in asked.bias.items():
            scores[token] += bias
        if self._grammar is not None:
            scores.masked_fill_(~self._grammar.allowed(), float("-inf"))
        return scores

    def _choose(self, scores: Tensor) -> int:
        if self._chance is None:
            return int(scores.argmax())
        likely = ((scores - scores.max()) / self.sampling.temperature).softmax(-1)
        if 0 < self.sampling.top_k < likely.numel():
            likely = torch.where(likely < likely.topk(self.sampling.top_k).values[-1], 0.0, likely)
        if self.sampling.top_p < 1:
            ordered, order = likely.sort(descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            unlikely = before >= self.sampling.top_p * likely.sum()
            unlikely[0] = False  # the likeliest stays, however small top_p is
            likely[order[unlikely]] = 0.0
        return int(torch.multinomial(likely, 1, generator=self._chance))

    def _likelihood(self, raw: Tensor, token: int) -> Likelihood | None:
        count = self.sampling.top_logprobs
        if count is None:
            return None
        logprobs = raw.log_softmax(-1)
        values, tokens = logprobs.topk(min(count, logprobs.numel()))
        return Likelihood(float(logprobs[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))


def _seed_of(seed: int, number: int) -> int:
    """The seed of one choice. Not seed + number: choices of one request must not be those of the next seed."""
    if number == 0:
        return seed % 2**63
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:8]) >> 1


def make_samplers(sampling: Sampling, count: int, grammar: Callable[[], Grammar] | None) -> Sequence[Sampler]:
    """One for each choice: seeds differ, so that choices do."""
    return [Sampler(sampling, number=number, grammar=None if grammar is None else grammar()) for number in range(count)]
