"""A prompt in chunks: every server of the route has one to work on, however many bytes a position is."""

import struct

import pytest
import torch

from corolla.apps.sim.paced import Pace, PacedSpan
from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import numbers_of, whole_model
from corolla.client import steps
from corolla.client.chunks import cut_into_steps
from corolla.clock import loop_time
from corolla.net.memory.links import LinkConditions
from corolla.net.memory.loop import run_virtual

STEP_S = 0.1
PROMPT = list(range(3072))


@pytest.mark.parametrize("window_positions", [384, 1 << 20], ids=["of large hidden states", "of small ones"])
def test_no_server_of_three_waits_while_a_prompt_is_read(
    monkeypatch: pytest.MonkeyPatch, window_positions: int
) -> None:
    hidden = torch.frombuffer(bytearray(struct.pack(f"<{len(PROMPT)}Q", *PROMPT)), dtype=torch.float32).view(1, -1, 2)
    monkeypatch.setattr(steps, "WINDOW_BYTES", 8 * window_positions)

    async def told() -> None:
        async with MemorySwarm(num_blocks=6, conditions=LinkConditions(0.001)) as swarm:
            for span in ("0:2", "2:4", "4:6"):
                pace = Pace(STEP_S)
                start, end = map(int, span.split(":"))
                await swarm.serve(span, span, runner=PacedSpan(start, end, pace), executor=pace.executor)
            client = await swarm.client("client")
            async with client.open_session(swarm.model, max_tokens=4096) as session:
                inputs = cut_into_steps(session, hidden, max_chunk_tokens=2048)
                began = loop_time()
                output = (await session.run(inputs, want="last"))[-1]
                took_s = loop_time() - began
            assert output is not None
            assert numbers_of(output) == whole_model(6, PROMPT)[-1:]
            assert len(inputs) >= 12
            assert took_s == pytest.approx((len(inputs) + 2) * STEP_S, rel=0.05)

    run_virtual(told())
