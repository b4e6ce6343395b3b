"""What announcing and reading cost is bounded, and somebody who asks nothing pays nothing."""

from pathlib import Path

import pytest

from corolla.apps.sim.traffic import measure_traffic, price_operations
from corolla.client.config import ClientConfig
from corolla.client.router import view_period_s
from corolla.net.memory.loop import run_virtual
from corolla.server.announcer import PERIOD_JITTER
from corolla.server.config import ServerConfig
from corolla.server.followers import LONGEST_PERIOD_S, PERIOD_PER_SERVER_S


@pytest.mark.parametrize(
    ("num_servers", "minutes", "server_kilobytes", "client_kilobytes"),
    [
        (10, 10.0, 120, 120),
        pytest.param(100, 1.0, 500, 1300, marks=pytest.mark.full),
    ],
)
def test_traffic_for_126_blocks_is_bounded(
    num_servers: int, minutes: float, server_kilobytes: float, client_kilobytes: float
) -> None:
    found = run_virtual(measure_traffic(num_servers, minutes=minutes))
    assert found.num_seen == num_servers
    assert found.server_mean.messages < 250
    assert 0 < found.server_mean.kilobytes < server_kilobytes
    assert found.active_client.messages < 250
    assert 0 < found.active_client.kilobytes < client_kilobytes
    assert found.idle_client.messages == 0
    assert found.most_under_a_key < 400


@pytest.mark.full
def test_a_minute_among_a_thousand_servers_is_bounded_for_everybody() -> None:
    """A whole such life takes minutes of CPU (`benchmarks/announcing.py`); what an operation costs, seconds."""
    num_servers = 1000
    found = run_virtual(price_operations(num_servers))
    assert found.num_seen == num_servers
    assert found.most_under_a_key < 400
    defaults = ServerConfig(model=Path("model"))
    announced_a_minute = 60 / (defaults.announce_period_s * (1 - PERIOD_JITTER))
    servers_read_a_minute = 60 / (0.75 * LONGEST_PERIOD_S)
    assert PERIOD_PER_SERVER_S * num_servers >= LONGEST_PERIOD_S
    clients_read_a_minute = 60 / view_period_s(num_servers, ClientConfig().refresh_period_s)
    server_messages = (
        found.announcing.messages * announced_a_minute + 2 * found.reading.messages * servers_read_a_minute
    )
    server_kb = found.announcing.kilobytes * announced_a_minute + 2 * found.reading.kilobytes * servers_read_a_minute
    assert 0 < server_messages < 100
    assert 0 < server_kb < 500
    assert 0 < found.reading.messages * clients_read_a_minute < 60
    assert 0 < found.reading.kilobytes * clients_read_a_minute < 4000
    assert found.busiest.messages * announced_a_minute < 3000
