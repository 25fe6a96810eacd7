"""What the trainer asks of a model, whole or cut into pipeline stages: one interface, so that there is one loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from automodel.config.schema import LossName
from automodel.data.batches import MicroBatch
from automodel.distributed.pipeline_parallel import AutoPipeline
from automodel.distributed.strategy import StrategyManager
from automodel.training.pipeline_step import PipelineRunner
from automodel.training.step import evaluation_sum, forward, forward_backward


class StepRunner(Protocol):
    """Implemented by :class:`WholeModelRunner` and :class:`automodel.training.pipeline_step.PipelineRunner`."""

    def forward_backward(self, local_batches: Sequence[MicroBatch], num_label_tokens: int) -> Tensor:
        """Add a step's gradients to ``.grad``; this rank's share of the summed loss, shape [], fp64."""

    def evaluation_sum(self, local_batches: Iterable[MicroBatch]) -> tuple[Tensor, int]:
        """This rank's share of the summed loss, shape [], fp64, and the trained tokens of its local batches."""

    def next_token_logits(self, input_ids: Tensor) -> Tensor:
        """``[batch, seq]`` -> ``[batch, vocab]`` of the last position, on every rank, without dropout."""

    def counted_parameters(self) -> list[nn.Parameter]:
        """Trained parameters that count in the gradient norm: a tied one once."""


class WholeModelRunner:
    """Every rank runs all layers."""

    def __init__(self, model: nn.Module, manager: StrategyManager, device: torch.device, loss: LossName) -> None:
        self.model = model
        self.manager = manager
        self.device = device
        self.loss = loss

    def forward_backward(self, local_batches: Sequence[MicroBatch], num_label_tokens: int) -> Tensor:
        return forward_backward(self.model, self.manager, local_batches, num_label_tokens, self.device, self.loss)

    def evaluation_sum(self, local_batches: Iterable[MicroBatch]) -> tuple[Tensor, int]:
        return evaluation_sum(self.model, self.manager, local_batches, self.device, self.loss)

    @torch.no_grad()
    def next_token_logits(self, input_ids: Tensor) -> Tensor:
        self.model.eval()
        with self.manager.forward_only(self.model):
            return forward(self.model, input_ids)[:, -1]

    def counted_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


def build_step_runner(model: nn.Module, manager: StrategyManager, device: torch.device, loss: LossName) -> StepRunner:
    """The runner for what ``apply_model_infrastructure`` returned."""
    if isinstance(model, AutoPipeline):
        return PipelineRunner(model, device)
    return WholeModelRunner(model, manager, device, loss)
