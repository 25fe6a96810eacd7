"""The order in which a model is spread over devices, top to bottom."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from automodel.config.distributed import FSDP2Config, MixedPrecision
from automodel.config.schema import LossName
from automodel.distributed.activation_checkpointing import apply_activation_checkpointing
from automodel.distributed.compilation import compile_blocks, compiles
from automodel.distributed.fsdp2 import FSDP2Manager
from automodel.distributed.mesh import MeshAxisName, MeshContext
from automodel.distributed.pipeline_parallel import AutoPipeline
from automodel.distributed.pipeline_stage import StageModule
from automodel.distributed.sequence_parallel import apply_sequence_parallel, check_sequence_parallel
from automodel.distributed.strategy import StrategyManager, build_manager
from automodel.distributed.tensor_parallel import TensorParallelPlan, apply_tensor_parallel, resolve_plan
from automodel.distributed.tensor_parallel_collectives import TensorParallelGroup
from automodel.model.init import initialize_buffers, initialize_weights, materialise
from automodel.model.output_head import LossHead
from automodel.model.weights import PretrainedWeights

__all__ = ["Infrastructure", "apply_model_infrastructure", "instantiate_infrastructure"]


@dataclass
class Infrastructure:
    """What :func:`apply_model_infrastructure` applies, made once for a run."""

    mesh_context: MeshContext
    manager: StrategyManager
    loss: LossName = "cross_entropy"


def instantiate_infrastructure(
    mesh_context: MeshContext, precision: MixedPrecision | None = None, loss: LossName = "cross_entropy"
) -> Infrastructure:
    """The parts that the context's settings ask for.

    Args:
        mesh_context: from :func:`automodel.distributed.setup.setup_distributed`.
        precision: compute dtypes where the strategy has no policy of its own.
        loss: linear_cross_entropy lets the model take ``shifted_labels`` and return its loss.
    """
    return Infrastructure(mesh_context, build_manager(mesh_context, precision), loss)


def apply_model_infrastructure(
    model: PreTrainedModel, infrastructure: Infrastructure, seed: int = 0, weights: PretrainedWeights | None = None
) -> nn.Module:
    """Spread a model over the devices; a model on meta gets its weights, initial or pretrained.

    Collective: every rank calls it with the same model.

    Args:
        model: fp32. On meta, from :func:`automodel.model.build.build_model`, no rank ever holds it whole; a
            model with weights, equal on all ranks, keeps them.
        infrastructure: from :func:`instantiate_infrastructure`.
        seed: of the run; initial weights are a function of it and of parameter names only.
        weights: of a checkpoint, made for this model; each rank reads its own slices. None: initial weights.

    Returns:
        the module to call in a step.

    Raises:
        ValueError: ``weights`` for a model that has some.
    """
    mesh_context = infrastructure.mesh_context
    if not any(parameter.is_meta for parameter in model.parameters()):
        if weights is not None:
            raise ValueError("the model has weights already: pretrained ones go into a model on meta")
        nn.Module.to(model, _parameter_device(mesh_context))
    tensor_parallel_plan = _tensor_parallel_plan(model, mesh_context)
    # Examined as transformers made it, before anything is sharded or hooked.
    loss_head = LossHead(model) if infrastructure.loss == "linear_cross_entropy" else None
    if mesh_context.pp_size > 1:
        return _apply_to_stages(model, infrastructure, tensor_parallel_plan, seed, weights)
    _apply_tensor_parallel(model, mesh_context, tensor_parallel_plan)
    if loss_head is not None:
        loss_head.install()
    apply_activation_checkpointing(model, mesh_context.activation_checkpointing)
    if compiles(mesh_context):
        compile_blocks(model)
    infrastructure.manager.shard(model)
    _give_weights(model, model, mesh_context, seed, weights)
    return infrastructure.manager.wrap(model)


def _apply_to_stages(
    model: PreTrainedModel,
    infrastructure: Infrastructure,
    plan: TensorParallelPlan | None,
    seed: int,
    weights: PretrainedWeights | None,
) -> AutoPipeline:
    """The same steps for each of this rank's pipeline stages."""
    mesh_context, manager = infrastructure.mesh_context, infrastructure.manager
    assert isinstance(manager, FSDP2Manager), "the rules of the layout leave pipelines to FSDP2"
    pipeline = AutoPipeline(model, mesh_context, manager.policy)
    for stage in pipeline.stage_modules:
        assert isinstance(stage, StageModule)
        _apply_tensor_parallel(stage.model, mesh_context, plan)
        apply_activation_checkpointing(stage.model, mesh_context.activation_checkpointing)
        if compiles(mesh_context):
            compile_blocks(stage.model)
        manager.shard(stage, gives_logits=stage.is_last)
        _give_weights(stage, stage.model, mesh_context, seed, weights)
    pipeline.connect()
    return pipeline


def _give_weights(
    module: nn.Module,
    model: PreTrainedModel,
    mesh_context: MeshContext,
    seed: int,
    weights: PretrainedWeights | None,
) -> None:
    """Weights of ``model`` in the sharded ``module``, which is the model or holds it; weights that came along stay."""
    if not any(parameter.is_meta for parameter in module.parameters()):
        return
    materialise(module, mesh_context.device, _parameter_device(mesh_context))
    if weights is None:
        initialize_weights(model, seed, mesh_context.device)
    else:
        initialize_buffers(model, seed, mesh_context.device)
        weights.load_into(model)


def _tensor_parallel_plan(model: nn.Module, mesh_context: MeshContext) -> TensorParallelPlan | None:
    """Resolved on the whole model: a pipeline stage alone does not show what a plan leaves out."""
    config = mesh_context.strategy_config
    if mesh_context.tp_size == 1 or not isinstance(config, FSDP2Config):
        return None
    plan = resolve_plan(model, config.tp_plan, mesh_context.tp_size)
    if config.sequence_parallel:
        check_sequence_parallel(model, plan)
    return plan


def _apply_tensor_parallel(model: nn.Module, mesh_context: MeshContext, plan: TensorParallelPlan | None) -> None:
    if plan is None:
        return
    config = mesh_context.strategy_config
    in_place = mesh_context.activation_checkpointing != "selective"
    group = TensorParallelGroup(mesh_context.mesh(MeshAxisName.TP), in_place)
    styles = apply_tensor_parallel(model, group, plan)
    if isinstance(config, FSDP2Config) and config.sequence_parallel:
        apply_sequence_parallel(model, group, styles)


def _parameter_device(mesh_context: MeshContext) -> torch.device:
    config = mesh_context.strategy_config
    offloaded = isinstance(config, FSDP2Config) and config.offload_policy == "cpu" and mesh_context.world_size > 1
    return torch.device("cpu") if offloaded else mesh_context.device
