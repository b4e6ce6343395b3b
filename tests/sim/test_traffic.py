"""What announcing and reading cost is bounded, nothing of it is left out, and who asks nothing pays nothing."""

from pathlib import Path

import pytest

from corolla.apps.sim.traffic import measure_traffic
from corolla.net.memory.loop import run_virtual
from corolla.net.memory.records import ASKED
from corolla.net.readings import ASKED_FIRST
from corolla.net.records import REPLICAS
from corolla.server.announcer import MAX_INDEXERS, PERIOD_JITTER
from corolla.server.config import ServerConfig
from corolla.server.placing import PlacingConfig, longest_pause_s
from corolla.swarm.announcement import NUM_KEYS


def expected_messages(num_servers: int) -> float:
    """A server's in a minute: each request has a reply, and whoever asks is asked as often."""
    asked = min(ASKED, num_servers - 1)
    renewals = 60 / (ServerConfig(model=Path("model")).announce_period_s * (1 - PERIOD_JITTER / 2))
    puts = renewals * (1 + min(1, MAX_INDEXERS / num_servers))
    readings = 60 / (longest_pause_s(num_servers, PlacingConfig()) / 2)  # what these see serves the measurements too
    return 2 * 2 * (puts * (asked + min(REPLICAS, num_servers - 1)) + readings * NUM_KEYS * (asked + ASKED_FIRST))


@pytest.mark.parametrize(
    ("num_servers", "minutes", "server_kilobytes", "busiest_kilobytes", "client_kilobytes"),
    [
        (10, 10.0, 250, 300, 160),
        pytest.param(100, 2.0, 1000, 4000, 800, marks=pytest.mark.full),
    ],
)
def test_traffic_for_126_blocks_is_bounded(
    num_servers: int, minutes: float, server_kilobytes: float, busiest_kilobytes: float, client_kilobytes: float
) -> None:
    found = run_virtual(measure_traffic(num_servers, minutes=minutes))
    assert found.num_seen == num_servers
    assert found.server_mean.messages < 800
    assert 0 < found.server_mean.kilobytes < server_kilobytes
    assert found.server_worst.kilobytes < busiest_kilobytes
    assert found.active_client.messages < 400
    assert 0 < found.active_client.kilobytes < client_kilobytes
    assert found.idle_client.messages == 0
    assert found.most_under_a_key < 400


def test_a_short_window_holds_all_that_a_server_says_and_reads_by_its_share() -> None:
    """Of searches, renewals and readings."""
    found = run_virtual(measure_traffic(40, minutes=1.0))
    assert found.server_mean.messages == pytest.approx(expected_messages(40), rel=0.15)
