"""What a hub or its repository does wrong is one sentence, and nothing half stays in the cache."""

import contextlib
import errno
import json
import os
import shutil
import struct
from collections import namedtuple
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from corolla.errors import BadInput, SwarmError
from corolla.models import cached_file, download
from corolla.models.hub import HubConfig, is_repository_name
from corolla.models.loading import load_span
from corolla.models.source import open_source
from corolla.models.testing_hub import Fault, run_local_hub

pytestmark = pytest.mark.slow

CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "architectures": ["LlamaForCausalLM"]}


def sentence(refusal):
    text = str(refusal.value)
    assert "\n" not in text
    assert "Traceback" not in text
    assert refusal.value.exit_code == 2
    return text


def leftovers(cache):
    """Files of repositories in the cache that are not whole and right: none may be mistaken for a good one."""
    return [
        path
        for path in cache.glob("hub/*--*/*/*")
        if path.is_file() and not path.name.startswith(".") and path.suffix != ".safetensors"
        if not (path.parent / ".held" / path.name).exists()
    ]


def of_weights(request):
    return "resolve" not in request.path and request.path.endswith(".safetensors")


@pytest.fixture
def copied(hub, tiny, tmp_path):
    """A copy of the model on the hub, to be damaged."""
    hub.repositories["someone/tiny"] = Path(shutil.copytree(tiny("llama").directory, tmp_path / "copy"))
    return hub.repositories["someone/tiny"]


# --- names


@pytest.mark.parametrize(
    "name",
    ["../etc/passwd", "a/../b", "..", "a/..", "a..b/c", "a/b/c", "a--b/c", "/", "a/", "/a", "a b/c", "a/b\n", ""],
)
def test_a_name_that_is_none_is_never_sent_to_a_hub(name, hub, open_here):
    assert not is_repository_name(name)
    with pytest.raises(BadInput):
        open_here(name)
    assert hub.requests == []


def test_a_word_alone_is_a_directory_and_the_sentence_says_how_a_repository_is_written(open_here, hub):
    with pytest.raises(
        BadInput, match="nowhere: no such model directory, and a hub's repository is written OWNER/NAME"
    ):
        open_here("nowhere")
    assert hub.requests == []


def test_a_revision_of_a_directory_means_nothing(tiny, open_here):
    with pytest.raises(BadInput, match=r"a revision \(v2\) means something for a hub's OWNER/NAME only"):
        open_here(tiny("llama").directory, revision="v2")


def test_a_repository_or_revision_that_is_not_there_is_named(hub, open_here):
    with pytest.raises(BadInput, match=f"{hub.endpoint}/some/thing: no such repository, or a private one") as refusal:
        open_here("some/thing")
    sentence(refusal)
    with pytest.raises(BadInput, match=f"{hub.endpoint}/someone/tiny: has no revision 'v9'"):
        open_here(revision="v9")


# --- repositories


def make_encoder(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))


def make_encoder_decoder(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"is_encoder_decoder": True}))


def make_pickled(model):
    for file in model.glob("*.safetensors*"):
        file.unlink()
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04never opened")


def make_gguf(model):
    for file in model.iterdir():
        file.unlink()
    (model / "tiny.Q4_0.gguf").write_bytes(b"GGUF")


def drop_a_shard(model):
    (model / "model-00003-of-00005.safetensors").unlink()


def climb_out(model):
    index = model / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = "../../secret.safetensors"
    index.write_text(json.dumps(content))


def cut_a_shard(model):
    with (model / "model-00002-of-00005.safetensors").open("r+b") as file:
        file.truncate(100_000)


def claim_a_gigabyte(model):
    with (model / "model-00002-of-00005.safetensors").open("r+b") as file:
        file.write(struct.pack("<Q", 1 << 30))


@pytest.mark.parametrize(
    ("damage", "says", "asks_for_weights"),
    [
        (make_encoder, "BertForMaskedLM is not a decoder", False),
        (make_encoder_decoder, "llama is an encoder-decoder", False),
        (make_pickled, "pytorch_model.bin: pickled weights can run code and are never opened", False),
        (make_gguf, r"holds GGUF files only; download one \(tiny.Q4_0.gguf\)", False),
        (drop_a_shard, "model-00003-of-00005.safetensors: missing shard", False),
        (climb_out, "'../../secret.safetensors', which is not a file of this directory", False),
        (cut_a_shard, "model-00002-of-00005.safetensors: has 100000 bytes, .* the file is truncated", True),
        (claim_a_gigabyte, "its header claims 1073741824 bytes, the format allows 100000000", True),
    ],
)
def test_a_repository_that_is_no_model_for_us_is_refused_before_more_is_downloaded(
    damage, says, asks_for_weights, hub, copied, open_here, cache
):
    damage(copied)
    with pytest.raises(BadInput, match=says) as refusal:
        open_here()
    sentence(refusal)
    assert any(map(of_weights, hub.requests)) == asks_for_weights
    assert not [request for request in hub.requests if request.file.endswith((".bin", ".gguf"))]
    assert not leftovers(cache)


