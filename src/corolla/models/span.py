"""The server's half of a model: consecutive blocks, run as the family runs them.

`Span.forward` is one step of one session: hidden states in, hidden states after the session's last block out, the cache
advanced. A session may use fewer blocks than are hosted (a route that enters in the middle, a server that stands in for
a smaller one): its cache says which. One device thread; two forwards of one span at once are not allowed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from corolla.errors import Unsupported
from corolla.models.building import building
from corolla.models.cache import SpanCache, with_calls
from corolla.models.capabilities import Capabilities, find_capabilities
from corolla.models.dataflow import Dataflow
from corolla.models.family import Structure
from corolla.models.quantization import held_bytes
from corolla.models.skeleton import (
    Entry,
    Exit,
    Given,
    PassThrough,
    SkeletonBlocks,
    SpanDone,
    count_outputs,
    find_blocks,
    text_config,
)

_MAX_SECTIONS: Final = 32
"""Block lists kept ready; building one again costs less than a step, and clients choose which there are."""


@dataclass(frozen=True, slots=True)
class _Section:
    """The model's block list as sessions over one part of the span run it."""

    blocks: SkeletonBlocks
    door: Entry | Given
    """Where the hidden state is put in."""


class Span:
    """Blocks `[start, end)` with their weights, on one device."""

    capabilities: Capabilities
    """Filled by `loading.load_span` before anybody sees the span."""

    def __init__(
        self,
        model: PreTrainedModel,
        start: int,
        end: int,
        structure: Structure,
        dataflow: Dataflow,
        read_bytes: int = 0,
    ) -> None:
        self.start = start
        self.end = end
        self.read_bytes = read_bytes
        """Of the checkpoint's files, to load it."""
        self.structure = structure
        self.dataflow = dataflow
        self._model = model
        self._place = find_blocks(model)
        self._whole_list = list(self._place.blocks)
        self.blocks = self._whole_list[start:end]
        parameter = next(self.blocks[0].parameters())
        self.device = parameter.device
        self.dtype = structure.stream_dtype
        """Of what travels; the weights' own for most families."""
        self._weights_dtype: torch.dtype = model.dtype
        self._cache_kind = with_calls(SpanCache, structure.special.cache_calls)
        self._config = text_config(model.config)
        self._section = lru_cache(_MAX_SECTIONS)(self._build_section)
        self._installed: _Section | None = None

    @property
    def num_blocks(self) -> int:
        return self.end - self.start

    @property
    def hidden_size(self) -> int:
        """Numbers for each position that travel between blocks."""
        return self.structure.width

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take: the hosted blocks', and what they need from outside the blocks."""
        return held_bytes(self._model)

    def new_cache(self, rows: int, start: int | None = None, end: int | None = None) -> SpanCache:
        """An empty cache for `rows` sequences, over the blocks `[start, end)` of the span; None: to its own ends.

        Raises Unsupported where the family cannot be cut.
        """
        start, end = self.start if start is None else start, self.end if end is None else end
        assert self.start <= start < end <= self.end, "the session checks blocks before"
        self._check_cuts(start, end)
        layers = [index for used in self.dataflow.cache_layers[start:end] for index in used]
        return self._cache_kind(self._config, start, end, rows, layers)

    def _check_cuts(self, start: int, end: int) -> None:
        borders = (self.start, *self.dataflow.cuts, self.end)
        if start not in borders or end not in borders:
            raise Unsupported(
                f"blocks {start}:{end} of {self.structure.family} cannot run apart from their neighbours",
                value=f"{start}:{end}",
                bound=f"cuts at {', '.join(str(cut) for cut in self.dataflow.cuts) or 'no block'}",
            )

    def self_test(self) -> Capabilities:
        """What this span can do, found by a short run. Raises BadInput when it cannot serve."""
        return find_capabilities(self)

    @torch.inference_mode()
    def forward(
        self,
        hidden: Tensor,
        cache: SpanCache,
        *,
        position_ids: Tensor | None = None,
        left_padding: Sequence[int] | None = None,
        token_ids: Tensor | None = None,
    ) -> Tensor:
        """The hidden state after the cache's last block; both are [rows, new_tokens, hidden_size].

        `position_ids` int64 [rows, new_tokens], None: counted on from the cache. `left_padding`: positions at the left
        of each row that nobody may attend to. `token_ids` int64 [rows, new_tokens] where the family needs them. The
        cache is unusable after an exception.
        """
        num_rows, num_new, _ = hidden.shape
        assert num_rows == cache.rows, "the session checks rows before"
        arguments: dict[str, object] = {"use_cache": True, self.structure.cache_argument: cache}
        if self.dataflow.needs_token_ids:
            assert token_ids is not None, "the session checks them before"
            arguments["input_ids"] = token_ids.to(self.device)
        else:
            arguments["inputs_embeds"] = self._placeholder(num_rows, num_new)
        if self.structure.takes_position_ids:
            # Always said: some families (bamba) count from 0 again in every chunk when they are not told.
            positions = self._count_on(cache, num_new) if position_ids is None else position_ids.to(self.device)
            arguments["position_ids"] = positions
        if left_padding is not None and any(left_padding):
            arguments["attention_mask"] = self._attention_mask(left_padding, cache.num_tokens + num_new)
        arguments |= self.structure.special.arguments
        section = self._section(cache.start, cache.end)
        self._install(section)
        stream = self.structure.unflatten(hidden.to(device=self.device, dtype=self.dtype))
        output = self._run(section.door, stream, arguments)
        cache.advance(num_new)
        return self.structure.flatten(output)

    def _build_section(self, start: int, end: int) -> _Section:
        blocks = list(self._whole_list)
        for index in range(self.start, start):
            blocks[index] = PassThrough(blocks[index], count_outputs(blocks[index]))
        blocks[end - 1] = Exit(blocks[end - 1])
        if start == 0:
            blocks[0] = door = Entry(blocks[0])
        else:
            before = cast("PassThrough", blocks[start - 1])
            blocks[start - 1] = door = Given(before.donor, before.num_outputs)
        return _Section(SkeletonBlocks(blocks), door)

    def _install(self, section: _Section) -> None:
        if section is not self._installed:
            self._place.replace(section.blocks)
            self._installed = section

    def _run(self, door: Entry | Given, stream: Tensor, arguments: dict[str, object]) -> Tensor:
        door.hidden = stream
        try:
            with building:
                self._place.runner(**arguments)
        except SpanDone as done:
            return done.hidden
        finally:
            door.hidden = None
        raise AssertionError("the family's forward did not reach the span's last block")

    def _count_on(self, cache: SpanCache, num_new: int) -> Tensor:
        first = cache.num_tokens
        return torch.arange(first, first + num_new, device=self.device).expand(cache.rows, num_new)

    def _placeholder(self, num_rows: int, num_new: int) -> Tensor:
        """Embeddings of which only shape, dtype and device matter: the entry puts the hidden state in their place."""
        size = self.structure.embedding_size
        return torch.zeros(num_rows, num_new, size, dtype=self._weights_dtype, device=self.device)

    def _attention_mask(self, left_padding: Sequence[int], num_tokens: int) -> Tensor:
        """int64 [rows, num_tokens]: 0 at the left padding, 1 elsewhere, as the family's forward takes it."""
        first = torch.tensor(list(left_padding), device=self.device)
        return (torch.arange(num_tokens, device=self.device) >= first[:, None]).to(torch.int64)
