"""From a checkpoint to a span, or to the client's half: only the tensors that are needed are read.

A run-time subclass of the family's own class prunes itself when it is built, and the ordinary `from_pretrained` loads
it: renames, fused experts, tied heads and quantization keep working, as on the whole model. It gets the checkpoint as a
state dict of `StoredTensor`s, which read their byte range when the loader asks for them: no copy on disk, no more
memory than the tensors being converted, and other people's blocks are never touched.
"""

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import EllipsisType
from typing import Final, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from corolla.errors import BadInput
from corolla.models.cache import GhostedCache
from corolla.models.capabilities import PROBE_TOKENS, Axis, Capabilities, needs_token_ids, probe
from corolla.models.checkpoint import Checkpoint, TensorInfo
from corolla.models.skeleton import Exit, PassThrough, SpanDone, find_blocks, prune, text_config
from corolla.models.span import Span, Structure

STORED_DTYPES: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}

_PROBE_BATCH, _PROBE_LENGTH = 13, 17
"""Sizes no family has as another dimension, so that each axis of the stream is known by its length."""


class StoredTensor:
    """A tensor still on disk. `[...]` reads it: all that transformers' loader asks of a checkpoint's entry."""

    def __init__(self, info: TensorInfo) -> None:
        self.info = info
        self.shape = torch.Size(info.shape)
        self.dtype = _stored_dtype(info)

    def __getitem__(self, _everything: EllipsisType) -> Tensor:
        return read_tensor(self.info)


def read_tensor(info: TensorInfo) -> Tensor:
    """One tensor's bytes, read into memory of its own. Raises BadInput when the file has changed since."""
    content = torch.empty(info.nbytes, dtype=torch.uint8)
    view = memoryview(content.numpy())
    with info.file.open("rb", buffering=0) as stream:
        stream.seek(info.start)
        while view:
            num_read = stream.readinto(view)
            if not num_read:
                raise BadInput(f"{info.file}: ends before byte {info.end}; it was truncated after it was opened")
            view = view[num_read:]
    return content.view(_stored_dtype(info)).reshape(info.shape)


def _stored_dtype(info: TensorInfo) -> torch.dtype:
    dtype = STORED_DTYPES.get(info.dtype)
    if dtype is None:
        raise BadInput(f"{info.file}: holds {info.dtype} tensors, which corolla cannot read")
    return dtype


