"""The training loop: data, forward-backward, one norm, clip, update, metrics."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from automodel.config.schema import TrainConfig
from automodel.data import DataBundle, TrainLoader, validation_batches
from automodel.data.batches import StepBatch
from automodel.distributed.gradients import clip_gradients, local_square_sum
from automodel.distributed.mesh import MeshAxisName, MeshContext
from automodel.distributed.strategy import StrategyManager
from automodel.distributed.world import World
from automodel.training.checkpoint.saver import CheckpointSaver, SaveRequest
from automodel.training.metrics import StepMetrics, ValidationMetrics, peak_memory_bytes
from automodel.training.step_runner import build_step_runner

_LOG = logging.getLogger(__name__)


class NotFiniteError(RuntimeError):
    """A loss or gradient norm is NaN or infinite; nothing was updated in that step."""


class TrainingObserver:
    """Told of every result; the rank that shows and writes them overrides the methods."""

    def on_step(self, metrics: StepMetrics) -> None: ...

    def on_validation(self, metrics: ValidationMetrics) -> None: ...

    def metrics_offset(self) -> int:
        """Size in bytes of metrics.jsonl, where this observer writes it."""
        return 0


@dataclass
class TrainingResult:
    """What a run reached.

    Attributes:
        objective: the last validation loss, else the last training loss; None before the first step.
        stopped: a stop was asked for before the last step.
    """

    first_loss: float | None = None
    last_loss: float | None = None
    val_losses: dict[int, float] = field(default_factory=dict)
    num_steps: int = 0
    stopped: bool = False

    @property
    def objective(self) -> float | None:
        return next(reversed(self.val_losses.values()), self.last_loss)


class Trainer:
    """Runs the steps on one rank. All ranks call the same methods in the same order.

    Args:
        config: of the run.
        mesh_context: this rank's place.
        model: what a step calls, from ``apply_model_infrastructure``.
        manager: the strategy, for gradient synchronisation.
        optimizer: over the model's parameters.
        lr_scheduler: stepped once a step.
        data: the same on every rank.
        loader: this rank's micro-batches.
        total_steps: where to end.
        observer: told of results on this rank.
        stop_requested: asked once a step; a stop on any rank stops all at the same step.
        flops_utilization: tokens per second -> MFU, where it is known.
        saver: saves checkpoints, or None.
        save_requested: asked once a step; a request on any rank has all save after that step.
        after_save: called with the step after each save, unless the run was asked to stop and should lose no time.
    """

    def __init__(
        self,
        config: TrainConfig,
        mesh_context: MeshContext,
        model: nn.Module,
        manager: StrategyManager,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler,
        data: DataBundle,
        loader: TrainLoader,
        total_steps: int,
        observer: TrainingObserver,
        stop_requested: Callable[[], bool],
        flops_utilization: Callable[[float], float] | None = None,
        saver: CheckpointSaver | None = None,
        save_requested: Callable[[], bool] = lambda: False,
        after_save: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.config = config
        self.mesh_context = mesh_context
        self.model = model
        self.manager = manager
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.data = data
        self.loader = loader
        self.total_steps = total_steps
        self.observer = observer
        self.stop_requested = stop_requested
        self.flops_utilization = flops_utilization
        self.saver = saver
        self.save_requested = save_requested
        self.after_save = after_save
        self.world = World(mesh_context)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.runner = build_step_runner(model, manager, mesh_context.device, config.training.loss)
        self.step = 0
        self.result = TrainingResult()
        self._save_now = False
        # The loader is a step ahead while a batch waits for the other ranks' word.
        self._loader_position = loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken; after the optimizer's state is loaded."""
        self.step = state["step"]
        self.loader.load_state_dict(state["loader"])
        self._loader_position = self.loader.state_dict()
        self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        self.result.last_loss = state["last_loss"]
        self.result.val_losses = dict([state["validation"]] if state["validation"] else [])

    def state_dict(self) -> dict[str, Any]:
        """The loop's own state after ``step`` steps, as JSON values; the same on every rank."""
        return {
            "step": self.step,
            "loader": self._loader_position,
            "lr_scheduler": self.lr_scheduler.state_dict(),
            "last_loss": self.result.last_loss,
            "validation": list(self.result.val_losses.items())[-1] if self.result.val_losses else None,
        }

    def train(self) -> TrainingResult:
        """Run to the last step, or to the first step boundary after a stop was asked for."""
        training = self.config.training
        if training.val_at_start and self.step == 0:
            self.validate()
        while self.step < self.total_steps:
            if not self._train_step():
                self.result.stopped = True
                self._save(final=True)
                return self.result
            if training.val_every_steps and self.step % training.val_every_steps == 0:
                self.validate()
            every = training.ckpt_every_steps
            if self._save_now or (every and self.step % every == 0 and self.step < self.total_steps):
                self._save()
        if training.val_at_end and self.step not in self.result.val_losses:
            self.validate()
        self._save(final=True)
        return self.result

    def _save(self, final: bool = False) -> None:
        """Save what the finished steps made; collective. Nothing to save before the first step."""
        self._save_now = False
        if self.saver is not None and self.step:
            request = SaveRequest(
                self.step, self.state_dict(), self.observer.metrics_offset(), self.result.val_losses.get(self.step)
            )
            self.saver.save(request, final)
            if not self.result.stopped:
                self.after_save(self.step)

    def _train_step(self) -> bool:
        """One step; False when all ranks agree to stop before it."""
        started = time.perf_counter()
        batch = self.loader.next_step()
        speaks = self.world.speaks_for_tokens
        num_label_tokens, num_samples, stops, saves = self.world.sum_counts(
            batch.num_label_tokens if speaks else 0,
            len(batch.sample_ids) if speaks else 0,
            int(self.stop_requested()),
            int(self.save_requested()),
        )
        if stops:
            return False
        if self.saver is not None:
            self.saver.check()
        self._save_now = saves > 0
        self.step += 1
        self.result.num_steps += 1
        if num_label_tokens:
            loss, grad_norm, peak_memory = self._update(batch, num_label_tokens)
        else:
            _LOG.warning("step %d has no trained token: no parameter was changed", self.step)
            loss, grad_norm, peak_memory = 0.0, 0.0, peak_memory_bytes(self.mesh_context.device_type)
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        self.lr_scheduler.step()
        if num_label_tokens:
            self.result.last_loss = loss
            if self.result.first_loss is None:
                self.result.first_loss = loss
        seconds = time.perf_counter() - started
        tokens_per_second = num_samples * self.config.training.seq_length / seconds
        metrics = StepMetrics(
            step=self.step,
            epoch=batch.epoch,
            loss=loss,
            grad_norm=grad_norm,
            lr=learning_rate,
            num_label_tokens=num_label_tokens,
            tokens_per_second=tokens_per_second,
            step_time_s=seconds,
            peak_memory_bytes=peak_memory,
            mfu=self.flops_utilization(tokens_per_second) if self.flops_utilization else None,
        )
        if self.config.data.log_sample_ids:
            metrics = dataclasses.replace(metrics, sample_ids=self._gather_sample_ids(batch.sample_ids))
        self.observer.on_step(metrics)
        self._loader_position = self.loader.state_dict()
        return True

    def _update(self, batch: StepBatch, num_label_tokens: int) -> tuple[float, float, int]:
        """Forward, backward, clip and update; returns loss, gradient norm and the largest peak memory."""
        device = self.mesh_context.device
        loss_sum = self.runner.forward_backward(batch.micro_batches, num_label_tokens)
        square_sum = local_square_sum(self.runner.counted_parameters(), self.world.ranks_of_a_stage, device)
        peak = torch.tensor(peak_memory_bytes(self.mesh_context.device_type), dtype=torch.float64, device=device)
        if not self.world.speaks_for_loss:
            loss_sum = loss_sum * 0.0
        # The one exchange of a step besides the strategy's own: every rank then derives the same numbers.
        gathered = self.world.gather(torch.stack([loss_sum, square_sum, peak]))
        loss = gathered[:, 0].sum().item() / num_label_tokens
        grad_norm = math.sqrt(max(gathered[:, 1].sum().item(), 0.0)) if gathered[:, 1].isfinite().all() else math.nan
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._raise_not_finite(gathered, loss, grad_norm)
        clip_gradients(self.parameters, grad_norm, self.config.training.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, grad_norm, int(gathered[:, 2].max().item())

    def _raise_not_finite(self, gathered: torch.Tensor, loss: float, grad_norm: float) -> None:
        def ranks(column: int) -> Sequence[int]:
            return torch.nonzero(~gathered[:, column].isfinite()).flatten().tolist()

        what, where = ("loss", ranks(0)) if ranks(0) else ("gradient norm", ranks(1))
        value = loss if what == "loss" else grad_norm
        raise NotFiniteError(
            f"step {self.step}: the {what} is not finite ({value}) on rank {', '.join(map(str, where))}; "
            "the run stopped before the update. A lower optimizer.lr, more lr_scheduler.warmup_steps, a "
            "training.max_grad_norm, or precision=fp32 may help"
        )

    def _gather_sample_ids(self, sample_ids: list[int]) -> list[int]:
        """All samples of the step, sorted; for checks, so speed does not matter."""
        if self.world.size == 1:
            return sorted(sample_ids)
        gathered: list[list[int]] = [[] for _ in range(self.world.size)]
        dist.all_gather_object(gathered, sample_ids if self.world.speaks_for_tokens else [])
        return sorted(sample for part in gathered for sample in part)

    def validate(self) -> float | None:
        """Mean loss over the trained tokens of all validation samples; None without any."""
        dataset = self.data.validation
        if dataset is None:
            return None
        batches = validation_batches(
            dataset,
            self.config.training.local_batch_size,
            self.mesh_context.axis_rank(MeshAxisName.DP),
            self.mesh_context.dp_size,
        )
        loss_sum, num_label_tokens = self.runner.evaluation_sum(batches)
        counts = torch.tensor(num_label_tokens, dtype=torch.float64, device=loss_sum.device)
        own = [loss_sum * float(self.world.speaks_for_loss), counts * float(self.world.speaks_for_tokens)]
        total_loss, total_tokens = self.world.gather(torch.stack(own)).sum(0).tolist()
        if not total_tokens:
            _LOG.warning("no trained token in the validation samples: no validation loss")
            return None
        loss = total_loss / total_tokens
        if not math.isfinite(loss):
            raise NotFiniteError(f"the validation loss after step {self.step} is not finite ({loss})")
        self.result.val_losses[self.step] = loss
        self.observer.on_validation(ValidationMetrics(self.step, loss, int(total_tokens)))
        return loss
