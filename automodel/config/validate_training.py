"""Rules of everything but the layout: model choice, precision, loop, optimizer, schedule, logger, launch."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

from automodel.config.distributed import DistributedSection, MixedPrecision
from automodel.config.errors import ConfigError
from automodel.config.schema import OptimizerConfig, TrainConfig

_OPTIMIZER_READS = {"adamw": ("betas", "eps"), "sgd": ("momentum",)}
_LOGGER_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


def check_model_choice(config: TrainConfig) -> None:
    """One source of the model, and weights that this source can give.

    Raises:
        ConfigError: none or two sources, or pretrained weights of a model without files.
    """
    model = config.model
    if model.pretrained_model_name_or_path is None and model.model_type is None:
        raise ConfigError(
            "model.pretrained_model_name_or_path",
            None,
            "the run needs a model",
            "a folder or hub name, or another choice of the group model, such as model=tiny_llama",
        )
    if model.pretrained_model_name_or_path is not None and model.model_type is not None:
        raise ConfigError(
            "model.model_type",
            model.model_type,
            "the model named by pretrained_model_name_or_path brings its own type",
            "none, or model=hf",
        )
    if model.pretrained_model_name_or_path is None and model.init == "pretrained":
        raise ConfigError(
            "model.init", "pretrained", "there is no pretrained_model_name_or_path to take weights from", "random"
        )


def check_precision(config: TrainConfig) -> None:
    """Refuse fp16: its gradients underflow without a loss scaler, and a sharded one does not exist here.

    Raises:
        ConfigError: names the dtype's setting.
    """
    section: DistributedSection = config.distributed
    policies: dict[str, Any] = {"precision": config.precision}
    policies["distributed.mp_policy"] = getattr(section.strategy_config, "mp_policy", None)
    if section.ep_size > 1:
        policies["distributed.moe.mp_policy"] = section.moe.mp_policy
    for prefix, policy in policies.items():
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            if policy is not None and getattr(policy, name) == "float16":
                legal = "bfloat16, float32" + (", none" if isinstance(policy, MixedPrecision) else "")
                raise ConfigError(
                    f"{prefix}.{name}", "float16", "fp16 needs a sharded loss scaler, which is not here", legal
                )


def check_launch(config: TrainConfig) -> None:
    """Ranges of the launch section.

    Raises:
        ConfigError: names the setting.
    """
    nproc = config.launch.nproc_per_node
    if nproc != "auto" and nproc < 1:
        raise ConfigError("launch.nproc_per_node", nproc, "a run has at least one process", "auto, 1, 2, ...")
    minutes = config.launch.timeout_minutes
    if not (math.isfinite(minutes) and minutes > 0):
        raise ConfigError("launch.timeout_minutes", minutes, "the time-out must be positive", "a positive number")


def check_strategy_ranges(section: DistributedSection) -> None:
    """Ranges of the strategy's own numbers.

    Raises:
        ConfigError: names the setting.
    """
    strategy = section.strategy_config
    for name in ("forward_prefetch", "backward_prefetch"):
        _at_least(0, f"distributed.{name}", getattr(strategy, name, 0))
    bucket = getattr(strategy, "bucket_cap_mb", None)
    if bucket is not None and not (math.isfinite(bucket) and bucket > 0):
        raise ConfigError(
            "distributed.bucket_cap_mb", bucket, "a bucket has a positive size", "a positive number, none"
        )


def check_loop(config: TrainConfig) -> None:
    """Ranges of the training section and of the seed.

    Raises:
        ConfigError: names the setting.
    """
    training = config.training
    if training.max_steps is None and training.num_epochs is None:
        raise ConfigError(
            "training.max_steps",
            None,
            "the run needs an end: neither max_steps nor num_epochs is set",
            "1, 2, ..., or training.num_epochs=1, 2, ...",
        )
    for name in ("max_steps", "num_epochs", "ckpt_every_steps", "val_every_steps"):
        _at_least(1, f"training.{name}", getattr(training, name), optional=True)
    _at_least(1, "training.seq_length", training.seq_length)
    _at_least(1, "training.log_every_steps", training.log_every_steps)
    _at_least(0, "training.generate_tokens", training.generate_tokens)
    norm = training.max_grad_norm
    if norm is not None and not norm > 0:
        raise ConfigError(
            "training.max_grad_norm", norm, "the largest norm must be positive", "a positive number, none (no clipping)"
        )
    # torch's generators take 64 bits.
    if not 0 <= config.seed < 2**63:
        raise ConfigError("seed", config.seed, "the seed is out of range", "0 to 2**63 - 1")
    data = config.data
    held_out = data.source == "stdlib" or data.val_files is not None or data.val_fraction > 0
    if not held_out and (training.val_every_steps is not None or training.val_at_start):
        key = "val_at_start" if training.val_every_steps is None else "val_every_steps"
        raise ConfigError(
            f"training.{key}",
            getattr(training, key),
            "data.val_fraction=0 without data.val_files leaves nothing to validate on",
            "leave it out, or data.val_fraction=0.1, or data.val_files=<glob>",
        )


def check_loss(config: TrainConfig) -> None:
    """A loss that the model itself returns leaves it in the output's dtype, and below fp32 it would be rounded.

    Raises:
        ConfigError: names the dtype's setting.
    """
    if config.training.loss != "linear_cross_entropy":
        return
    explicit = getattr(config.distributed.strategy_config, "mp_policy", None)
    prefix, policy = ("precision", config.precision) if explicit is None else ("distributed.mp_policy", explicit)
    if policy.output_dtype not in (None, "float32"):
        raise ConfigError(
            f"{prefix}.output_dtype",
            policy.output_dtype,
            "training.loss=linear_cross_entropy is what the model returns, and it is returned in fp32",
            "float32, or training.loss=cross_entropy",
        )


def check_optimizer(config: TrainConfig) -> None:
    """Ranges of the optimizer, and settings that the chosen one does not read.

    Raises:
        ConfigError: names the setting.
    """
    optimizer = config.optimizer
    for other, names in _OPTIMIZER_READS.items():
        for name in names:
            value = getattr(optimizer, name)
            if other != optimizer.name and value != getattr(OptimizerConfig(), name):
                raise ConfigError(
                    f"optimizer.{name}",
                    value,
                    f"this setting belongs to {other} and {optimizer.name} cannot use it",
                    f"leave it out, or optimizer={other}",
                )
    for name in ("lr", "weight_decay"):
        value = getattr(optimizer, name)
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(
                f"optimizer.{name}", value, "it must not be negative, nor infinite", "0 or a positive number"
            )
    for index, beta in enumerate(optimizer.betas):
        if not 0 <= beta < 1:
            raise ConfigError(f"optimizer.betas[{index}]", beta, "a decay rate is below 1", "0.0 to below 1.0")
    if not 0 <= optimizer.momentum < 1:
        raise ConfigError("optimizer.momentum", optimizer.momentum, "a momentum is below 1", "0.0 to below 1.0")
    if not (math.isfinite(optimizer.eps) and optimizer.eps > 0):
        raise ConfigError(
            "optimizer.eps", optimizer.eps, "it keeps a division from 0, so it is positive", "such as 1e-8"
        )


def check_lr_scheduler(config: TrainConfig) -> None:
    """Ranges of the schedule. A run may be shorter than its warm-up and then ends inside it.

    Raises:
        ConfigError: names the setting.
    """
    scheduler, steps = config.lr_scheduler, config.training.max_steps
    _at_least(0, "lr_scheduler.warmup_steps", scheduler.warmup_steps)
    if not 0 <= scheduler.min_lr_ratio <= 1:
        raise ConfigError(
            "lr_scheduler.min_lr_ratio", scheduler.min_lr_ratio, "it is a share of optimizer.lr", "0.0 to 1.0"
        )
    decay = scheduler.decay_steps
    if decay is None:
        return
    if scheduler.name != "wsd":
        raise ConfigError(
            "lr_scheduler.decay_steps",
            decay,
            f"this setting belongs to wsd and {scheduler.name} cannot use it",
            "leave it out, or lr_scheduler=wsd",
        )
    _at_least(1, "lr_scheduler.decay_steps", decay, optional=True)
    if steps is not None and decay > steps - scheduler.warmup_steps:
        room = steps - scheduler.warmup_steps
        raise ConfigError(
            "lr_scheduler.decay_steps",
            decay,
            f"warm-up ({scheduler.warmup_steps}) and decay must fit into the {steps} steps of the run",
            f"1 to {room}, or none: a tenth of the run" if room >= 1 else "none: a tenth of the run",
        )


def check_logger(config: TrainConfig) -> None:
    """The logger's package is an optional extra.

    Raises:
        ConfigError: it is not installed.
    """
    name = config.logger.name
    package = _LOGGER_PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ConfigError(
            "logger",
            name,
            f"the package {package} is not installed",
            f"logger=none, or first: pip install -e '.[{name}]'",
        )


def _at_least(smallest: int, key: str, value: int | None, optional: bool = False) -> None:
    if value is not None and value < smallest:
        legal = f"{smallest}, {smallest + 1}, ..." + (", none" if optional else "")
        raise ConfigError(key, value, f"it must be at least {smallest}", legal)
