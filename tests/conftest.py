"""What all tests share: quiet threads, patient property tests, a tokenizer for tiny random models, and a browser.

A file is not imported where only tests with a mark are wanted that it nowhere names: importing all of them, in each of
two processes, takes longer than many a test. So a mark must stand in the file of its tests, which every run checks.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from playwright.sync_api import Browser

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: two tests at once must not fight over cores

settings.register_profile("corolla", deadline=None)  # a busy machine is slow, not wrong
settings.load_profile("corolla")

MARKS = ("slow", "full")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    wanted = str(config.option.markexpr).partition(" and not ")[0]
    if wanted in MARKS and collection_path.suffix == ".py":
        return not names_mark(collection_path, wanted) or None
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for path, mark in {(item.path, mark) for item in items for mark in MARKS if item.get_closest_marker(mark)}:
        if not names_mark(path, mark):
            raise pytest.UsageError(f"{path} has tests marked `{mark}` and does not say `mark.{mark}` itself")


def names_mark(path: Path, mark: str) -> bool:
    return f"mark.{mark}" in path.read_text(encoding="utf-8")


NUM_WORDS = 128
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} eos {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.fixture(scope="session")
def write_tokenizer() -> Callable[[Path], None]:
    """Saves a tokenizer with a chat template into a model directory: words `w5` … `w127`, `eos` is token 2."""

    def write(directory: Path) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = ["pad", "bos", "eos", "user", "assistant"] + [f"w{number}" for number in range(5, NUM_WORDS)]
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="pad"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="pad", bos_token="bos", eos_token="eos", chat_template=TEMPLATE
        )
        fast.save_pretrained(directory)

    return write


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CHROMIUM_FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """The system's Chromium, headless; it reaches nobody but what a test serves. Skips where there is none.

    Ends with its module: as long as it lives an event loop runs in this thread, and other tests need their own.
    """
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=60_000)  # a busy machine is slow, not wrong
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(CHROMIUM_FLAGS))
        yield browser
        browser.close()
