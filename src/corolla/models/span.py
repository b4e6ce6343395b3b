"""The server's half of a model: consecutive blocks, run as the family runs them.

`Span.forward` is one step of one session: hidden states in, hidden states after the session's last block out, the cache
advanced. A session may use fewer blocks than are hosted (a route that enters in the middle, a server that stands in for
a smaller one): its cache says which. One device thread; two forwards of one span at once are not allowed.
"""

import logging
from collections.abc import Mapping, Sequence
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
from corolla.models.family import CODE_FAILS, Structure
from corolla.models.quantization import held_bytes
from corolla.models.recording import MIN_TOKENS, CannotRecord, RecordedLayers, Recording, record
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
from corolla.models.tape import Play, write_tape

log = logging.getLogger(__name__)

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
    max_positions: int | None = None
    """How many positions the checkpoint says that its model has; None: no bound. There may be a table of them."""

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
        self._tape = lru_cache(_MAX_SECTIONS)(self._find_tape)
        self._recording: Recording | None = None
        self._installed: _Section | None = None

    @property
    def num_blocks(self) -> int:
        return self.end - self.start

    @property
    def hidden_size(self) -> int:
        """Numbers for each position that travel between blocks."""
        return self.structure.width

    @property
    def vocabulary(self) -> int:
        """Token ids that the family knows; only where blocks need them does it matter here."""
        return self._config.vocab_size

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
        # Always said: some families (bamba) count from 0 again in every chunk when they are not told.
        positions = self._count_on(cache, num_new) if position_ids is None else position_ids.to(self.device)
        stream = self.structure.unflatten(hidden.to(device=self.device, dtype=self.dtype))
        extra: dict[str, Tensor] = {}
        if self.dataflow.needs_token_ids:
            assert token_ids is not None, "the session checks them before"
            extra["input_ids"] = token_ids.to(self.device)
        if left_padding is not None and any(left_padding):
            extra["attention_mask"] = self._attention_mask(left_padding, cache.num_tokens + num_new)
        tape = None
        if self._recording is not None and num_rows == num_new == 1 and not extra and cache.num_tokens >= MIN_TOKENS:
            tape = self._tape(cache.start, cache.end)
        if tape is None:
            output = self._run_family(stream, positions, cache, extra)
        else:
            output = tape(stream, positions, cache.layers, cache.num_tokens)
        cache.advance(num_new)
        return self.structure.flatten(output)

    def use_tapes(self) -> bool:
        """Take tapes for decode steps of one row from here on, where the family can be recorded (`tape.py`).

        Whether all of the span's blocks have one; those of a part are found when a session first needs it. Sessions may
        be under way: what they computed so far stays right.
        """
        if self._recording is not None:
            return self._tape(self.start, self.end) is not None
        if self.dataflow.needs_token_ids or not self.new_cache(1).grows_only:
            return False
        try:
            self._recording = self._record()
        except CannotRecord as reason:
            self._log_no_tape(str(reason))
        except Exception as failure:  # noqa: BLE001 - whatever another's code raises without data: it runs as ever
            self._log_no_tape(repr(failure))
        return self._recording is not None and self._tape(self.start, self.end) is not None

    @torch.no_grad()  # inference mode keeps tensors from some of what a forward does without data
    def _record(self) -> Recording:
        cache = self.new_cache(1)
        hidden = torch.zeros(1, 1, self.hidden_size, dtype=self.dtype, device=self.device)

        def run(hidden: Tensor, positions: Tensor, layers: RecordedLayers) -> None:
            cache.put(layers.layer, layers.num_tokens)
            self._run_family(hidden, positions, cache, {})

        blocks = dict(enumerate(self.blocks, self.start))
        return record(self._model, blocks, self.structure.unflatten(hidden), run)

    def _log_no_tape(self, reason: str) -> None:
        log.debug("no tape", extra={"family": self.structure.family, "reason": reason})

    def _find_tape(self, start: int, end: int) -> Play | None:
        """A tape for the blocks `[start, end)`, tried out; None: they run by the family's forward."""
        assert self._recording is not None, "recorded first"
        try:
            tape = write_tape(
                self._recording, after=None if start == self.start else start - 1, last=end - 1, device=self.device
            )
            if self._plays_exactly(tape, start, end):
                return tape
        except CannotRecord as reason:
            self._log_no_tape(str(reason))
        except CODE_FAILS as failure:
            self._log_no_tape(repr(failure))
        else:
            self._log_no_tape("it gave other bits than the family's forward")
        return None

    def _plays_exactly(self, tape: Play, start: int, end: int) -> bool:
        """Whether a tape gives the forward's bits, and leaves them in the cache, at a few lengths."""
        played, expected = self.new_cache(1, start, end), self.new_cache(1, start, end)
        chance = torch.Generator().manual_seed(0)
        for num_new in (3, 1, 1, 1):
            hidden = torch.randn(1, num_new, self.hidden_size, generator=chance).to(self.device, self.dtype)
            stream, positions = self.structure.unflatten(hidden), self._count_on(expected, num_new)
            output = self._run_family(stream, positions, expected, {})
            if num_new > 1:
                self._run_family(stream, positions, played, {})
            elif not torch.equal(tape(stream, positions, played.layers, played.num_tokens), output):
                return False
            for cache in (played, expected):
                cache.advance(num_new)
        return played.equals(expected)

    def _run_family(self, stream: Tensor, positions: Tensor, cache: SpanCache, extra: Mapping[str, Tensor]) -> Tensor:
        """The family's forward over the cache's blocks; `extra` arguments go beside the ordinary ones."""
        num_rows, num_new = positions.shape
        arguments: dict[str, object] = {"use_cache": True, self.structure.cache_argument: cache, **extra}
        if "input_ids" not in extra:
            arguments["inputs_embeds"] = self._placeholder(num_rows, num_new)
        if self.structure.takes_position_ids:
            arguments["position_ids"] = positions
        arguments |= self.structure.special.arguments
        section = self._section(cache.start, cache.end)
        self._install(section)
        return self._run(section.door, stream, arguments)

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
