"""Opens a model, whatever names it: a directory, a GGUF file, or a repository of a hub.

    a directory with config.json and safetensors     as it is
    a GGUF file, or a directory with one             converted once into the cache
    OWNER/NAME                                       a hub's repository; its tensors come when they are held

A directory of that name comes first. Imports neither torch nor the hub's client before it needs them.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from corolla.errors import BadInput
from corolla.models.checkpoint import MAX_HEADER_BYTES, Checkpoint, open_checkpoint, read_checkpoint
from corolla.models.disk_cache import DiskCache, Say, user_cache
from corolla.models.gguf import find_gguf, open_gguf
from corolla.models.hub import Hub, HubConfig, is_repository_name
from corolla.models.hub_files import HubFiles, open_repository
from corolla.models.source_options import SourceOptions
from corolla.models.transfer import Progress, show_nothing

_TOKENIZER_KINDS: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_DEFAULT_REVISION: Final = "main"


def open_model_source(
    name_or_dir: str | os.PathLike[str],
    options: SourceOptions,
    *,
    has_tokenizer: bool = False,
    progress: Progress = show_nothing,
    say: Say = lambda _sentence: None,
) -> Checkpoint:
    """`open_source` with the options of a command."""
    return open_source(
        name_or_dir,
        revision=options.revision,
        token=options.token,
        cache_dir=options.cache_dir,
        max_disk_bytes=options.max_disk_bytes,
        has_tokenizer=has_tokenizer,
        progress=progress,
        say=say,
    )


def open_source(
    name_or_dir: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    max_disk_bytes: int | None = None,
    has_tokenizer: bool = True,
    progress: Progress = show_nothing,
    say: Say = lambda _sentence: None,
    hub: HubConfig | None = None,
) -> Checkpoint:
    """The model's description; its tensors are read, or downloaded, when they are held.

    `revision`, `token` (None: the saved login or HF_TOKEN), `hub`: for repositories. `cache_dir`, `max_disk_bytes`:
    where downloads and conversions go and how much they may take. `has_tokenizer`: also get the small files that a
    tokenizer is made of. Blocks while it downloads. Raises BadInput when it cannot be a model for us, SwarmError when
    the hub fails.
    """
    name = os.fspath(name_or_dir)
    path = Path(name).expanduser()
    cache = DiskCache(user_cache() if cache_dir is None else Path(cache_dir).expanduser(), max_disk_bytes)
    with _disk_faults_said(cache.root):
        if not path.exists() and is_repository_name(name):
            files = open_repository(name, revision or _DEFAULT_REVISION, Hub(hub, token), cache, progress)
            return _read_repository(files, has_tokenizer=has_tokenizer)
        if revision is not None:
            raise BadInput(f"{name}: a revision ({revision}) means something for a hub's OWNER/NAME only")
        gguf = find_gguf(path)
        if gguf is not None:
            return read_checkpoint(open_gguf(gguf, cache, say))
        if not path.exists() and not path.is_absolute():
            raise BadInput(f"{name}: no such model directory, and a hub's repository is written OWNER/NAME")
        return open_checkpoint(path)


def _read_repository(files: HubFiles, *, has_tokenizer: bool) -> Checkpoint:
    if not any(name.endswith(".safetensors") for name in files.file_names):
        _refuse_other_weights(files)
    checkpoint = read_checkpoint(files)
    if has_tokenizer:
        with files.hold({name: [(0, size)] for name, size in _tokenizer_files(files).items()}):
            pass  # the directory keeps them as long as `files` lives
    return checkpoint


def _refuse_other_weights(files: HubFiles) -> None:
    gguf = [name for name in files.file_names if name.endswith(".gguf")]
    if gguf and files.size_of("config.json") is None:
        raise BadInput(f"{files.name}: holds GGUF files only; download one ({gguf[0]}) and name that file")


def _tokenizer_files(files: HubFiles) -> dict[str, int]:
    """What a tokenizer, a chat template and generation settings are read from: all small files but the weights'."""
    names = [name for name in files.file_names if name.endswith(_TOKENIZER_KINDS) and not name.endswith(".index.json")]
    sizes = {name: files.size_of(name) or 0 for name in names}
    return {name: size for name, size in sizes.items() if size <= MAX_HEADER_BYTES}


@contextmanager
def _disk_faults_said(root: Path) -> Generator[None]:
    """The cache's own faults (no permission, no such disk) in the user's words."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"{error.filename or root}: cannot be used: {error.strerror or error}") from error
