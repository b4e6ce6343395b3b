"""The line by which programs learn that a peer answers requests, and where."""

import json

import pytest

from corolla.apps.cli.ready import ready_line, say_ready
from corolla.ids import PeerId

PEER = PeerId("12D3KooWpeer")
ADDRESSES = ["/ip4/10.0.0.1/tcp/31330/p2p/12D3KooWpeer", "/ip4/127.0.0.1/tcp/31330/p2p/12D3KooWpeer"]


def test_a_server_says_its_id_its_half_open_span_and_the_first_of_its_addresses() -> None:
    said = ready_line(PEER, (10, 20), ADDRESSES, as_json=False)
    assert said == f"ready peer={PEER} blocks=10:20 addr={ADDRESSES[0]}"


def test_a_peer_without_a_model_says_no_blocks() -> None:
    assert ready_line(PEER, None, ADDRESSES, as_json=False) == f"ready peer={PEER} addr={ADDRESSES[0]}"


@pytest.mark.parametrize(("blocks", "span"), [((0, 4), "0:4"), (None, None)])
def test_as_json_it_is_one_object_with_these_three(blocks: tuple[int, int] | None, span: str | None) -> None:
    said = json.loads(ready_line(PEER, blocks, ADDRESSES, as_json=True))
    assert said == {"peer": PEER, "blocks": span, "addr": ADDRESSES[0]}


def test_it_is_one_line_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    say_ready(PEER, (0, 4), ADDRESSES, as_json=False)
    said = capsys.readouterr()
    assert said.out == ready_line(PEER, (0, 4), ADDRESSES, as_json=False) + "\n"
    assert said.err == ""
