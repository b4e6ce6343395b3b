"""ZAYA's blocks hand a second state on: the router's hidden state, which the next block's router adds to its own.

On the wire both are one tensor, the router's numbers behind the hidden state's. So each block takes one packed tensor
apart and packs its own two again; block 0, whose router has nothing before it, gets zeros and drops them, and the
last gives the hidden state alone, which is all that the norm takes.
"""

import functools
from collections.abc import Callable
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from corolla.models.skeleton import find_blocks
from corolla.models.special import Special

Forward = Callable[..., tuple[Tensor, Tensor]]


def _prepare(model: PreTrainedModel) -> None:
    blocks = list(find_blocks(model).blocks)
    for block in blocks:
        run = functools.partial(
            _run_packed, block.forward, model.config.hidden_size, block is blocks[0], block is blocks[-1]
        )
        cast("Any", block).forward = run


def _run_packed(
    forward: Forward,
    hidden_size: int,
    is_first: bool,
    is_last: bool,
    packed: Tensor,
    _router: object = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    hidden, router = packed[..., :hidden_size].contiguous(), packed[..., hidden_size:]
    hidden, router = forward(hidden, None if is_first else router, **kwargs)
    return hidden if is_last else torch.cat([hidden, router], dim=-1), None


def _router_size(config: PreTrainedConfig) -> int:
    return int(config.router_hidden_size)


SPECIAL: Final = Special(prepare=_prepare, extra_width=_router_size)
