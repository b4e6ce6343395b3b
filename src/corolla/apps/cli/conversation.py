"""Prompts in, streamed text out: what `generate`, `chat` and the demo share. Imports torch and transformers.

A conversation keeps one session. Each turn renders the whole conversation with the model's chat template, and
sends only what the servers do not hold yet: the part after the longest common beginning.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)

from corolla import AutoDistributedModelForCausalLM
from corolla.apps.cli.network import chosen_servers, client_network, is_exact
from corolla.apps.cli.progress import Shown
from corolla.client.config import ClientConfig
from corolla.errors import BadInput
from corolla.models.frugal import give_back_freed
from corolla.models.source_options import SourceOptions

if TYPE_CHECKING:
    from corolla.client.inference import InferenceSession
    from corolla.client.model import DistributedModelForCausalLM

Write = Callable[[str], None]
ShouldStop = Callable[[], bool]
Message = dict[str, str]
"""`role` and `content`."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen: the likeliest, unless a temperature or top_p is given."""

    max_new_tokens: int = 256
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature is not None and not math.isfinite(self.temperature):
            raise BadInput(f"--temperature must be a number above 0, not {self.temperature}")
        if self.seed is not None and not self.is_sampled:
            raise BadInput("a seed means nothing without --temperature or --top-p: the likeliest token is taken")

    @property
    def is_sampled(self) -> bool:
        return self.temperature is not None or self.top_p is not None

    def arguments(self) -> dict[str, Any]:
        """For `generate`."""
        chosen = {"temperature": self.temperature, "top_p": self.top_p}
        given = {name: value for name, value in chosen.items() if value is not None}
        return {"max_new_tokens": self.max_new_tokens, "do_sample": self.is_sampled, **given}


@dataclass(slots=True)
class Pace:
    """When tokens came, in seconds of `time.perf_counter()`."""

    asked_at: float
    token_times: list[float] = field(default_factory=list[float])

    @property
    def first_token_s(self) -> float | None:
        return self.token_times[0] - self.asked_at if self.token_times else None

    @property
    def tokens_per_s(self) -> float | None:
        """After the first token, whose wait is the prompt's."""
        if len(self.token_times) < 2:
            return None
        return (len(self.token_times) - 1) / (self.token_times[-1] - self.token_times[0])


@dataclass(frozen=True, slots=True)
class SwarmModel:
    """A model on the swarm with its tokenizer."""

    model: "DistributedModelForCausalLM"
    tokenizer: PreTrainedTokenizerBase

    def encode(self, text: str) -> list[int]:
        return cast("list[int]", self.tokenizer(text)["input_ids"])

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The conversation as the model was taught to read it, up to where its answer begins."""
        rendered = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return cast("list[int]", cast("Any", rendered)["input_ids"])

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))


def open_model(
    name_or_dir: str | Path,
    peers: Sequence[str],
    *,
    dtype: str | None,
    source: SourceOptions | None = None,
    shown: Shown | None = None,
) -> SwarmModel:
    """Join the swarm and load the model's local half and tokenizer. Raises BadInput or NoPeers."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = AutoDistributedModelForCausalLM.from_pretrained(
        name_or_dir, initial_peers=peers, dtype=dtype, config=ClientConfig(servers=chosen_servers(), exact=is_exact()),
        network=client_network(), source=source, has_tokenizer=True,
        progress=None if shown is None else shown.progress, say=None if shown is None else shown.say,
    )  # fmt: skip
    swarm_model = SwarmModel(model, load_tokenizer(model.checkpoint.directory))
    give_back_freed()  # reading a tokenizer leaves tens of megabytes
    return swarm_model


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Raises BadInput when there is none in the directory."""
    try:
        return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(str(directory), local_files_only=True))
    except (OSError, ValueError) as wrong:
        raise BadInput(f"{directory} has no tokenizer that can be read: {str(wrong).splitlines()[0]}") from wrong


def _never() -> bool:
    return False


class Conversation:
    """Turns of one session, or a single one."""

    def __init__(self, swarm_model: SwarmModel, session: "InferenceSession", sampling: Sampling) -> None:
        self.session = session
        self.messages: list[Message] = []
        self._swarm_model = swarm_model
        self._sampling = sampling
        self._known: list[int] = []
        """Tokens of the session, of which the servers hold `session.position` (all but the last, usually)."""
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)

    def ask(self, question: str, write: Write, *, should_stop: ShouldStop = _never) -> Pace:
        """Send the question, give the answer to `write` as it comes.

        `should_stop` is asked after each token; the part of the answer that came stays in the conversation.
        """
        self.messages.append({"role": "user", "content": question})
        answer: list[str] = []

        def keep(text: str) -> None:
            answer.append(text)
            write(text)

        try:
            return self.complete(self._swarm_model.encode_chat(self.messages), keep, should_stop=should_stop)
        finally:
            self.messages.append({"role": "assistant", "content": "".join(answer)})

    def complete(self, prompt: Sequence[int], write: Write, *, should_stop: ShouldStop = _never) -> Pace:
        """Continue exactly these tokens. Raises BadInput when there are none."""
        if not prompt:
            raise BadInput("the prompt is empty: give it some text")
        held = common_length(self._known, prompt)
        self._hold(self._known[:held])
        streamer = _Streamer(self._swarm_model.tokenizer, write)
        new = torch.tensor([list(prompt[held:])])
        try:
            self._swarm_model.model.generate(
                new,
                attention_mask=torch.ones_like(new),
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([_Stop(should_stop)]),
                session=self.session,
                **self._sampling.arguments(),
            )
        finally:
            self._hold([*prompt, *streamer.tokens])
        return streamer.pace

    def _hold(self, tokens: list[int]) -> None:
        """Make the session hold a beginning of `tokens` and nothing else."""
        self._known = tokens
        self.session.position = min(self.session.position, len(tokens))
        self.session.output_ids = torch.tensor([tokens]) if tokens else None
        self.session.attention_mask = None


def common_length(known: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens of `prompt` need not be sent: its common beginning with `known`, short of its last token."""
    most = min(len(known), len(prompt) - 1)
    return next((i for i in range(most) if known[i] != prompt[i]), most)


class _Stop(StoppingCriteria):
    """Ends a generation between two tokens, when the session is in order: inside a step, it would not be."""

    def __init__(self, should_stop: ShouldStop) -> None:
        self._should_stop = should_stop

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride] - its hints are narrower than what it takes
        self, input_ids: torch.Tensor, scores: Any, **_others: Any
    ) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._should_stop(), dtype=torch.bool, device=input_ids.device)


class _Streamer(TextStreamer):
    """Gives text to `write` as soon as it is whole, and notes each token and its time."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Write) -> None:
        super().__init__(cast("Any", tokenizer), skip_prompt=True, skip_special_tokens=True)
        self.tokens: list[int] = []
        self.pace = Pace(time.perf_counter())
        self._write = write
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:  # transformers gives the prompt first
            self._is_prompt = False
        else:
            self.pace.token_times.append(time.perf_counter())
            self.tokens += value.flatten().tolist()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text)
