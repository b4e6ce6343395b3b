"""`corolla route` shows the chain a session would take, every term of its cost, and the next best."""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from corolla.apps.cli import main as frame
from corolla.apps.cli import route
from corolla.apps.cli.route import (
    PricedRoute,
    best_routes,
    left_out_of,
    only_one,
    session_tokens,
    too_short,
    usual_tokens,
)
from corolla.apps.cli.route_table import print_json, print_route
from corolla.apps.status.reading import ModelStatus
from corolla.client.lists import ServerLists
from corolla.errors import BadInput, MissingBlocks
from corolla.ids import Fingerprint, PeerId
from corolla.net.memory.transport import identity_of
from corolla.swarm.announcement import Announcement, ModelEntry, short_peer
from corolla.swarm.cost import CostModel
from corolla.swarm.view import ServerView, View

COST = CostModel()
WEIGHTS = Fingerprint("ab" * 16)


def server(name: str, blocks: tuple[int, int], rtt_s: float, **said: Any) -> ServerView:
    announcement = Announcement(
        state="online", start=blocks[0], end=blocks[1], num_blocks=4, fingerprint=WEIGHTS, model_name="tiny",
        dtype="float32", decode_tokens_per_s=100.0, free_cache_tokens=4096, name=name, **said,
    )  # fmt: skip
    return ServerView(PeerId(f"peer-of-{name}"), announcement, expires_at=0.0, rtt_s=rtt_s)


def status_of(*servers: ServerView, fingerprint: Fingerprint = WEIGHTS) -> ModelStatus:
    return ModelStatus(ModelEntry(name="tiny", fingerprint=fingerprint, num_blocks=4), View.of(servers))


HALVES = (
    server("front", (0, 2), 0.02, next_rtts={short_peer(PeerId("peer-of-back")): 0.004}),
    server("back", (2, 4), 0.04, queue_s=0.005),
)


def printed(status: ModelStatus, *, explain: bool, tokens: int = 1024) -> str:
    file = io.StringIO()
    print_route(status, best_routes(status, tokens, COST), explain=explain, console=Console(file=file))
    return file.getvalue()


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


def test_the_chain_is_shown_in_order_with_its_cost() -> None:
    text = printed(status_of(*HALVES), explain=False)
    assert "tiny: route over 2 server(s), 59.0 ms a step, 16.9 tokens a second" in text
    assert [row[0] for row in rows(text) if ":" in row[0] and row[0] != "tiny:"] == ["0:2", "2:4"]
    assert "overhead" not in text


def test_every_term_is_shown_and_they_sum_up() -> None:
    table = [row for row in rows(printed(status_of(*HALVES), explain=True)) if row[0] in ("0:2", "2:4", "back")]
    front, back, home = ([float(cell) for cell in row[3:]] for row in table)
    assert front == pytest.approx([10.0, 1.0, 0.0, 10.0, 0.0, 21.0])
    assert back == pytest.approx([2.0, 1.0, 5.0, 10.0, 0.0, 18.0])
    assert home == pytest.approx([20.0, 20.0])
    assert front[-1] + back[-1] + home[-1] == pytest.approx(59.0)


def test_the_runner_up_is_explained_too_or_said_to_be_missing() -> None:
    whole = server("whole", (0, 4), 0.2)
    text = printed(status_of(*HALVES, whole), explain=True)
    assert "tiny: runner-up over 1 server(s)" in text
    assert "no other chain covers every block" in printed(status_of(*HALVES), explain=True)


def test_who_was_left_out_is_said_with_the_choice_that_did_it() -> None:
    small = server("small", (0, 4), 0.001, quantization="nf4")
    blocked = server("blocked", (2, 4), 0.002)
    choices = ServerLists(blocked=frozenset({blocked.peer}), takes_quantized=False)
    view = status_of(*HALVES, small, blocked).view
    left_out = left_out_of(view, choices.left_out(view))
    status = replace(status_of(*HALVES), view=choices.applied(view))
    file = io.StringIO()
    print_route(status, best_routes(status, 1024, COST), explain=True, left_out=left_out, console=Console(file=file))
    said = [line.strip() for line in file.getvalue().splitlines() if line.startswith("left out")]
    assert said == [
        "left out: 0:4 …of-small small: holds the weights as nf4, which was not wanted",
        "left out: 2:4 …-blocked blocked: among the servers not to use",
    ]
    only_front = ServerLists(allowed=frozenset({HALVES[0].peer}))
    assert set(only_front.left_out(view).values()) == {"not among the servers to use"}


def test_no_room_shows_as_a_penalty() -> None:
    [row] = [row for row in rows(printed(status_of(server("full", (0, 4), 0.02)), explain=True)) if row[0] == "0:4"]
    assert row[-2] == "0.0"
    [priced] = best_routes(status_of(server("full", (0, 4), 0.02)), 5000, COST)
    assert priced.price.hops[0].penalty_s == pytest.approx(10.0)
    assert "31.0 ms a step, 32.3 tokens a second; it has no room" in printed(
        status_of(server("full", (0, 4), 0.02)), explain=False, tokens=5000
    )


