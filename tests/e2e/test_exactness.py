"""The core promise, over real processes: what the swarm writes is what the local model writes."""

from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.logits_process import SuppressTokensLogitsProcessor
from transformers.generation.streamers import BaseStreamer

from corolla.client.model import DistributedModelForCausalLM
from corolla.errors import BadInput

pytestmark = pytest.mark.slow

Swarms = dict[int, DistributedModelForCausalLM]
PROMPT = torch.arange(3, 19)[None]
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def padded_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 32000, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :5], mask[1, :1] = 0, 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_128_greedy_tokens_equal_the_local_models(swarm_s: Swarms, local_s: PreTrainedModel, count: int) -> None:
    got = swarm_s[count].generate(PROMPT, max_new_tokens=128, **GREEDY)
    assert got.shape == (1, 144)
    assert torch.equal(got, local_s.generate(PROMPT, max_new_tokens=128, **GREEDY))


@pytest.fixture(scope="module")
def sampled(local_s: PreTrainedModel) -> torch.Tensor:
    """What the local model draws with a seed."""
    return draw(local_s, seed=7)


def draw(model: Any, *, seed: int, num_tokens: int = 128) -> torch.Tensor:
    torch.manual_seed(seed)
    options = GREEDY | {"do_sample": True, "temperature": 1.3, "top_p": 0.9}
    return model.generate(PROMPT, max_new_tokens=num_tokens, **options)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_128_tokens_sampled_with_a_seed_equal_the_local_models(
    swarm_s: Swarms, sampled: torch.Tensor, count: int
) -> None:
    assert sampled.shape == (1, 144)
    assert torch.equal(draw(swarm_s[count], seed=7), sampled)


def test_another_seed_gives_another_text(local_s: PreTrainedModel, sampled: torch.Tensor) -> None:
    assert not torch.equal(draw(local_s, seed=8, num_tokens=16), sampled[:, : 16 + 16])


def test_a_batch_with_left_padding_gives_what_the_local_model_gives(swarm_s: Swarms, local_s: PreTrainedModel) -> None:
    options = GREEDY | {"max_new_tokens": 24}
    assert torch.equal(swarm_s[2].generate(**padded_batch(), **options), local_s.generate(**padded_batch(), **options))


def test_logits_equal_the_local_models_with_and_without_padding(swarm_s: Swarms, local_s: PreTrainedModel) -> None:
    with torch.no_grad():
        for inputs in ({"input_ids": PROMPT}, padded_batch()):
            mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
            got, expected = swarm_s[4](**inputs).logits, local_s(**inputs).logits
            assert got.shape == expected.shape
            assert (got - expected)[mask].abs().max() <= 1e-5


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
def test_beams_give_what_they_give_locally(swarm_s: Swarms, local_s: PreTrainedModel, options: dict[str, int]) -> None:
    arguments = GREEDY | options | {"max_new_tokens": 16}
    assert torch.equal(swarm_s[2].generate(PROMPT, **arguments), local_s.generate(PROMPT, **arguments))


def test_rows_that_end_early_do_not_disturb_the_others(swarm_s: Swarms, local_s: PreTrainedModel) -> None:
    first = local_s.generate(**padded_batch(), max_new_tokens=8, **GREEDY)
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": int(first[1, 14]), "max_new_tokens": 20}
    got = swarm_s[2].generate(**padded_batch(), **options)
    assert torch.equal(got, local_s.generate(**padded_batch(), **options))


