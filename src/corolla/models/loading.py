"""From a checkpoint to a span, or to the client's half: only the tensors that are needed are read.

A run-time subclass of the family's own class prunes itself when it is built, and the ordinary `from_pretrained` loads
it: renames, fused experts, tied heads and quantization keep working, as on the whole model. Which tensors it needs is
found by asking transformers' own renaming rules where each would go; other people's blocks are never touched.
"""

import copy
from collections.abc import Iterator, Mapping
from types import MappingProxyType, new_class
from typing import Any, Final, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.base import HfQuantizer

from corolla.errors import BadInput
from corolla.models.building import building
from corolla.models.checkpoint import Checkpoint
from corolla.models.dataflow import Dataflow
from corolla.models.family import causal_class, inspect_family, outline_of, quiet, read_config, watch_family
from corolla.models.prequantized import check_not_quantized_twice, quantizer_of
from corolla.models.quantization import Quantization, quantization_config, why_nf4_fails
from corolla.models.skeleton import prune, stand_ins_for_pruned
from corolla.models.sound import SoundTensor
from corolla.models.span import Span
from corolla.models.special import special_for
from corolla.models.stored import STORED_DTYPES, StoredTensor

_NOTHING: Final[Mapping[str, object]] = MappingProxyType({})


def load_span(
    checkpoint: Checkpoint,
    start: int,
    end: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    quantization: Quantization = "none",
    known: Span | None = None,
) -> Span:
    """Blocks `[start, end)`, loaded, tried out and ready. `dtype` None keeps the checkpoint's own.

    `quantization` holds the blocks' linear layers in fewer bits. `known`: any span of this checkpoint in this dtype:
    what it found out about the family is not found out again. Raises BadInput when the span is not in the model, the
    family cannot be cut, the weights are damaged, or what quantizes them is not installed.
    """
    check_span(checkpoint, start, end)
    check_not_quantized_twice(checkpoint, quantization)
    config = read_config(checkpoint)
    family = causal_class(checkpoint, config)
    dtype = dtype or checkpoint_dtype(checkpoint, config)
    outline = outline_of(family, config, dtype)
    structure = inspect_family(outline) if known is None else known.structure
    dataflow = watch_family(outline, structure) if known is None else known.dataflow
    check_cuts(checkpoint, dataflow, start, end)
    prune(outline, start, end, keep_ends=False, needed=dataflow.side_parameters)
    kind = pruned_class(family, start, end, keep_ends=False, needed=dataflow.side_parameters)
    model, read_bytes = load_pruned(checkpoint, kind, outline, dtype=dtype, device=device, quantization=quantization)
    span = Span(model, start, end, structure, dataflow, read_bytes)
    span.max_positions = checkpoint.max_positions
    try:
        span.capabilities = span.self_test()
    except BadInput as failure:
        why = why_nf4_fails(outline) if quantization == "nf4" else None
        raise failure if why is None else BadInput(f"{checkpoint.name}: {why}") from failure
    return span


def check_span(checkpoint: Checkpoint, start: int, end: int) -> None:
    """Raises BadInput, with the valid range, when `[start, end)` is no span of the model."""
    num_blocks = checkpoint.num_blocks
    if not 0 <= start < end <= num_blocks:
        raise BadInput(
            f"{start}:{end} is no span of {checkpoint.name}, which has {num_blocks} blocks: START:END must keep "
            f"0 <= START < END <= {num_blocks}"
        )


def check_cuts(checkpoint: Checkpoint, dataflow: Dataflow, start: int, end: int) -> None:
    """Raises BadInput, with the possible cuts, when blocks outside `[start, end)` share more with it than a stream."""
    for cut in (start, end):
        linked = [link for link in sorted(dataflow.links) if link[0] < cut <= link[1]]
        if linked:
            first, last = linked[0]
            cuts = ", ".join(str(cut) for cut in dataflow.cuts) or "nowhere, only whole"
            raise BadInput(
                f"{checkpoint.name} cannot be cut at {cut}: block {last} uses what block {first} keeps; "
                f"it can be cut at: {cuts}"
            )


def pruned_class(
    family: type[PreTrainedModel],
    start: int,
    end: int,
    *,
    keep_ends: bool,
    needed: frozenset[str] = frozenset(),
    bases: tuple[type, ...] = (),
    members: Mapping[str, object] = _NOTHING,
) -> type[PreTrainedModel]:
    """A subclass of `family`, with `bases` before it, that prunes itself when built.

    It has the family's name and module, by which transformers finds conversions and quantization rules.
    """

    def build(self: PreTrainedModel, config: PreTrainedConfig, *args: object, **kwargs: object) -> None:
        family.__init__(self, config, *args, **kwargs)
        special_for(str(config.model_type)).prepare(self)
        prune(self, start, end, keep_ends=keep_ends, needed=needed)

    def tie(self: PreTrainedModel, missing_keys: set[str] | None = None, recompute_mapping: bool = True) -> None:
        family.tie_weights(self, missing_keys, recompute_mapping=False)  # from anew it would name what was pruned

    def contexts(_kind: type[PreTrainedModel], *args: Any, **kwargs: Any) -> list[object]:
        return [building, *family.get_init_context(*args, **kwargs)]

    own: dict[str, object] = {
        "__init__": build,
        "get_init_context": classmethod(contexts),
        "tie_weights": tie,
        "__module__": family.__module__,
        **members,
    }
    return cast(
        "type[PreTrainedModel]", new_class(family.__name__, (*bases, family), {}, lambda body: body.update(own))
    )


