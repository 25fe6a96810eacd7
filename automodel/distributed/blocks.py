"""The repeated blocks of a model: what FSDP groups and activation checkpointing wrap."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class NotOwned(nn.Module):
    """Stands for a module that another stage owns: gives back its first input.

    Plain attributes of the original stay, because some models read, for example, a layer's kind of attention. In
    the place of an embedding it gives zero: a later stage starts from hidden states, and what a model adds to those,
    such as learned positions, the first stage has added.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.is_embedding = isinstance(original, nn.Embedding)
        for name, value in vars(original).items():
            if isinstance(value, (str, int, float)) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros((), device=hidden.device) if self.is_embedding else hidden


def transformer_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Fully qualified name -> block, in forward order.

    A Hugging Face model's blocks are the entries of its ``ModuleList`` of ``num_hidden_layers``; for any
    other model, of its outermost ``ModuleList``s. Blocks that other pipeline stages own are left out.

    Raises:
        ValueError: the model has no ``ModuleList``.
    """
    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)
    }
    if not lists:
        raise ValueError(f"{type(model).__name__} has no ModuleList of blocks to shard or checkpoint")
    depth = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    stacks = {name: module for name, module in lists.items() if len(module) == depth} or lists
    outermost = [name for name in stacks if not any(name.startswith(f"{other}.") for other in stacks)]
    blocks = ((f"{name}.{index}", block) for name in outermost for index, block in stacks[name].named_children())
    return {name: block for name, block in blocks if not isinstance(block, NotOwned)}
