"""One parity case and how a rank runs it: the product's own trainer on small synthetic data."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from automodel.config.schema import TrainConfig, load
from automodel.data import DataBundle, EpochSampler, TokenDataset, TrainLoader, byte_tokenizer
from automodel.distributed.mesh import MeshAxisName
from automodel.distributed.pipeline_parallel import AutoPipeline
from automodel.distributed.setup import setup_distributed
from automodel.model.build import build_config, build_model
from automodel.model.infrastructure import apply_model_infrastructure, instantiate_infrastructure
from automodel.model.weights import PretrainedWeights
from automodel.training.lr_scheduler import build_lr_scheduler
from automodel.training.metrics import StepMetrics, ValidationMetrics
from automodel.training.optimizer import build_optimizer
from automodel.training.run import mixed_precision
from automodel.training.trainer import Trainer, TrainingObserver

TINY_LLAMA = {
    "vocab_size": 67,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.1,
}


@dataclass(frozen=True)
class Case:
    """A run of a few SGD steps.

    Attributes:
        model_type: of transformers.
        model: fields of its configuration.
        distributed: the ``distributed`` section; the reference run ignores it.
        settings: other sections, e.g. ``{"training": {"local_batch_size": 4}}``.
        num_samples: of the training set; steps beyond it start another epoch.
        fault: dotted name of a context manager that breaks something on purpose, for negative controls.
    """

    model_type: str = "llama"
    model: dict[str, Any] = field(default_factory=lambda: dict(TINY_LLAMA))
    distributed: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_samples: int = 64
    steps: int = 3
    fault: str | None = None

    def config(self, reference: bool) -> TrainConfig:
        """The run's settings: fp32, plain SGD, a third of the labels masked, clipping that bites."""
        sections: dict[str, dict[str, Any]] = {
            "model": {"model_type": self.model_type, "config": self.model, "init": "random"},
            "precision": dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"), "float32"),
            "data": {"mask_labels": 0.33},
            "optimizer": {"name": "sgd", "lr": 0.3, "weight_decay": 0.0},
            "lr_scheduler": {"name": "constant"},
            "training": {
                "max_steps": self.steps,
                "global_batch_size": 16,
                "local_batch_size": 2,
                "seq_length": 16,
                "max_grad_norm": 1.0,
            },
        }
        for name, values in self.settings.items():
            sections[name] = {**sections.get(name, {}), **values}
        sections["distributed"] = {} if reference else self.distributed
        return load(sections)


@dataclass
class Outcome:
    """What a run gave.

    Attributes:
        weights: SHA-256 over the whole initial weights, by name.
        losses, norms: of each step.
        val_loss: at the end; None when no validation token is trained.
        gradients: name -> whole gradient of each step, after clipping, fp32.
        local_numels: name -> elements held by rank 0.
        final_weights: SHA-256 of this rank's view of the whole weights at the end.
    """

    weights: str
    losses: list[float]
    norms: list[float]
    val_loss: float | None
    gradients: list[dict[str, np.ndarray]]
    local_numels: dict[str, int]
    final_weights: str


class _Recorder(TrainingObserver):
    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []
        self.validations: list[ValidationMetrics] = []

    def on_step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)

    def on_validation(self, metrics: ValidationMetrics) -> None:
        self.validations.append(metrics)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a DTensor (collective), or the tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def named_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters by the model's own names, whatever wraps it."""
    return {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}


