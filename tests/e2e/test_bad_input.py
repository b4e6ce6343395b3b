"""What cannot work gets one sentence, the right exit code and no traceback; and nothing is announced."""

import json
import logging
import re
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from hashlib import sha256
from pathlib import Path

import pytest

from corolla.apps.bench.setup import ONE_THREAD
from corolla.apps.cli import main as frame
from corolla.apps.processes import Processes
from corolla.apps.warm import WarmStart
from corolla.client.config import ClientConfig
from corolla.client.connection import Connection
from corolla.models.checkpoint import open_checkpoint
from corolla.models.fingerprint import fingerprint
from corolla.models.testing import write_tiny
from corolla.net.libp2p.config import NetworkConfig
from corolla.swarm.announcement import MODELS_KEY

pytestmark = pytest.mark.slow

Corolla = Callable[..., subprocess.CompletedProcess[str]]
Running = Callable[..., AbstractContextManager[subprocess.Popen[str]]]

BAD_INPUT, NO_PEERS, REFUSED = 2, 3, 6
CACHE_TOKENS = 64
START_TIMEOUT_S = 180.0
NOBODY = "12D3KooWBmAwcd4PJNJvfV89HwE48nwkRmAgo8Vy3uQEyNNHBox2"


def error_of(done: subprocess.CompletedProcess[str], exit_code: int) -> str:
    """The one sentence that a failed command said."""
    assert done.returncode == exit_code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.startswith("Error: ")] == lines[-1:], done.stderr
    return lines[-1]


@pytest.fixture
def corolla_here(capsys: pytest.CaptureFixture[str]) -> Iterator[Corolla]:
    """The same command line in this process, which has imported torch already: most of a client's start."""
    handlers = logging.root.handlers[:]

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        words = [str(argument) for argument in arguments]
        exit_code = frame.run(words)
        return subprocess.CompletedProcess(words, exit_code, *capsys.readouterr())

    yield run
    logging.root.handlers[:] = handlers  # the command's own writes to what capsys is about to close


@pytest.fixture(scope="module")
def bootstrap(warm: WarmStart) -> Iterator[str]:
    with Processes(ONE_THREAD, popen=warm.popen) as processes:
        yield processes.start("the bootstrap peer", "bootstrap").wait_ready(time.monotonic() + START_TIMEOUT_S).addr


@pytest.fixture(scope="module")
def announced(bootstrap: str) -> Iterator[Callable[[], int]]:
    """How many servers the bootstrap peer has heard of: each puts a record under this key."""
    connection = Connection(NetworkConfig(is_client=True), ClientConfig(), [bootstrap])
    yield lambda: len(connection.run(connection.swarm.transport.records.get(MODELS_KEY)))
    connection.close()


@pytest.fixture(scope="module")
def served(tiny: Path, warm: WarmStart) -> Iterator[str]:
    """A server of all of tiny's blocks, with room for 64 tokens."""
    with Processes(ONE_THREAD, popen=warm.popen) as processes:
        server = processes.start("the server", "serve", str(tiny), "--cache-tokens", str(CACHE_TOKENS))
        yield server.wait_ready(time.monotonic() + START_TIMEOUT_S).addr


# --- models


def no_directory(model: Path) -> Path:
    shutil.rmtree(model)
    return model


def a_file(model: Path) -> Path:
    shutil.rmtree(model)
    model.write_bytes(b"weights")
    return model


def no_config(model: Path) -> Path:
    (model / "config.json").unlink()
    return model / "config.json"


def garbled_config(model: Path) -> Path:
    (model / "config.json").write_text('{"model_type": "llama"')
    return model / "config.json"


def encoder(model: Path) -> Path:
    return change_config(model, model_type="bert", architectures=["BertForMaskedLM"])


def encoder_decoder(model: Path) -> Path:
    return change_config(model, model_type="t5", architectures=["T5ForConditionalGeneration"], is_encoder_decoder=True)


def unknown_family(model: Path) -> Path:
    return change_config(model, model_type="nonesuch", architectures=["NonesuchForCausalLM"])


def change_config(model: Path, **changes: object) -> Path:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return file


def only_pickles(model: Path) -> Path:
    for file in model.glob("*.safetensors*"):
        file.unlink()
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04never opened")
    return model / "pytorch_model.bin"


def no_weights(model: Path) -> Path:
    for file in model.glob("*.safetensors*"):
        file.unlink()
    return model / "model.safetensors"


def missing_shard(model: Path) -> Path:
    (model / "model-00003-of-00005.safetensors").unlink()
    return model / "model-00003-of-00005.safetensors"


def truncated_shard(model: Path) -> Path:
    file = model / "model-00002-of-00005.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return file


def shard_cut_in_its_header(model: Path) -> Path:
    file = model / "model-00002-of-00005.safetensors"
    file.write_bytes(file.read_bytes()[:40])
    return file


