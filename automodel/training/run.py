"""One rank of a run, from a checked config to the objective."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from automodel.config.distributed import MixedPrecision
from automodel.config.errors import ConfigError
from automodel.config.schema import PrecisionConfig, TrainConfig
from automodel.data import DataBundle, EpochSampler, TrainLoader, build_data
from automodel.distributed.compilation import compiles
from automodel.distributed.mesh import MeshAxisName, MeshContext
from automodel.distributed.pipeline_parallel import AutoPipeline
from automodel.distributed.setup import setup_distributed
from automodel.distributed.world import World
from automodel.launch.context import LaunchContext
from automodel.launch.lifetime import StopFlag
from automodel.launch.process_group import initialize, shutdown
from automodel.model.build import build_config, build_model, count_parameters
from automodel.model.infrastructure import apply_model_infrastructure, instantiate_infrastructure
from automodel.model.weights import PretrainedWeights
from automodel.training.checkpoint.continuing import RunStart, describe_run, prepare_run_folder
from automodel.training.checkpoint.folder import CHECKPOINTS
from automodel.training.checkpoint.loader import check_same_model, check_same_run, choose_checkpoint, load_checkpoint
from automodel.training.checkpoint.pieces import model_tensors
from automodel.training.checkpoint.saver import CheckpointSaver, checkpoint_group
from automodel.training.consolidated import Consolidation
from automodel.training.generate import generate_text
from automodel.training.loggers import MetricLogger, build_loggers
from automodel.training.lr_scheduler import build_lr_scheduler
from automodel.training.metrics import MetricsFile, StepMetrics, ValidationMetrics, scalar_values
from automodel.training.mfu import mfu, model_flops_per_token, num_matmul_parameters, peak_flops
from automodel.training.optimizer import build_optimizer
from automodel.training.progress import Progress
from automodel.training.step_runner import StepRunner
from automodel.training.summary import closing_summary
from automodel.training.trainer import Trainer, TrainingObserver, TrainingResult

_LOG = logging.getLogger(__name__)
GENERATION_PROMPT = "def "


def run(
    config: TrainConfig,
    run_dir: Path,
    context: LaunchContext,
    device_type: str,
    stop_requested: StopFlag,
) -> float | None:
    """Train as ``config`` says, as one of ``context.world_size`` ranks. Collective.

    Args:
        config: already checked against the world.
        run_dir: an existing folder; rank 0 writes metrics there.
        context: this rank's place.
        device_type: ``cpu`` or ``cuda``.
        stop_requested: what this rank was asked to do between two steps: stop, or save.

    Returns:
        the last validation loss, else the last training loss; None when stopped before a step.
    """
    started = time.perf_counter()
    timeout = datetime.timedelta(minutes=config.launch.timeout_minutes)
    initialize(context, device_type, timeout)
    mesh_context = setup_distributed(config.distributed, context.world_size, device_type, timeout)
    data = build_data(config)
    _check_same_data(mesh_context, data)
    hf_config = build_config(config.model)
    _check_vocabulary(hf_config.get_text_config().vocab_size, data)
    model = build_model(hf_config, config.model)
    flops_utilization = _flops_utilization(model, hf_config, config, mesh_context)
    num_parameters = count_parameters(model)
    group = checkpoint_group(context.world_size)
    checkpoint = choose_checkpoint(config.checkpoint.resume, run_dir, context.rank, group)
    if checkpoint is not None:
        check_same_model(checkpoint, {name: tuple(tensor.shape) for name, tensor in model_tensors(model)})
        check_same_run(checkpoint, config, data.train.fingerprint)
    infrastructure = instantiate_infrastructure(mesh_context, mixed_precision(config.precision), config.training.loss)
    source = config.model.weights_source if checkpoint is None else None
    weights = None if source is None else PretrainedWeights(model, source, download=False)
    consolidation = Consolidation(config, model, data.tokenizer, context.rank)
    trained = apply_model_infrastructure(model, infrastructure, config.seed, weights)
    if weights is not None:
        _LOG.info("this rank read %s of %s bytes of %s", f"{weights.bytes_read:,}", f"{weights.total_bytes:,}", source)
    optimizer = build_optimizer(trained, config.optimizer)
    loader = TrainLoader(
        data.train,
        EpochSampler(len(data.train), config.seed),
        config.training.global_batch_size,
        config.training.local_batch_size,
        mesh_context.axis_rank(MeshAxisName.DP),
        mesh_context.dp_size,
    )
    total_steps = _total_steps(config, loader)
    lr_scheduler = build_lr_scheduler(optimizer, config.lr_scheduler, total_steps)
    if checkpoint is not None:
        load_checkpoint(checkpoint, trained, optimizer, context.rank, context.world_size, group)
    saver = CheckpointSaver(
        config.checkpoint,
        run_dir,
        trained,
        optimizer,
        context.rank,
        context.world_size,
        group,
        describe_run(config, run_dir, mesh_context, data),
    )
    with ExitStack() as stack:
        observer = TrainingObserver()
        reporter: Reporter | None = None
        if context.rank == 0:
            start = prepare_run_folder(run_dir, checkpoint, config.checkpoint.resume)
            reporter = observer = stack.enter_context(Reporter(config, run_dir, total_steps, start))
            reporter.message(_header(config, mesh_context, num_parameters, data, total_steps, device_type))
            if isinstance(trained, AutoPipeline):
                reporter.message(trained.describe())
        trainer = Trainer(
            config=config,
            mesh_context=mesh_context,
            model=trained,
            manager=infrastructure.manager,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            data=data,
            loader=loader,
            total_steps=total_steps,
            observer=observer,
            stop_requested=stop_requested,
            flops_utilization=flops_utilization,
            saver=saver,
            save_requested=stop_requested.take_save_request,
            after_save=lambda step: consolidation.after_checkpoint(trained, saver, step),
        )
        if checkpoint is not None:
            trainer.load_state_dict(checkpoint.index["trainer"])
            if checkpoint.path.parent == saver.run_dir / CHECKPOINTS:
                saver.saved_step = checkpoint.step
        result = trainer.train()
        if not result.stopped:
            consolidation.at_end(trained, run_dir)
        text = None if result.stopped else _sample_text(trainer.runner, config, data, mesh_context)
        if reporter is not None:
            reporter.close_with(result, text, time.perf_counter() - started)
    shutdown()
    return result.objective


def mixed_precision(precision: PrecisionConfig) -> MixedPrecision:
    """The ``precision`` group as a policy for the strategies."""
    return MixedPrecision(precision.param_dtype, precision.reduce_dtype, precision.output_dtype)


class Reporter(TrainingObserver):
    """Rank 0's console, log, metrics.jsonl and metric loggers; a context manager."""

    def __init__(self, config: TrainConfig, run_dir: Path, total_steps: int, start: RunStart) -> None:
        self._run_dir = run_dir
        self._progress = Progress(total_steps, start.step + 1, config.training.log_every_steps)
        self._metrics = MetricsFile(run_dir / "metrics.jsonl", start.keep_metrics_bytes)
        self._loggers: list[MetricLogger] = build_loggers(config.logger, run_dir, dataclasses.asdict(config))
        self._stack = ExitStack()

    def __enter__(self) -> Reporter:
        self._stack.callback(self._metrics.close)
        for logger in self._loggers:
            self._stack.callback(logger.close)
        self._stack.enter_context(self._progress)
        return self

    def __exit__(self, *details: Any) -> None:
        self._stack.__exit__(*details)

    def message(self, text: str) -> None:
        self._progress.message(text)

    def on_step(self, metrics: StepMetrics) -> None:
        self._write(metrics)
        self._progress.update(metrics)

    def on_validation(self, metrics: ValidationMetrics) -> None:
        self._write(metrics)
        self._progress.validation(metrics)

    def metrics_offset(self) -> int:
        return self._metrics.size

    def _write(self, metrics: StepMetrics | ValidationMetrics) -> None:
        self._metrics.write(metrics)
        for logger in self._loggers:
            logger.log(metrics.step, scalar_values(metrics))

    def close_with(self, result: TrainingResult, generated_text: str | None, seconds: float) -> None:
        """Show the closing lines."""
        steps = list(result.val_losses)
        self.message(
            closing_summary(
                num_steps=result.num_steps,
                first_loss=result.first_loss,
                last_loss=result.last_loss,
                val_loss_at_start=result.val_losses.get(0),
                val_loss_at_end=result.val_losses[steps[-1]] if steps and steps[-1] > 0 else None,
                generated_text=generated_text,
                run_dir=self._run_dir,
                seconds=seconds,
            )
        )


