"""What comes from a hub is what lies there, and no byte comes that is not needed, or twice."""

import threading
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from corolla.errors import BadInput, SwarmError
from corolla.models import checkpoint as checkpoint_module
from corolla.models.description import describe_model
from corolla.models.disk_cache import disk_bytes
from corolla.models.fingerprint import fingerprint
from corolla.models.loading import load_span
from corolla.models.local_half import load_local_half
from corolla.models.testing import ChainedHalf, load_chain
from corolla.models.testing_hub import Fault


def block_of(name):
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return numbers[0] if numbers else -1


def names_of(checkpoint, start, end):
    return [name for name in checkpoint.tensors if start <= block_of(name) < end]


def bytes_of(checkpoint, names):
    return sum(checkpoint.tensors[name].nbytes for name in names)


@pytest.fixture
def exact_headers(monkeypatch):
    """Only eight bytes of each shard before its header: as of a large model, where 64 KB are nothing."""
    monkeypatch.setattr(checkpoint_module, "FIRST_BYTES", 8)


def test_a_model_from_the_hub_writes_the_same_tokens_as_from_its_directory(tiny, open_here):
    prompt = torch.tensor([[5, 17, 99, 3, 42]])
    local, remote = (load_chain(checkpoint, [2, 3]) for checkpoint in (tiny("llama"), open_here()))
    expected = local.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(remote.generate(prompt, max_new_tokens=12, do_sample=False), expected)


def test_it_is_called_by_its_name_and_commit_and_has_the_directorys_fingerprint(tiny, hub, open_here):
    checkpoint = open_here()
    assert (checkpoint.name, checkpoint.commit) == ("someone/tiny", hub.commit_of("someone/tiny"))
    assert fingerprint(checkpoint) == fingerprint(tiny("llama"))
    assert tiny("llama").commit is None


def test_which_blocks_are_on_this_disk_is_known_before_a_download(open_here, exact_headers):
    checkpoint = open_here()
    before = describe_model(checkpoint)
    assert before.block_missing_bytes == before.block_download_bytes
    load_span(checkpoint, 1, 3)
    missing = describe_model(checkpoint).block_missing_bytes
    assert [block for block, lacks in enumerate(missing) if not lacks] == [1, 2]
    assert missing[0] == before.block_download_bytes[0]


@pytest.mark.parametrize(("start", "end"), [(0, 2), (1, 5), (5, 6)])
def test_a_span_downloads_the_bytes_of_its_tensors_and_no_others(start, end, hub, open_here, exact_headers):
    checkpoint = open_here()
    opened = hub.sent_bytes()
    load_span(checkpoint, start, end)
    assert hub.sent_bytes() - opened == bytes_of(checkpoint, names_of(checkpoint, start, end))
    assert opened == sum(
        info.start for info in checkpoint.tensors.values() if info.start == first_byte(checkpoint, info)
    )


def first_byte(checkpoint, info):
    return min(other.start for other in checkpoint.tensors.values() if other.file == info.file)


def test_a_client_downloads_no_blocks(hub, open_here, exact_headers):
    checkpoint = open_here()
    opened = hub.sent_bytes()
    which = fingerprint(checkpoint)
    assert len(which) == 32
    sampled = hub.sent_bytes() - opened
    assert sampled <= 16 * 4096
    load_local_half(checkpoint, ChainedHalf)
    total = hub.sent_bytes() - opened
    ends = bytes_of(checkpoint, names_of(checkpoint, -1, 0))
    assert ends <= total <= ends + sampled


def test_what_was_downloaded_once_is_not_downloaded_again(hub, open_here):
    load_span(open_here(), 1, 4)
    sent = hub.sent_bytes()
    load_span(open_here(), 2, 4)
    assert hub.sent_bytes() == sent
    assert hub.sent_bytes(".json") == sum(request.sent_bytes for request in first_by_path(hub, ".json"))


def first_by_path(hub, suffix):
    return {request.path: request for request in reversed(hub.requests) if request.path.endswith(suffix)}.values()


def test_a_cached_model_opens_without_its_hub(hub, open_here, impatient):
    commit = open_here().commit
    load_span(open_here(), 0, 2)
    hub.fault = lambda _request: Fault(status=503)
    load_span(open_here(), 0, 2)
    asked = len(hub.requests)
    load_span(open_here(revision=commit), 0, 2)
    assert len(hub.requests) == asked, "a commit never changes: nobody needs to be asked"
    with pytest.raises(SwarmError, match="answers 503"):
        load_span(open_here(), 4, 6)


