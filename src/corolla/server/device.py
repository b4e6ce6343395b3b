"""Whether the wanted device is there, and how much memory it has left."""

import os

from corolla.errors import BadInput


def check_device(device: str) -> None:
    """Raises BadInput when this machine does not have it. `cpu` needs no look, and no import of torch."""
    if device == "cpu":
        return
    import torch

    if device == "mps":
        if not torch.backends.mps.is_available():
            raise BadInput("--device mps: this machine has no Apple GPU that torch can use")
        return
    index = int(device.partition(":")[2] or 0)
    if not torch.cuda.is_available():
        built = "torch sees no GPU" if torch.version.cuda else "the installed torch is a CPU build (README: with CUDA)"
        raise BadInput(f"--device {device}: {built}")
    if index >= torch.cuda.device_count():
        raise BadInput(f"--device {device}: this machine has GPUs 0 to {torch.cuda.device_count() - 1}")


def free_memory_bytes(device: str) -> int:
    """Bytes that the device can still give: of the machine's memory for `cpu` and `mps`."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    return _available_memory()


def _available_memory() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:  # counts what caches would give back; sysconf does not
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # not Linux: half of all there is
