"""``torch.compile`` for each block of a model."""

from __future__ import annotations

import torch
from torch import nn

from automodel.distributed.blocks import transformer_blocks
from automodel.distributed.mesh import MeshContext

BACKEND = "inductor"


def compiles(mesh_context: MeshContext) -> bool:
    """Whether the strategy's settings ask for it."""
    return getattr(mesh_context.strategy_config, "enable_compile", False)


def blocks_to_cast_whole(model: nn.Module, mesh_context: MeshContext) -> list[nn.Module]:
    """Blocks whose parameters must be cast outside the graph: in a checkpoint the compiler cannot follow an exchange
    of parameters, and would leave the block uncompiled."""
    if compiles(mesh_context) and mesh_context.activation_checkpointing:
        return list(transformer_blocks(model).values())
    return []


def compile_blocks(model: nn.Module) -> None:
    """Compile the forward of each block, in place; names of modules and parameters do not change.

    Blocks of one kind share one compiled graph. Applied after activation checkpointing, so that the compiler decides
    within the kept and the recomputed operations, and before ``fully_shard``, whose hooks stay outside the graph.

    Args:
        model: a model with blocks.
    """
    for block in transformer_blocks(model).values():
        # Not nn.Module.compile: it takes hooks into the graph, and a checkpointed block it leaves uncompiled without
        # a word (torch 2.13).
        block.forward = torch.compile(block.forward, backend=BACKEND)
