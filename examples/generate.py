"""Generate with a model whose blocks run on servers, and compare with the whole model in this process.

    python examples/generate.py

With a swarm of your own, the three lines around `from_pretrained` and `generate` are all there is to it.
"""

import torch
from local_swarm import local_swarm
from transformers import AutoModelForCausalLM, PreTrainedModel

from corolla import AutoDistributedModelForCausalLM

PROMPT = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


def ask(model: PreTrainedModel, *, do_sample: bool) -> torch.Tensor:
    """Twelve new tokens for each prompt, with transformers' own `generate`."""
    torch.manual_seed(0)
    return model.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=12, do_sample=do_sample, temperature=1.2
    )


def main() -> None:
    with local_swarm() as swarm:
        distributed = AutoDistributedModelForCausalLM.from_pretrained(swarm.model, initial_peers=[swarm.address])
        local = AutoModelForCausalLM.from_pretrained(swarm.model)
        num_parameters = [sum(p.numel() for p in model.parameters()) for model in (distributed, local)]
        print(f"parameters here: {num_parameters[0]:,} of {num_parameters[1]:,}")
        for do_sample in (False, True):
            tokens = ask(distributed, do_sample=do_sample)
            print("sampled:" if do_sample else "greedy:", tokens.tolist())
            print("equal to the local model's:", torch.equal(tokens, ask(local, do_sample=do_sample)))
        distributed.close()


if __name__ == "__main__":
    main()
