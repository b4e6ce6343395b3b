"""`corolla serve --device` takes four kinds of words and no other."""

import click
import pytest

from corolla.apps.cli.serve import Device, command


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:15", "mps"])
def test_a_device_stays_as_typed(device: str) -> None:
    assert command.make_context("serve", ["MODEL", "--device", device]).params["device"] == device


@pytest.mark.parametrize(
    "text", ["", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:1000", "cuda:1 ", "cuda:1\n", "mps:0", "cpu:0", "cuda:٣"]
)
def test_what_is_no_device_is_refused_with_those_that_are(text: str) -> None:
    with pytest.raises(click.UsageError, match=r"is not one of cpu, cuda, cuda:N, mps"):
        Device().convert(text, None, None)


def test_without_the_option_it_is_the_cpu() -> None:
    assert command.make_context("serve", ["MODEL"]).params["device"] == "cpu"
