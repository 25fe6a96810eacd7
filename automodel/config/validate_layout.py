"""Rules of the layout: what each strategy can do, how sizes fit the world, the model and the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from automodel.config.coerce import coerce
from automodel.config.distributed import DistributedSection, ParallelismSizes
from automodel.config.errors import ConfigError
from automodel.config.numbers import divisors
from automodel.config.pipeline_rules import check_stages
from automodel.config.schema import TrainConfig

# Fields of Hugging Face configurations that these rules read; the experts go by three names.
EXPERT_COUNT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
MODEL_SIZE_FIELDS = (
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    *EXPERT_COUNT_FIELDS,
)
# Ids of the byte-level tokenizer: 256 bytes and three control tokens.
BYTE_VOCABULARY_SIZE = 259

_NOT_WITH: dict[str, tuple[str, ...]] = {
    "fsdp2": (),
    "ddp": ("tp_size", "pp_size", "cp_size", "ep_size", "dp_replicate_size"),
    "megatron_fsdp": ("pp_size", "ep_size", "dp_replicate_size"),
}


def check_strategy(section: DistributedSection) -> None:
    """Refuse axes that the strategy does not combine with.

    Raises:
        ConfigError: names the axis.
    """
    for name in _NOT_WITH[section.strategy]:
        size = getattr(section, name)
        if size is not None and size > 1:
            raise ConfigError(
                f"distributed.{name}",
                size,
                f"the strategy {section.strategy} does not combine with this axis",
                "1, or distributed.strategy=fsdp2",
            )
    if section.ep_size > 1 and section.tp_size > 1 and not section.sequence_parallel:
        raise ConfigError(
            "distributed.sequence_parallel",
            False,
            f"ep_size={section.ep_size} with tp_size={section.tp_size} needs it: tp ranks must hold different tokens",
            "true, or ep_size=1, or tp_size=1",
        )


def check_nodes(config: TrainConfig, local_world_size: int | None) -> None:
    """Tensor parallel communicates in every layer, so it crosses nodes only when asked to.

    Args:
        config: the run.
        local_world_size: ranks of one node; None where there is one node.

    Raises:
        ConfigError: tp_size does not divide the ranks of a node.
    """
    tp_size = config.distributed.tp_size
    if local_world_size is None or config.launch.allow_tp_across_nodes or local_world_size % tp_size == 0:
        return
    raise ConfigError(
        "distributed.tp_size",
        tp_size,
        f"tp_size must divide the {local_world_size} ranks of a node",
        [*divisors(local_world_size), "or launch.allow_tp_across_nodes=true"],
    )


def check_model_sizes(config: TrainConfig, sizes: Mapping[str, Any], world_size: int) -> None:
    """Hold the model's sizes against the layout. Uneven kv heads and vocabularies are no errors.

    Args:
        config: the run.
        sizes: fields of the model's configuration by name, those of :data:`MODEL_SIZE_FIELDS`; what is
            absent, None or not a number is not checked.
        world_size: number of ranks.

    Raises:
        ConfigError: names the size and the rule.
    """
    known = {name: _whole_number(name, sizes.get(name)) for name in MODEL_SIZE_FIELDS}
    section = config.distributed
    _check_heads(section, known["num_attention_heads"])
    check_stages(section, known["num_hidden_layers"])
    for name in EXPERT_COUNT_FIELDS:
        experts = known[name]
        if experts is not None and experts % section.ep_size:
            data_ranks = section.resolve(world_size).dp_size * section.cp_size
            raise ConfigError(
                "distributed.ep_size",
                section.ep_size,
                f"ep_size must divide the model's {experts} experts",
                [size for size in divisors(experts) if data_ranks % size == 0],
            )
    vocabulary = known["vocab_size"]
    byte_level = config.data.tokenizer is None and config.model.pretrained_model_name_or_path is None
    if byte_level and vocabulary is not None and vocabulary < BYTE_VOCABULARY_SIZE:
        raise ConfigError(
            "model.config.vocab_size",
            vocabulary,
            f"the byte-level tokenizer has {BYTE_VOCABULARY_SIZE} tokens",
            f"{BYTE_VOCABULARY_SIZE} or more, or a data.tokenizer with fewer tokens",
        )
    positions = known["max_position_embeddings"]
    if positions is not None and config.training.seq_length > positions:
        raise ConfigError(
            "training.seq_length",
            config.training.seq_length,
            f"the model has max_position_embeddings={positions}",
            f"at most {positions}, or a larger model.config.max_position_embeddings",
        )


def check_sequence(section: DistributedSection, seq_length: int) -> None:
    """The sequence splits evenly: head-tail over cp, and over tp under sequence parallel.

    Raises:
        ConfigError: names the multiple that ``seq_length`` must be.
    """
    multiple, reasons = 1, []
    if section.cp_size > 1:
        multiple = 2 * section.cp_size
        reasons.append(f"2 * cp_size={section.cp_size}")
    if section.sequence_parallel and section.tp_size > 1:
        multiple = math.lcm(multiple, section.cp_size * section.tp_size)
        reasons.append(
            f"{'cp_size * ' if section.cp_size > 1 else ''}tp_size={section.tp_size} under sequence_parallel"
        )
    if seq_length % multiple:
        below = seq_length - seq_length % multiple
        raise ConfigError(
            "training.seq_length",
            seq_length,
            f"seq_length must be a multiple of {' and of '.join(reasons)}",
            [value for value in (below, below + multiple) if value],
        )


def check_batch(config: TrainConfig, sizes: ParallelismSizes) -> int:
    """The global batch is a whole number of local batches on every data rank.

    Returns:
        The number of accumulated local batches in a step.

    Raises:
        ConfigError: the batch sizes do not divide, or DDP's static graph meets accumulation.
    """
    total, local, dp_size = config.training.global_batch_size, config.training.local_batch_size, sizes.dp_size
    for name, value in (("global_batch_size", total), ("local_batch_size", local)):
        if value < 1:
            raise ConfigError(f"training.{name}", value, "a batch has at least one sample", "1, 2, ...")
    if total % (local * dp_size):
        below = total - total % (local * dp_size)
        near = [str(value) for value in (below, below + local * dp_size) if value]
        legal = f"a multiple of {local * dp_size}, such as {' or '.join(near)}"
        if total % dp_size == 0:
            legal += f"; or training.local_batch_size={', '.join(map(str, divisors(total // dp_size)))}"
        raise ConfigError(
            "training.global_batch_size",
            total,
            f"it must be a multiple of local_batch_size * dp_size = {local} * {dp_size}",
            legal,
        )
    accumulation = total // (local * dp_size)
    if accumulation > 1 and getattr(config.distributed.strategy_config, "static_graph", False):
        raise ConfigError(
            "distributed.static_graph",
            True,
            f"a static graph does not work with gradient accumulation, and this step has {accumulation} local batches",
            f"false, or training.local_batch_size={total // dp_size}",
        )
    return accumulation


def _check_heads(section: DistributedSection, heads: int | None) -> None:
    if heads is None:
        return
    if heads % section.tp_size:
        raise ConfigError(
            "distributed.tp_size",
            section.tp_size,
            f"tp_size must divide the model's {heads} attention heads",
            divisors(heads),
        )
    ulysses = getattr(section.strategy_config, "cp_method", None) == "ulysses"
    if ulysses and (heads // section.tp_size) % section.cp_size:
        raise ConfigError(
            "distributed.cp_size",
            section.cp_size,
            f"ulysses spreads the {heads // section.tp_size} attention heads of a tp rank over cp_size ranks",
            [*divisors(heads // section.tp_size), "or distributed.cp_method=all_gather"],
        )


def _whole_number(name: str, value: Any) -> int | None:
    """A size as a number; None where a family gives one per layer, or none."""
    if value is None or not isinstance(value, (int, float, str)):
        return None
    number: int = coerce(value, int, f"model.config.{name}")
    if number < 1:
        raise ConfigError(f"model.config.{name}", value, "a size must be at least 1", "1, 2, ...")
    return number
