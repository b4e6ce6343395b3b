"""A device that this machine does not have is refused by name, with what there is instead. No GPU is touched here."""

import sys

import pytest
import torch

from corolla.errors import BadInput
from corolla.server.device import check_device, free_memory_bytes


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Makes torch see so many CUDA GPUs, of a build with CUDA or without, or Apple's."""

    def see(*, gpus: int = 0, cuda: str | None = None, mps: bool = False) -> None:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return see


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:1", "mps", "cpu"])
def test_what_is_there_is_taken(device: str, machine) -> None:
    machine(gpus=2, cuda="13.0", mps=True)
    check_device(device)


def test_the_cpu_is_there_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it fails
    check_device("cpu")


def test_a_cpu_build_of_torch_is_told_from_a_machine_without_a_gpu(machine) -> None:
    machine()
    with pytest.raises(BadInput, match=r"--device cuda: the installed torch is a CPU build \(README"):
        check_device("cuda")
    machine(cuda="13.0")
    with pytest.raises(BadInput, match="--device cuda:1: torch sees no GPU"):
        check_device("cuda:1")


def test_an_index_beyond_the_last_gpu_is_refused_with_those_that_there_are(machine) -> None:
    machine(gpus=2, cuda="13.0")
    with pytest.raises(BadInput, match="--device cuda:2: this machine has GPUs 0 to 1"):
        check_device("cuda:2")


def test_mps_is_refused_where_torch_has_none(machine) -> None:
    machine(gpus=1, cuda="13.0")
    with pytest.raises(BadInput, match="--device mps: this machine has no Apple GPU"):
        check_device("mps")


def test_free_memory_is_the_gpus_own_and_the_machines_for_cpu_and_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (asked.append(device), (7, 80))[1])
    assert free_memory_bytes("cuda:1") == 7
    assert asked == [torch.device("cuda:1")]
    assert free_memory_bytes("cpu") > 1 << 20
    assert free_memory_bytes("mps") > 1 << 20
    assert len(asked) == 1
