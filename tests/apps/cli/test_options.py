"""Shared options: wrong values are named before anything starts."""

import click
import pytest

from corolla.apps.cli.options import BlockSpan, HostPort, join_option, require_peers
from corolla.errors import BadInput


@pytest.mark.parametrize("text", ["127.0.0.1:0", "example.org:31330", "[::1]:65535"])
def test_a_listening_address_stays_as_typed(text: str) -> None:
    assert HostPort().convert(text, None, None) == text


@pytest.mark.parametrize("text", ["127.0.0.1", ":80", "::1:80", "host:", "host:65536", "host:-1", "host:http"])
def test_what_is_no_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(click.UsageError, match="address"):
        HostPort().convert(text, None, None)


def test_a_span_is_half_open() -> None:
    assert BlockSpan().convert("10:20", None, None) == (10, 20)


@pytest.mark.parametrize("text", ["10", "10-20", "a:b", "-1:3", ":", "1:2:3"])
def test_what_is_no_span_is_refused_by_name(text: str) -> None:
    with pytest.raises(click.UsageError, match="is not A:B"):
        BlockSpan().convert(text, None, None)


def test_addresses_come_from_the_flags_else_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ...]] = []
    command = click.command()(join_option(lambda join: seen.append(require_peers(join))))
    monkeypatch.setenv("COROLLA_PEERS", "/a /b,/c")
    command.main([], standalone_mode=False)
    command.main(["--join", "/d", "--join", "/e"], standalone_mode=False)
    assert seen == [("/a", "/b", "/c"), ("/d", "/e")]


def test_no_address_at_all_says_how_to_give_one() -> None:
    with pytest.raises(BadInput, match=r"--join ADDR.*COROLLA_PEERS"):
        require_peers(())
