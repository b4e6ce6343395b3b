"""What a server tells Prometheus is what it did; names follow Prometheus' conventions, and the dashboard uses them."""

import asyncio
import json
import re
import socket
import time
import urllib.request
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from corolla.apps.gateway.metrics import GatewayMetrics
from corolla.apps.metrics import server
from corolla.apps.metrics.dht import DhtMetrics
from corolla.apps.metrics.server import ServerMetrics, metrics_page
from corolla.apps.sim.swarm import MemorySwarm
from corolla.apps.sim.toy import hidden_of
from corolla.errors import BadInput, Refused
from corolla.net.libp2p.addresses import HostPort
from corolla.net.libp2p.traffic import DhtTraffic
from corolla.net.memory.loop import run_virtual
from corolla.server.config import SessionLimits
from corolla.swarm.announcement import announcement_key
from corolla.wire.tensors import WireTensor

DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana-dashboard.json"
HIDDEN = 4


def states(num_tokens: int) -> WireTensor:
    return WireTensor("float32", (1, num_tokens, HIDDEN), bytes(4 * num_tokens * HIDDEN))


def test_what_was_computed_held_and_refused_is_told() -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=4) as swarm:
            handler = await swarm.serve("a", "0:4", cache_tokens=256)
            metrics = ServerMetrics(
                handler, DhtTraffic(puts=3, bytes_put=700, calls_answered=Counter(find=5)), lambda: {"cut_off": 7}
            )
            handler.on_step = metrics.saw_step
            value = metrics.registry.get_sample_value
            client = await swarm.client("c")
            hidden_size = handler.runner.facts.hidden_size
            async with client.open_session(swarm.model, max_tokens=100) as session:
                for num_tokens in (5, 1, 1):
                    hidden = WireTensor("float32", (1, num_tokens, hidden_size), bytes(4 * num_tokens * hidden_size))
                    await session.step(hidden, num_tokens=num_tokens, want="last")
                assert value("corolla_server_steps_total", {"kind": "decode"}) == 2
                assert value("corolla_server_tokens_total", {"kind": "prefill"}) == 5
                assert value("corolla_server_compute_seconds_count", {"kind": "decode"}) == 2
                assert value("corolla_server_queue_seconds_count", {"kind": "prefill"}) == 1
                assert value("corolla_server_sessions") == 1
                assert value("corolla_server_cache_tokens") == 256
                assert value("corolla_server_cache_used_tokens") == 112  # pages of 16
                with pytest.raises(Refused):
                    await client.start_session(swarm.model, max_tokens=512, max_rows=1000)
            assert value("corolla_server_refusals_total", {"code": "unsupported"}) == 1
            assert value("corolla_server_streams_turned_away_total", {"why": "cut_off"}) == 7
            assert (value("corolla_server_dht_puts_total"), value("corolla_server_dht_put_bytes_total")) == (3, 700)
            assert value("corolla_server_dht_calls_answered_total", {"kind": "find"}) == 5
            assert value("corolla_server_blocks") == 4

    run_virtual(told())


def test_what_sessions_keep_for_lost_servers_is_told_with_its_bound() -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=4) as swarm:
            limits = SessionLimits(max_journal_bytes=50)
            value = ServerMetrics(await swarm.serve("a", "0:2", limits=limits), DhtTraffic()).registry.get_sample_value
            await swarm.serve("b", "2:4")
            client = await swarm.client("c")
            async with client.open_session(swarm.model, max_tokens=64) as session:
                for number in range(20):
                    await session.step(hidden_of([[number]]), num_tokens=1, want="last")
                assert 0 < (value("corolla_server_journal_bytes") or 0) <= 50
                assert value("corolla_server_journal_bytes_at_most") == 50
                assert value("corolla_server_journals_shed_total") == 0, "one alone keeps its own bound"

    run_virtual(told())


def test_records_of_others_that_make_no_sense_are_told_by_what_is_wrong_with_them() -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=4) as swarm:
            liar = await swarm.join("liar")
            key = announcement_key(swarm.model.fingerprint, liar.peer)
            assert await liar.records.put(key, b"junk", 180)
            traffic = DhtTraffic(records_refused=Counter({"bad signature": 5}))
            value = ServerMetrics(await swarm.serve("a", "0:4"), traffic).registry.get_sample_value
            await asyncio.sleep(10)
            why = {"why": "not a msgpack array of the right length"}
            assert value("corolla_server_announcements_rejected_total", why)
            assert value("corolla_server_dht_records_refused_total", {"flaw": "bad signature"}) == 5

    run_virtual(told())


