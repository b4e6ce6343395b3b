"""How `corolla trace` draws answers: a line of numbers, the two routes, a bar for each step.

What is drawn was said by a gateway, with names that strangers chose: `Text`, never markup. Signs differ as well as
colours, so that a bar can be read where there are none.
"""

from collections.abc import Sequence
from typing import Any, Final

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from corolla.apps.cli.logs import escape_unprintable
from corolla.apps.cli.status_table import PLAIN_WIDTH

BAR_WIDTH: Final = 72
KINDS: Final = {
    "here": ("=", "cyan"),
    "wire": ("·", "bright_black"),
    "queue": ("▒", "yellow"),
    "compute": ("█", "magenta"),
    "send": ("▌", "blue"),
    "rest": ("░", "bright_black"),
}
COLUMNS: Final = ("wire", "queue", "compute", "send")
Part = tuple[str, float]
"""Kind and seconds."""


def print_traces(traces: Sequence[dict[str, Any]], *, max_steps: int, console: Console | None = None) -> None:
    """Every answer in turn."""
    console = console or Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    if not traces:
        console.print("no answers yet: ask the gateway something")
    for trace in traces:
        console.print(headline(trace))
        for name, route in (("route", trace["route"]), ("runner-up", trace["runner_up"])):
            console.print(Text.assemble((f"  {name:<10}", "bright_black"), _route(route)))
        mean, total_s = mean_of(trace)
        if mean:
            console.print(_mean_table(mean, total_s))
        if steps := trace["steps"][:max_steps]:
            console.print(_legend())
            print_steps(trace, steps, console)
            if len(trace["steps"]) > len(steps):
                console.print(Text(f"  … {trace['num_steps'] - len(steps)} more steps (--steps N)", "bright_black"))


def headline(trace: dict[str, Any]) -> Text:
    """`MODEL: 79 tokens, 14.5 tokens/s, first after 439 ms, stop`."""
    text = Text.assemble((escape_unprintable(trace["model"]), "bold"), f": {trace['answered_tokens']} tokens")
    if trace["tokens_per_s"]:
        text.append(f", {trace['tokens_per_s']:.1f} tokens/s")
    if trace["first_token_s"] is not None:
        text.append(f", first after {_ms(trace['first_token_s'])}")
    if trace["route_changes"]:
        text.append(f", {trace['route_changes']} route change(s)")
    return text.append(f", {trace['finish_reason'] or 'running'}")


def parts_of(step: dict[str, Any]) -> list[Part]:
    """A step's time in the order in which it passed; last what nobody can place."""
    parts: list[Part] = [("here", step["local_s"])]
    for hop in step["hops"]:
        parts += [(kind, hop[f"{kind}_s"] or 0.0) for kind in ("wire", "queue", "compute", "send")]
    return [*parts, ("wire", step["return_s"] or 0.0), ("rest", step["rest_s"])]


def bar(parts: Sequence[Part], total_s: float, full_s: float) -> Text:
    """The parts as signs; `full_s` seconds fill the width. Parts that overlapped are drawn to fit the total."""
    text, drawn, passed_s = Text(), 0, 0.0
    sum_s = sum(seconds for _, seconds in parts)
    scale = BAR_WIDTH * min(total_s, full_s) / full_s / sum_s if sum_s > 0 and full_s > 0 else 0.0
    for kind, seconds in parts:
        passed_s += seconds
        end = round(passed_s * scale)  # of the running sum: what is rounded away here is given to the next
        sign, style = KINDS[kind]
        text.append(sign * (end - drawn), style)
        drawn = end
    return text


def print_steps(trace: dict[str, Any], steps: Sequence[dict[str, Any]], console: Console) -> None:
    """A line for each; of a long answer the gateway has not kept the middle."""
    dropped = trace["num_steps"] - len(trace["steps"])
    full_s = {
        kind: max((step["total_s"] for step in steps if step["kind"] == kind), default=0.0)
        for kind in ("prefill", "decode")
    }
    for place, step in enumerate(steps):
        number = place + 1 + (dropped if place >= trace["num_first_steps"] else 0)
        name = f"prompt {step['tokens']}" if step["kind"] == "prefill" else f"token {number}"
        line = Text(f"  {name:<12}{_ms(step['total_s']):>8}  ")
        console.print(line.append(bar(parts_of(step), step["total_s"], full_s[step["kind"]])))


def mean_of(trace: dict[str, Any]) -> tuple[list[tuple[str, list[float]]], float]:
    """Rows of (where, seconds by `COLUMNS`) of the route in use, averaged over its decode steps whose sending is known;
    and a step's whole time, which is less than its parts where they overlapped. No rows before the first such step."""
    decode = [step for step in trace["steps"] if step["kind"] == "decode" and step["hops"]]
    same = [step for step in decode if step["route"] == decode[-1]["route"]]
    same = [step for step in same if all(hop["send_s"] is not None for hop in step["hops"])] or same
    if not same:
        return [], 0.0

    def mean(seconds: Sequence[float | None]) -> float:
        return sum(second or 0.0 for second in seconds) / len(same)

    hops = trace["routes"][same[-1]["route"]]["hops"]
    rows = [
        (_server(hop), [mean([step["hops"][place][f"{kind}_s"] for step in same]) for kind in COLUMNS])
        for place, hop in enumerate(hops)
    ]
    here = ("here", [0.0, 0.0, mean([step["local_s"] for step in same]), 0.0])
    back = ("back", [mean([step["return_s"] for step in same]), 0.0, 0.0, 0.0])
    rest = ("rest", [mean([step["rest_s"] for step in same]), 0.0, 0.0, 0.0])
    return [here, *rows, back, rest], mean([step["total_s"] for step in same])


def _mean_table(mean: Sequence[tuple[str, list[float]]], total_s: float) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("a token, on average", no_wrap=True)
    for name in (*COLUMNS, "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, seconds in mean:
        share = f"{sum(seconds) / total_s:.0%}" if total_s else ""
        table.add_row(Text(name), *(_ms(second) if second else "" for second in seconds), share)
    table.add_row("", "", "", "", Text(_ms(total_s), "bold"), "")
    return table


def _route(route: dict[str, Any] | None) -> Text:
    if route is None:
        return Text("none")
    chain = " → ".join(f"{_server(hop)} {hop['blocks']}" for hop in route["hops"])
    expected_s = route["expected_s"]
    return Text(chain + ("" if expected_s is None else f", {_ms(expected_s)} a token expected"))


def _server(hop: dict[str, Any]) -> str:
    return escape_unprintable(hop["name"] or f"…{hop['peer'][-8:]}")


def _legend() -> Text:
    return Text("  ").append_text(
        Text("   ").join(Text(f"{sign} {kind}", style) for kind, (sign, style) in KINDS.items())
    )


def _ms(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.1f} ms" if seconds < 0.01 else f"{1000 * seconds:.0f} ms"
