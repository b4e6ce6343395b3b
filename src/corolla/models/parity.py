"""Whether a family comes out right in spans: chained ones against the whole model, bit for bit in fp32.

One tiny random model of the family is written, loaded whole by transformers and in parts by us, and both run the same
prompt in the same pieces: two rows, without and with padding, prefill and decode, and back three positions and on.
The table of families in `docs/families.md` is made of these reports, and `make latest` compares two of them.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from corolla.errors import BadInput
from corolla.models.capabilities import Capabilities
from corolla.models.checkpoint import Checkpoint, open_checkpoint
from corolla.models.family import quiet
from corolla.models.loading import load_span
from corolla.models.skeleton import CACHE_ARGUMENTS
from corolla.models.testing import ChainedHalf, load_chain, write_tiny
from corolla.models.tiny import TINY_VOCABULARY

Outcome = Literal["right", "refused", "wrong", "not tried"]

_ROWS: Final = 2
_NUM_TOKENS: Final = 14
_PADDING: Final = 3
_IN_CHUNKS: Final = ((0, 7), (7, 11), (11, 12), (12, 13), (13, 14))
"""Two prefill chunks, the first beyond the tiny sliding window, then decode."""
_IN_ONE_PIECE: Final = ((0, 11), (11, 12), (12, 13), (13, 14))
_AT_ONCE: Final = ((0, _NUM_TOKENS),)
_ROUNDING: Final = 1e-5
"""What shapes of batches alone may change in fp32, where logits are about 1."""
_SOME_CUTS: Final = (2, 3)
"""Inside and at the edge of most tiny layer patterns; every border besides is tried with blocks one by one."""
_DRAFT: Final = 3


@dataclass(frozen=True, slots=True)
class FamilyReport:
    """What became of one family."""

    family: str
    outcome: Outcome
    detail: str = ""
    """Why, in one sentence; a remark where it is right all the same."""
    can: Capabilities | None = None
    num_blocks: int = 0
    with_padding: bool = False
    """Whether rows padded at their left were compared too: some families' own models cannot run them."""


def known_families() -> list[str]:
    """Every family that the installed transformers lists as a causal language model."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def try_family(family: str, directory: Path) -> FamilyReport:
    """Write a tiny model of `family` into `directory` and compare."""
    try:
        write_tiny(directory, family, max_shard_size="1GB")
        with quiet():
            whole = cast("PreTrainedModel", AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval())
    except Exception as failure:  # noqa: BLE001 - whatever another's code raises: there is nothing to compare with
        return FamilyReport(family, "not tried", f"transformers itself: {_first_line(failure)}")
    try:
        half = _load_in_parts(open_checkpoint(directory))
    except BadInput as refusal:
        return FamilyReport(family, "refused", str(refusal).removeprefix(f"{directory}/"))
    return _compare(family, whole, half)


def _load_in_parts(checkpoint: Checkpoint) -> ChainedHalf:
    whole_span = load_span(checkpoint, 0, checkpoint.num_blocks)
    cuts = [cut for cut in _SOME_CUTS if cut in whole_span.capabilities.cuts]
    half = load_chain(checkpoint, cuts, known=whole_span)
    half.whole_span = whole_span
    return half


def _compare(family: str, whole: PreTrainedModel, half: ChainedHalf) -> FamilyReport:
    whole_span = half.whole_span
    assert whole_span is not None, "loaded with it"
    all_can = [part.span.capabilities for part in half.parts]
    pieces = _IN_CHUNKS if all(can.prefill_in_chunks for can in all_can) else _IN_ONE_PIECE
    faults: list[str] = []
    remarks: list[str] = []
    compared: list[bool] = []
    for padded in (False, True):
        try:
            expected = run_in_pieces(whole, None, padded=padded, pieces=pieces)
        except Exception as failure:  # noqa: BLE001 - as above
            remarks.append(f"transformers itself{', padded' if padded else ''}: {_first_line(failure)}")
            continue
        compared.append(padded)
        for name, parts in (("spans", half.parts), ("blocks one by one", half.one_by_one())):
            output = run_in_pieces(half, half.new_local_cache(parts), padded=padded, pieces=pieces)
            if torch.equal(output, expected):
                continue
            at_once = run_in_pieces(whole, None, padded=padded, pieces=_AT_ONCE)
            if _difference(output, at_once) < _ROUNDING < _difference(expected, at_once):
                remarks.append(
                    "transformers' own cache gives other logits than the whole in one piece, which these equal"
                )
            else:
                faults.append(f"{name}{', padded' if padded else ''}: differs by {_difference(output, expected):.0e}")
    if all(can.can_trim for can in all_can) and not trims_exactly(half):
        faults.append("differs after going back")
    outcome = "wrong" if faults else "right" if False in compared else "not tried"
    can = whole_span.capabilities
    return FamilyReport(
        family,
        outcome,
        "; ".join(dict.fromkeys(faults or remarks)),
        can,
        whole_span.num_blocks,
        with_padding=True in compared,
    )


def prompt() -> Tensor:
    return torch.randint(3, TINY_VOCABULARY, (_ROWS, _NUM_TOKENS), generator=torch.Generator().manual_seed(5))


def run_in_pieces(model: Any, cache: object, *, padded: bool, pieces: Sequence[tuple[int, int]]) -> Tensor:
    """The logits of the prompt, run piece by piece; those of the padding are 0. Without `cache` the model makes one."""
    token_ids = prompt()
    mask = torch.ones_like(token_ids)
    mask[1, :_PADDING] = 0 if padded else 1
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    parameters = inspect.signature(model.forward).parameters
    cache_argument = next(name for name in CACHE_ARGUMENTS if name in parameters)
    parts: list[Tensor] = []
    for first, last in pieces:
        arguments: dict[str, object] = {cache_argument: cache, "use_cache": True}
        if padded:
            arguments["attention_mask"] = mask[:, :last]
        if "position_ids" in parameters:
            arguments["position_ids"] = position_ids[:, first:last]
        with torch.no_grad():
            output = model(token_ids[:, first:last], **arguments)
        cache = output[cache_argument] if cache is None else cache
        parts.append(output.logits)
    logits = torch.cat(parts, 1)
    logits[mask == 0] = 0
    return logits


def trims_exactly(half: ChainedHalf) -> bool:
    """Whether a rejected draft leaves nothing behind."""
    token_ids = prompt()
    straight, trimmed = half.new_local_cache(), half.new_local_cache()
    run = cast("Any", half)
    with torch.no_grad():
        for cache in (straight, trimmed):
            run(token_ids[:, :8], past_key_values=cache)
        run(token_ids[:, 11 : 11 + _DRAFT], past_key_values=trimmed)
        trimmed.crop(-_DRAFT)
        for first, last in ((8, 10), (10, 11)):
            expected = run(token_ids[:, first:last], past_key_values=straight).logits
            if not torch.equal(run(token_ids[:, first:last], past_key_values=trimmed).logits, expected):
                return False
    return True


def _difference(output: Tensor, expected: Tensor) -> float:
    return float((output - expected).abs().max())


def _first_line(failure: Exception) -> str:
    lines = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {lines[0][:160]}" if lines else type(failure).__name__