class Collector(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.has_ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.has_ended = True


def test_streamers_stopping_criteria_and_processors_are_transformers_own(
    swarm_s: Swarms, local_s: PreTrainedModel
) -> None:
    plain = local_s.generate(PROMPT, max_new_tokens=12, **GREEDY)
    unwanted = plain[0, 16:20].tolist()
    options = GREEDY | {"max_new_tokens": 12}

    def extras() -> dict[str, Any]:
        return {
            "logits_processor": LogitsProcessorList([SuppressTokensLogitsProcessor(unwanted)]),
            "stopping_criteria": StoppingCriteriaList([lambda ids, _scores, **_: ids.shape[1] >= 22]),
        }

    streamer = Collector()
    got = swarm_s[2].generate(PROMPT, streamer=streamer, **options, **extras())
    assert torch.equal(got, local_s.generate(PROMPT, **options, **extras()))
    assert got.shape[1] == 22
    assert not set(unwanted) & set(got[0, 16:].tolist())
    assert streamer.tokens == got[0].tolist()
    assert streamer.has_ended


def test_a_conversation_goes_on_without_prefilling_again(swarm_s: Swarms, local_s: PreTrainedModel) -> None:
    model, more = swarm_s[2], torch.tensor([[5, 6, 7]])
    with model.inference_session(max_length=64) as session:
        first = model.generate(PROMPT, max_new_tokens=6, **GREEDY)
        assert session.position == first.shape[1] - 1
        steps = []
        inner = session.run_blocks
        session.run_blocks = lambda hidden, **rest: (steps.append(hidden.shape[1]), inner(hidden, **rest))[1]
        second = model.generate(more, max_new_tokens=6, **GREEDY)
        assert steps[0] == 4  # the last token of the first answer, and the three new ones
        assert [(hop.start, hop.end) for hop in session.route] == [(0, 4), (4, 8)]
    text = torch.cat([first, more], dim=1)
    assert torch.equal(torch.cat([first, second], dim=1), local_s.generate(text, max_new_tokens=6, **GREEDY))


def test_going_back_in_a_session_forgets_what_came_after(swarm_s: Swarms, local_s: PreTrainedModel) -> None:
    model = swarm_s[2]
    with torch.no_grad(), model.inference_session(max_length=64) as session:
        model(PROMPT)
        session.position = 10
        got = model(torch.tensor([[9, 8]])).logits
        expected = local_s(torch.cat([PROMPT[:, :10], torch.tensor([[9, 8]])], dim=1)).logits[:, 10:]
        assert (got - expected).abs().max() <= 1e-5
        assert session.position == 12


def test_a_prompt_longer_than_a_chunk_is_sent_in_several(swarm_s: Swarms, local_s: PreTrainedModel) -> None:
    prompt = torch.randint(5, 32000, (2, 1500), generator=torch.Generator().manual_seed(2))
    options = GREEDY | {"max_new_tokens": 8}
    assert torch.equal(swarm_s[2].generate(prompt, **options), local_s.generate(prompt, **options))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda model: model.generate(torch.ones(1, 40000, dtype=torch.int64), max_new_tokens=1, **GREEDY),
            "positions",
        ),
        (lambda model: model(PROMPT, output_hidden_states=True), "output_hidden_states"),
        (lambda model: model(PROMPT, attention_mask=1 - torch.eye(16)[5:6].long()), "padding"),
        (lambda model: model.generate(PROMPT, use_cache=False, max_new_tokens=2, **GREEDY), "use_cache"),
        (lambda model: model.inference_session(max_length=0).__enter__(), "at least one token"),
        (lambda model: model.inference_session(max_length=99999).__enter__(), "positions"),
    ],
    ids=["too long", "hidden states", "holes in the mask", "no cache", "no room", "session too long"],
)
def test_what_cannot_be_done_is_said_before_anything_is_sent(swarm_s: Swarms, call: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        call(swarm_s[2])


def test_a_session_used_up_says_the_two_numbers_and_stays_usable(swarm_s: Swarms, local_s: PreTrainedModel) -> None:
    model = swarm_s[2]
    with model.inference_session(max_length=20):
        with pytest.raises(BadInput, match=r"26 tokens.*20"):
            model.generate(PROMPT, max_new_tokens=10, **GREEDY)
        got = model.generate(PROMPT, max_new_tokens=5, **GREEDY)
    assert torch.equal(got, local_s.generate(PROMPT, max_new_tokens=5, **GREEDY))
