"""The ``distributed`` section: strategies, pipeline, experts and sizes, without torch.

One parser, :func:`parse_distributed_section`, reads it from Hydra, from a plain dict, or as None
for one device. Fields of the strategies follow the libraries' own names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from automodel.config.coerce import coerce, from_mapping, is_none
from automodel.config.errors import ConfigError, nearest, unknown_key
from automodel.config.numbers import divisors

ActivationCheckpointing = Literal[False, True, "full", "selective"]


@dataclass
class MixedPrecision:
    """dtypes of FSDP2's mixed precision, by name; the fields are those of torch's MixedPrecisionPolicy."""

    param_dtype: Literal["float32", "bfloat16", "float16"] | None = "bfloat16"
    reduce_dtype: Literal["float32", "bfloat16", "float16"] | None = "bfloat16"
    output_dtype: Literal["float32", "bfloat16", "float16"] | None = "bfloat16"
    cast_forward_inputs: bool = True


@dataclass
class FSDP2Config:
    """Fully sharded data parallelism (torch's ``fully_shard``), with HSDP through ``dp_replicate_size``.

    Attributes:
        sequence_parallel: shard the sequence between tensor-parallel regions.
        tp_plan: module pattern -> style name, instead of the model's own plan.
        mp_policy: dtypes; none: bf16 for all three from Python, ``precision`` from ``train.py``.
        offload_policy: ``cpu`` keeps parameters, gradients and optimizer state in host memory.
        defer_fsdp_grad_sync: reduce gradients once a step instead of once a micro-batch. Between
            micro-batches each rank then holds whole gradients.
        reshard_after_forward: free a block's gathered parameters after its forward and gather
            them again in its backward (ZeRO-3); false keeps them until its backward (ZeRO-2). None: true, and
            false under pipeline parallel, where parameters are then gathered once for all micro-batches.
        gather_once_per_step: keep parameters gathered from the first forward of a step to its last
            backward. Each rank then holds the whole model in ``param_dtype`` during a step.
        forward_prefetch: number of blocks whose parameters are gathered ahead in forward.
        backward_prefetch: the same in backward.
        enable_compile: torch.compile for each block.
    """

    sequence_parallel: bool = False
    tp_plan: dict[str, str] | None = None
    mp_policy: MixedPrecision | None = None
    offload_policy: Literal["cpu"] | None = None
    defer_fsdp_grad_sync: bool = True
    reshard_after_forward: bool | None = None
    gather_once_per_step: bool = False
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    cp_method: Literal["all_gather", "ulysses"] = "all_gather"
    enable_compile: bool = False


@dataclass
class DDPConfig:
    """Replicated data parallelism (torch's DistributedDataParallel); fields as in torch.

    ``enable_compile`` is torch.compile for each block.
    """

    broadcast_buffers: bool = True
    find_unused_parameters: bool = False
    static_graph: bool = False
    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = False
    enable_compile: bool = False


@dataclass
class MegatronFSDPConfig:
    """The megatron-fsdp library."""

    zero_dp_strategy: Literal[0, 1, 2, 3] = 3


@dataclass
class PipelineConfig:
    """Pipeline schedule and splitting; read when ``pp_size`` > 1.

    Attributes:
        pp_schedule: a name of ``conf/pipeline``, or torch's class name.
        pp_microbatch_size: samples of a micro-batch; a local batch holds several.
        scale_grads_in_schedule: let the schedule divide gradients by the number of micro-batches; the loss is
            then multiplied by it, so that the result stays the same.
        layers_per_stage: none: one stage a rank, two where the schedule has many, balanced by their parameters.
        module_fqns_per_model_part: the modules of each stage by full name.
        pp_schedule_csv: path of a schedule in torch's CSV format, instead of ``pp_schedule``.
        round_virtual_stages_to_pp_multiple: what to do when layers / layers_per_stage is no multiple of pp_size.
        pp_plan: modules with parameters by full name, in the order in which they run, for a model without a plan
            of its own: the embedding, the list of layers, the final norm, the head.
    """

    pp_schedule: str = "1f1b"
    pp_microbatch_size: int = 1
    scale_grads_in_schedule: bool = False
    layers_per_stage: int | None = None
    module_fqns_per_model_part: list[list[str]] | None = None
    pp_schedule_csv: str | None = None
    round_virtual_stages_to_pp_multiple: Literal["up", "down"] | None = None
    pp_plan: list[str] | None = None


@dataclass
class MoEParallelizerConfig:
    """Experts; read when ``ep_size`` > 1."""

    reshard_after_forward: bool = False
    ignore_router_for_ac: bool = True
    wrap_outer_model: bool = True
    lm_head_precision: str | None = None
    mp_policy: MixedPrecision | None = None


StrategyConfig = FSDP2Config | DDPConfig | MegatronFSDPConfig
STRATEGIES: dict[str, type] = {
    "fsdp2": FSDP2Config,
    "megatron_fsdp": MegatronFSDPConfig,
    "ddp": DDPConfig,
}
STRATEGY_ALIASES = {"megatron-fsdp": "megatron_fsdp", "mfsdp": "megatron_fsdp"}


@dataclass(frozen=True)
class ParallelismSizes:
    """Sizes of all axes, resolved: their product is the world.

    ``dp_size`` is dp_replicate_size * dp_shard_size.
    """

    dp_size: int = 1
    dp_replicate_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1

    @property
    def dp_shard_size(self) -> int:
        return self.dp_size // self.dp_replicate_size

    @property
    def world_size(self) -> int:
        return self.pp_size * self.dp_size * self.cp_size * self.tp_size

    @property
    def ep_shard_size(self) -> int:
        """Ranks that hold the same experts' shards: dp * cp * tp / ep."""
        return self.dp_size * self.cp_size * self.tp_size // self.ep_size

    def describe(self) -> str:
        """``pp 1, dp_replicate 2, dp_shard 2, cp 1, tp 1, ep 1``, outermost axis first."""
        return (
            f"pp {self.pp_size}, dp_replicate {self.dp_replicate_size}, dp_shard {self.dp_shard_size}, "
            f"cp {self.cp_size}, tp {self.tp_size}, ep {self.ep_size}"
        )


@dataclass
class DistributedSection:
    """The parsed section. Sizes are as requested; :meth:`resolve` fits them to a world."""

    strategy: str = "fsdp2"
    dp_size: int | None = None
    dp_replicate_size: int | None = None
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1
    activation_checkpointing: ActivationCheckpointing = False
    strategy_config: StrategyConfig = field(default_factory=FSDP2Config)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    moe: MoEParallelizerConfig = field(default_factory=MoEParallelizerConfig)

    @property
    def sequence_parallel(self) -> bool:
        return getattr(self.strategy_config, "sequence_parallel", False)

    def resolve(self, world_size: int) -> ParallelismSizes:
        """Fit the sizes to ``world_size`` ranks.

        Raises:
            ConfigError: the sizes do not multiply to the world, HSDP's or the experts' rule fails.
        """
        model_parallel = self.tp_size * self.pp_size * self.cp_size
        if world_size % model_parallel:
            raise ConfigError(
                "distributed",
                f"tp_size={self.tp_size} pp_size={self.pp_size} cp_size={self.cp_size}",
                f"tp_size * pp_size * cp_size = {model_parallel} must divide the world of {world_size} processes",
                f"a world that is a multiple of {model_parallel}, or sizes whose product divides {world_size}",
            )
        dp_size = world_size // model_parallel
        if self.dp_size is not None and self.dp_size != dp_size:
            raise ConfigError(
                "distributed.dp_size",
                self.dp_size,
                f"dp_size must be world / (tp_size * pp_size * cp_size) = {world_size} / {model_parallel}",
                f"{dp_size}, none (inferred), or a world of {self.dp_size * model_parallel} processes",
            )
        replicate = self.dp_replicate_size or 1
        if replicate > 1 and (dp_size % replicate or replicate >= dp_size):
            legal = divisors(dp_size)[:-1] or [1]
            raise ConfigError(
                "distributed.dp_replicate_size",
                replicate,
                f"HSDP needs a dp_replicate_size that divides dp_size={dp_size} and is smaller",
                legal,
            )
        if (dp_size * self.cp_size) % self.ep_size:
            raise ConfigError(
                "distributed.ep_size",
                self.ep_size,
                f"ep_size must divide dp_size * cp_size = {dp_size * self.cp_size}",
                divisors(dp_size * self.cp_size),
            )
        return ParallelismSizes(dp_size, replicate, self.tp_size, self.pp_size, self.cp_size, self.ep_size)

    def smallest_world(self) -> int:
        """The smallest legal number of processes for these sizes."""
        model_parallel = self.tp_size * self.pp_size * self.cp_size
        if self.dp_size is not None:
            return self.dp_size * model_parallel
        replicate = self.dp_replicate_size or 1
        # dp * cp must be a multiple of ep, and dp one of dp_replicate_size, larger than it.
        dp_size = math.lcm(replicate, self.ep_size // math.gcd(self.ep_size, self.cp_size))
        if dp_size == replicate > 1:
            dp_size *= 2
        return dp_size * model_parallel


_COMMON = (
    "strategy",
    "dp_size",
    "dp_replicate_size",
    "tp_size",
    "pp_size",
    "cp_size",
    "ep_size",
    "activation_checkpointing",
    "pipeline",
    "moe",
)
_HINTS: dict[str, Any] = {
    "dp_size": int | None,
    "dp_replicate_size": int | None,
    "tp_size": int,
    "pp_size": int,
    "cp_size": int,
    "ep_size": int,
    "activation_checkpointing": ActivationCheckpointing,
    "pipeline": PipelineConfig,
    "moe": MoEParallelizerConfig,
}


def section_keys(strategy: str) -> list[str]:
    """Every key that a ``distributed`` section of this strategy may hold."""
    return [*_COMMON, *(f.name for f in dataclasses.fields(STRATEGIES[strategy]))]


def parse_distributed_section(section: Mapping[str, Any] | None) -> DistributedSection:
    """Parse the ``distributed`` section.

    Args:
        section: the YAML of the README's contract as a mapping (a plain dict or a Hydra
            ``DictConfig``), or None for one device.

    Fields of another strategy that stand at their defaults are dropped.

    Raises:
        ConfigError: an unknown key, a wrong type, a size below 1, or a set field of another strategy.
    """
    if is_none(section):
        return DistributedSection()
    if not isinstance(section, Mapping):
        raise ConfigError("distributed", section, "this is a section and takes nested keys", list(_COMMON))
    section = _plain(section)
    strategy = coerce(section.get("strategy", "fsdp2"), str, "distributed.strategy").lower()
    strategy = STRATEGY_ALIASES.get(strategy, strategy)
    if strategy not in STRATEGIES:
        raise ConfigError(
            "distributed.strategy",
            section["strategy"],
            "there is no such strategy",
            list(STRATEGIES),
            nearest(strategy, [*STRATEGIES, *STRATEGY_ALIASES]),
        )
    values: dict[str, Any] = {"strategy": strategy}
    own: dict[str, Any] = {}
    own_names = {f.name for f in dataclasses.fields(STRATEGIES[strategy])}
    for name, value in section.items():
        key = f"distributed.{name}"
        if name in own_names:
            own[name] = value
        elif name in _HINTS:
            if name in ("pipeline", "moe") and is_none(value):
                continue
            values[name] = coerce(value, _HINTS[name], key)
        elif name != "strategy":
            _refuse_foreign(name, value, strategy)
    for name in ("dp_size", "dp_replicate_size", "tp_size", "pp_size", "cp_size", "ep_size"):
        if values.get(name) is not None and values[name] < 1:
            raise ConfigError(f"distributed.{name}", values[name], "a size must be at least 1", "1, 2, ...")
    values["strategy_config"] = from_mapping(STRATEGIES[strategy], own, "distributed")
    return DistributedSection(**values)


def _refuse_foreign(name: str, value: Any, strategy: str) -> None:
    """Drop another strategy's field at its default; refuse it when set, and any unknown key."""
    for other, cls in STRATEGIES.items():
        for item in dataclasses.fields(cls):
            if item.name != name:
                continue
            foreign: Any = from_mapping(cls, {name: value}, "distributed")
            if getattr(foreign, name) != getattr(cls(), name):
                raise ConfigError(
                    f"distributed.{name}",
                    value,
                    f"this setting belongs to the strategy {other} and {strategy} cannot use it",
                    f"leave it out, or distributed.strategy={other}",
                )
            return
    raise unknown_key("distributed", name, value, section_keys(strategy))


def _plain(section: Mapping[str, Any]) -> dict[str, Any]:
    """Plain containers, also from a DictConfig (told by its name: omegaconf is not needed here)."""
    if type(section).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        return OmegaConf.to_container(section, resolve=True)  # type: ignore[return-value]
    return dict(section)
