"""The repeated blocks of a model: what FSDP groups and activation checkpointing wrap."""

from __future__ import annotations

from torch import nn


def transformer_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Fully qualified name -> block, in forward order.

    A Hugging Face model's blocks are the entries of its ``ModuleList`` of ``num_hidden_layers``; for any
    other model, of its outermost ``ModuleList``s.

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
    return {f"{name}.{index}": block for name in outermost for index, block in stacks[name].named_children()}
