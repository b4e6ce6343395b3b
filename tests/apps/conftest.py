"""A model on a swarm that is none: it says what it was told to, for the commands around it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

EOS = 2


@dataclass
class CannedModel:
    """Each question gets the next of the answers: numbers of words."""

    answers: list[list[int]]
    after_each_token: Callable[[], None] = lambda: None
    max_positions: int = 64
    opened: list[int] = field(default_factory=list[int])
    """How long each session may become."""
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    is_closed: bool = False

    @contextmanager
    def inference_session(self, *, max_length: int) -> Iterator[Any]:
        self.opened.append(max_length)
        yield SimpleNamespace(position=0, output_ids=None, attention_mask=None, route=[])

    def generate(self, inputs: torch.Tensor, *, streamer: Any, **arguments: Any) -> None:
        self.arguments = arguments
        streamer.put(inputs)
        for token in [*self.answers.pop(0), EOS]:
            streamer.put(torch.tensor([token]))
            self.after_each_token()
        streamer.end()

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(scope="session")
def canned(tmp_path_factory: pytest.TempPathFactory, write_tokenizer: Callable[[Path], None]) -> Callable[..., Any]:
    """Makes a `SwarmModel` that gives these answers; its `.model` is a `CannedModel`."""
    from corolla.apps.cli.conversation import SwarmModel, load_tokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    tokenizer = load_tokenizer(directory)

    def make(*answers: list[int]) -> Any:
        return SwarmModel(CannedModel(list(answers)), tokenizer)  # pyright: ignore[reportArgumentType]

    return make
