"""How good placement is: against every placement of small swarms, and over eight hours of coming and going.

    python benchmarks/placement_quality.py [PICTURE.svg]

The picture (`docs/img/placement.svg`) shows one such day. `docs/placement.md` quotes the numbers. About five minutes.
"""

import random
import statistics
import sys
from pathlib import Path

from corolla.apps.sim.placement import Churn, History, simulate
from corolla.apps.sim.small import optimum, random_small_swarm, settle
from corolla.net.memory.loop import run_virtual
from corolla.swarm.placement import block_rates
from corolla.swarm.rebalance import Model

WARM_UP_S = 900.0
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 960, 380, 56, 44, 40


def print_small(num_swarms: int = 1000) -> None:
    rng = random.Random(7)  # noqa: S311 - reproducible on purpose
    joined: list[float] = []
    settled: list[float] = []
    while len(settled) < num_swarms:
        placed, num_blocks = random_small_swarm(rng)
        best = optimum(placed, num_blocks)
        if best > 0:
            joined.append(min(block_rates(placed, num_blocks)) / best)
            settled.append(min(block_rates(settle(placed, Model(num_blocks))[-1], num_blocks)) / best)
    for what, shares in (("after joining", joined), ("after moving", settled)):
        print(f"small swarms {what}: mean {statistics.mean(shares):.3f} of the optimum, worst {min(shares):.3f}")


def print_churn(num_seeds: int = 6) -> History:
    histories = [run_virtual(simulate(Churn(seed=seed))) for seed in range(num_seeds)]
    for seed, history in enumerate(histories):
        print(
            f"churn, seed {seed}: {history.quality(WARM_UP_S):.3f} of the best, {len(history.deaths)} deaths, "
            f"{len(history.moves)} moves, {len(history.uncovered(WARM_UP_S))} of {len(history.samples)} looks uncovered"
        )
    print(f"mean {statistics.mean(history.quality(WARM_UP_S) for history in histories):.3f}")
    return histories[0]


def picture(history: History) -> str:
    """An SVG: the weakest block's throughput over the hours, beside the best that was possible."""
    hours = history.samples[-1].at_s / 3600
    top = 1.1 * max(sample.best for sample in history.samples)

    def x(at_s: float) -> float:
        return LEFT + (WIDTH - LEFT - 16) * at_s / 3600 / hours

    def y(rate: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * rate / top

    def line(rates: list[float], colour: str, width: float) -> str:
        points = " ".join(f"{x(s.at_s):.1f},{y(rate):.1f}" for s, rate in zip(history.samples, rates, strict=True))
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>'

    marks = [
        f'<path d="M{x(at_s):.1f} {HEIGHT - BOTTOM} v-10" stroke="#c0392b" stroke-width="2"/>'
        for at_s in history.deaths
    ] + [f'<circle cx="{x(at_s):.1f}" cy="{HEIGHT - BOTTOM - 16}" r="2" fill="#7f8c8d"/>' for at_s in history.moves]
    hour_labels = [
        f'<text x="{x(3600 * hour):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{hour} h</text>'
        for hour in range(int(hours) + 1)
    ]
    rate_labels = [
        f'<text x="{LEFT - 8}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate}</text>' for rate in range(0, int(top), 20)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            f'<text x="{LEFT}" y="22" font-size="14">tokens a second through the weakest of 40 blocks: '
            '<tspan fill="#2471a3">reached</tspan>, <tspan fill="#a6acaf">best placement of the same servers</tspan>; '
            '<tspan fill="#c0392b">a server dies</tspan>, <tspan fill="#7f8c8d">one moves</tspan></text>',
            line([sample.best for sample in history.samples], "#a6acaf", 2),
            line([sample.actual for sample in history.samples], "#2471a3", 1.5),
            *marks, *hour_labels, *rate_labels,
            "</svg>\n",
        ]
    )  # fmt: skip


if __name__ == "__main__":
    print_small()
    shown = print_churn()
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(picture(shown))
