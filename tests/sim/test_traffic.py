"""What announcing and reading cost is bounded, and somebody who asks nothing pays nothing."""

import pytest

from corolla.apps.sim.traffic import measure_traffic
from corolla.net.memory.loop import run_virtual


@pytest.mark.parametrize(
    ("num_servers", "minutes", "server_kilobytes", "client_kilobytes"),
    [
        (10, 10.0, 120, 120),
        pytest.param(100, 3.0, 500, 1300, marks=pytest.mark.slow),
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
