"""`corolla trace` asks a gateway and draws where the time of its answers went."""

import io
import json
import re
from typing import Any

import pytest
from rich.console import Console

from corolla.apps.cli import main as frame
from corolla.apps.cli.trace_chart import BAR_WIDTH, bar, mean_of, parts_of, print_traces
from corolla.apps.gateway import trace_facts
from corolla.apps.gateway.traces import TracedHop, TracedRoute, TraceStore
from corolla.apps.sim.toy_gateway import ToyGateway
from corolla.errors import BadInput, NoPeers, RemoteProtocolError
from corolla.ids import PeerId
from corolla.wire.messages import HopTiming

ROUTE = TracedRoute(
    (TracedHop(PeerId("a"), "attic", 0, 4), TracedHop(PeerId("peer-of-b"), "", 4, 8)), (0.01, 0.02, 0.01), 0.09
)


def traced(*, num_decoded: int = 3, name: str = "attic") -> dict[str, Any]:
    route = TracedRoute((TracedHop(PeerId("a"), name, 0, 4), *ROUTE.hops[1:]), ROUTE.links_s, ROUTE.expected_s)
    trace = TraceStore().begin(model="tiny", now=0.0)
    trace.took_route(route, ROUTE)
    times = [HopTiming(0.004, 0.02, 0.002), HopTiming(0.0, 0.026, 0.002)]
    trace.saw_step("prefill", tokens=40, total_s=0.6, local_s=0.1, chunks=[times])
    for _ in range(num_decoded):
        trace.saw_step("decode", tokens=1, total_s=0.1, local_s=0.006, chunks=[times])
    trace.finish("stop")
    whole = trace_facts.whole(trace)
    assert json.loads(json.dumps(whole)) == whole
    return whole


def printed(traces: list[dict[str, Any]], max_steps: int = 20) -> str:
    file = io.StringIO()
    print_traces(traces, max_steps=max_steps, console=Console(file=file))
    return file.getvalue()


def test_an_answer_is_told_with_its_routes_its_mean_and_its_steps() -> None:
    text = printed([traced()])
    assert "tiny: 4 tokens, 10.0 tokens/s, first after 600 ms, stop" in text
    assert "route     attic 0:4 → …eer-of-b 4:8, 90 ms a token expected" in text
    assert "runner-up" in text
    rows = [line.split() for line in text.splitlines()]
    assert re.search(r"attic +10(\.0)? ms +4\.0 ms +20 ms +2\.0 ms +36%", text)
    assert ["prompt", "40"] in [row[:2] for row in rows]
    assert [row[:2] for row in rows if row[:1] == ["token"]] == [["token", "2"], ["token", "3"], ["token", "4"]]


def test_a_bar_is_as_long_as_its_step_and_shows_each_kind() -> None:
    step = traced()["steps"][1]
    whole = bar(parts_of(step), step["total_s"], step["total_s"]).plain
    assert len(whole) == BAR_WIDTH
    assert len(bar(parts_of(step), step["total_s"], 2 * step["total_s"]).plain) == BAR_WIDTH // 2
    assert whole.count("█") == pytest.approx(BAR_WIDTH * 0.46, abs=1)
    assert whole.count("▌") == pytest.approx(BAR_WIDTH * 0.04, abs=1)
    assert whole.count("·") == pytest.approx(BAR_WIDTH * 0.4, abs=2)  # of three links, each rounded
    assert whole.startswith("=")


def test_a_bar_of_overlapping_chunks_is_no_longer_than_its_step() -> None:
    assert len(bar([("compute", 5.0), ("wire", 3.0)], 2.0, 2.0).plain) == BAR_WIDTH
    assert bar([("compute", 0.0)], 0.0, 0.0).plain == ""


def test_the_mean_is_over_the_route_in_use() -> None:
    assert [name for name, _ in mean_of(traced())[0]] == ["here", "attic", "…eer-of-b", "back", "rest"]
    for num_decoded in (1, 3):
        rows, total_s = mean_of(traced(num_decoded=num_decoded))
        assert sum(sum(seconds) for _, seconds in rows) == pytest.approx(total_s)
        assert total_s == pytest.approx(0.1)
    assert mean_of(traced(num_decoded=0)) == ([], 0.0)


def test_steps_of_a_long_answer_keep_their_numbers() -> None:
    lines = printed([traced(num_decoded=1000)], max_steps=600).splitlines()
    numbers = [int(line.split()[1]) for line in lines if line.split()[:1] == ["token"]]
    assert numbers[30:32] == [32, 522]
    assert numbers[-1] == 1001
    assert "981 more steps" in printed([traced(num_decoded=1000)])


def test_names_are_never_markup() -> None:
    assert "[red]x[/red]" in printed([traced(name="[red]x[/red]")])


def test_no_answers_yet_says_so() -> None:
    assert printed([]) == "no answers yet: ask the gateway something\n"


def test_a_gateway_is_asked_and_its_key_is_needed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ToyGateway(api_key="right") as gateway:
        gateway.serve("attic", "0:30")
        gateway.chat("Hi", key="right")
        monkeypatch.delenv("COROLLA_API_KEY", raising=False)
        assert frame.run(["trace", "--gateway", gateway.url]) == BadInput.exit_code
        assert "--api-key" in capsys.readouterr().err
        monkeypatch.setenv("COROLLA_API_KEY", "right")
        assert frame.run(["trace", "--gateway", gateway.url + "/", "--json"]) == 0
        [trace] = json.loads(capsys.readouterr().out)["traces"]
        assert trace["model"] == "toy"
        assert trace["steps"][0]["kind"] == "prefill"
        assert frame.run(["trace", "--gateway", gateway.url]) == 0
        assert "toy: " in capsys.readouterr().out
        assert frame.run(["trace", "--gateway", gateway.url + "/assets"]) == RemoteProtocolError.exit_code


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "file:///etc/passwd", "ftp://x"])
def test_only_web_addresses_are_asked(url: str) -> None:
    assert frame.run(["trace", "--gateway", url]) == BadInput.exit_code


def test_nobody_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.run(["trace", "--gateway", "http://127.0.0.1:9"]) == NoPeers.exit_code
    assert "no gateway answers at http://127.0.0.1:9" in capsys.readouterr().err
