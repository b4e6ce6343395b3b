"""A server that holds its blocks in fewer bits says so: those who want them whole are told, others get its outputs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from corolla import AutoDistributedModelForCausalLM
from corolla.errors import MissingBlocks
from corolla.models.checkpoint import open_checkpoint
from corolla.models.testing import load_chain

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

IDS = torch.randint(3, 120, (1, 9), generator=torch.Generator().manual_seed(1))


def test_a_quantized_server_serves_those_who_take_that_and_no_others(tiny: Path, running: Callable[..., Any]) -> None:
    with running("serve", tiny, "--quant", "int8", "--json") as server:
        alone = load_chain(open_checkpoint(tiny), [], quantization="int8")
        address = json.loads(server.stdout.readline())["addr"]
        for wanted in ("any", "none"):
            model = AutoDistributedModelForCausalLM.from_pretrained(tiny, initial_peers=[address], quantization=wanted)
            try:
                with torch.no_grad():
                    if wanted == "any":
                        assert torch.equal(model(IDS).logits, alone(IDS).logits)
                    else:
                        with pytest.raises(MissingBlocks, match="only quantized, which was not wanted"):
                            model(IDS)
            finally:
                model.close()
