"""One conversation over several `generate` calls: the servers keep what was said, only new tokens are sent.

python examples/conversation.py
"""

import torch
from local_swarm import local_swarm

from corolla import AutoDistributedModelForCausalLM


def main() -> None:
    with local_swarm() as swarm:
        model = AutoDistributedModelForCausalLM.from_pretrained(swarm.model, initial_peers=[swarm.address])
        options = {"max_new_tokens": 6, "do_sample": False}
        with model.inference_session(max_length=64) as session:
            first = model.generate(torch.tensor([[5, 6, 7, 8]]), **options)
            print("first turn:", first.tolist())
            for hop in session.route:
                print(f"blocks {hop.start}:{hop.end} on {hop.peer_id}")
            print("tokens held by the servers:", session.position)

            second = model.generate(torch.tensor([[9, 10]]), **options)
            print("second turn:", second.tolist())
            print("tokens held by the servers:", session.position)

            # Unsay the second turn: nothing is sent now, the next step tells the servers.
            session.position = first.shape[1] - 1
            session.output_ids = first
            print("the second turn again:", model.generate(torch.tensor([[9, 10]]), **options).tolist())
        model.close()


if __name__ == "__main__":
    main()
