"""From a ``distributed`` section to a :class:`MeshContext`, for ``train.py`` and for a loop of your own."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from automodel.config.distributed import DistributedSection, parse_distributed_section
from automodel.distributed.mesh import MeshContext, create_device_mesh

__all__ = ["parse_distributed_section", "setup_distributed"]


def setup_distributed(
    section: Mapping[str, Any] | DistributedSection | None,
    world_size: int | None = None,
    device_type: str | None = None,
    timeout: datetime.timedelta | None = None,
) -> MeshContext:
    """Resolve ``section`` against the world and build the meshes.

    Collective for more than one process: ``torch.distributed.init_process_group`` must have run.

    Args:
        section: the ``distributed`` YAML as a mapping, an already parsed section, or None for one device.
        world_size: number of processes; None asks torch.distributed (1 when it is not initialised).
        device_type: ``cpu`` or ``cuda``; None takes CUDA where there is one.
        timeout: for every group that is made here.

    Raises:
        ConfigError: unknown key, wrong type, or sizes that do not fit the world.
    """
    parsed = section if isinstance(section, DistributedSection) else parse_distributed_section(section)
    if world_size is None:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = parsed.resolve(world_size)
    device_mesh, moe_mesh, flattened = create_device_mesh(sizes, device_type, timeout)
    return MeshContext(
        sizes=sizes,
        device_type=device_type,
        device_mesh=device_mesh,
        moe_mesh=moe_mesh,
        flattened=flattened,
        strategy_config=parsed.strategy_config,
        pipeline_config=parsed.pipeline,
        moe_config=parsed.moe,
        activation_checkpointing=parsed.activation_checkpointing,
    )
