"""How long the text stands still when a server is killed, frozen or told to leave; a replica is up, processes are real.

One generation of S over two servers for each figure; at token 20 the second of them is struck. The *stall* is the
longest wait for a token from then on, and the median step of the same run stands beside it. Every run's tokens are
compared with plain transformers'.
"""

import statistics
from dataclasses import dataclass, replace
from typing import Final

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel

from corolla import AutoDistributedModelForCausalLM
from corolla.apps.bench.fleet import Blow, Fleet, ask_to_leave, freeze, kill_family
from corolla.apps.bench.generation import Generation, generate, prompt_of
from corolla.apps.bench.replay_cost import replay_cost_s
from corolla.apps.bench.setup import ONE_THREAD, describe_setup, model_s, spread
from corolla.apps.processes import Processes
from corolla.client.config import ClientConfig
from corolla.client.model import DistributedModelForCausalLM
from corolla.ids import PeerId
from corolla.net.liveness import Liveness

SPANS: Final = ("0:4", "4:8")
STRUCK: Final = 1
"""Index of the server that is lost."""
STRUCK_AT: Final = 20
SHORT: Final = 16
LONG: Final = 2000
NEW_TOKENS: Final = 40
DRAIN_TOKENS: Final = 150
"""A drain moves beside the generation, which must still be going on when the swap comes."""
SWIFT: Final = Liveness(interval_s=0.2, dead_after_s=0.6)
BY_HEART: Final = ClientConfig()


@dataclass(frozen=True, slots=True)
class Case:
    """One row: what befalls the server, in what kind of generation."""

    name: str
    blow: Blow
    aim: str
    others: str = "–"
    prompt_tokens: int = SHORT
    new_tokens: int = NEW_TOKENS
    config: ClientConfig = BY_HEART


CASES: Final = (
    Case("SIGKILL of the process tree", kill_family, "≤ 0.5 s", "63–361 s; never"),
    Case(f"the same at {LONG:,} tokens of context", kill_family, "≤ 0.5 s + replay", prompt_tokens=LONG),
    Case("frozen, default heartbeat", freeze, "≤ 7 s", "not recovered"),
    Case("frozen, heartbeat 0.2 s, dead after 0.6 s", freeze, "≤ 1 s", config=replace(BY_HEART, liveness=SWIFT)),
    Case("drain (SIGTERM)", ask_to_leave, "longest ≤ 3 × median", new_tokens=DRAIN_TOKENS),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of a case, in seconds."""

    stall_s: float
    step_s: float
    longest_before_s: float
    """Without any loss: what this machine's other work alone does to a step."""
    replay_s: float
    """What a server of the lost span takes to compute what it has to be told again."""

    @property
    def times_median(self) -> float:
        return self.stall_s / self.step_s


def run(rounds: int) -> None:
    """Measure and print."""
    console = Console(highlight=False)
    torch.set_num_threads(1)
    model = model_s()
    console.print(f"corolla bench recovery: {rounds} rounds; S over {len(SPANS)} servers, a replica of each up")
    console.print(describe_setup())
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with Processes(ONE_THREAD) as processes:
        fleet = Fleet(processes, model, SPANS, replicas=2)
        fleet.launch()
        outcomes = {case: [_one_run(fleet, plain, case) for _ in range(rounds)] for case in CASES}
    _print(console, outcomes)


def _one_run(fleet: Fleet, plain: PreTrainedModel, case: Case) -> Outcome:
    fleet.replace_lost()
    fleet.wait_all()
    prompt = prompt_of(case.prompt_tokens)
    swarm = AutoDistributedModelForCausalLM.from_pretrained(
        fleet.model, initial_peers=[fleet.address], config=case.config
    )
    try:
        generation = _lose_one(swarm, fleet, prompt, case)
    finally:
        swarm.close()
    expected = generate(plain, prompt, case.new_tokens)
    assert torch.equal(generation.tokens, expected.tokens), f"{case.name}: the text differs from the local model's"
    before, after = generation.steps_s[: STRUCK_AT - 1], generation.steps_s[STRUCK_AT - 1 :]
    return Outcome(
        stall_s=max(after),
        step_s=statistics.median(generation.steps_s),
        longest_before_s=max(before),
        replay_s=replay_cost_s(fleet.model, _span(SPANS[STRUCK]), case.prompt_tokens + STRUCK_AT),
    )


def _lose_one(swarm: DistributedModelForCausalLM, fleet: Fleet, prompt: torch.Tensor, case: Case) -> Generation:
    with swarm.inference_session(max_length=prompt.shape[1] + case.new_tokens) as session:
        before: list[PeerId] = []

        def strike(number: int) -> None:
            if number == STRUCK_AT:
                before.extend(hop.peer_id for hop in session.route)
                fleet.strike(case.blow, [before[STRUCK]])

        generation = generate(swarm, prompt, case.new_tokens, on_token=strike)
        after = [hop.peer_id for hop in session.route]
    assert before[STRUCK] not in after, f"{case.name}: the struck server was not left"
    return generation


def _span(blocks: str) -> tuple[int, int]:
    start, end = map(int, blocks.split(":"))
    return start, end


def _print(console: Console, outcomes: dict[Case, list[Outcome]]) -> None:
    table = Table("what", "stall", "median step", "aim", "others", box=None, header_style="bold")
    for case, runs in outcomes.items():
        if case.blow is ask_to_leave:
            figure = spread([run.times_median for run in runs], " × median")
        else:
            figure = spread([run.stall_s for run in runs], " s")
        steps = spread([1000 * run.step_s for run in runs], " ms")
        table.add_row(case.name, figure, steps, case.aim, case.others)
    console.print(table)
    for case, runs in outcomes.items():
        if case.prompt_tokens == LONG:
            replay = spread([run.replay_s for run in runs], " s")
            console.print(f"the substitute's own prefill of {LONG + STRUCK_AT:,} tokens, measured here: {replay}")
    before = [run.longest_before_s for runs in outcomes.values() for run in runs]
    console.print(f"longest step before token {STRUCK_AT}, with nobody lost: {spread(before, ' s')}")
    console.print("Tokens equal to plain transformers' in every run.")
