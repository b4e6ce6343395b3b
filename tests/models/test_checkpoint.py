"""A checkpoint is described exactly or refused in one sentence that names the file; it is never half believed."""

import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors import safe_open

from corolla.errors import BadInput
from corolla.models.checkpoint import MAX_HEADER_BYTES, open_checkpoint

CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "architectures": ["LlamaForCausalLM"]}
ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def shard(header, data=b"\0" * 16, length=None):
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(body) if length is None else length) + body + data


def write(directory, config=CONFIG, **files):
    if config is not None:
        (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name, content in files.items():
        path = directory / {"single": "model.safetensors", "index": "model.safetensors.index.json"}.get(name, name)
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return directory


def test_every_tensor_lies_where_safetensors_itself_finds_it(tiny):
    checkpoint = tiny("mixtral")
    assert len({info.file for info in checkpoint.tensors.values()}) > 1
    seen = set()
    for file in {info.file for info in checkpoint.tensors.values()}:
        with safe_open(file, "pt") as opened:
            for name in list(opened.keys()):
                info, tensor = checkpoint.tensors[name], opened.get_tensor(name)
                raw = file.read_bytes()[info.start : info.end]
                assert (info.file, info.shape) == (file, tuple(tensor.shape))
                assert raw == tensor.numpy().tobytes()
                seen.add(name)
    assert seen == set(checkpoint.tensors)


def test_the_config_is_read_whatever_the_family_calls_things(tiny):
    assert (tiny("gpt2").num_blocks, tiny("gpt2").max_positions) == (6, 256)
    assert (tiny("bloom").num_blocks, tiny("bloom").max_positions) == (6, None)
    assert (tiny("llama").num_blocks, tiny("llama").max_positions) == (6, 256)
    assert tiny("llama").name == tiny("llama").directory.name


def test_a_nested_text_config_counts(tmp_path):
    nested = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 7, "max_position_embeddings": 99}}
    checkpoint = open_checkpoint(write(tmp_path, nested, single=shard({"a": ENTRY})))
    assert (checkpoint.num_blocks, checkpoint.max_positions) == (7, 99)


def test_infinity_is_read_as_transformers_writes_it(tmp_path):
    config = {**CONFIG, "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    assert open_checkpoint(write(tmp_path, config, single=shard({"a": ENTRY}))).config["time_step_limit"] == [
        0,
        math.inf,
    ]