def test_tensors_of_another_shape_than_the_config_says_are_refused_before_they_are_downloaded(hub, copied, open_here):
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"intermediate_size": 112}))
    checkpoint = open_here()
    sent = hub.sent_bytes()
    with pytest.raises(BadInput, match=r"by config.json it should be \[64, 112\]|should be \[112, 64\]") as refusal:
        load_span(checkpoint, 0, 2)
    sentence(refusal)
    assert hub.sent_bytes() == sent


# --- a hub that lies


def longer(content):
    return content + b"more"


def shorter(content):
    return content[:-3]


def other(content):
    return bytes(byte ^ 1 for byte in content)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            Fault(headers={"Content-Range": "bytes 7-9/1000"}),
            "asked for 'bytes .*' of .*, it answered 'bytes 7-9/1000'",
        ),
        (Fault(content=longer), r"asked for \d+ bytes of model-0000.*, it would send \d+"),
        (Fault(content=shorter), r"asked for \d+ bytes of model-0000.*, it would send \d+"),
        (Fault(content=longer, headers={"Transfer-Encoding": "chunked"}), "sends more bytes of model-0000.* than were"),
        (Fault(headers={"Content-Length": "999999999"}), r"asked for \d+ bytes .*, it would send 999999999"),
        (Fault(ignores_range=True), "does not serve parts of model-0000"),
        (Fault(status=416), r"lacks a file, or a part of one, that its own list has \(416\)"),
        (Fault(status=404), r"lacks a file, or a part of one, that its own list has \(404\)"),
        (Fault(status=403), r"the hub refuses access \(403\)"),
    ],
)
def test_an_answer_about_other_bytes_than_those_asked_for_is_refused(fault, says, hub, open_here, cache):
    checkpoint = open_here()
    hub.fault = lambda request: fault if of_weights(request) else None
    with pytest.raises(BadInput, match=says) as refusal:
        load_span(checkpoint, 1, 4)
    sentence(refusal)
    hub.fault = lambda _request: None
    load_span(checkpoint, 1, 4)  # nothing wrong has stayed


def test_a_hub_that_never_gets_further_is_given_up(hub, open_here):
    checkpoint = open_here()
    hub.fault = lambda request: Fault(most_bytes=0) if of_weights(request) else None
    with pytest.raises(SwarmError, match=r"does not answer \(.*\); tried 3 times"):
        load_span(checkpoint, 1, 4)


def test_bytes_with_another_checksum_are_refused_and_removed(hub, open_here, cache):
    checkpoint = open_here()
    hub.fault = lambda request: Fault(content=other) if of_weights(request) else None
    with (
        pytest.raises(BadInput, match=f"is not what {hub.endpoint} promises by its checksum; removed") as refusal,
        checkpoint.hold(checkpoint.tensors),
    ):
        pass
    assert not Path(sentence(refusal).partition(": ")[0]).exists()
    hub.fault = lambda _request: None
    with checkpoint.hold(checkpoint.tensors):
        pass


def test_a_small_file_with_another_checksum_is_refused_and_removed(hub, open_here, cache):
    hub.fault = lambda request: (
        Fault(content=lambda text: text.replace(b"6", b"7")) if request.file == "config.json" else None
    )
    with pytest.raises(BadInput, match=r"config.json: is not what .* promises") as refusal:
        open_here()
    sentence(refusal)
    assert not list(cache.glob("hub/*/*/config.json"))


def test_an_answer_that_makes_no_sense_is_said(hub, open_here):
    hub.fault = lambda _request: Fault(content=lambda _content: b"[]")
    with pytest.raises(SwarmError, match="its answer about someone/tiny makes no sense"):
        open_here()


# --- the disk

Usage = namedtuple("Usage", "total used free")


def test_what_cannot_fit_on_the_disk_is_refused_before_it_is_downloaded(hub, open_here, monkeypatch):
    checkpoint = open_here()
    sent = hub.sent_bytes()
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _path: Usage(10**9, 10**9, 1000))
    with pytest.raises(
        BadInput, match=r"someone/tiny needs 0\.\d MB more on the disk of .*, which has 0\.0 MB free"
    ) as refusal:
        load_span(checkpoint, 0, 6)
    sentence(refusal)
    assert hub.sent_bytes() == sent


def full_after(num_bytes):
    """A `pwrite` of a disk with so much room."""
    left, pwrite = [num_bytes], os.pwrite

    def write(descriptor, content, start):
        left[0] -= len(content)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, content, start)

    return write