def of_all_stages(model: torch.nn.Module, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """``values`` by parameter name, of all pipeline stages together; collective.

    Raises:
        AssertionError: the two copies of a tied parameter differ.
    """
    if not isinstance(model, AutoPipeline):
        return values
    gathered: list[Any] = [None] * model.mesh_context.pp_size
    dist.all_gather_object(gathered, values, group=model.mesh_context.group(MeshAxisName.PP))
    merged = {name: value for part in gathered for name, value in part.items()}
    for tie in model.split.ties:
        if tie.copy_name in merged:
            assert np.array_equal(merged.pop(tie.copy_name), merged[tie.name]), f"{tie} has drifted apart"
    return merged


def digest(model: torch.nn.Module) -> str:
    """SHA-256 over all whole parameters in the order of their names; collective."""
    total = hashlib.sha256()
    values = {name: whole(p.detach()).float().cpu().numpy() for name, p in named_parameters(model).items()}
    for name, value in sorted(of_all_stages(model, values).items()):
        total.update(name.encode())
        total.update(value.tobytes())
    return total.hexdigest()


def synthetic_data(config: TrainConfig, num_samples: int) -> DataBundle:
    """Random tokens below the model's vocabulary."""
    seq_length = config.training.seq_length
    tokens = np.random.default_rng(7).integers(
        0, config.model.config["vocab_size"], (num_samples + 10) * seq_length + 1
    )
    split = num_samples * seq_length + 1
    train = TokenDataset(tokens[:split], seq_length, config.data.mask_labels, config.seed)
    validation = TokenDataset(tokens[split - 1 :], seq_length, config.data.mask_labels, config.seed)
    return DataBundle(byte_tokenizer(), train, validation, int(tokens.max()))


def run_case(case: Case, world_size: int, on_model: Callable[[torch.nn.Module], None] | None = None) -> Outcome:
    """Run ``case`` on this rank; collective when ``world_size`` > 1. A world of 1 is the reference run."""
    config = case.config(reference=world_size == 1)
    mesh_context = setup_distributed(config.distributed, world_size, "cpu")
    infrastructure = instantiate_infrastructure(mesh_context, mixed_precision(config.precision), config.training.loss)
    model = build_model(build_config(config.model), config.model)
    source = config.model.weights_source
    pretrained = None if source is None else PretrainedWeights(model, source)
    trained = apply_model_infrastructure(model, infrastructure, config.seed, pretrained)
    weights = digest(trained)
    data = synthetic_data(config, case.num_samples)
    optimizer = build_optimizer(trained, config.optimizer)
    gradients: list[dict[str, np.ndarray]] = []

    def record_gradients(*_: Any) -> None:
        values = {
            name: whole(parameter.grad).detach().float().numpy().copy()
            for name, parameter in named_parameters(trained).items()
            if parameter.grad is not None
        }
        gradients.append(of_all_stages(trained, values))

    optimizer.register_step_pre_hook(record_gradients)
    recorder = _Recorder()
    loader = TrainLoader(
        data.train,
        EpochSampler(len(data.train), config.seed),
        config.training.global_batch_size,
        config.training.local_batch_size,
        mesh_context.axis_rank(MeshAxisName.DP),
        mesh_context.dp_size,
    )
    trainer = Trainer(
        config=config,
        mesh_context=mesh_context,
        model=trained,
        manager=infrastructure.manager,
        optimizer=optimizer,
        lr_scheduler=build_lr_scheduler(optimizer, config.lr_scheduler, case.steps),
        data=data,
        loader=loader,
        total_steps=case.steps,
        observer=recorder,
        stop_requested=lambda: False,
    )
    if on_model is not None:
        on_model(trained)
    trainer.train()
    return Outcome(
        weights=weights,
        losses=[metrics.loss for metrics in recorder.steps],
        norms=[metrics.grad_norm for metrics in recorder.steps],
        val_loss=recorder.validations[-1].val_loss if recorder.validations else None,
        gradients=gradients,
        local_numels={
            name: (p.to_local() if isinstance(p, DTensor) else p).numel()
            for name, p in named_parameters(trained).items()
        },
        final_weights=digest(trained),
    )


def mesh_time_outs(world_size: int, seconds: float) -> set[float]:
    """Time-outs of all groups of a mesh with every axis, in seconds."""
    timeout = datetime.timedelta(seconds=seconds)
    context = setup_distributed({"tp_size": 2, "ep_size": 2}, world_size, "cpu", timeout)
    assert context.device_mesh is not None
    assert context.moe_mesh is not None
    meshes = [context.device_mesh, context.moe_mesh, *context.flattened.values()]
    groups = [group for mesh in meshes for group in mesh.get_all_groups()]
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return {backend.options._timeout.total_seconds() for backend in backends}
