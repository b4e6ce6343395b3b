"""What a client does not need is not imported; who needs it later finds it."""

import ctypes
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from corolla.models.frugal import give_back_freed, give_back_library_pages

LATER = """
import sys
from corolla.models.frugal import import_modeling
import_modeling()
import corolla.client.model
assert "scipy.optimize" not in sys.modules, "scipy came along"
import numpy, transformers.utils
from transformers.loss import loss_for_object_detection as losses
assert losses.is_scipy_available is transformers.utils.is_scipy_available
assert transformers.utils.is_scipy_available()
rows, columns = losses.linear_sum_assignment(numpy.array([[1.0, 0.0], [0.0, 1.0]]))
assert list(columns) == [1, 0], columns
"""


NO_COMPILER = """
import sys, torch
from corolla.models.frugal import import_modeling
import_modeling()
import corolla.client.model, corolla.server.hosting
import transformers.models.llama.modeling_llama
from torch.utils._python_dispatch import TorchDispatchMode
class Mode(TorchDispatchMode):  # which torch tells its compiler to leave alone
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
with Mode():
    assert torch.ones(2).sum() == 2
assert not hasattr(sys.modules["torch._dynamo"], "__file__"), "the compiler came along"
assert "sympy" not in sys.modules and "torch.distributed.tensor" not in sys.modules
"""

AS_ALWAYS = (
    NO_COMPILER
    + """
from transformers.integrations import finegrained_fp8, deepgemm
from transformers.masking_utils import TransformGetItemToIndex
from transformers.generation.continuous_batching.cache import PagedAttentionCache
%s
import torch._dynamo
assert torch._dynamo.__file__ and sys.modules["torch._dynamo"] is torch._dynamo
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
from torch._dynamo import trace_rules
assert id(finegrained_fp8._load_finegrained_fp8_kernel) in trace_rules._allowed_callable_ids, "not told"
assert any(getattr(each, "_dynamo_marked_constant", False) for each in vars(deepgemm).values())
assert not any(type(finder).__module__.startswith("corolla") for finder in sys.meta_path)
with Mode():
    assert torch.ones(2).sum() == 2
values = torch.arange(3)
with TransformGetItemToIndex():
    rows = torch.vmap(lambda at: values[at])(torch.tensor([2, 0]))
assert rows.tolist() == [2, 0]
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(NO_COMPILER, id="left-out"),
        pytest.param(AS_ALWAYS % "torch.compile(lambda x: x, backend='eager')(torch.ones(2))", id="who-compiles"),
        pytest.param(AS_ALWAYS % "from torch._dynamo.exc import Unsupported", id="who-imports-a-part"),
        pytest.param(AS_ALWAYS % "import torch._dynamo.config as config; config.verbose", id="who-sets-it"),
        pytest.param(AS_ALWAYS % "import corolla.models.recording as r; r.symbols()", id="who-records"),
    ],
)
def test_torchs_compiler_is_imported_by_what_needs_it_and_not_before(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr


TRAINS = """
from corolla.models.frugal import import_modeling
import_modeling()
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
texts = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
arguments = TrainingArguments(output_dir=sys.argv[1], max_steps=2, report_to=[], use_cpu=True)
done = Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), arguments, train_dataset=texts).train()
assert done.global_step == 2 and 0 < done.training_loss < 10
"""


@pytest.mark.slow
def test_who_trains_in_the_same_process_finds_all_it_needs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRAINS, str(tmp_path)], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr


SHARDS = """
import os, sys
os.environ["WORLD_SIZE"] = "2"
from corolla.models.frugal import import_modeling
import_modeling()
from transformers.distributed import tensor_parallel
assert "torch.distributed.tensor" in sys.modules and tensor_parallel.DTensor
"""


@pytest.mark.slow
def test_a_process_that_torchrun_started_can_shard() -> None:
    done = subprocess.run([sys.executable, "-c", SHARDS], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_scipy_is_imported_by_what_needs_it_and_not_before() -> None:
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's allocator is what keeps it")
def test_freed_memory_below_what_is_in_use_goes_back_to_the_system() -> None:
    pieces = [bytes(1000) for _ in range(100_000)]
    in_use = pieces[::1000]  # between the others, so that the allocator keeps what is freed around them
    del pieces
    freed_from = psutil.Process().memory_info().rss
    give_back_freed()
    given_back = freed_from - psutil.Process().memory_info().rss
    assert given_back > 50_000_000, f"{given_back} of 100,000,000 bytes were given back"
    assert all(piece == bytes(1000) for piece in in_use)


def resident_kb_of(library: str) -> int:
    """Kilobytes of a library's code in this process's memory."""
    is_it, resident_kb = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[0].isdigit() or line[0] in "abcdef":
            is_it = library in line and " r-xp " in line
        elif is_it and line.startswith("Rss:"):
            resident_kb += int(line.split()[1])
    return resident_kb


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_code_that_only_the_import_touched_leaves_memory_and_what_is_called_comes_back() -> None:
    numbers = torch.linspace(0, 1, 4096).reshape(64, 64)
    expected = numbers @ numbers
    before = resident_kb_of("libtorch_cpu")
    give_back_library_pages()
    after = resident_kb_of("libtorch_cpu")
    assert after < before / 2, f"{before} kB of torch's code were in memory, {after} kB still are"
    assert torch.equal(numbers @ numbers, expected)