def test_servers_that_take_no_session_so_long_are_left_out_and_said() -> None:
    short, long = server("a", (0, 4), 0.02, max_session_tokens=128), server("b", (0, 4), 0.02, max_session_tokens=512)
    view = status_of(short, long).view
    assert too_short(view, 128) == {}
    assert too_short(view, 129) == {short.peer: "takes sessions of 128 tokens at most"}


def test_the_usual_session_is_no_longer_than_servers_take() -> None:
    short, long = server("a", (0, 4), 0.02, max_session_tokens=128), server("b", (0, 4), 0.02, max_session_tokens=512)
    assert usual_tokens(status_of(short)) == 128
    assert usual_tokens(status_of(short, long)) == 512
    assert usual_tokens(status_of(short, server("c", (0, 4), 0.02))) == 2048


def test_a_long_prompt_takes_a_route_past_a_thin_link_and_the_output_says_what_it_counts() -> None:
    thin = {short_peer(PeerId("peer-of-front")): 100_000}
    status = status_of(
        *HALVES[:1], server("thin", (2, 4), 0.02, inflows=thin, position_bytes=2_000), server("far", (2, 4), 0.08)
    )
    short, long = (
        best_routes(status, 2048, COST.for_session(prompt_tokens=tokens, max_tokens=2048))[0] for tokens in (1, 1000)
    )
    assert [hop.peer for hop in short.route.hops] == ["peer-of-front", "peer-of-thin"]
    assert [hop.peer for hop in long.route.hops] == ["peer-of-front", "peer-of-far"]
    file = io.StringIO()
    print_route(status, [long], explain=False, prompt_tokens=1000, console=Console(file=file))
    assert "with a prompt of 1000 tokens" in file.getvalue()
    assert "prompt" not in printed(status, explain=False)


def test_the_session_asked_about_holds_the_prompt_and_a_usual_answer() -> None:
    status = status_of(server("a", (0, 4), 0.02, max_session_tokens=512))
    assert session_tokens(status, None, 1) == session_tokens(status, None, 100) == 512
    assert session_tokens(status, None, 500) == 500 + COST.usual_new_tokens
    assert session_tokens(status, 600, 500) == 600
    with pytest.raises(BadInput, match="a prompt of 500 tokens does not fit into a session of 400"):
        session_tokens(status, 400, 500)


def test_json_has_every_term(capsys: pytest.CaptureFixture[str]) -> None:
    status = status_of(*HALVES)
    print_json(status, best_routes(status, 1024, COST))
    said = json.loads(capsys.readouterr().out)
    [route] = said["routes"]
    assert [hop["blocks"] for hop in route["hops"]] == ["0:2", "2:4"]
    assert route["cost_s"] == pytest.approx(sum(hop["total_s"] for hop in route["hops"]) + route["return_s"])


def test_a_servers_name_is_never_markup() -> None:
    assert "[red]x[/red]" in printed(status_of(server("[red]x[/red]", (0, 4), 0.02)), explain=True)


def test_missing_blocks_are_named() -> None:
    with pytest.raises(MissingBlocks, match="2:4"):
        best_routes(status_of(HALVES[0]), 1024, COST)


def test_a_name_of_several_models_asks_for_a_fingerprint() -> None:
    twins = [status_of(), status_of(fingerprint=Fingerprint("cd" * 16))]
    with pytest.raises(BadInput, match=r"2 models are called tiny.*abababababab, cdcdcdcdcdcd"):
        only_one(twins, "tiny")
    assert only_one(twins[:1], "tiny") is twins[0]


def test_without_an_address_it_says_how_to_give_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COROLLA_PEERS", raising=False)
    assert frame.run(["route", "tiny"]) == BadInput.exit_code
    assert "--join ADDR" in capsys.readouterr().err


def test_a_priced_route_prices_its_own_hops() -> None:
    for priced in best_routes(status_of(*HALVES, server("whole", (0, 4), 0.2)), 1024, COST):
        assert isinstance(priced, PricedRoute)
        assert tuple(hop.hop for hop in priced.price.hops) == priced.route.hops
        assert priced.price.total_s == pytest.approx(priced.route.cost_s)


@pytest.mark.parametrize("options", [[], ["--explain"], ["--json"]])
def test_the_command_shows_the_route_and_with_explain_its_terms(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """Of a swarm that is asked for this model; by the user's choice without the server that has all blocks."""
    whole = replace(server("whole", (0, 4), 0.001), peer=identity_of("whole").peer)

    async def ask_swarm(peers: Sequence[str], wanted: Sequence[str]) -> list[ModelStatus]:
        assert (list(peers), list(wanted)) == (["/there"], ["tiny"])
        return [status_of(*HALVES, whole)]

    monkeypatch.setattr(route, "ask_swarm", ask_swarm)
    words = ["route", "tiny", "--tokens", "1024", "--join", "/there", "--block-server", whole.peer]
    assert frame.run([*words, *options]) == 0
    said = capsys.readouterr().out
    if options == ["--json"]:
        assert [hop["blocks"] for hop in json.loads(said)["routes"][0]["hops"]] == ["0:2", "2:4"]
        return
    assert "tiny: route over 2 server(s), 59.0 ms a step" in said
    for explained in ("overhead", "no other chain covers every block", "whole: among the servers not to use"):
        assert (explained in said) == bool(options)