def _check_same_data(mesh_context: MeshContext, data: DataBundle) -> None:
    """Each rank reads the files itself; those of another machine may differ."""
    if not World(mesh_context).agree(data.train.fingerprint):
        raise RuntimeError(
            "the ranks read different training data: the machines have other files, another version of Python "
            "(data=stdlib) or another tokenizer"
        )


def _check_vocabulary(vocab_size: int, data: DataBundle) -> None:
    if data.max_token_id >= vocab_size:
        raise ConfigError(
            "model.config.vocab_size",
            vocab_size,
            f"the tokenizer gives token ids up to {data.max_token_id}",
            f"a vocabulary of at least {data.max_token_id + 1}, or another data.tokenizer",
        )


def _total_steps(config: TrainConfig, loader: TrainLoader) -> int:
    limits = []
    if config.training.max_steps is not None:
        limits.append(config.training.max_steps)
    if config.training.num_epochs is not None:
        limits.append(config.training.num_epochs * loader.steps_per_epoch)
    return min(limits)


def _flops_utilization(
    model: nn.Module, hf_config: Any, config: TrainConfig, mesh_context: MeshContext
) -> Callable[[float], float] | None:
    # Peaks are of bf16 and fp16 products: a share of them would say nothing about fp32.
    if mesh_context.device_type != "cuda" or config.precision.param_dtype == "float32":
        return None
    peak = peak_flops(torch.cuda.get_device_name())
    if peak is None:
        return None
    flops = model_flops_per_token(hf_config, num_matmul_parameters(model, hf_config), config.training.seq_length)
    return lambda tokens_per_second: mfu(tokens_per_second, flops, mesh_context.world_size, peak)


