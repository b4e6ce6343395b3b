"""Whom `from_pretrained` joins: who is named, else who the environment names; nobody is built in."""

import pytest

from corolla import AutoDistributedModelForCausalLM
from corolla.client.auto import resolve_peers
from corolla.errors import BadInput


def test_without_peers_those_of_the_environment_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COROLLA_PEERS", "/a, /b /c,")
    assert resolve_peers(None) == ["/a", "/b", "/c"]
    assert resolve_peers(["/d", ""]) == ["/d"]
    assert resolve_peers("/d,/e") == ["/d", "/e"]


@pytest.mark.parametrize("peers", [None, [], ""])
@pytest.mark.parametrize("variable", [None, "", " , "])
def test_without_any_the_error_says_how_to_name_them(
    peers: list[str] | str | None, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COROLLA_PEERS", raising=False)
    if variable is not None:
        monkeypatch.setenv("COROLLA_PEERS", variable)
    with pytest.raises(BadInput, match=r"initial_peers=\['/ip4/.*environment variable COROLLA_PEERS"):
        AutoDistributedModelForCausalLM.from_pretrained("no such model", initial_peers=peers)
