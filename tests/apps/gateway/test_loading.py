"""A gateway's models come from a hub as a server's do: it says how far it is, and leaving ends the download."""

import logging
import threading
from pathlib import Path

import pytest
from huggingface_hub import constants

from corolla.apps.gateway.serving import GatewayOptions, load_while_wanted
from corolla.errors import SwarmError
from corolla.models import transfer
from corolla.models.source_options import SourceOptions
from corolla.models.testing_hub import LocalHub, run_local_hub
from corolla.net.libp2p.addresses import parse_host_port


@pytest.fixture
def hub(tiny_bytes, monkeypatch):
    with run_local_hub() as running:
        running.repositories["someone/bytes"] = tiny_bytes
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, running.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)  # as HF_ENDPOINT sets both at import
        monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)
        yield running


def options(cache: Path) -> GatewayOptions:
    return GatewayOptions(["someone/bytes"], parse_host_port("127.0.0.1:0"), SourceOptions(cache_dir=cache))


def test_a_download_is_told_in_bytes_and_seconds(hub: LocalHub, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(transfer, "_TELL_AFTER_S", -1.0)  # said when somebody would wonder, after seconds
    with caplog.at_level(logging.INFO, logger="corolla"):
        models = load_while_wanted(options(tmp_path / "cache"), threading.Event())
    assert list(models) == ["someone/bytes"]
    assert hub.sent_bytes() > 0
    assert [line for line in caplog.messages if line.startswith("someone/bytes: ") and " MB, " in line]


def test_leaving_ends_a_download(hub: LocalHub, tmp_path):
    is_left = threading.Event()
    is_left.set()
    with pytest.raises(SwarmError, match="left before the download was done"):
        load_while_wanted(options(tmp_path / "cache"), is_left)