def test_a_branch_is_looked_up_again(hub, open_here, tiny, tmp_path):
    before = open_here().commit
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in tiny("llama").directory.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    (moved / "generation_config.json").write_text("{}")
    hub.repositories["someone/tiny"] = moved
    after = open_here()
    assert after.commit != before
    assert (after.directory / "generation_config.json").read_text() == "{}"


def test_the_tokenizers_files_are_there_after_opening_and_code_is_not(tiny, hub, open_here, tmp_path, write_tokenizer):
    from transformers import AutoTokenizer

    model = tmp_path / "model"
    model.mkdir()
    for file in tiny("llama").directory.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    write_tokenizer(model)
    (model / "modeling.py").write_text("raise SystemExit")
    hub.repositories["someone/words"] = model
    directory = open_here("someone/words").directory
    assert AutoTokenizer.from_pretrained(directory)("w7 w9")["input_ids"] == [7, 9]
    assert not (directory / "modeling.py").exists()
    bare = open_here("someone/words", has_tokenizer=False, cache_dir=tmp_path / "other")
    assert not (bare.directory / "tokenizer.json").exists()


# --- broken connections


def breaking(num_requests, most_bytes):
    """Break off the first requests for weights after some bytes."""
    left = [num_requests]

    def fault(request):
        if "/resolve/" in request.path or not request.path.endswith(".safetensors") or not left[0]:
            return None
        left[0] -= 1
        return Fault(most_bytes=most_bytes)

    return fault


def test_a_connection_that_breaks_off_is_taken_up_where_it_broke(tiny, hub, open_here, exact_headers):
    checkpoint = open_here()
    opened = hub.sent_bytes()
    hub.fault = breaking(9, most_bytes=20_000)
    span = load_span(checkpoint, 0, 6)
    assert hub.sent_bytes() - opened == bytes_of(checkpoint, names_of(checkpoint, 0, 6))
    for mine, other in zip(span.blocks, load_span(tiny("llama"), 0, 6).blocks, strict=True):
        assert all(torch.equal(mine.state_dict()[name], tensor) for name, tensor in other.state_dict().items())


def test_a_download_that_was_given_up_goes_on_later_without_reading_anything_twice(
    hub, open_here, impatient, exact_headers
):
    checkpoint = open_here(hub=replace(impatient, connections=1))  # several would have bytes on the way
    opened, breaks = hub.sent_bytes(), breaking(6, most_bytes=20_000)
    hub.fault = lambda request: breaks(request) or (Fault(status=500) if hub.sent_bytes() - opened > 60_000 else None)
    with pytest.raises(SwarmError, match="answers 500; tried 3 times"):
        load_span(checkpoint, 0, 6)
    assert hub.sent_bytes() - opened > 60_000
    hub.fault = lambda _request: None
    again = open_here()
    load_span(again, 0, 6)
    assert hub.sent_bytes() - opened == bytes_of(again, names_of(again, 0, 6))


def test_a_user_who_has_enough_ends_the_download_and_keeps_what_came(hub, open_here, exact_headers):
    class Enough(Exception):
        pass

    def give_up(transfer):
        if is_loading and transfer.done_bytes > 60_000:
            raise Enough

    is_loading = False
    checkpoint = open_here(progress=give_up)
    opened, is_loading = hub.sent_bytes(), True
    hub.fault = lambda _request: Fault(before=lambda: time.sleep(0.05))
    with pytest.raises(Enough):
        load_span(checkpoint, 0, 6)
    hub.fault = lambda _request: None
    load_span(open_here(), 0, 6)
    # a connection that was cut on our side had bytes on the way, which the hub counts as sent
    on_the_way = 3 * 50_000
    assert hub.sent_bytes() - opened <= bytes_of(checkpoint, names_of(checkpoint, 0, 6)) + on_the_way


def test_progress_is_told_in_bytes_and_seconds_up_to_the_end(open_here, exact_headers):
    told = []
    checkpoint = open_here(progress=told.append)
    told.clear()
    load_span(checkpoint, 0, 6)
    total = bytes_of(checkpoint, names_of(checkpoint, 0, 6))
    assert told[-1].done_bytes == told[-1].total_bytes == total
    assert all(earlier.done_bytes <= later.done_bytes for earlier, later in pairwise(told))
    assert str(told[-1]).startswith(f"someone/tiny: {total / 1e6:.1f} of {total / 1e6:.1f} MB, 0 s")


# --- several at once


def test_two_that_start_at_once_download_everything_once(hub, open_here, exact_headers):
    """Two threads stand for two processes: the locks are of open files, not of processes."""
    expected = bytes_of(checkpoint := open_here(), names_of(checkpoint, 1, 4))
    opened = hub.sent_bytes()
    hub.fault = lambda _request: Fault(before=lambda: time.sleep(0.02))
    waiting, failures = [], []

    def load():
        try:
            load_held(open_here(progress=lambda transfer: waiting.append(transfer.waiting)), 1, 4)
        except Exception as failure:  # noqa: BLE001 - told below
            failures.append(failure)

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert failures == []
    assert hub.sent_bytes() - opened == expected
    assert "another process downloads the same" in waiting


