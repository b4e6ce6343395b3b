"""A server that loads blocks beside those it serves computes as if it did not."""

import threading
import time

import torch

from corolla.models import loading
from corolla.models.checkpoint import open_checkpoint
from corolla.models.loading import load_span
from corolla.models.testing import write_tiny


def test_nobody_computes_with_the_defaults_under_which_another_model_is_built(tmp_path, monkeypatch):
    checkpoint = open_checkpoint(write_tiny(tmp_path / "tiny", "llama"))
    serving = load_span(checkpoint, 0, 3)
    seen, is_building = set(), threading.Event()
    serving.blocks[0].register_forward_pre_hook(lambda *_: seen.add(torch.get_default_dtype()))
    prune = loading.prune

    def slow_prune(*args, **options):
        if torch.get_default_dtype() == torch.bfloat16:
            is_building.set()
            time.sleep(0.3)
        prune(*args, **options)

    monkeypatch.setattr(loading, "prune", slow_prune)
    loader = threading.Thread(target=load_span, args=(checkpoint, 3, 6), kwargs={"dtype": torch.bfloat16})
    loader.start()
    assert is_building.wait(60)
    hidden, cache = torch.randn(1, 1, serving.hidden_size), serving.new_cache(1)
    while loader.is_alive():
        serving.forward(hidden, cache)
    loader.join()
    assert seen == {torch.float32}
