"""Servers of several stages with a replica each, and a client that writes texts over them by hand."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from corolla.apps.bench.ends import Ends
from corolla.apps.bench.fleet import Fleet
from corolla.apps.bench.fragile import FragileSession, Loss, Written, write
from corolla.apps.bench.setup import ONE_THREAD
from corolla.apps.cli.network import client_network
from corolla.apps.processes import Processes
from corolla.client.config import ClientConfig
from corolla.client.router import ServedModel
from corolla.client.swarm import Swarm, join_swarm
from corolla.models.checkpoint import open_checkpoint
from corolla.models.tensors import wire_dtype
from corolla.net.libp2p.transport import open_transport

CONFIG: Final = ClientConfig(shun_s=0.01)
"""A server that forgot a session is as good as before, and is soon wanted again."""


@dataclass(frozen=True, slots=True)
class Stages:
    """A joined swarm, and the client's half of its model."""

    swarm: Swarm
    model: ServedModel
    ends: Ends

    async def write(
        self, prompt: torch.Tensor, num_tokens: int, losses: Sequence[Loss] = (), *, exact: bool = False
    ) -> Written:
        """One text on a session of its own."""
        session = FragileSession(
            self.swarm, self.model, replace(CONFIG, exact=exact), max_tokens=prompt.shape[1] + num_tokens, max_rows=1,
            wire_dtype=wire_dtype(self.ends.embedding.dtype),
        )  # fmt: skip
        await session.start()
        try:
            return await write(session, self.ends, prompt, num_tokens, losses)
        finally:
            session.close()


@asynccontextmanager
async def joined_stages(
    model: Path, spans: tuple[str, ...], dtype: torch.dtype, *, replicas: int = 2
) -> AsyncIterator[Stages]:
    """Servers of each span that compute in `dtype`, for as long as the block lasts.

    With one of each, who forgot a session is its own substitute.
    """
    checkpoint = open_checkpoint(model)
    served = ServedModel.of(checkpoint)
    with Processes(ONE_THREAD) as processes:
        fleet = Fleet(processes, model, spans, ("--dtype", wire_dtype(dtype)), replicas=replicas, min_replicas=1)
        fleet.launch()
        fleet.wait_all()
        async with (
            open_transport(client_network()) as transport,
            join_swarm(transport, [fleet.address], CONFIG) as swarm,
        ):
            yield Stages(swarm, served, Ends.of(checkpoint, dtype))