def load_span(
    checkpoint: Checkpoint,
    start: int,
    end: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Span:
    """Blocks `[start, end)`, loaded, checked by a short run and ready. `dtype` None keeps the checkpoint's own.

    Raises BadInput when the span is not in the model or the family cannot be cut.
    """
    if not 0 <= start < end <= checkpoint.num_blocks:
        raise BadInput(
            f"blocks {start}:{end} are no span of {checkpoint.name}, which has {checkpoint.num_blocks} blocks: "
            f"0 <= start < end <= {checkpoint.num_blocks}"
        )
    config = read_config(checkpoint)
    family = causal_class(checkpoint, config)
    outline = outline_of(family, config)
    structure = inspect_family(outline)
    prune(outline, start, end, keep_ends=False)
    kind = pruned_class(family, (), start, end, keep_ends=False)
    model = load_pruned(checkpoint, kind, outline, dtype=dtype, device=device)
    span = Span(model, start, end, structure)
    span.capabilities = _find_capabilities(span)
    return span


def read_config(checkpoint: Checkpoint) -> PretrainedConfig:
    """transformers' config of the checkpoint. Raises BadInput for a family that transformers does not know."""
    model_type = str(checkpoint.config["model_type"])
    if model_type not in CONFIG_MAPPING:
        raise BadInput(f"{checkpoint.directory / 'config.json'}: this transformers knows no family {model_type!r}")
    kind = cast("type[PretrainedConfig]", CONFIG_MAPPING[model_type])
    return cast("PretrainedConfig", kind.from_dict(dict(checkpoint.config)))


def causal_class(checkpoint: Checkpoint, config: PretrainedConfig) -> type[PreTrainedModel]:
    """The family's class with a language model's head. Raises BadInput when it is not a decoder."""
    file = checkpoint.directory / "config.json"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise BadInput(f"{file}: {config.model_type} is not a decoder that transformers knows")
    return cast("type[PreTrainedModel]", MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


def checkpoint_dtype(checkpoint: Checkpoint, config: PretrainedConfig) -> torch.dtype:
    """The dtype the config names, else that of the first floating-point tensor."""
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    stored = (STORED_DTYPES.get(info.dtype) for info in checkpoint.tensors.values())
    return next((dtype for dtype in stored if dtype is not None and dtype.is_floating_point), torch.float32)


def inspect_family(outline: PreTrainedModel) -> Structure:
    """What the family's forward takes and what arrives at its first block, seen by running it without memory."""
    place = find_blocks(outline)
    family = str(outline.config.model_type)
    if needs_token_ids(place.owner, place.blocks[0]):
        raise BadInput(f"{family}: its blocks need token ids beside the hidden state, which corolla does not send yet")
    if getattr(text_config(outline.config), "num_kv_shared_layers", 0):
        raise BadInput(f"{family}: some of its blocks use the cache of others, so it cannot be cut")
    embedding_size = int(outline.get_input_embeddings().weight.shape[-1])
    return Structure(
        family=family,
        needs_token_ids=False,
        takes_position_ids="position_ids" in inspect.signature(type(place.owner).forward).parameters,
        cache_argument=cache_argument(place.owner),
        embedding_size=embedding_size,
        stream_shape=_stream_shape(outline, embedding_size),
    )


def cache_argument(owner: nn.Module) -> str:
    """Under which name the family's forward takes its cache. Raises BadInput when it has a way of its own."""
    parameters = inspect.signature(type(owner).forward).parameters
    for name in ("past_key_values", "cache_params"):
        if name in parameters:
            return name
    raise BadInput(f"{type(owner).__name__}: keeps its state in a way of its own, which corolla does not know")


def _stream_shape(outline: PreTrainedModel, embedding_size: int) -> tuple[Axis | int, ...]:
    place = find_blocks(outline)
    hosted_none = GhostedCache(text_config(outline.config), range(0))
    embeddings = torch.zeros(_PROBE_BATCH, _PROBE_LENGTH, embedding_size, dtype=outline.dtype, device="meta")
    first = place.blocks[0]
    place.blocks[0] = Exit(PassThrough(first, None))
    try:
        place.owner(inputs_embeds=embeddings, use_cache=True, **{cache_argument(place.owner): hosted_none})
    except SpanDone as done:
        axes: dict[int, Axis] = {_PROBE_BATCH: "batch", _PROBE_LENGTH: "tokens"}
        return tuple(axes.get(size, size) for size in done.hidden.shape)
    finally:
        place.blocks[0] = first
    raise AssertionError("the family's forward did not reach its first block")


def load_pruned(
    checkpoint: Checkpoint,
    kind: type[PreTrainedModel],
    outline: PreTrainedModel,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> PreTrainedModel:
    """An instance of `kind` with the checkpoint's weights. `outline`: the same, pruned, on the meta device.

    Raises BadInput when a tensor is missing or has another shape than the config says.
    """
    config = copy.deepcopy(outline.config)
    state = {name: StoredTensor(checkpoint.tensors[name]) for name in needed_tensors(checkpoint, outline)}
    options: dict[str, object] = {} if str(device) == "cpu" else {"device_map": {"": device}}
    try:
        with _quiet():
            model, report = kind.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=dtype or checkpoint_dtype(checkpoint, config),
                output_loading_info=True,
                **options,
            )
    except RuntimeError as error:
        raise BadInput(f"{checkpoint.directory}: {str(error).splitlines()[0]}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise BadInput(f"{checkpoint.directory}: lacks {len(missing)} tensors, {missing[0]!r} first")
    return cast("PreTrainedModel", model.eval())


def needed_tensors(checkpoint: Checkpoint, outline: PreTrainedModel) -> list[str]:
    """The checkpoint's tensors that end up, renamed or fused, in `outline`. Raises BadInput on a wrong shape."""
    wanted = cast("dict[str, Tensor]", outline.state_dict())
    transforms = get_model_conversion_mapping(outline)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    needed: list[str] = []
    for name, info in checkpoint.tensors.items():
        target, pattern = rename_source_key(name, renamings, converters, outline.base_model_prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = rename_source_key(name, [], [], outline.base_model_prefix, wanted)
        if target in wanted:
            needed.append(name)
            if pattern is None and tuple(wanted[target].shape) != info.shape:
                raise BadInput(
                    f"{info.file}: {name!r} is {list(info.shape)}, config.json makes it {list(wanted[target].shape)}"
                )
    return needed


def pruned_class(
    family: type[PreTrainedModel], bases: tuple[type[object], ...], start: int, end: int, *, keep_ends: bool
) -> type[PreTrainedModel]:
    """A subclass of `family`, `bases` before it, that prunes itself when built. It has the family's name and module,
    by which transformers finds conversions and quantization rules."""

    def build(self: PreTrainedModel, config: PretrainedConfig, *args: object, **kwargs: object) -> None:
        family.__init__(self, config, *args, **kwargs)
        prune(self, start, end, keep_ends=keep_ends)

    members: dict[str, object] = {"__init__": build, "__module__": family.__module__}
    if not keep_ends:
        members["tie_weights"] = _tie_nothing
    return type(family.__name__, (*bases, family), members)


def _tie_nothing(_self: PreTrainedModel, *_args: object, **_kwargs: object) -> None:
    """A server holds neither embeddings nor head."""


def outline_of(family: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """The whole model without its weights (meta device)."""
    with torch.device("meta"), _quiet():
        return cast("PreTrainedModel", family._from_config(copy.deepcopy(config)))


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers draws progress bars and warns of what is meant here; errors still raise."""
    verbosity, had_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()


def _find_capabilities(span: Span) -> Capabilities:
    structure = span.structure
    sizes = {"batch": 1, "tokens": PROBE_TOKENS}
    shape = [size if isinstance(size, int) else sizes[size] for size in structure.stream_shape]
    hidden = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device=span.device, dtype=span.dtype)
    seen = probe(span, hidden, structure.token_axis)
    return Capabilities(
        family=structure.family,
        needs_token_ids=structure.needs_token_ids,
        takes_position_ids=structure.takes_position_ids,
        stream_shape=structure.stream_shape,
        can_trim=seen.can_trim,
        prefill_in_chunks=seen.prefill_in_chunks,
        cache_bytes_per_token=seen.cache_bytes_per_token,
        cache_bytes_per_row=seen.cache_bytes_per_row,
    )
