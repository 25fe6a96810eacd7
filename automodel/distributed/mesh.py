"""Device meshes: one axis per parallel kind, axes of size 1 included.

"Axis" is an axis of the mesh, "dim" a dimension of a tensor.
"""

from __future__ import annotations

import datetime
import warnings
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from automodel.config.distributed import (
    ActivationCheckpointing,
    FSDP2Config,
    MoEParallelizerConfig,
    ParallelismSizes,
    PipelineConfig,
    StrategyConfig,
)

__all__ = ["MeshAxisName", "MeshContext", "ParallelismSizes", "create_device_mesh"]


class MeshAxisName(StrEnum):
    """Names of the mesh axes, as torch sees them."""

    PP = "pp"
    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    CP = "cp"
    TP = "tp"
    DP = "dp"
    DP_SHARD_CP = "dp_shard_cp"
    DP_CP = "dp_cp"
    EP_SHARD = "ep_shard"
    EP = "ep"


DEVICE_MESH_AXES = (
    MeshAxisName.PP,
    MeshAxisName.DP_REPLICATE,
    MeshAxisName.DP_SHARD,
    MeshAxisName.CP,
    MeshAxisName.TP,
)
MOE_MESH_AXES = (MeshAxisName.PP, MeshAxisName.EP_SHARD, MeshAxisName.EP)
FLATTENED_AXES: dict[MeshAxisName, tuple[MeshAxisName, ...]] = {
    MeshAxisName.DP: (MeshAxisName.DP_REPLICATE, MeshAxisName.DP_SHARD),
    MeshAxisName.DP_SHARD_CP: (MeshAxisName.DP_SHARD, MeshAxisName.CP),
    MeshAxisName.DP_CP: (MeshAxisName.DP_REPLICATE, MeshAxisName.DP_SHARD, MeshAxisName.CP),
}


@dataclass
class MeshContext:
    """Where this process stands among all, and how the model is to be spread.

    One process needs no mesh: ``device_mesh`` is then None, every axis has size 1 and rank 0.

    Attributes:
        device_mesh: axes pp, dp_replicate, dp_shard, cp, tp, outermost first.
        moe_mesh: axes pp, ep_shard, ep over the same ranks, when ep_size > 1.
        flattened: the axes dp, dp_shard_cp and dp_cp, each a one-axis mesh.
    """

    sizes: ParallelismSizes = field(default_factory=ParallelismSizes)
    device_type: str = "cpu"
    device_mesh: DeviceMesh | None = None
    moe_mesh: DeviceMesh | None = None
    flattened: dict[MeshAxisName, DeviceMesh] = field(default_factory=dict)
    strategy_config: StrategyConfig = field(default_factory=FSDP2Config)
    pipeline_config: PipelineConfig = field(default_factory=PipelineConfig)
    moe_config: MoEParallelizerConfig = field(default_factory=MoEParallelizerConfig)
    activation_checkpointing: ActivationCheckpointing = False

    @property
    def axis_names(self) -> tuple[MeshAxisName, ...]:
        return DEVICE_MESH_AXES

    @property
    def world_size(self) -> int:
        return self.sizes.world_size

    @property
    def rank(self) -> int:
        return dist.get_rank() if self.device_mesh is not None else 0

    @property
    def dp_size(self) -> int:
        return self.sizes.dp_size

    @property
    def dp_replicate_size(self) -> int:
        return self.sizes.dp_replicate_size

    @property
    def dp_shard_size(self) -> int:
        return self.sizes.dp_shard_size

    @property
    def tp_size(self) -> int:
        return self.sizes.tp_size

    @property
    def pp_size(self) -> int:
        return self.sizes.pp_size

    @property
    def cp_size(self) -> int:
        return self.sizes.cp_size

    @property
    def ep_size(self) -> int:
        return self.sizes.ep_size

    @property
    def device(self) -> torch.device:
        """This process's device, with its index on CUDA."""
        if self.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self.device_type)

    def mesh(self, *axes: MeshAxisName) -> DeviceMesh:
        """The sub-mesh of these axes; axes may be flattened ones.

        Raises:
            RuntimeError: there is no device mesh (one process).
        """
        if self.device_mesh is None:
            raise RuntimeError("one process has no device mesh")
        if len(axes) == 1 and axes[0] in self.flattened:
            return self.flattened[axes[0]]
        if axes[0] in (MeshAxisName.EP, MeshAxisName.EP_SHARD):
            assert self.moe_mesh is not None, "ep_size is 1: there is no expert mesh"
            return self.moe_mesh[tuple(axes)]
        with warnings.catch_warnings():
            # Naming a flattened axis beside another (dp_replicate, dp_shard_cp) has no other public spelling.
            warnings.filterwarnings("ignore", message="Slicing a flattened dim")
            return self.device_mesh[tuple(str(axis) for axis in axes)]

    def axis_rank(self, axis: MeshAxisName) -> int:
        """This process's coordinate on ``axis``; 0 without a mesh."""
        return 0 if self.device_mesh is None else self.mesh(axis).get_local_rank()

    def group(self, axis: MeshAxisName) -> dist.ProcessGroup | None:
        """The process group of ``axis``; None without a mesh."""
        return None if self.device_mesh is None else self.mesh(axis).get_group()


def create_device_mesh(
    sizes: ParallelismSizes, device_type: str, timeout: datetime.timedelta | None = None
) -> tuple[DeviceMesh | None, DeviceMesh | None, dict[MeshAxisName, DeviceMesh]]:
    """Build the meshes for ``sizes``; collective, the process group must be initialised.

    Args:
        sizes: resolved sizes; their product must be the world.
        device_type: ``cpu`` or ``cuda``.
        timeout: for every group of the meshes; None keeps torch's defaults.

    Returns:
        device mesh (None for one process), expert mesh (None for ep_size 1), flattened axes.

    Raises:
        ValueError: the sizes do not multiply to the world.
    """
    if sizes.world_size == 1:
        return None, None, {}
    if sizes.world_size != dist.get_world_size():
        raise ValueError(f"the layout has {sizes.world_size} ranks and the world {dist.get_world_size()}")
    shape = (sizes.pp_size, sizes.dp_replicate_size, sizes.dp_shard_size, sizes.cp_size, sizes.tp_size)
    device_mesh = init_device_mesh(device_type, shape, mesh_dim_names=tuple(map(str, DEVICE_MESH_AXES)))
    flattened = {
        name: device_mesh[tuple(str(axis) for axis in axes)]._flatten(str(name))
        for name, axes in FLATTENED_AXES.items()
    }
    moe_mesh = None
    if sizes.ep_size > 1:
        moe_shape = (sizes.pp_size, sizes.ep_shard_size, sizes.ep_size)
        moe_mesh = init_device_mesh(device_type, moe_shape, mesh_dim_names=tuple(map(str, MOE_MESH_AXES)))
    if timeout is not None:
        groups: list[Any] = [*device_mesh.get_all_groups(), *(mesh.get_group() for mesh in flattened.values())]
        groups += moe_mesh.get_all_groups() if moe_mesh is not None else []
        _set_timeouts(groups, timeout)
    return device_mesh, moe_mesh, flattened


def _set_timeouts(groups: list[dist.ProcessGroup], timeout: datetime.timedelta) -> None:
    """Give mesh groups the run's time-out: ``init_device_mesh`` has no argument for it.

    Private in torch (tried 2.13); there is no public setter for an existing group.
    """
    from torch.distributed.distributed_c10d import _set_pg_timeout

    for group in groups:
        _set_pg_timeout(timeout, group)
