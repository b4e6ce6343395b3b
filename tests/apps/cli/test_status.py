"""`corolla status`: who serves what, told apart into healthy, fragile and broken, and never markup from strangers."""

import io
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import click
import pytest
from rich.console import Console
from rich.text import Text

from corolla.apps.cli import main as frame
from corolla.apps.cli import status
from corolla.apps.cli.status import health_code
from corolla.apps.cli.status_table import block_map, print_json, print_tables
from corolla.apps.status.facts import as_json, runs
from corolla.apps.status.reading import ModelStatus, choose, read_swarm
from corolla.errors import BadInput, NoRoute
from corolla.ids import Fingerprint, short
from corolla.net.memory.loop import run_virtual
from corolla.net.memory.network import MemoryNetwork
from corolla.net.memory.transport import MemoryTransport, identity_of
from corolla.swarm.announcement import MODELS_KEY, Announcement, ModelEntry, State, announcement_key

WEIGHTS = Fingerprint("ab" * 16)
OTHER = Fingerprint("cd" * 16)
LIFETIME_S = 180.0


async def announce(
    server: MemoryTransport, blocks: tuple[int, int], *, name: str = "", fingerprint: Fingerprint = WEIGHTS,
    state: State = "online", lifetime_s: float = LIFETIME_S,
) -> None:  # fmt: skip
    said = Announcement(
        state=state, start=blocks[0], end=blocks[1], num_blocks=8, fingerprint=fingerprint, model_name="tiny",
        dtype="float32", decode_tokens_per_s=25.0, free_cache_tokens=4096, name=name,
    )  # fmt: skip
    entry = ModelEntry(name="tiny", fingerprint=fingerprint, num_blocks=8)
    assert await server.records.put(announcement_key(fingerprint, server.peer), said.encode(), lifetime_s)
    assert await server.records.put(MODELS_KEY, entry.encode(), LIFETIME_S)


def status_of(*spans: tuple[int, int], wanted: tuple[str, ...] = (), name: str = "") -> list[ModelStatus]:
    """What a newcomer sees of a swarm with these servers."""

    async def look() -> list[ModelStatus]:
        network = MemoryNetwork(random.Random(1))
        async with AsyncExitStack() as stack:
            hub = await stack.enter_async_context(network.transport("hub"))
            for number, blocks in enumerate(spans):
                server = await stack.enter_async_context(network.transport(f"server {number}"))
                await server.join(hub.addresses, timeout_s=5)
                await announce(server, blocks, name=name)
            client = await stack.enter_async_context(network.transport("client"))
            await client.join(hub.addresses, timeout_s=5)
            return await read_swarm(client, wanted)

    return run_virtual(look())


def test_a_model_that_its_last_server_has_left_is_not_listed_although_the_index_still_names_it() -> None:
    async def look(*wanted: str) -> list[ModelStatus]:
        async with MemoryNetwork(random.Random(1)).transport("server") as server:
            await announce(server, (0, 8))
            assert len(await read_swarm(server, wanted)) == 1
            left = Announcement(
                state="left", start=0, end=8, num_blocks=8, fingerprint=WEIGHTS, model_name="tiny", dtype="float32"
            )
            await server.records.put(announcement_key(WEIGHTS, server.peer), left.encode(), LIFETIME_S + 1)
            assert len(await server.records.get(MODELS_KEY)) == 1
            return await read_swarm(server, wanted)

    assert run_virtual(look()) == []
    with pytest.raises(NoRoute, match="nobody serves tiny in this swarm; served: nothing"):
        run_virtual(look("tiny"))


def printed(statuses: list[ModelStatus]) -> str:
    file = io.StringIO()
    print_tables(statuses, Console(file=file))
    return file.getvalue()


def test_what_makes_no_sense_is_dropped_and_told(caplog: pytest.LogCaptureFixture) -> None:
    async def look() -> list[ModelStatus]:
        network = MemoryNetwork(random.Random(1))
        async with network.transport("server") as server, network.transport("liar") as liar:
            await liar.join(server.addresses, timeout_s=5)
            await announce(server, (0, 8))
            assert await liar.records.put(announcement_key(WEIGHTS, liar.peer), b"junk", LIFETIME_S)
            assert await liar.records.put(MODELS_KEY, b"junk", LIFETIME_S)
            return await read_swarm(server, ())

    [status] = run_virtual(look())
    why = "not a msgpack array of the right length"
    assert as_json(status)["rejected"] == {why: 1}
    assert f"announcements dropped: {why} (1)" in " ".join(printed([status]).split())
    [warning] = caplog.records
    assert warning.__dict__["by_reason"] == {why: 1}
    assert "dropped" not in printed(status_of((0, 8)))


