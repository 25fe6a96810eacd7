"""Forward and backward of one step through a pipeline schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel.config.distributed import FSDP2Config
from automodel.data.batches import MicroBatch
from automodel.distributed.mesh import MeshAxisName
from automodel.distributed.pipeline_parallel import AutoPipeline
from automodel.training.loss import cross_entropy_sum


class PipelineRunner:
    """Runs each local batch through the schedule, cut into micro-batches.

    The loss is divided by the trained tokens of the whole global batch before it is back-propagated, as without a
    pipeline, so that local batches simply add up. Ranks without the last stage report a loss of zero.

    Args:
        pipeline: this rank's stages.
        device: of this rank.
    """

    def __init__(self, pipeline: AutoPipeline, device: torch.device) -> None:
        self.pipeline = pipeline
        self.device = device
        config = pipeline.mesh_context.strategy_config
        self.defers_reduction = isinstance(config, FSDP2Config) and config.defer_fsdp_grad_sync

    def forward_backward(self, local_batches: Sequence[MicroBatch], num_label_tokens: int) -> Tensor:
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            value = cross_entropy_sum(logits, labels)
            loss_sum.add_(value.detach())
            return value / num_label_tokens

        for index, batch in enumerate(local_batches):
            self.pipeline.run_training(
                batch.input_ids.to(self.device),
                batch.labels.to(self.device),
                loss,
                reduce_gradients=index == len(local_batches) - 1 or not self.defers_reduction,
            )
        self.pipeline.sum_tied_gradients()
        return loss_sum

    @torch.no_grad()
    def evaluation_sum(self, local_batches: Iterable[MicroBatch]) -> tuple[Tensor, int]:
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        num_label_tokens = 0

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            value = cross_entropy_sum(logits, labels)
            loss_sum.add_(value)
            return value

        was_training = self.pipeline.training
        self.pipeline.eval()
        try:
            for batch in local_batches:
                self.pipeline.run_forward(batch.input_ids.to(self.device), batch.labels.to(self.device), loss)
                num_label_tokens += batch.num_label_tokens
        finally:
            self.pipeline.train(was_training)
        return loss_sum, num_label_tokens

    @torch.no_grad()
    def next_token_logits(self, input_ids: Tensor) -> Tensor:
        self.pipeline.eval()
        logits = self.pipeline.run_forward(input_ids)
        context = self.pipeline.mesh_context
        if logits is not None:
            last = logits[:, -1].float().contiguous()
        else:
            vocabulary = self.pipeline.parts[0].config.get_text_config().vocab_size
            last = torch.empty((len(input_ids), vocabulary), device=self.device)
        group = context.group(MeshAxisName.PP)
        assert group is not None
        dist.broadcast(last, dist.get_global_rank(group, self.pipeline.stage_ranks[-1]), group=group)
        return last

    def counted_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.pipeline.counted_parameters() if parameter.requires_grad]