def test_a_disk_that_fills_up_in_mid_download_is_said_and_nothing_half_stays(hub, open_here, cache, monkeypatch):
    checkpoint = open_here()
    with monkeypatch.context() as patch:
        patch.setattr(cached_file.os, "pwrite", full_after(150_000))
        with pytest.raises(BadInput, match=r"someone/tiny needs .* MB more on the disk of") as refusal:
            load_span(checkpoint, 0, 6)
    sentence(refusal)
    # A file that was whole by then stays, and is checked when it is next used; which ones, is the threads' race.
    for file in checkpoint.directory.glob("*.safetensors"):
        assert cached_file.CachedFile(file, file.stat().st_size).is_whole()
    load_span(checkpoint, 0, 6)


def test_a_disk_that_is_found_full_when_room_is_taken_costs_no_download(hub, open_here, cache, monkeypatch):
    checkpoint = open_here()
    sent = hub.sent_bytes()

    def refuse(_descriptor, _start, _length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cached_file.os, "posix_fallocate", refuse)
    with pytest.raises(BadInput, match="MB more on the disk of"):
        load_span(checkpoint, 0, 6)
    assert hub.sent_bytes() == sent


def test_a_disk_that_is_full_from_the_start_is_said_and_nothing_half_stays(open_here, cache, monkeypatch):
    def refuse(path, _content):
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(BadInput, match="cannot be used: No space left on device") as refusal:
        open_here()
    sentence(refusal)
    assert not [path for path in (cache / "hub").rglob("*") if path.is_file()]


def test_a_cache_that_cannot_be_written_is_named(hub, open_here, tmp_path):
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(BadInput, match=f"{tmp_path}/file.*: cannot be used: Not a directory") as refusal:
        open_here(cache_dir=tmp_path / "file")
    sentence(refusal)


# --- anything


@pytest.fixture(scope="module")
def any_hub(tmp_path_factory):
    """A hub whose one repository is written anew for each example."""
    with run_local_hub() as running:
        yield running, tmp_path_factory.mktemp("any")


GOOD = {
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "U8", "shape": [8], "data_offsets": [16, 24]},
}
EDITS = st.lists(st.tuples(st.integers(0, 200), st.binary(min_size=1, max_size=3)), max_size=4)
FIELD = st.tuples(
    st.sampled_from(["a", "b", "__metadata__"]),
    st.sampled_from(["dtype", "shape", "data_offsets", None]),
    st.one_of(st.none(), st.lists(st.integers(-1, 1 << 70), max_size=3), st.sampled_from(["F4", "BF16", "X", 3, {}])),
)
SHARDS = st.sampled_from(["x.safetensors", "y.safetensors", "../x.safetensors", "/etc/passwd", "", 5, [], None])


@pytest.mark.full
@hypothesis_settings(max_examples=200)
@given(
    fields=st.lists(FIELD, max_size=2),
    edits=EDITS,
    weight_map=st.dictionaries(st.sampled_from(["a", "b", "c"]), SHARDS, max_size=3),
    index_edits=EDITS,
)
def test_any_change_of_header_and_index_is_harmless_or_refused(any_hub, fields, edits, weight_map, index_edits):
    open_changed(any_hub, fields, edits, weight_map, index_edits)


def open_changed(any_hub, fields, edits, weight_map, index_edits):
    """Open a repository of one good shard with changes in its header and its index, then hold all its tensors."""
    hub, scratch = any_hub
    model, cache = scratch / "model", scratch / "cache"
    for directory in (model, cache):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "x.safetensors").write_bytes(changed(shard_with(fields), edits))
    index = {"weight_map": {"a": "x.safetensors", "b": "x.safetensors"} | weight_map}
    (model / "model.safetensors.index.json").write_bytes(changed(json.dumps(index).encode(), index_edits))
    hub.repositories["any/thing"] = model
    with contextlib.suppress(BadInput):
        check_tensors(open_source("any/thing", cache_dir=cache, hub=HubConfig(endpoint=hub.endpoint)), model)


def check_tensors(checkpoint, model):
    """All are where the header says, and hold what the hub has there."""
    with checkpoint.hold(checkpoint.tensors):
        for info in checkpoint.tensors.values():
            right = (model / info.file.name).read_bytes()
            assert 8 < info.start <= info.end <= len(right)
            assert info.file.read_bytes()[info.start : info.end] == right[info.start : info.end]


def shard_with(fields):
    header = json.loads(json.dumps(GOOD))
    for name, field, value in fields:
        if field is None:
            header[name] = value
        elif isinstance(header.get(name), dict):
            header[name][field] = value
    body = json.dumps(header).encode()
    return struct.pack("<Q", len(body)) + body + bytes(range(24))


def changed(content, edits):
    for place, put in edits:
        content = content[: place % len(content)] + put + content[place % len(content) + len(put) :]
    return content