def test_two_servers_for_every_block_are_healthy() -> None:
    [status] = status_of((0, 8), (0, 4), (4, 8))
    assert as_json(status)["health"] == "healthy"
    assert "tiny: healthy, 8 blocks" in printed([status])


def test_a_block_on_one_server_only_is_fragile() -> None:
    [status] = status_of((0, 8), (0, 5))
    said = as_json(status)
    assert (said["health"], said["fragile_blocks"], said["missing_blocks"]) == ("fragile", [5, 6, 7], [])
    assert "on one server only: 5:8" in printed([status])


def test_a_block_on_no_server_is_broken() -> None:
    [status] = status_of((0, 3), (4, 8))
    said = as_json(status)
    assert (said["health"], said["missing_blocks"]) == ("broken", [3])
    assert "no server for 3:4" in printed([status])


def test_every_server_has_a_row_with_its_blocks_and_round_trip() -> None:
    [status] = status_of((4, 8), (0, 4))
    lines = [line.split() for line in printed([status]).splitlines()]
    rows = [words for words in lines if words and words[0] in ("0:4", "4:8")]
    assert [words[0] for words in rows] == ["0:4", "4:8"]
    assert all(words[2:6] == ["online", "float32", "25.0", "4096"] for words in rows)
    assert all(server["rtt_s"] is not None for server in as_json(status)["servers"])


def test_a_server_that_is_announced_but_does_not_answer_is_named_and_not_counted_on() -> None:
    async def look() -> list[ModelStatus]:
        network = MemoryNetwork(random.Random(1))
        async with network.transport("hub") as hub, network.transport("dead") as dead, network.transport("me") as me:
            for peer in (dead, me):
                await peer.join(hub.addresses, timeout_s=5)
            await announce(hub, (0, 4), name="left half")
            await announce(dead, (4, 8), name="right half")
            network.kill(dead.peer)
            return await read_swarm(me, ())

    [status] = run_virtual(look())
    said = as_json(status)
    assert (said["health"], said["missing_blocks"]) == ("broken", [4, 5, 6, 7])
    assert [(server["blocks"], server["is_silent"]) for server in said["servers"]] == [("0:4", False), ("4:8", True)]
    assert json.loads(json.dumps(said, allow_nan=False)) == said
    assert health_code([status]) == 11
    text = " ".join(printed([status]).split())
    assert "no server for 4:8; no answer from 4:8" in text
    assert "right half); on one server only: 0:4" in text


def test_eighty_columns_have_room_for_a_servers_name_and_all_figures() -> None:
    file = io.StringIO()
    print_tables(status_of((0, 8), name="attic-gpu"), Console(file=file, width=80, force_terminal=True, no_color=True))
    lines = file.getvalue().splitlines()
    assert all(len(Text.from_ansi(line).plain.rstrip()) <= 80 for line in lines)
    assert "…" not in file.getvalue().replace("…" + short(identity_of("server 0").peer), "")
    for words in ("attic-gpu", "tokens/s", "queue ms", "rtt ms", "online", "float32", "4096"):
        assert words in file.getvalue()


def test_a_servers_name_is_never_markup() -> None:
    assert "[red]x[/red]" in printed(status_of((0, 8), name="[red]x[/red]"))


def test_an_empty_swarm_says_so() -> None:
    assert printed(status_of()) == "nobody serves a model in this swarm\n"


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(status_of((0, 8)))
    [model] = json.loads(capsys.readouterr().out)["models"]
    assert model["name"] == "tiny"
    assert model["fingerprint"] == WEIGHTS
    assert model["coverage"] == [{"blocks": "0:8", "servers": 1}]
    assert [server["blocks"] for server in model["servers"]] == ["0:8"]


def test_a_model_is_found_by_name_or_fingerprint() -> None:
    entries = [
        ModelEntry(name="a", fingerprint=WEIGHTS, num_blocks=8),
        ModelEntry(name="b", fingerprint=OTHER, num_blocks=8),
    ]
    assert choose(entries, ()) == entries
    assert choose(entries, ("b",)) == entries[1:]
    assert choose(entries, ("abab",)) == entries[:1]


def test_a_model_that_nobody_serves_is_named() -> None:
    with pytest.raises(NoRoute, match=r"nobody serves huge in this swarm; served: tiny"):
        status_of((0, 8), wanted=("huge",))


def test_coverage_is_told_in_runs() -> None:
    assert runs([1, 1, 2, 0, 0]) == [(0, 2, 1), (2, 3, 2), (3, 5, 0)]


def test_without_an_address_it_says_how_to_give_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COROLLA_PEERS", raising=False)
    assert frame.run(["status"]) == BadInput.exit_code
    assert "--join ADDR" in capsys.readouterr().err


