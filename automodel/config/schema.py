"""Every setting of a run as dataclasses, without torch.

They are Hydra's structured configs (:func:`register`), and what the library takes:
:func:`load` turns a composed config into a :class:`TrainConfig`. The ``distributed`` section has
its own dataclasses in :mod:`automodel.config.distributed`, since its fields depend on the strategy.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from automodel.config.coerce import from_mapping, is_none
from automodel.config.distributed import DistributedSection, parse_distributed_section

DTypeName = Literal["float32", "bfloat16", "float16"]
LossName = Literal["cross_entropy", "linear_cross_entropy"]


@dataclass
class ModelConfig:
    """A Hugging Face causal language model.

    ``config`` holds fields of the model's own configuration class, on top of what ``model_type`` or
    ``pretrained_model_name_or_path`` gives. ``init`` none means pretrained where a path is named,
    else random.
    """

    model_type: str | None = None
    pretrained_model_name_or_path: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    init: Literal["random", "pretrained"] | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False

    @property
    def weights_source(self) -> str | None:
        """Folder or hub name that the weights come from; None: initial weights."""
        return None if self.init == "random" else self.pretrained_model_name_or_path


@dataclass
class PrecisionConfig:
    """dtypes of compute, gradient reduction and output; master weights are always fp32."""

    param_dtype: DTypeName = "bfloat16"
    reduce_dtype: DTypeName = "float32"
    output_dtype: DTypeName = "float32"


@dataclass
class DataConfig:
    """Where samples come from. Order and masking are functions of seed, epoch and sample index."""

    source: Literal["stdlib", "text"] = "stdlib"
    files: str | list[str] | None = None
    text_field: str | None = None
    tokenizer: str | None = None
    val_files: str | list[str] | None = None
    val_fraction: float = 0.1
    val_max_samples: int | None = 256
    mask_labels: float = 0.0
    log_sample_ids: bool = False
    packed_sequence_size: int = 0


@dataclass
class OptimizerConfig:
    """``weight_decay`` applies to parameters of two and more dimensions."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 3e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.0


@dataclass
class LRSchedulerConfig:
    """Warm-up is linear from 0. ``decay_steps`` is wsd's final decay (none: a tenth of the run)."""

    name: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1
    decay_steps: int | None = None


@dataclass
class TrainingConfig:
    """The loop. Sizes are in samples; ``seq_length`` in tokens.

    ``loss`` linear_cross_entropy never holds the logits of all tokens at once, which pays from vocabularies of
    some ten thousand tokens on.
    """

    max_steps: int | None = None
    num_epochs: int | None = None
    global_batch_size: int = 8
    local_batch_size: int = 2
    seq_length: int = 256
    loss: LossName = "cross_entropy"
    max_grad_norm: float | None = 1.0
    ckpt_every_steps: int | None = None
    val_every_steps: int | None = None
    val_at_start: bool = False
    val_at_end: bool = True
    log_every_steps: int = 1
    generate_tokens: int = 200


@dataclass
class CheckpointConfig:
    """What to go on from, how many to keep, and how to save; see the README for the meanings of ``resume``.

    ``async_save`` copies the state and writes it while training goes on. ``on_failure``: a checkpoint that cannot
    be written ends the run, or is a warning in its log.

    ``save_consolidated`` writes the model as Hugging Face's libraries load it: at the end of the run to its folder
    ``hf``; every: also beside each checkpoint, to ``checkpoints/step_<N>/hf``. ``export_dtype`` is that of its weights.
    """

    resume: str | None = None
    keep_last: int | None = None
    keep_best: int | None = None
    async_save: bool = False
    on_failure: Literal["stop", "warn"] = "stop"
    save_consolidated: Literal["final", "every", "never"] = "final"
    export_dtype: DTypeName = "float32"


@dataclass
class LoggerConfig:
    """Where metrics go besides the console and metrics.jsonl."""

    name: Literal["none", "tensorboard", "wandb", "mlflow"] = "none"
    project: str = "automodel"
    run_name: str | None = None
    mode: Literal["online", "offline"] = "online"
    tracking_uri: str | None = None


@dataclass
class LaunchConfig:
    """Processes of this run on this host."""

    nproc_per_node: int | Literal["auto"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_minutes: float = 10.0
    allow_tp_across_nodes: bool = False


@dataclass
class TrainConfig:
    """One run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    distributed: DistributedSection = field(default_factory=DistributedSection)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    seed: int = 0


def load(composed: Mapping[str, Any]) -> TrainConfig:
    """A composed config, as plain containers, to a :class:`TrainConfig`.

    Raises:
        ConfigError: unknown key (with the nearest name) or a value of the wrong type.
    """
    plain = dict(composed)
    section = plain.pop("distributed", None)
    names = {f.name for f in dataclasses.fields(TrainConfig)}
    config = from_mapping(TrainConfig, {k: v for k, v in plain.items() if not (k in names and is_none(v))})
    config.model.config = {name: None if is_none(value) else value for name, value in config.model.config.items()}
    config.distributed = parse_distributed_section(section)
    return config


def register() -> None:
    """Store the root schema for Hydra as ``train_schema``; a misspelled key is then refused.

    Two sections stay open to new keys, because their fields depend on a choice: ``distributed`` on
    the strategy (checked in full by :func:`parse_distributed_section`), ``model.config`` on the
    Hugging Face class (checked against it before any rank starts).
    """
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    schema = OmegaConf.structured(_structured(TrainConfig))
    schema.distributed = {}
    OmegaConf.set_struct(schema.distributed, False)
    OmegaConf.set_struct(schema.model.config, False)
    ConfigStore.instance().store(name="train_schema", node=schema)


def _structured(cls: type) -> type:
    """``cls`` with its names and defaults, and with fields that take any value.

    OmegaConf's own conversions would refuse the string ``none`` for an optional number and cut 2.5
    to the whole number 2 without a word; :func:`load` converts, and says why it refuses.
    """
    hints = typing.get_type_hints(cls)
    fields: list[Any] = []
    for item in dataclasses.fields(cls):
        hint = hints[item.name]
        if hint is DistributedSection:
            fields.append((item.name, Any, None))
        elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
            nested = _structured(hint)
            fields.append((item.name, nested, field(default_factory=nested)))
        elif typing.get_origin(hint) is dict:
            fields.append((item.name, dict[str, Any], field(default_factory=dict)))
        else:
            default = list(item.default) if isinstance(item.default, tuple) else item.default
            fields.append((item.name, Any, field(default_factory=functools.partial(copy.copy, default))))
    return dataclasses.make_dataclass(cls.__name__, fields)
