"""Fully sharded data parallelism with torch's ``fully_shard``, and HSDP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from automodel.config.distributed import FSDP2Config, MixedPrecision
from automodel.distributed.blocks import transformer_blocks
from automodel.distributed.compilation import blocks_to_cast_whole
from automodel.distributed.mesh import MeshAxisName, MeshContext
from automodel.distributed.mixed_precision import cast_in_forward, dtype_of

__all__ = ["FSDP2Config", "FSDP2Manager"]


class FSDP2Manager:
    """Shards each block as a group of its own and everything else, tied weights included, as the root group.

    At world size 1 nothing is sharded and the numbers are the same.

    Args:
        config: the strategy's settings.
        mesh_context: parameters are sharded over dp_shard x cp and replicated over dp_replicate.
        precision: used where ``config.mp_policy`` is None; None is ``MixedPrecision()``, bf16.
    """

    def __init__(self, config: FSDP2Config, mesh_context: MeshContext, precision: MixedPrecision | None = None) -> None:
        self.config = config
        self.mesh_context = mesh_context
        self.policy = config.mp_policy or precision or MixedPrecision()

    def data_parallel_mesh(self) -> DeviceMesh:
        """One axis: shard. Two axes mean replicate x shard to ``fully_shard``, so only HSDP gets two."""
        if self.mesh_context.dp_replicate_size > 1:
            return self.mesh_context.mesh(MeshAxisName.DP_REPLICATE, MeshAxisName.DP_SHARD_CP)
        return self.mesh_context.mesh(MeshAxisName.DP_SHARD_CP)

    def shard(self, model: nn.Module, gives_logits: bool = True) -> nn.Module:
        """Shard in place.

        Args:
            gives_logits: false for a pipeline stage whose hidden states another stage goes on with; they keep
                their compute dtype.
        """
        if self.mesh_context.world_size == 1:
            return model
        mesh = self.data_parallel_mesh()
        reshard = self.config.reshard_after_forward
        if reshard is None:
            reshard = self.mesh_context.pp_size == 1
        reshard = reshard and not self.config.gather_once_per_step
        blocks = list(transformer_blocks(model).values())
        for block in blocks:
            fully_shard(
                block,
                mesh=mesh,
                # Backward begins with the last block: freeing it in between would only cost a gather.
                reshard_after_forward=reshard and block is not blocks[-1],
                mp_policy=self._mp_policy(gives_logits=False),
                offload_policy=self._offload_policy(),
            )
        fully_shard(
            model,
            mesh=mesh,
            # Gathered again at once in backward: freeing the root between the two only costs a gather.
            reshard_after_forward=False,
            mp_policy=self._mp_policy(gives_logits),
            offload_policy=self._offload_policy(),
        )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                # A divide factor of 1 is a plain sum; gloo has no pre-multiplied one.
                module.set_force_sum_reduction_for_comms(True)
        self._set_prefetch(cast("list[FSDPModule]", blocks))
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.mesh_context.world_size == 1:
            cast_in_forward(model, self.policy, blocks_to_cast_whole(model, self.mesh_context))
        return model

    @contextmanager
    def micro_batch(self, model: nn.Module, is_first: bool, is_last: bool) -> Iterator[None]:
        if isinstance(model, FSDPModule):
            model.set_is_last_backward(is_last)
            model.set_requires_gradient_sync(is_last or not self.config.defer_fsdp_grad_sync)
            if self.config.gather_once_per_step:
                model.set_reshard_after_backward(is_last)
        yield

    @contextmanager
    def forward_only(self, model: nn.Module) -> Iterator[None]:
        try:
            yield
        finally:
            # What only a backward would free again; named_parameters() is the sharded ones after this.
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def _mp_policy(self, gives_logits: bool) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(
            param_dtype=dtype_of(self.policy.param_dtype),
            reduce_dtype=dtype_of(self.policy.reduce_dtype),
            # Between blocks the hidden states keep the compute dtype.
            output_dtype=dtype_of(self.policy.output_dtype) if gives_logits else None,
            cast_forward_inputs=self.policy.cast_forward_inputs,
        )

    def _offload_policy(self) -> OffloadPolicy:
        if self.config.offload_policy == "cpu":
            return CPUOffloadPolicy(pin_memory=self.mesh_context.device_type == "cuda")
        return OffloadPolicy()

    def _set_prefetch(self, blocks: list[FSDPModule]) -> None:
        for index, block in enumerate(blocks):
            ahead = blocks[index + 1 : index + 1 + self.config.forward_prefetch]
            if ahead:
                block.set_modules_to_forward_prefetch(ahead)
            behind = blocks[max(0, index - self.config.backward_prefetch) : index]
            if behind:
                block.set_modules_to_backward_prefetch(behind[::-1])
