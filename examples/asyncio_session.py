"""The asyncio API under the blocking one: a session's steps, with the local half of a llama by hand.

    python examples/asyncio_session.py

`session.step` takes the hidden states that the first block expects and gives back those after the last block. What
comes before and after (embedding, final norm, output matrix, the choice of a token) is the caller's. The blocking
API does the same for every family; this is for programs that have an event loop, or another use for the states.
"""

import asyncio

import torch
from local_swarm import LocalSwarm, local_swarm
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm
from transformers import AutoModelForCausalLM

from corolla.client.router import ServedModel
from corolla.client.swarm import join_swarm
from corolla.models.checkpoint import open_checkpoint
from corolla.models.stored import read_tensor
from corolla.models.tensors import to_torch, to_wire
from corolla.net.libp2p.config import NetworkConfig
from corolla.net.libp2p.transport import open_transport

PROMPT = [5, 6, 7, 8]
NEW_TOKENS = 12


async def generate(swarm_address: LocalSwarm) -> list[int]:
    """The likeliest continuation of the prompt."""
    checkpoint = open_checkpoint(swarm_address.model)
    embeddings, norm, output = (
        read_tensor(checkpoint.tensors[name])
        for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    )

    def likeliest(hidden: Tensor) -> int:
        return int(linear(rms_norm(hidden[0, -1], norm.shape, norm, eps=1e-6), output).argmax())

    model = ServedModel.of(checkpoint)
    tokens, new = list(PROMPT), list(PROMPT)
    async with (
        open_transport(NetworkConfig(is_client=True)) as transport,
        join_swarm(transport, [swarm_address.address]) as swarm,
        swarm.open_session(model, max_tokens=len(PROMPT) + NEW_TOKENS) as session,
    ):
        for _ in range(NEW_TOKENS):
            hidden = to_wire(embedding(torch.tensor([new]), embeddings))
            states = await session.step(hidden, num_tokens=len(new), want="last")
            assert states is not None
            new = [likeliest(to_torch(states))]
            tokens += new
        milliseconds = [f"{1000 * timing.compute_s:.1f}" for timing in session.timings]
        print(f"computing took {' + '.join(milliseconds)} ms on the servers in the last step")
    return tokens


def main() -> None:
    with local_swarm() as swarm:
        tokens = asyncio.run(generate(swarm))
        print("tokens:", tokens)
        local = AutoModelForCausalLM.from_pretrained(swarm.model)
        expected = local.generate(torch.tensor([PROMPT]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
        print("equal to the local model's:", tokens == expected[0].tolist())


if __name__ == "__main__":
    main()