def test_the_page_is_there_while_the_server_serves_and_a_taken_port_is_named() -> None:
    async def told() -> None:
        async with MemorySwarm(num_blocks=4) as swarm:
            handler = await swarm.serve("a", "0:4")
            transport = cast("Any", SimpleNamespace(dht_traffic=DhtTraffic(), turned_away={}))
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))
                port = taken.getsockname()[1]
                taken.listen()
                with (
                    pytest.raises(BadInput, match=f"cannot listen on 127.0.0.1:{port}"),
                    metrics_page(HostPort("ip4", "127.0.0.1", port), handler, transport),
                ):
                    pass
            with metrics_page(HostPort("ip4", "127.0.0.1", port), handler, transport):
                page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()  # noqa: ASYNC210
                assert "corolla_server_cache_tokens" in page
                assert answer(port, "health") == (200, "ok")
                assert answer(port, "ready") == (200, "ready")
                assert answer(port, "redy")[0] == 404  # else a probe that is misspelt finds all well
                for name in ("is_leaving", "is_away"):  # no new session is taken
                    setattr(handler, name, True)
                    assert answer(port, "ready") == (503, "not ready")
                    assert answer(port, "health") == (200, "ok")
                    setattr(handler, name, False)
            with pytest.raises(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=1)  # noqa: ASYNC210 - a thread answers

    run_virtual(told())


def test_callers_who_say_nothing_take_no_more_threads_than_there_are_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CALLERS", 3)

    async def told() -> None:
        async with MemorySwarm(num_blocks=4) as swarm:
            handler = await swarm.serve("a", "0:4")
            transport = cast("Any", SimpleNamespace(dht_traffic=DhtTraffic(), turned_away={}))
            port = free_port()
            with metrics_page(HostPort("ip4", "127.0.0.1", port), handler, transport):
                silent = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(3)]
                with socket.create_connection(("127.0.0.1", port), timeout=5) as too_many:
                    assert too_many.recv(1) == b""
                for each in silent:
                    each.close()
                for _ in range(100):  # their threads notice soon, not at once
                    with suppress(httpx.TransportError):
                        assert answer(port, "health") == (200, "ok")
                        return
                    time.sleep(0.1)  # noqa: ASYNC251 - a thread answers
                raise AssertionError("the places of those who left are not given to others")

    run_virtual(told())


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def answer(port: int, path: str) -> tuple[int, str]:
    got = httpx.get(f"http://127.0.0.1:{port}/{path}", timeout=30)
    return got.status_code, got.json()["status"]


def all_names() -> dict[str, str]:
    """Every metric of gateway and server, and its kind."""

    async def told() -> bytes:
        async with MemorySwarm(num_blocks=4) as swarm:
            return generate_latest(ServerMetrics(await swarm.serve("a", "0:4"), DhtTraffic()).registry)

    gateway = GatewayMetrics()
    gateway.registry.register(DhtMetrics("corolla_gateway", DhtTraffic()))
    for name in ("active_answers", "waiting_requests", "kept_sessions"):
        gateway.watch(name, name, lambda: 0.0)
    text = (run_virtual(told()) + gateway.page()).decode()
    return {family.name: family.type for family in text_string_to_metric_families(text)}


def test_names_say_what_they_count_and_in_which_unit() -> None:
    for name, kind in all_names().items():
        assert re.fullmatch(r"corolla_(server|gateway)_[a-z_]+", name), name
        assert not name.endswith(("_ms", "_s", "_total_total")), name
        if kind == "histogram":
            assert name.endswith("_seconds"), name


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    names = all_names()
    known = set(names) | {f"{name}_total" for name, kind in names.items() if kind == "counter"}
    known |= {
        f"{name}_{part}" for name, kind in names.items() if kind == "histogram" for part in ("bucket", "sum", "count")
    }
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    used = {name for expression in asked for name in re.findall(r"corolla_[a-z_]+", expression)}
    assert len(used) > 15
    assert used <= known, used - known