def load_pruned(
    checkpoint: Checkpoint,
    kind: type[PreTrainedModel],
    outline: PreTrainedModel,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    is_mapped: bool = False,
    quantization: Quantization = "none",
) -> tuple[PreTrainedModel, int]:
    """An instance of `kind` with the checkpoint's weights, and how many bytes of them were read.

    `outline`: the same, pruned, on the meta device. `is_mapped`: leave the weights on the disk until they are touched.
    Raises BadInput when a tensor is missing, holds NaN or has another shape than the config says, or what getting them
    from a hub raised.
    """
    sources = needed_tensors(checkpoint, outline, quantizer_of(checkpoint, outline, device))
    needed = list(dict.fromkeys(sources.values()))
    stored = {name: (source, checkpoint.tensors[source]) for name, source in sources.items()}
    entries = {
        # What is mapped is not looked at: that would read it all.
        name: StoredTensor(info, is_mapped=True) if is_mapped else SoundTensor(source, info)
        for name, (source, info) in stored.items()
    }
    options: dict[str, Any] = {
        "config": copy.deepcopy(outline.config),
        "state_dict": dict(entries),
        "dtype": dtype,
        "output_loading_info": True,
    }
    if quantization != "none":
        options["quantization_config"] = quantization_config(quantization, dtype, outline)
    if str(device) != "cpu" or quantization != "none":
        options["device_map"] = {"": device}
    try:
        with checkpoint.hold(needed), quiet():
            loaded = kind.from_pretrained(None, **options)
    except RuntimeError as error:
        raise BadInput(f"{checkpoint.directory}: does not load: {str(error).strip().splitlines()[0]}") from error
    model, report = cast("tuple[PreTrainedModel, dict[str, set[str]]]", loaded)
    if missing := sorted(report["missing_keys"]):
        raise BadInput(f"{checkpoint.directory}: lacks {len(missing)} of the model's tensors, {missing[0]!r} first")
    return model.eval(), sum(entry.read_bytes for entry in entries.values())


def needed_tensors(
    checkpoint: Checkpoint, outline: PreTrainedModel, quantizer: HfQuantizer | None = None
) -> dict[str, str]:
    """The checkpoint's tensors that end up, renamed or fused, in `outline`, and under which name to give each.

    As a rule its own; a tensor that several blocks share is stored under the name of the first, which may be pruned.
    Raises BadInput on a wrong shape.
    """
    wanted = outline.state_dict()
    heirs = stand_ins_for_pruned(outline)
    needed: dict[str, str] = {}
    for name, target, is_as_stored in place_tensors(checkpoint, outline, quantizer):
        if target not in wanted:
            if target in heirs:
                needed[heirs[target]] = name
            continue
        if is_as_stored:
            check_shape(checkpoint, name, wanted[target])
        needed[name] = name
    return needed


def check_shape(checkpoint: Checkpoint, name: str, expected: torch.Tensor) -> None:
    """Raises BadInput when the tensor is stored in another shape than the model's own has."""
    info, shape = checkpoint.tensors[name], tuple(expected.shape)
    if shape != info.shape:
        raise BadInput(f"{info.file}: {name!r} is {list(info.shape)}, by config.json it should be {list(shape)}")


def place_tensors(
    checkpoint: Checkpoint, outline: PreTrainedModel, quantizer: HfQuantizer | None = None
) -> Iterator[tuple[str, str, bool]]:
    """For each tensor of the checkpoint: its name, where in the model it goes, and whether it goes there as it is."""
    wanted = outline.state_dict()
    transforms = get_model_conversion_mapping(outline, None, quantizer)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    for name in checkpoint.tensors:
        target, converted_by = rename_source_key(name, renamings, converters, outline.base_model_prefix, wanted)
        if target not in wanted and name in wanted:  # as the loader does: a rule was too eager
            target, converted_by = rename_source_key(name, [], [], outline.base_model_prefix, wanted)
        yield name, target, converted_by is None


def checkpoint_dtype(checkpoint: Checkpoint, config: PreTrainedConfig) -> torch.dtype:
    """The dtype the config names, else that of the first floating-point tensor."""
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    stored = (STORED_DTYPES.get(info.dtype) for info in checkpoint.tensors.values())
    return next((dtype for dtype in stored if dtype is not None and dtype.is_floating_point), torch.float32)
