"""Every rule that the settings alone decide, in one order, before any process starts."""

from __future__ import annotations

from automodel.config.availability import check_available
from automodel.config.distributed import ParallelismSizes
from automodel.config.errors import ConfigError
from automodel.config.pipeline_rules import check_pipeline
from automodel.config.schema import TrainConfig
from automodel.config.validate_checkpoint import check_checkpoint
from automodel.config.validate_layout import (
    MODEL_SIZE_FIELDS,
    check_batch,
    check_model_sizes,
    check_nodes,
    check_sequence,
    check_strategy,
)
from automodel.config.validate_training import (
    check_launch,
    check_logger,
    check_loop,
    check_loss,
    check_lr_scheduler,
    check_model_choice,
    check_optimizer,
    check_precision,
    check_strategy_ranges,
)

__all__ = ["MODEL_SIZE_FIELDS", "check_model_sizes", "resolve_world_size", "validate"]


def resolve_world_size(config: TrainConfig, context_world_size: int | None, num_gpus: int) -> int:
    """The number of ranks of the run.

    Args:
        config: the run.
        context_world_size: what torchrun or srun has already started; None: this process starts the ranks.
        num_gpus: GPUs of this host.

    Raises:
        ConfigError: CUDA without a GPU, or more processes than GPUs.
    """
    check_launch(config)
    device, nproc = config.launch.device, config.launch.nproc_per_node
    if device == "cuda" and num_gpus == 0:
        raise ConfigError("launch.device", device, "no CUDA device is visible on this host", "cpu, auto")
    if context_world_size is not None:
        return context_world_size
    gpus = 0 if device == "cpu" else num_gpus
    if nproc == "auto":
        return gpus or config.distributed.smallest_world()
    if gpus and nproc > gpus:
        raise ConfigError(
            "launch.nproc_per_node",
            nproc,
            f"each process needs a GPU of its own, and this host has {gpus}",
            f"1 to {gpus}, or launch.device=cpu",
        )
    return nproc


def validate(config: TrainConfig, world_size: int, local_world_size: int | None = None) -> ParallelismSizes:
    """Check every rule that needs neither the model's class nor the data's files.

    Args:
        config: the run.
        world_size: number of ranks, see :func:`resolve_world_size`.
        local_world_size: ranks of one node, where there are several nodes.

    Returns:
        The sizes of all axes.

    Raises:
        ConfigError: the first rule that is broken.
    """
    section = config.distributed
    check_model_choice(config)
    check_precision(config)
    check_launch(config)
    check_strategy(section)
    check_strategy_ranges(section)
    check_loop(config)
    check_loss(config)
    sizes = section.resolve(world_size)
    check_nodes(config, local_world_size)
    check_model_sizes(config, config.model.config, world_size)
    check_sequence(section, config.training.seq_length)
    accumulation = check_batch(config, sizes)
    local_batch_size = config.training.local_batch_size
    check_pipeline(section, local_batch_size, local_batch_size * accumulation)
    check_optimizer(config)
    check_lr_scheduler(config)
    check_logger(config)
    check_checkpoint(config)
    check_available(config)
    return sizes
