"""Replicated data parallelism with torch's DistributedDataParallel."""

# No postponed annotations here: DDP reads the types of its communication hook at run time.

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from automodel.config.distributed import DDPConfig, MixedPrecision
from automodel.distributed.compilation import blocks_to_cast_whole
from automodel.distributed.mesh import MeshAxisName, MeshContext
from automodel.distributed.mixed_precision import cast_in_forward

__all__ = ["DDPConfig", "DDPManager"]


class DDPManager:
    """Whole weights on every rank; gradients are summed once a step.

    Args:
        config: options of DistributedDataParallel.
        mesh_context: gradients are summed over its dp axis.
        precision: compute dtypes; None is fp32.
    """

    def __init__(self, config: DDPConfig, mesh_context: MeshContext, precision: MixedPrecision | None = None) -> None:
        self.config = config
        self.mesh_context = mesh_context
        self.policy = precision

    def shard(self, model: nn.Module) -> nn.Module:
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.policy is not None:
            cast_in_forward(model, self.policy, blocks_to_cast_whole(model, self.mesh_context))
        if self.mesh_context.world_size == 1:
            return model
        device = self.mesh_context.device
        group = self.mesh_context.group(MeshAxisName.DP)
        options: dict[str, Any] = (
            {} if self.config.bucket_cap_mb is None else {"bucket_cap_mb": self.config.bucket_cap_mb}
        )
        wrapped = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            process_group=group,
            broadcast_buffers=self.config.broadcast_buffers,
            find_unused_parameters=self.config.find_unused_parameters,
            static_graph=self.config.static_graph,
            gradient_as_bucket_view=self.config.gradient_as_bucket_view,
            **options,
        )
        # DDP would average what the loss has already divided.
        wrapped.register_comm_hook(group, _sum_gradients)
        return wrapped

    @contextmanager
    def micro_batch(self, model: nn.Module, is_first: bool, is_last: bool) -> Iterator[None]:
        if isinstance(model, DistributedDataParallel) and not is_last:
            with model.no_sync():
                yield
        else:
            yield

    def forward_only(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()


def _sum_gradients(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