def test_the_servers_that_blocks_hang_on_are_named() -> None:
    [status] = status_of((0, 8), (0, 5), name="cellar")
    text = " ".join(printed([status]).split())
    [alone] = as_json(status)["fragile"]
    assert alone["blocks"] == "5:8"
    assert f"on one server only: 5:8 (…{alone['peer'][-8:]} cellar)" in text


def test_the_map_has_a_sign_for_every_block() -> None:
    assert str(block_map([0, 1, 2, 9, 10])) == "    0  ·129+"
    lines = str(block_map([1] * 100)).splitlines()
    assert [line.split() for line in lines] == [["0", "1" * 64], ["64", "1" * 36]]
    assert "    0  22222111" in printed(status_of((0, 8), (0, 5)))


def test_the_exit_code_tells_the_worst_health() -> None:
    healthy, fragile, broken = status_of((0, 8), (0, 8)), status_of((0, 8)), status_of((0, 3))
    assert health_code(healthy) == 0
    assert health_code(healthy + fragile) == 10
    assert health_code(fragile + broken) == 11
    assert health_code([]) == 11


def test_watching_gives_one_document_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        print_json(status_of((0, 8)), indent=None)
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [model["health"] for document in documents for model in document["models"]] == ["fragile", "fragile"]


# The command, with a swarm in memory where it would have joined one


Changes = list[Callable[[MemoryTransport], Awaitable[None]]]
JOIN = ("--join", "/ip4/127.0.0.1/tcp/1/p2p/x")


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Changes:
    """What happens to the swarm, whose one server has all blocks, between one look and the next; then the user ends."""
    changes: Changes = []

    @asynccontextmanager
    async def joined(_peers: Sequence[str]) -> AsyncIterator[MemoryTransport]:
        network = MemoryNetwork(random.Random(1))
        async with network.transport("server") as server, network.transport("client") as client:
            await client.join(server.addresses, timeout_s=5)
            await announce(server, (0, 8))

            async def sleep(_seconds: float) -> None:
                if not changes:
                    raise click.Abort
                await changes.pop(0)(server)

            monkeypatch.setattr(status, "asyncio", SimpleNamespace(run=run_virtual, sleep=sleep))
            yield client

    monkeypatch.setattr(status, "asyncio", SimpleNamespace(run=run_virtual))
    monkeypatch.setattr(status, "_joined", joined)
    return changes


async def leave(server: MemoryTransport) -> None:
    await announce(server, (0, 8), state="left", lifetime_s=LIFETIME_S + 1)


async def come_back(server: MemoryTransport) -> None:
    await announce(server, (0, 8), lifetime_s=LIFETIME_S + 2)


async def serve_half(server: MemoryTransport) -> None:
    await announce(server, (0, 4), lifetime_s=LIFETIME_S + 1)


def test_watching_looks_again_and_again_until_it_is_ended(
    meanwhile: Changes, capsys: pytest.CaptureFixture[str]
) -> None:
    meanwhile += [serve_half]
    assert frame.run(["status", "--watch", "--json", *JOIN]) == frame.INTERRUPTED
    documents = [json.loads(line)["models"] for line in capsys.readouterr().out.splitlines()]
    assert [model["health"] for models in documents for model in models] == ["fragile", "broken"]


def test_a_watched_model_that_goes_is_said_to_be_gone_and_shown_again_when_it_comes_back(
    meanwhile: Changes, capsys: pytest.CaptureFixture[str]
) -> None:
    for form in ([], ["--json"]):
        meanwhile += [leave, come_back]
        assert frame.run(["status", WEIGHTS, "--watch", "--every", "3", *form, *JOIN]) == frame.INTERRUPTED
        out, err = capsys.readouterr()
        gone = f"nobody serves {WEIGHTS} now; looking again every 3 s"
        assert (gone in out, gone in err) == (not form, bool(form))
        if form:
            assert [len(json.loads(line)["models"]) for line in out.splitlines()] == [1, 0, 1]
        else:
            assert out.count("tiny: fragile") == 2
            assert "nobody serves a model" not in out


def test_watching_what_nobody_serves_ends_at_once(meanwhile: Changes, capsys: pytest.CaptureFixture[str]) -> None:
    meanwhile += [come_back]
    assert frame.run(["status", "huge", "--watch", *JOIN]) == NoRoute.exit_code
    assert "nobody serves huge in this swarm; served: tiny" in capsys.readouterr().err


@pytest.mark.usefixtures("meanwhile")
@pytest.mark.parametrize(("options", "code"), [([], 0), (["--exit-code"], 10)])
def test_the_command_exits_with_the_health_where_that_is_wanted(options: list[str], code: int) -> None:
    assert frame.run(["status", *options, *JOIN]) == code