BAD_CONFIGS = {
    "not json": ("{", "config.json: is not valid JSON"),
    "not an object": ("[1]", "config.json: holds no JSON object"),
    "no family": ({"num_hidden_layers": 2}, "config.json: has no model_type"),
    "no blocks": ({"model_type": "llama"}, "config.json: does not say how many blocks"),
    "blocks without end": ({"model_type": "llama", "num_hidden_layers": 10**9}, "more than 10000 cannot be announced"),
    "zero blocks": ({"model_type": "llama", "num_hidden_layers": 0}, "does not say how many blocks"),
    "encoder-decoder": (
        {"model_type": "t5", "is_encoder_decoder": True, "num_layers": 6},
        "t5 is an encoder-decoder",
    ),
    "encoder": (
        {"model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": 2},
        "BertForMaskedLM is not a decoder",
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_bad_config_is_refused(case, tmp_path):
    config, says = BAD_CONFIGS[case]
    with pytest.raises(BadInput, match=says):
        open_checkpoint(write(tmp_path, config, single=shard({"a": ENTRY})))


def index(**weight_map):
    return {"weight_map": weight_map}


BAD_FILES = {
    "no weights": ({}, "model.safetensors: missing"),
    "pickle only": ({"pytorch_model.bin": b"\x80"}, r"pytorch_model.bin: pickled weights .* never opened"),
    "sharded pickle": ({"pytorch_model.bin.index.json": b"{}"}, "pickled weights"),
    "missing shard": ({"index": index(a="x.safetensors")}, "x.safetensors: missing shard"),
    "shard elsewhere": ({"index": index(a="../x.safetensors")}, "not a file of this directory"),
    "shard is no name": ({"index": {"weight_map": {"a": 3}}}, "names 3"),
    "shard is a list": ({"index": {"weight_map": {"a": ["x.safetensors"]}}}, "not a file of this directory"),
    "no weight map": ({"index": {}}, "has no weight_map"),
    "index lies": (
        {"index": index(b="x.safetensors"), "x.safetensors": shard({"a": ENTRY})},
        "x.safetensors: lacks the tensor 'b'",
    ),
    "empty": ({"single": b""}, "too few .* truncated"),
    "header cut off": ({"single": shard({"a": ENTRY}, b"")[:20]}, "truncated"),
    "gigabyte header": ({"single": shard(b"{}", length=MAX_HEADER_BYTES + 1)}, "the format allows"),
    "pointer of Git LFS": (
        {"single": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"},
        "a pointer of Git LFS, the weights were not downloaded: run `git lfs pull`",
    ),
    "a page in place of the file": ({"single": b"<!DOCTYPE html>" * 50}, "damaged, or not safetensors"),
    "header not json": ({"single": shard(b"\xff\xfe")}, "model.safetensors: is not valid JSON"),
    "data cut off": ({"single": shard({"a": ENTRY}, b"\0" * 15)}, "'a' should end at byte .* truncated"),
    "offset beyond": ({"single": shard({"a": {**ENTRY, "data_offsets": [8, 24]}})}, "truncated"),
    "overlap": (
        {"single": shard({"a": ENTRY, "b": {**ENTRY, "data_offsets": [8, 24]}}, b"\0" * 24)},
        "'a' and 'b' overlap",
    ),
    "backwards": ({"single": shard({"a": {**ENTRY, "data_offsets": [16, 0]}})}, "its range has -16 bytes"),
    "negative": ({"single": shard({"a": {**ENTRY, "data_offsets": [-16, 0]}})}, "malformed"),
    "wrong bytes": ({"single": shard({"a": {**ENTRY, "shape": [2, 3]}})}, r"F32 \[2, 3\], but its range has 16"),
    "unknown dtype": ({"single": shard({"a": {**ENTRY, "dtype": "F128"}})}, "malformed"),
    "no shape": ({"single": shard({"a": {"dtype": "F32", "data_offsets": [0, 16]}})}, "malformed"),
    "entry no object": ({"single": shard({"a": 5})}, "'a' is malformed"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_weights_are_refused(case, tmp_path):
    files, says = BAD_FILES[case]
    with pytest.raises(BadInput, match=says) as refusal:
        open_checkpoint(write(tmp_path, **files))
    assert str(tmp_path) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert refusal.value.exit_code == 2


def test_a_directory_that_is_not_there_or_not_one_is_refused(tmp_path):
    with pytest.raises(BadInput, match="nowhere: no such model directory"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(BadInput, match="is a file, not a model directory"):
        open_checkpoint(tmp_path / "model.gguf")
    with pytest.raises(BadInput, match=r"config.json: no config.json"):
        open_checkpoint(tmp_path)


HEADERS = st.dictionaries(
    st.sampled_from(["a", "b", "__metadata__"]),
    st.one_of(
        st.none(),
        st.fixed_dictionaries(
            {},
            optional={
                "dtype": st.sampled_from(["F32", "U8", "F4", "X", 3]),
                "shape": st.lists(st.integers(-1, 1 << 70), max_size=3),
                "data_offsets": st.lists(st.integers(-1, 1 << 70), max_size=3),
            },
        ),
    ),
)


@hypothesis_settings(max_examples=150)
@given(header=HEADERS, data=st.binary(max_size=40))
def test_any_header_is_right_or_refused(tmp_path_factory, header, data):
    directory = write(tmp_path_factory.mktemp("any"), single=shard(header, data))
    try:
        checkpoint = open_checkpoint(directory)
    except BadInput:
        return
    size = (directory / "model.safetensors").stat().st_size
    assert all(0 < info.start <= info.end <= size for info in checkpoint.tensors.values())


WEIGHT_MAPS = st.dictionaries(
    st.sampled_from(["a", "b"]),
    st.sampled_from(["x.safetensors", "y.safetensors", "../x.safetensors", "/etc/passwd", "", ".", 5, [], {}, None]),
)


@hypothesis_settings(max_examples=150)
@given(weight_map=st.one_of(WEIGHT_MAPS, st.none(), st.just([])), header=HEADERS)
def test_any_index_is_right_or_refused(tmp_path_factory, weight_map, header):
    files = {"index": {"weight_map": weight_map}, "x.safetensors": shard(header, b"\0" * 32)}
    directory = write(tmp_path_factory.mktemp("any"), **files)
    try:
        checkpoint = open_checkpoint(directory)
    except BadInput:
        return
    assert {name: info.file.name for name, info in checkpoint.tensors.items()} == weight_map
    assert set(weight_map) <= set(header)


@hypothesis_settings(max_examples=150)
@given(content=st.binary(max_size=200))
def test_any_bytes_are_refused_without_another_error(tmp_path_factory, content):
    with pytest.raises(BadInput):
        open_checkpoint(write(tmp_path_factory.mktemp("bytes"), single=content, index=content))
