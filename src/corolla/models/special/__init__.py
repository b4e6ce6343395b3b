"""What few families need beyond their own code: one small file each, named for the family.

`special_for(family)` finds it; a family without a file needs nothing. `docs/families.md` tells when to write one and
goes through `zaya.py` line by line.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, cast

from transformers import PreTrainedConfig, PreTrainedModel


def _nothing(_model: PreTrainedModel) -> None:
    """Most families' models are right as they are."""


def _no_width(_config: PreTrainedConfig) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Special:
    """How a family departs from the ordinary."""

    prepare: Callable[[PreTrainedModel], None] = _nothing
    """Changes a model when it has just been built: on the meta device, before its weights are loaded."""
    extra_width: Callable[[PreTrainedConfig], int] = _no_width
    """Numbers that travel with each position behind the hidden state, and are 0 where they come from the client."""
    cache_calls: type = object
    """What the family asks of its cache besides what transformers' own answers; becomes a base of the span's cache."""
    arguments: Mapping[str, object] = field(default_factory=dict[str, object])
    """Given to every forward, over what anybody else says."""
    has_own_cache: bool = False
    """transformers says that its common cache does not serve the family; with `cache_calls` it does."""


ORDINARY: Final = Special()


def special_for(family: str) -> Special:
    """The special ways of a family, by its model type."""
    name = f"{__name__}.{family.replace('-', '_')}"
    if not family.replace("-", "_").isidentifier() or importlib.util.find_spec(name) is None:
        return ORDINARY
    return cast("Special", importlib.import_module(name).SPECIAL)
