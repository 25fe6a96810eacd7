"""The order in which a model is spread over devices, top to bottom."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from automodel.config.distributed import FSDP2Config, MixedPrecision
from automodel.distributed.activation_checkpointing import apply_activation_checkpointing
from automodel.distributed.mesh import MeshContext
from automodel.distributed.strategy import StrategyManager, build_manager
from automodel.model.init import initialize_weights, materialise

__all__ = ["Infrastructure", "apply_model_infrastructure", "instantiate_infrastructure"]


@dataclass
class Infrastructure:
    """What :func:`apply_model_infrastructure` applies, made once for a run."""

    mesh_context: MeshContext
    manager: StrategyManager


def instantiate_infrastructure(mesh_context: MeshContext, precision: MixedPrecision | None = None) -> Infrastructure:
    """The parts that the context's settings ask for.

    Args:
        mesh_context: from :func:`automodel.distributed.setup.setup_distributed`.
        precision: compute dtypes where the strategy has no policy of its own.
    """
    return Infrastructure(mesh_context, build_manager(mesh_context, precision))


def apply_model_infrastructure(model: PreTrainedModel, infrastructure: Infrastructure, seed: int) -> nn.Module:
    """Spread a model on meta over the devices and give it its initial weights.

    Collective: every rank calls it with the same model.

    Args:
        model: on meta, fp32, from :func:`automodel.model.build.build_model`.
        infrastructure: from :func:`instantiate_infrastructure`.
        seed: of the run; the weights are a function of it and of parameter names only.

    Returns:
        the module to call in a step.
    """
    mesh_context = infrastructure.mesh_context
    apply_activation_checkpointing(model, mesh_context.activation_checkpointing)
    infrastructure.manager.shard(model)
    materialise(model, mesh_context.device, _parameter_device(mesh_context))
    initialize_weights(model, seed)
    return infrastructure.manager.wrap(model)


def _parameter_device(mesh_context: MeshContext) -> torch.device:
    config = mesh_context.strategy_config
    offloaded = isinstance(config, FSDP2Config) and config.offload_policy == "cpu" and mesh_context.world_size > 1
    return torch.device("cpu") if offloaded else mesh_context.device
