"""A GGUF model is converted once, loses nothing of what it holds, and gives the tokens that transformers gives."""

import os
import shutil
import struct
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from corolla.errors import BadInput
from corolla.models.checkpoint import open_checkpoint
from corolla.models.gguf import find_gguf
from corolla.models.gguf_header import check_gguf
from corolla.models.hub import HubConfig
from corolla.models.source import open_source
from corolla.models.testing import load_chain
from corolla.models.testing_hub import LocalHub, run_local_hub

PROMPT = torch.tensor([[5, 17, 33]])


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with run_local_hub() as running:
        yield running


def tokens_of(checkpoint):
    chain = load_chain(checkpoint, [1], dtype=torch.float32)
    return chain.generate(PROMPT, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)


@pytest.mark.slow
def test_directory_hub_and_gguf_give_the_tokens_that_transformers_gives(tmp_path, hub):
    gguf, said = tmp_path / "tiny.gguf", []
    write_tiny_gguf(gguf)
    options = {"cache_dir": tmp_path / "cache", "say": said.append, "hub": HubConfig(endpoint=hub.endpoint)}
    converted = open_source(gguf, **options)
    assert (converted.name, converted.config["dtype"]) == ("tiny", "float32")
    assert "quantization_config" not in converted.config
    hub.repositories["someone/tiny"] = converted.directory
    sources = [converted, open_checkpoint(converted.directory), open_source("someone/tiny", **options)]
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    expected = whole.generate(PROMPT, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert [tokens_of(checkpoint).tolist() for checkpoint in sources] == [expected.tolist()] * 3
    words = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")('!"#')["input_ids"]
    assert AutoTokenizer.from_pretrained(converted.directory)('!"#')["input_ids"] == words
    assert open_source(tmp_path, **options).directory == converted.directory  # the directory that holds the file
    assert len(said) == 1, "converted once"


@pytest.mark.slow
def test_packed_weights_become_bfloat16(tmp_path):
    from gguf import GGMLQuantizationType

    write_tiny_gguf(tmp_path / "tiny.gguf", kind=GGMLQuantizationType.Q8_0)
    checkpoint = open_source(tmp_path / "tiny.gguf", cache_dir=tmp_path / "cache")
    assert {info.dtype for info in checkpoint.tensors.values()} == {"BF16"}


@pytest.mark.slow
def test_a_gguf_file_that_lacks_a_tensor_is_refused_and_nothing_stays(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf", without=("blk.1.ffn_up.weight",))
    with pytest.raises(BadInput, match=r"tiny.gguf could not be converted: .*lacks 1 .*up_proj") as refusal:
        open_source(tmp_path / "tiny.gguf", cache_dir=tmp_path / "cache")
    assert "\n" not in str(refusal.value)
    assert not list((tmp_path / "cache" / "gguf").glob("*/"))


def test_garbage_that_begins_like_gguf_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF a very small model")
    with pytest.raises(BadInput, match=r"tiny\.gguf: says version \d+, known are 2 and 3; .*damaged, or not GGUF$"):
        open_source(tmp_path / "tiny.gguf", cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache" / "gguf").glob("*/"))


def test_a_gguf_file_cut_anywhere_in_its_text_is_refused_in_one_sentence(tmp_path):
    write_tiny_gguf(tmp_path / "whole.gguf")
    check_gguf(tmp_path / "whole.gguf")
    content = (tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in {*range(4, 4000, 97), *range(4, 64)}:
        cut.write_bytes(content[:length])
        with pytest.raises(
            BadInput, match=rf"cut\.gguf: has {length} bytes, [^\n]+ should lie beyond; the file is truncated$"
        ):
            open_source(cut, cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("gguf/*"))


@pytest.mark.slow
def test_a_gguf_file_cut_in_its_tensors_is_refused_and_nothing_stays(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    with (tmp_path / "tiny.gguf").open("r+b") as file:
        file.truncate((tmp_path / "tiny.gguf").stat().st_size - 100)
    with pytest.raises(BadInput, match=r"^tiny\.gguf could not be converted: [^\n]*truncated or damaged[^\n]*$"):
        open_source(tmp_path / "tiny.gguf", cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache" / "gguf").glob("*/"))


FIELD = struct.pack("<IQQ", 3, 0, 1)
"""What comes before the one field of a file; or before the one tensor."""
TENSOR = struct.pack("<IQQ", 3, 1, 0)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (struct.pack("<IQQ", 3, 0, 1 << 60), f"field 1 of {1 << 60} should lie beyond"),
        (FIELD + struct.pack("<Q", (1 << 64) - 1), "field 1 of 1 should lie beyond"),
        (FIELD + struct.pack("<Q1sIIQ", 1, b"a", 9, 0, 1 << 60), "field 1 of 1 should lie beyond"),
        (FIELD + struct.pack("<Q1sI", 1, b"a", 77), "field 1 of 1 is of the unknown type 77"),
        (struct.pack("<IQQ", 9, 0, 1), "says version 9, known are 2 and 3; the file is damaged, or not GGUF"),
        (TENSOR + struct.pack("<Q1sI", 1, b"a", 1 << 31), "says 2147483648 dimensions, at most 4"),
        (TENSOR + struct.pack("<Q1sIQIQ", 1, b"a", 1, 4, 0, 1 << 50), "the last tensor should lie beyond"),
    ],
)
def test_a_gguf_file_whose_numbers_lie_is_refused_at_once(text, sentence, tmp_path):
    (tmp_path / "lies.gguf").write_bytes(b"GGUF" + text)
    with pytest.raises(BadInput, match=rf"lies\.gguf: [^\n]*{sentence}[^\n]*$"):
        open_source(tmp_path / "lies.gguf", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (struct.pack(">IQQ", 3, 0, 0), "is a big-endian GGUF file, and only little-endian ones are read"),
        (FIELD + struct.pack("<Q1sIIQIQ", 1, b"a", 9, 9, 1, 4, 0), "field 1 of 1 is an array of arrays"),
    ],
)
def test_a_gguf_file_of_a_kind_that_is_not_read_is_refused_without_calling_it_damaged(text, sentence, tmp_path):
    (tmp_path / "strange.gguf").write_bytes(b"GGUF" + text)
    with pytest.raises(BadInput, match=rf"strange\.gguf: {sentence}") as refusal:
        open_source(tmp_path / "strange.gguf", cache_dir=tmp_path / "cache")
    assert "damaged" not in str(refusal.value)


def test_what_is_no_gguf_file_is_refused_whatever_its_name_says(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"not this")
    with pytest.raises(BadInput, match=r"model\.gguf: is not a GGUF file, whatever its name says"):
        open_source(tmp_path / "model.gguf", cache_dir=tmp_path / "cache")


def test_of_several_files_in_a_directory_one_must_be_named(tmp_path):
    for number in range(3):
        (tmp_path / f"model-{number}.gguf").write_bytes(b"GGUF")
    with pytest.raises(BadInput, match=r"holds 3 GGUF files \(model-0.gguf, model-1.gguf, model-2.gguf\); name one"):
        open_source(tmp_path, cache_dir=tmp_path / "cache")


def test_a_model_directory_stays_one_though_a_gguf_file_lies_in_it(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert find_gguf(tmp_path) == tmp_path / "model.gguf"
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf(tmp_path) is None
    assert find_gguf(tmp_path / "config.json") is None
    assert find_gguf(tmp_path / "nowhere") is None
    shutil.copy(tmp_path / "model.gguf", tmp_path / "odd-name")
    assert find_gguf(tmp_path / "odd-name") == tmp_path / "odd-name"


def test_a_changed_file_is_another_model(tmp_path):
    from corolla.models.gguf import key_of

    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(5_000_000))
    first = key_of(file)
    assert key_of(file) == first
    os.utime(file, (1, 1))
    assert key_of(file) != first, "somebody wrote to it"
    second = key_of(file)
    file.write_bytes(b"GGUF" + bytes(4_999_999) + b"x")
    os.utime(file, (1, 1))
    assert key_of(file) != second


def write_tiny_gguf(path, *, without=(), kind=None):
    """A llama of two blocks, hidden size 32; byte-level tokens. `kind`: of the matrices."""
    import gguf
    import numpy as np

    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    tokens = [f"<{i}>" for i in range(3)] + [chr(33 + i) for i in range(60)] + ['!"']
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * 61)
    writer.add_token_merges(['! "'])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {"token_embd.weight": (64, 32), "output_norm.weight": (32,), "output.weight": (64, 32)}
    of_block = {
        "attn_norm": (32,), "ffn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32),
        "attn_output": (32, 32), "ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64),
    }  # fmt: skip
    shapes |= {f"blk.{block}.{name}.weight": shape for block in (0, 1) for name, shape in of_block.items()}
    for name, shape in shapes.items():
        matrix = rng.standard_normal(shape).astype(np.float32)
        if name in without:
            continue
        if kind is None or len(shape) == 1:
            writer.add_tensor(name, matrix)
        else:
            writer.add_tensor(name, gguf.quants.quantize(matrix, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
