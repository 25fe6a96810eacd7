"""One pipeline stage on torch's schedules: the only file that reaches into ``torch.distributed.pipelining``.

Private names of torch used here, tried with 2.13: those of ``PipelineStage`` that :class:`Stage` overrides,
``InferenceMode``, ``_user_meta``, ``extract_tensor_metas``, a schedule's ``_n_microbatches``, ``_loss_fn``,
``_warmup_p2p`` and its flags of initialisation. :func:`check_torch` refuses a torch that lacks one.

Why not the stock stage. It finds shapes by running each stage on uninitialised memory, again after each change between
training and evaluation, and drops FSDP's accumulated gradients when it does. Its halves of a split backward look up the
parameters that are registered at that moment, which after a reshard are not those of the graph, so gradients are
missing without an error. And a V placement cannot run without backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from transformers import PreTrainedModel

from automodel.config.errors import ConfigError


class StageModule(nn.Module):
    """What a stage runs: its part of the model, from token ids or hidden states to hidden states or logits.

    Stages before the last call the base model: some heads scale or cap logits around the projection, which must
    not happen to hidden states.

    Args:
        model: from ``take_stage``.
        index: of the stage.
        num_stages: over all ranks.
    """

    def __init__(self, model: PreTrainedModel, index: int, num_stages: int) -> None:
        super().__init__()
        self.model = model
        self.index = index
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self.expected: tuple[torch.Size, torch.dtype] | None = None

    @property
    def config(self) -> Any:
        return self.model.config

    def forward(self, inputs: Tensor, **kwargs: Any) -> Tensor:
        """``[batch, seq]`` ids or ``[batch, seq, hidden]`` -> hidden states, or logits ``[batch, seq, vocab]``.

        Raises:
            RuntimeError: the hidden states are not what the next stage expects to receive.
        """
        named = {"input_ids" if self.is_first else "inputs_embeds": inputs, "use_cache": False, **kwargs}
        if self.is_last:
            logits: Tensor = self.model(**named).logits
            return logits
        hidden: Tensor = self.model.base_model(**named).last_hidden_state
        if self.expected is not None and (hidden.shape, hidden.dtype) != self.expected:
            shape, dtype = self.expected
            raise RuntimeError(
                f"it gives {hidden.dtype} {tuple(hidden.shape)}, and the next stage expects {dtype} {tuple(shape)}"
            )
        return hidden


class Stage(PipelineStage):
    """A stage with static shapes, set before each schedule step by :func:`set_shapes`.

    Attributes:
        reduce_gradients: whether the step at hand ends with FSDP's reduce-scatter; without it whole gradients wait
            in FSDP's own buffers for a later step.
    """

    reduce_gradients = True
    submod: StageModule

    def fsdp_modules(self) -> list[FSDPModule]:
        return [module for module in self.submod.modules() if isinstance(module, FSDPModule)]

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Called by every schedule once a step."""
        if self.has_backward and self.reduce_gradients:
            super().perform_reduce_grad(grad_scale_factor)
        else:
            for module in self.fsdp_modules():
                module.reshard()

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if backward_type != "full":
            # Both halves look up submod.parameters(): these must be the unsharded ones, which are in the graph.
            for module in self.fsdp_modules():
                module.unshard()
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def set_shape(self, num_microbatches: int, inputs: Tensor, outputs: Tensor, train: bool) -> None:
        """Make buffers for ``num_microbatches`` of these shapes; no communication, gradients stay.

        Args:
            inputs: on meta, what one micro-batch enters with.
            outputs: on meta, what it leaves with; not used by the last stage.
        """
        from torch.distributed.pipelining._utils import InferenceMode, extract_tensor_metas

        self.has_backward = train
        self._inference_mode = InferenceMode.STATIC
        self._user_meta.inputs = extract_tensor_metas((inputs,))
        self._user_meta.outputs = extract_tensor_metas((outputs,))
        self._user_meta.input_grads = self._user_meta.output_grads = None
        self._prepare_forward_infra(num_microbatches, None, None, has_backward=train)
        if train:
            self._prepare_backward_infra(num_microbatches)
        self.submod.expected = (outputs.shape, outputs.dtype)


def set_shapes(
    schedule: Any, stages: list[Stage], hidden_shape: tuple[int, int, int], dtype: torch.dtype, train: bool
) -> None:
    """Fit a schedule and this rank's stages to the micro-batches of its next step.

    Args:
        schedule: one of torch's schedule objects over ``stages``.
        hidden_shape: ``[batch, seq, hidden]`` between stages, of one micro-batch on this rank.
        dtype: of the hidden states.
        train: with backward.
    """
    # Gradients flow back to the previous stage only where its output is known to need them.
    hidden = torch.empty(hidden_shape, device="meta", dtype=dtype, requires_grad=True)
    ids = torch.empty(hidden_shape[:2], device="meta", dtype=torch.long)
    for stage in stages:
        stage.set_shape(schedule._n_microbatches, ids if stage.is_first else hidden, hidden, train)
    if hasattr(schedule, "_stage"):
        schedule._stage_forward_initialized, schedule._stage_backward_initialized = True, train
    else:
        schedule._stages_forward_initialized, schedule._stages_backward_initialized = True, train


def open_connections(schedule: Any, stages: list[Stage]) -> None:
    """Make the pipeline's connections before the first step; collective over its ranks, once.

    On NCCL these are communicators, and ranks that made them one by one inside a schedule could wait for each other.
    """
    schedule._warmup_p2p(stages, True, False)
    dist.all_reduce(torch.zeros(1, device=stages[0].device), group=stages[0].group)


def check_torch(pp_size: int) -> None:
    """Refuse a torch whose pipeline stages are not those that this file was written for.

    Raises:
        ConfigError: a name is missing.
    """
    from torch.distributed.pipelining import _utils

    wanted = (
        (_utils, "InferenceMode"),
        (_utils, "extract_tensor_metas"),
        (PipelineStage, "_prepare_forward_infra"),
        (PipelineStage, "_prepare_backward_infra"),
        (PipelineStage, "perform_reduce_grad"),
        (PipelineStage, "backward_maybe_with_nosync"),
    )
    for owner, name in wanted:
        if not hasattr(owner, name):
            raise ConfigError(
                "distributed.pp_size",
                pp_size,
                f"pipeline stages need torch 2.13's {name}, and torch {torch.__version__} has none",
                "1, or torch 2.13",
            )
