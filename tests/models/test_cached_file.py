"""What the journal of a cached file says is true, whatever happened to it."""

import os

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from corolla.models.cached_file import CachedFile, Writer
from corolla.models.disk_cache import disk_bytes, journal_of

SIZE = 100_000


@pytest.fixture
def file(tmp_path):
    return CachedFile(tmp_path / "model.safetensors", SIZE)


def put(file, start, content):
    with Writer(file) as writer:
        writer.write(start, content)
        writer.record(start, start + len(content))


def test_it_holds_what_was_recorded_and_takes_no_room_for_the_rest(file):
    assert file.held() == []
    put(file, 50_000, b"x" * 10)
    put(file, 50_010, b"y" * 10)
    put(file, 7, b"z")
    assert file.held() == [(7, 8), (50_000, 50_020)]
    assert file.path.stat().st_size == SIZE
    assert file.path.read_bytes()[50_000:50_020] == b"x" * 10 + b"y" * 10
    assert disk_bytes(file.path) < SIZE


def test_what_was_written_but_not_recorded_is_not_held(file):
    with Writer(file) as writer:
        writer.write(0, b"x" * 10)
    assert file.held() == []


def test_it_is_whole_when_every_byte_is_there_and_checked_when_somebody_looked(file):
    put(file, 0, b"x" * (SIZE - 1))
    assert not file.is_whole()
    put(file, SIZE - 1, b"x")
    assert file.is_whole()
    assert not file.is_checked()
    file.mark_checked()
    assert file.is_checked()
    assert file.held() == [(0, SIZE)]


@pytest.mark.parametrize("loss", ["data", "journal", "size"])
def test_a_file_that_lost_something_holds_nothing_and_can_be_filled_anew(file, loss):
    put(file, 0, b"x" * SIZE)
    if loss == "data":
        file.path.unlink()
    elif loss == "journal":
        journal_of(file.path).unlink()
    else:
        os.truncate(file.path, SIZE // 2)
    assert file.held() == []
    put(file, 5, b"y")
    assert file.held() == [(5, 6)]


def test_a_line_that_a_crash_cut_off_counts_for_nothing(file):
    put(file, 0, b"x" * 20)
    put(file, 500, b"x" * 20)
    journal = journal_of(file.path)
    os.truncate(journal, journal.stat().st_size - 2)
    assert file.held() == [(0, 20)]


def test_removing_it_leaves_nothing(file, tmp_path):
    put(file, 0, b"x")
    file.remove()
    file.remove()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_room_is_taken_before_bytes_come(file):
    with Writer(file) as writer:
        writer.reserve([(10_000, 60_000)])
        assert 50_000 <= disk_bytes(file.path) < SIZE
    assert file.held() == []


@hypothesis_settings(max_examples=100)
@given(
    content=st.one_of(st.text(max_size=60), st.from_regex(r"(\d{1,6} \d{1,6}\n|checked\n|x\n){0,5}", fullmatch=True))
)
def test_any_journal_gives_ranges_within_the_file(tmp_path_factory, content):
    file = CachedFile(tmp_path_factory.mktemp("any") / "f", SIZE)
    put(file, 0, b"x")
    journal_of(file.path).write_text(content)
    held = file.held()
    assert all(0 <= start < end <= SIZE for start, end in held)
    assert held == sorted(held)
