"""Swarm keys: strict files, proofs that mean one thing, and nothing secret in any text."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.errors import BadInput
from corolla.net.swarm_key import SwarmKey, find_prover, load_keys, new_key, parse_key, prove

FIRST, SECOND = SwarmKey(b"1" * 32), SwarmKey(b"2" * 32)


def write(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_key_survives_its_file(tmp_path: Path) -> None:
    keys = [new_key() for _ in range(3)]
    paths = [write(tmp_path / str(number), key.line().encode() + b"\n") for number, key in enumerate(keys)]
    assert load_keys(paths) == tuple(keys)
    assert len(set(keys)) == 3


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o777])
def test_a_file_open_to_others_is_refused_with_the_cure(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "key", new_key().line().encode(), mode)
    with pytest.raises(BadInput, match=rf"{path}.*chmod 600"):
        load_keys([path])


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xff\xfe\x00secret", id="binary"),
        pytest.param(FIRST.line().encode()[:-1], id="a digit short"),
        pytest.param(FIRST.line().upper().encode(), id="upper case"),
        pytest.param(FIRST.line().encode() + b"0", id="a digit more"),
        pytest.param(f"{FIRST.line()}\n{SECOND.line()}\n".encode(), id="two keys"),
        pytest.param(b"corolla-swarm-key-2:" + b"31" * 32, id="another version"),
        pytest.param(b"31" * 32, id="no head"),
        pytest.param(b"x" * 1_000_000, id="a megabyte"),
    ],
)
def test_what_is_no_key_is_refused_by_file_and_never_quoted(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path / "key", content)
    with pytest.raises(BadInput, match=str(path)) as refused:
        load_keys([path])
    assert "3131" not in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_missing_file_and_a_directory_are_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(BadInput, match=str(path)):
            load_keys([path])


def test_a_printed_key_shows_nothing() -> None:
    assert "1111" not in repr(FIRST)
    assert "1111" not in f"{[FIRST]} {FIRST}"


def test_any_key_is_accepted_and_a_strangers_is_not() -> None:
    proof = prove(SECOND, b"domain", b"a", b"b")
    assert find_prover([FIRST, SECOND], proof, b"domain", b"a", b"b") == SECOND
    assert find_prover([FIRST], proof, b"domain", b"a", b"b") is None
    assert find_prover([], proof, b"domain", b"a", b"b") is None
    assert find_prover([SECOND], b"", b"domain", b"a", b"b") is None


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_a_proof_over_some_fields_is_none_over_others(said: list[bytes], meant: list[bytes]) -> None:
    proof = prove(FIRST, b"domain", *said)
    assert (find_prover([FIRST], proof, b"domain", *meant) is not None) == (said == meant)


def test_a_key_copied_with_spaces_around_is_still_the_key() -> None:
    assert parse_key(f"  {FIRST.line()}\r\n") == FIRST
