"""Pipeline parallelism for ordinary Hugging Face models: split, stages, schedule.

:class:`AutoPipeline` is what a rank trains instead of the whole model. Each step's local batches are run through the
schedule one after the other, cut into micro-batches; ``training/pipeline_step.py`` does that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from automodel.config.distributed import MixedPrecision, PipelineConfig
from automodel.distributed.gradients import local_tensor
from automodel.distributed.mesh import MeshAxisName, MeshContext
from automodel.distributed.mixed_precision import dtype_of
from automodel.distributed.pipeline_schedules import (
    LossFunction,
    build_forward_schedule,
    build_schedule,
    place_stages,
)
from automodel.distributed.pipeline_split import SplitPlan, Tie, split_plan, take_stage
from automodel.distributed.pipeline_stage import Stage, StageModule, check_torch, open_connections, set_shapes

__all__ = ["AutoPipeline", "SplitPlan", "plan_pipeline"]


def plan_pipeline(model: PreTrainedModel, config: PipelineConfig, pp_size: int) -> tuple[list[int], SplitPlan]:
    """The pipeline rank of each stage, and what each stage owns; the same on every rank.

    Args:
        model: whole, on meta.

    Raises:
        ConfigError: the model has no pipeline plan, the settings do not fit its layers, or torch lacks what is needed.
    """
    check_torch(pp_size)
    num_layers = model.config.get_text_config().num_hidden_layers
    stage_ranks = place_stages(config, pp_size, num_layers)
    return stage_ranks, split_plan(model, config, len(stage_ranks), pp_size)


class AutoPipeline(nn.Module):
    """This rank's stages of a model, and the schedule that runs them.

    ``named_parameters`` gives the names of the whole model: each rank has those of its stages.

    Args:
        model: whole, on meta; it stays as it is.
        mesh_context: its pp axis holds the stages.
        precision: of the strategy; hidden states travel between stages in ``param_dtype``.

    Attributes:
        stage_modules: to be sharded and given weights before :meth:`connect`.

    Raises:
        ConfigError: see :func:`plan_pipeline`.
    """

    def __init__(self, model: PreTrainedModel, mesh_context: MeshContext, precision: MixedPrecision) -> None:
        super().__init__()
        self.mesh_context = mesh_context
        self.stage_ranks, self.split = plan_pipeline(model, mesh_context.pipeline_config, mesh_context.pp_size)
        self.rank = mesh_context.axis_rank(MeshAxisName.PP)
        num_stages = len(self.stage_ranks)
        self.stage_modules = nn.ModuleList(
            StageModule(take_stage(model, self.split, index), index, num_stages)
            for index, rank in enumerate(self.stage_ranks)
            if rank == self.rank
        )
        self._hidden_size: int = model.config.get_text_config().hidden_size
        self._dtype = dtype_of(precision.param_dtype) or torch.float32
        self._stages: list[Stage] = []
        self._schedules: dict[tuple[int, bool], Any] = {}
        self._shape: tuple[Any, ...] = ()
        self._loss_function: LossFunction | None = None

    @property
    def parts(self) -> list[PreTrainedModel]:
        """This rank's stages as models with the whole model's names."""
        return [cast(StageModule, module).model for module in self.stage_modules]

    @property
    def has_first(self) -> bool:
        return self.stage_ranks[0] == self.rank

    @property
    def has_last(self) -> bool:
        return self.stage_ranks[-1] == self.rank

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for part in self.parts:
            yield from part.named_parameters(prefix, recurse, remove_duplicate)

    def counted_parameters(self) -> list[nn.Parameter]:
        """This rank's parameters without copies of tied ones: what counts in the gradient norm."""
        copies = {tie.copy_name for tie in self.split.ties if self.stage_ranks[tie.copy_stage] == self.rank}
        return [parameter for name, parameter in self.named_parameters() if name not in copies]

    def connect(self) -> None:
        """Join the stages, whose weights are in place; copies of tied parameters get their values. Collective."""
        group = self.mesh_context.group(MeshAxisName.PP)
        num_stages = len(self.stage_ranks)
        self._stages = [
            Stage(module, cast(StageModule, module).index, num_stages, self.mesh_context.device, group=group)
            for module in self.stage_modules
        ]
        open_connections(self._schedule(1, train=False), self._stages)
        with torch.no_grad():
            for tie in self.split.ties:
                self._copy_from_home(tie)

    def run_training(
        self,
        input_ids: Tensor,
        labels: Tensor,
        loss_function: LossFunction,
        reduce_gradients: bool,
        **arguments: Tensor,
    ) -> None:
        """Forward and backward of one local batch; gradients are added to ``.grad``. Collective over the pipeline.

        Args:
            input_ids, labels: ``[batch, seq]``, a multiple of ``pp_microbatch_size`` rows, the same on all ranks of
                the pipeline.
            loss_function: ``(logits, labels) -> loss`` of a micro-batch, called where the last stage is.
            reduce_gradients: end with the reduce-scatter over data-parallel ranks; without it, whole gradients wait
                for the next local batch.
            arguments: ``[batch, ...]``, passed to every stage.
        """
        config = self.mesh_context.pipeline_config
        rows = config.pp_microbatch_size
        schedule = self._schedule(len(input_ids) // rows, train=True)
        factor = schedule._n_microbatches if config.scale_grads_in_schedule else 1
        self._loss_function = lambda logits, target: loss_function(logits, target) * factor
        for stage in self._stages:
            stage.reduce_gradients = reduce_gradients
        self._run(schedule.step, schedule, rows, input_ids, labels, arguments, train=True)

    @torch.no_grad()
    def run_forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        loss_function: LossFunction | None = None,
        **arguments: Tensor,
    ) -> Tensor | None:
        """Forward of any number of rows, in the mode (training or evaluation) that the modules are in. Collective.

        Args:
            labels, loss_function: as in :meth:`run_training`; without labels the logits are returned.

        Returns:
            without labels, logits ``[batch, seq, vocab]`` on the rank of the last stage; else None.
        """
        rows = self.mesh_context.pipeline_config.pp_microbatch_size
        rows = rows if len(input_ids) % rows == 0 else 1
        schedule = self._schedule(len(input_ids) // rows, train=False)
        self._loss_function = loss_function or (lambda logits, target: logits.new_zeros(()))
        target = input_ids if labels is None else labels
        return self._run(
            schedule.eval, schedule, rows, input_ids, target, arguments, train=False, keep_logits=labels is None
        )

    def _run(
        self,
        call: Any,
        schedule: Any,
        rows: int,
        input_ids: Tensor,
        labels: Tensor,
        arguments: dict[str, Tensor],
        train: bool,
        keep_logits: bool = False,
    ) -> Tensor | None:
        seq = input_ids.shape[1]
        shape = (id(schedule), rows, seq, train)
        if shape != self._shape:
            # Sequence parallelism begins and ends inside a stage: between stages sequences are whole.
            set_shapes(schedule, self._stages, (rows, seq, self._hidden_size), self._dtype, train)
            self._shape = shape
        with self._naming_stages():
            result: Tensor | None = call(
                *((input_ids,) if self.has_first else ()),
                target=labels if self.has_last else None,
                return_outputs=keep_logits,
                **arguments,
            )
        return result

    def _schedule(self, num_microbatches: int, train: bool) -> Any:
        key = (num_microbatches, train)
        if key not in self._schedules:
            config, pp_size = self.mesh_context.pipeline_config, self.mesh_context.pp_size
            self._schedules[key] = (
                build_schedule(config, self._stages, num_microbatches, self._loss)
                if train
                else build_forward_schedule(self.stage_ranks, pp_size, self._stages, num_microbatches, self._loss)
            )
        return self._schedules[key]

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        assert self._loss_function is not None
        return self._loss_function(logits, labels)

    @contextmanager
    def _naming_stages(self) -> Iterator[None]:
        """An error inside a schedule says which stages this rank runs."""
        try:
            yield
        except Exception as error:
            stages = " and ".join(str(index) for index, rank in enumerate(self.stage_ranks) if rank == self.rank)
            raise RuntimeError(f"pipeline stage {stages}: {_innermost(error)}") from error

    @torch.no_grad()
    def sum_tied_gradients(self) -> None:
        """Add the gradients of tied parameters' two copies, on both; after the last local batch of a step."""
        for tie in self.split.ties:
            home, copy = self._local(tie.name, tie.home), self._local(tie.copy_name, tie.copy_stage)
            gradients = [local_tensor(p.grad) for p in (home, copy) if p is not None and p.grad is not None]
            if home is not None and copy is not None:
                gradients[0] += gradients[1]
                gradients[1].copy_(gradients[0])
            elif gradients:
                other = torch.empty_like(gradients[0])
                peer = self._peer(tie.copy_stage if home is not None else tie.home)
                self._exchange([("send", gradients[0], peer), ("recv", other, peer)])
                gradients[0] += other

    def _copy_from_home(self, tie: Tie) -> None:
        home, copy = self._local(tie.name, tie.home), self._local(tie.copy_name, tie.copy_stage)
        if home is not None and copy is not None:
            local_tensor(copy).copy_(local_tensor(home))
        elif home is not None:
            self._exchange([("send", local_tensor(home).contiguous(), self._peer(tie.copy_stage))])
        elif copy is not None:
            received = torch.empty_like(local_tensor(copy))
            self._exchange([("recv", received, self._peer(tie.home))])
            local_tensor(copy).copy_(received)

    def _local(self, name: str, stage: int) -> nn.Parameter | None:
        """The parameter, where this rank has the stage."""
        for module in cast("Iterable[StageModule]", self.stage_modules):
            if module.index == stage:
                return module.model.get_parameter(name)
        return None

    def _peer(self, stage: int) -> int:
        group = self.mesh_context.group(MeshAxisName.PP)
        assert group is not None
        return dist.get_global_rank(group, self.stage_ranks[stage])

    def _exchange(self, messages: list[tuple[str, Tensor, int]]) -> None:
        """Send and receive between two ranks of the pipeline; empty shards need no message."""
        group = self.mesh_context.group(MeshAxisName.PP)
        operations = [
            dist.P2POp(dist.isend if kind == "send" else dist.irecv, tensor, peer, group)
            for kind, tensor, peer in messages
            if tensor.numel()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()

    def describe(self) -> str:
        """A table with a line for each stage: its rank, layers, other modules and parameters."""
        lines = [f"{'stage':>5}  {'rank':>4}  {'layers':>9}  {'parameters':>15}  also"]
        first = 0
        for index, (rank, count) in enumerate(zip(self.stage_ranks, self.split.num_layers, strict=True)):
            names = self.split.stages[index]
            layers = f"{first}-{first + count - 1}" if count > 1 else f"{first}"
            stack = next(name for name in names if name.endswith(f".{first}")).rpartition(".")[0]
            others = ", ".join(name for name in names if not name.startswith(f"{stack}."))
            parameters = f"{self.split.num_parameters[index]:,}"
            lines.append(f"{index:>5}  {rank:>4}  {layers:>9}  {parameters:>15}  {others}".rstrip())
            first += count
        return "\n".join(lines)


def _innermost(error: BaseException) -> str:
    """The message that torch's stage wrapped in its own, which lists the inputs."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"