@pytest.mark.parametrize(
    "spoil",
    [
        no_directory, a_file, no_config, garbled_config, encoder, encoder_decoder, unknown_family, only_pickles,
        no_weights, missing_shard, truncated_shard, shard_cut_in_its_header,
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_served_is_one_sentence_naming_the_file(
    corolla: Corolla,
    tiny: Path,
    bootstrap: str,
    announced: Callable[[], int],
    tmp_path: Path,
    spoil: Callable[[Path], Path],
) -> None:
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    file = spoil(model)
    assert f"{file}:" in error_of(corolla("serve", model, "--join", bootstrap), BAD_INPUT)
    assert announced() == 0


def test_a_client_names_the_damaged_file_as_well(
    corolla_here: Corolla, tiny: Path, served: str, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    file = missing_shard(model)
    assert f"{file}:" in error_of(corolla_here("generate", model, "w9", "--join", served), BAD_INPUT)


@pytest.mark.parametrize("blocks", ["0:7", "6:9", "3:3", "5:2"])
def test_a_span_that_the_model_has_not_is_answered_with_the_valid_ranges(
    corolla: Corolla, tiny: Path, bootstrap: str, announced: Callable[[], int], blocks: str
) -> None:
    said = error_of(corolla("serve", tiny, "--blocks", blocks, "--join", bootstrap), BAD_INPUT)
    assert f"{blocks} is not a span" in said
    assert "blocks 0:6" in said
    assert announced() == 0


def test_a_cut_between_blocks_that_share_keys_is_answered_with_the_possible_cuts(
    corolla: Corolla, tmp_path: Path, bootstrap: str, announced: Callable[[], int]
) -> None:
    """Blocks 3 to 5 use what block 2 has cached: they stay on its server."""
    model = write_tiny(tmp_path / "shares", "gemma3n_text", num_kv_shared_layers=2)
    said = error_of(corolla("serve", model, "--blocks", "0:5", "--join", bootstrap), BAD_INPUT)
    assert "cannot be cut at 5: block 5 uses what block 2 keeps; it can be cut at: 1, 2" in said
    assert announced() == 0


@pytest.mark.parametrize("blocks", ["3", "a:b", "-1:3", "1:2:3"])
def test_what_is_no_span_at_all_is_answered_with_how_one_is_written(corolla: Corolla, tiny: Path, blocks: str) -> None:
    assert "A:B" in error_of(corolla("serve", tiny, f"--blocks={blocks}"), BAD_INPUT)


# --- peers and sessions


@pytest.fixture(scope="module", autouse=True)
def lonely(running: Running, tiny: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Commands that look for a peer which is not there; they take their whole window, beside the other tests."""
    address = f"/ip4/127.0.0.1/tcp/{closed_port()}/p2p/{NOBODY}"
    with ExitStack() as stack:
        commands = {"serve": ["serve", tiny], "generate": ["generate", tiny, "w9"], "status": ["status"]}
        yield {name: stack.enter_context(running(*command, "--join", address)) for name, command in commands.items()}


def closed_port() -> int:
    """Bound and never listened on: nobody answers there, and nobody else gets it."""
    KEPT_BOUND.bind(("127.0.0.1", 0))
    return int(KEPT_BOUND.getsockname()[1])


KEPT_BOUND = socket.socket()


def test_other_weights_under_the_same_name_are_refused_with_both_fingerprints(
    corolla: Corolla, tiny: Path, served: str, tmp_path: Path, write_tokenizer: Callable[[Path], None]
) -> None:
    tuned = write_tiny(tmp_path / tiny.name, "llama", seed=1)
    write_tokenizer(tuned)
    said = error_of(corolla("generate", tuned, "w9 w10", "--max-new-tokens", "5", "--join", served), REFUSED)
    assert fingerprint(open_checkpoint(tuned)) in said
    assert fingerprint(open_checkpoint(tiny)) in said
    assert f"a model named {tiny.name}" in said


def test_a_prompt_longer_than_the_server_allows_is_answered_with_the_two_numbers(
    corolla_here: Corolla, tiny: Path, served: str
) -> None:
    prompt = " ".join(["w9"] * 70)
    said = error_of(corolla_here("generate", tiny, prompt, "--raw", "--max-new-tokens", "5", "--join", served), REFUSED)
    assert re.search(r"\b75\b", said)
    assert re.search(rf"\b{CACHE_TOKENS}\b", said)


def test_a_prompt_longer_than_the_model_allows_is_answered_with_the_two_numbers(
    corolla_here: Corolla, tiny: Path, served: str
) -> None:
    prompt = " ".join(["w9"] * 300)
    said = error_of(
        corolla_here("generate", tiny, prompt, "--raw", "--max-new-tokens", "5", "--join", served), BAD_INPUT
    )
    assert "305 tokens" in said
    assert "256 positions" in said


@pytest.mark.parametrize(("name", "window_s"), [("serve", 30), ("generate", 15), ("status", 15)])
def test_when_no_peer_answers_the_addresses_tried_and_the_time_are_said(
    lonely: dict[str, subprocess.Popen[str]], name: str, window_s: int
) -> None:
    process = lonely[name]
    out, err = process.communicate(timeout=80)
    said = error_of(subprocess.CompletedProcess(process.args, process.returncode, out, err), NO_PEERS)
    assert f"/p2p/{NOBODY} within {window_s} s" in said


@pytest.mark.parametrize("command", ["serve", "status", "bootstrap"])
def test_an_address_that_is_none_is_quoted(corolla: Corolla, tiny: Path, command: str) -> None:
    arguments = [tiny] if command == "serve" else []
    assert "'example.org:80'" in error_of(corolla(command, *arguments, "--join", "example.org:80"), BAD_INPUT)


@pytest.mark.parametrize("command", ["generate", "chat", "status"])
def test_without_any_address_it_is_said_how_to_give_one(corolla: Corolla, tiny: Path, command: str) -> None:
    arguments = {"generate": [tiny, "w9"], "chat": [tiny]}.get(command, [])
    said = error_of(corolla(command, *arguments, COROLLA_PEERS=""), BAD_INPUT)
    assert "--join" in said
    assert "COROLLA_PEERS" in said


# --- the machine


def test_a_port_in_use_is_named(corolla: Corolla, tiny: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        endpoint = f"127.0.0.1:{holder.getsockname()[1]}"
        said = error_of(corolla("serve", tiny, "--listen", endpoint), BAD_INPUT)
    assert f"cannot listen on {endpoint}" in said
    assert "in use" in said


def garbage(key: Path) -> None:
    key.write_bytes(b"not a key")
    key.chmod(0o600)


def open_to_others(key: Path) -> None:
    key.write_bytes(b"x" * 68)
    key.chmod(0o644)


def a_directory(key: Path) -> None:
    key.mkdir()


def below_a_file(key: Path) -> None:
    key.parent.rmdir()
    key.parent.write_bytes(b"")


@pytest.mark.parametrize("make", [garbage, open_to_others, a_directory, below_a_file])
def test_an_identity_file_that_cannot_be_used_is_named(
    corolla: Corolla, tiny: Path, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    key = tmp_path / "keys" / "key"
    key.parent.mkdir()
    make(key)
    assert str(key) in error_of(corolla("serve", tiny, "--identity", key), BAD_INPUT)


SMALL_DISK = """
import resource, sys
from pathlib import Path
from corolla.apps.cli.main import run
from corolla.apps.demo import demo, smollm

wheel, digest, most_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
demo.SMOLLM2 = smollm.ModelWheel("Tiny", "tiny==1", digest, "tiny/tiny.gguf", 1000, 1000)
resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
sys.exit(run(["demo", "--wheel", wheel]))
"""
"""The demo with a small model, on a disk that takes no file above a size: a full one, as far as a program can tell."""


def test_a_disk_that_fills_up_while_the_demo_converts_is_said_and_nothing_stays(
    running: Running, tmp_path: Path
) -> None:
    gguf, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    write_packed_gguf(gguf)
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "tiny/tiny.gguf")
    most_bytes = 2 * gguf.stat().st_size  # the packed model fits, the unpacked one does not
    script = [sys.executable, "-c", SMALL_DISK, str(wheel), sha256(wheel.read_bytes()).hexdigest(), str(most_bytes)]
    with running(["env", f"XDG_CACHE_HOME={cache}", *script]) as demo:
        out, err = demo.communicate(timeout=100)
    said = error_of(subprocess.CompletedProcess(script, demo.returncode, out, err), 1)
    assert "tiny.gguf could not be converted" in said
    assert "too large" in said
    assert not list((cache / "corolla" / "models").glob("*/*"))


def write_packed_gguf(path: Path) -> None:
    """A llama of one block with weights of 4.5 bits, 1 MB that become 3.6 MB."""
    import gguf
    import numpy as np

    size, num_tokens = 512, 128
    q4, rng = gguf.GGMLQuantizationType.Q4_0, np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(size)
    writer.add_feed_forward_length(size)
    writer.add_head_count(8)
    writer.add_head_count_kv(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(num_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([chr(256 + i) for i in range(num_tokens - 1)] + [chr(256) + chr(257)])
    writer.add_token_types([1] * num_tokens)
    writer.add_token_merges([f"{chr(256)} {chr(257)}"])
    names = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    shapes = {f"blk.0.{name}.weight": (size, size) for name in names}
    for name, shape in (
        {"token_embd.weight": (num_tokens, size), "output.weight": (num_tokens, size)} | shapes
    ).items():
        values = rng.standard_normal(shape).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, q4), raw_dtype=q4)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(size, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