def _header(
    config: TrainConfig,
    mesh_context: MeshContext,
    num_parameters: int,
    data: DataBundle,
    total_steps: int,
    device_type: str,
) -> str:
    training = config.training
    accumulation = training.global_batch_size // (training.local_batch_size * mesh_context.dp_size)
    batches = f"{accumulation} micro-batches of {training.local_batch_size} a rank"
    if mesh_context.pp_size > 1:
        rows = mesh_context.pipeline_config.pp_microbatch_size
        batches = f"{accumulation} local batches of {training.local_batch_size // rows} micro-batches of {rows}"
    validation = len(data.validation) if data.validation is not None else 0
    return (
        f"{config.model.pretrained_model_name_or_path or config.model.model_type}: {num_parameters:,} parameters\n"
        f"{config.distributed.strategy} on {mesh_context.world_size} x {device_type}: {mesh_context.sizes.describe()}\n"
        f"{len(data.train):,} training and {validation:,} validation samples of {training.seq_length} tokens\n"
        f"{total_steps} steps of {training.global_batch_size} samples, {batches}"
    )


def _sample_text(runner: StepRunner, config: TrainConfig, data: DataBundle, mesh_context: MeshContext) -> str | None:
    if config.training.generate_tokens == 0:
        return None

    def agree(token: torch.Tensor) -> torch.Tensor:
        if mesh_context.world_size > 1:
            dist.broadcast(token, src=0)
        return token

    # Each token lengthens the input: compiled blocks would be compiled anew for these few forwards.
    with torch.compiler.set_stance("force_eager") if compiles(mesh_context) else nullcontext():
        return generate_text(
            lambda ids: runner.next_token_logits(ids).unsqueeze(1),
            data.tokenizer,
            GENERATION_PROMPT,
            config.training.generate_tokens,
            config.training.seq_length,
            config.seed,
            mesh_context.device,
            agree=agree,
        )