def load_held(checkpoint, start, end):
    with checkpoint.hold(names_of(checkpoint, start, end)):
        pass


def test_several_pieces_come_at_once(hub, open_here, exact_headers):
    checkpoint = open_here()
    running, most = [0], [0]
    gate = threading.Lock()

    def enter():
        with gate:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.05)
        with gate:
            running[0] -= 1

    hub.fault = lambda request: Fault(before=enter) if "/resolve/" in request.path else None
    load_held(checkpoint, 0, 6)
    assert most[0] == 3  # as many connections as the config says


# --- what the hub may do and say


@pytest.mark.parametrize(
    "headers",
    [
        {"Retry-After": "1"},
        pytest.param({"RateLimit": '"api";r=0;t=1'}, marks=pytest.mark.slow),
    ],
)
def test_a_hub_that_asks_to_wait_is_waited_for(headers, hub, open_here):
    refused = []

    def busy_once(request):
        if refused:
            return None
        refused.append(request)
        return Fault(status=429, headers=headers)

    hub.fault = busy_once
    told = []
    began = time.monotonic()
    assert open_here(progress=told.append).num_blocks == 6
    assert time.monotonic() - began >= 1
    assert any("answers 429; again in" in transfer.waiting for transfer in told)


def test_a_hub_that_asks_to_wait_for_an_hour_is_not(hub, open_here):
    hub.fault = lambda _request: Fault(status=429, headers={"Retry-After": "3600"})
    began = time.monotonic()
    with pytest.raises(SwarmError, match=r"asks to wait 3600 s; corolla waits 120 s at most") as refusal:
        open_here()
    assert time.monotonic() - began < 60
    assert refusal.value.exit_code == 1


@pytest.mark.parametrize("status", [500, 503])
def test_a_hub_that_stumbles_is_asked_again(status, hub, open_here):
    left = [2]

    def stumble(_request):
        left[0] -= 1
        return Fault(status=status) if left[0] >= 0 else None

    hub.fault = stumble
    assert open_here().num_blocks == 6


def test_a_hub_that_is_not_there_is_named_after_a_few_tries(hub, open_here, impatient, cache):
    nobody = replace(impatient, endpoint="http://127.0.0.1:9")
    with pytest.raises(SwarmError, match=r"http://127.0.0.1:9 does not answer \(.*refused.*\); tried 3 times"):
        open_here(hub=nobody)


def test_the_token_is_for_the_hub_and_never_for_whom_it_sends_us_to(hub, open_here, monkeypatch):
    hub.gated.add("someone/tiny")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    load_span(open_here(), 0, 1)
    by_cdn = [request for request in hub.requests if request.path.startswith("/someone/tiny/model")]
    at_hub = [request for request in hub.requests if request not in by_cdn]
    assert len(by_cdn) > 5
    assert not [request for request in by_cdn if "resolve" not in request.path and "authorization" in request.headers]
    assert all(request.headers["authorization"] == f"Bearer {hub.token}" for request in at_hub)


def test_a_gated_repository_is_refused_with_its_page_and_opened_with_the_token(hub, open_here, cache):
    hub.gated.add("someone/tiny")
    with pytest.raises(BadInput, match=f"someone/tiny is gated: ask for access at {hub.endpoint}/someone/tiny") as no:
        open_here(token="hf_wrong")
    assert "\n" not in str(no.value)
    assert no.value.exit_code == 2
    assert open_here(token=hub.token).num_blocks == 6


# --- the cap


def test_a_cap_lets_go_of_what_was_used_before_and_refuses_what_can_never_fit(hub, open_here, tmp_path, exact_headers):
    first = open_here(max_disk_bytes=520_000)
    load_held(first, 0, 2)
    assert disk_bytes(tmp_path / "cache" / "hub") < 520_000
    load_held(first, 3, 5)
    assert disk_bytes(tmp_path / "cache" / "hub") < 520_000
    sent = hub.sent_bytes()
    load_held(first, 3, 5)
    assert hub.sent_bytes() == sent
    load_held(first, 0, 2)
    assert hub.sent_bytes() > sent
    with pytest.raises(BadInput, match=r"someone/tiny needs 0\.\d MB in .*, which may hold 0\.5 MB at most"):
        load_held(open_here(max_disk_bytes=520_000, cache_dir=tmp_path / "other"), 0, 6)
