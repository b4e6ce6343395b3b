"""Identities: stable over restarts, safe on disk, and readable by the network daemon."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.errors import BadInput
from corolla.ids import PeerId
from corolla.net.identity import (
    ephemeral,
    from_seed,
    load_or_create,
    peer_id_bytes,
    peer_id_from_bytes,
    public_key_of,
)


def test_the_same_file_gives_the_same_identity_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "identity"
    first = load_or_create(path)
    assert load_or_create(path) == first
    assert first != ephemeral()


def test_a_new_key_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / "identity"
    load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == ["identity"]


def test_racing_processes_end_up_with_one_identity(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    with ThreadPoolExecutor(8) as pool:
        assert len({identity.peer for identity in pool.map(load_or_create, [path] * 32)}) == 1


def test_a_key_file_open_to_others_is_refused_with_the_cure(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    load_or_create(path)
    path.chmod(0o640)
    with pytest.raises(BadInput, match=rf"{path}.*0640.*chmod 600"):
        load_or_create(path)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x08\x01\x12\x40" + bytes(64), bytes(68), bytes(10_000)])
def test_a_file_that_holds_no_key_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(BadInput, match=str(path)):
        load_or_create(path)
    assert path.read_bytes() == content


def test_a_directory_in_place_of_the_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=str(tmp_path)):
        load_or_create(tmp_path)


def test_an_impossible_path_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BadInput, match=str(tmp_path / "file")):
        load_or_create(tmp_path / "file" / "identity")


def test_the_peer_id_is_libp2ps_own() -> None:
    """From the libp2p peer-ids specification's Ed25519 test vector (private key, protobuf)."""
    spec_key = bytes.fromhex(
        "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
        "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    )
    identity = from_seed(spec_key[4:36])
    assert identity.key_file() == spec_key
    assert identity.peer.startswith("12D3KooW")
    assert peer_id_bytes(identity.peer) == bytes.fromhex(
        "0024080112201ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    )


@given(st.binary(min_size=32, max_size=32), st.binary(max_size=200))
def test_the_peer_id_alone_checks_a_signature(seed: bytes, message: bytes) -> None:
    identity = from_seed(seed)
    public_key_of(identity.peer).verify(identity.sign(message), message)


@given(st.binary(min_size=1, max_size=64))
def test_peer_ids_survive_the_way_to_bytes_and_back(raw: bytes) -> None:
    assert peer_id_bytes(peer_id_from_bytes(raw)) == raw


@pytest.mark.parametrize("text", ["", "0OIl", "Qm" + "a" * 44, "1" * 52, "a" * 10_000, "12D3KooW"])
def test_other_texts_are_no_ed25519_peer(text: str) -> None:
    with pytest.raises(ValueError):
        public_key_of(PeerId(text))


def test_a_printed_identity_shows_no_key() -> None:
    identity = from_seed(b"s" * 32)
    assert "ssss" not in repr(identity)
    assert identity.peer in repr(identity)
