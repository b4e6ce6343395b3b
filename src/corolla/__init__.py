"""corolla: run large language models over many machines, none of which could hold the model alone.

Public names load lazily, so that `import corolla` costs nothing and a DHT peer never imports torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corolla.client.auto import AutoDistributedModelForCausalLM

__all__ = ["AutoDistributedModelForCausalLM", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "AutoDistributedModelForCausalLM":
        from corolla.client.auto import AutoDistributedModelForCausalLM

        return AutoDistributedModelForCausalLM
    raise AttributeError(f"module 'corolla' has no attribute {name!r}")
