"""Settings and their rules. Nothing here imports torch or transformers."""

from automodel.config.distributed import (
    DDPConfig,
    DistributedSection,
    FSDP2Config,
    MegatronFSDPConfig,
    MixedPrecision,
    MoEParallelizerConfig,
    ParallelismSizes,
    PipelineConfig,
    parse_distributed_section,
)
from automodel.config.errors import ConfigError
from automodel.config.schema import TrainConfig, load

__all__ = [
    "ConfigError",
    "DDPConfig",
    "DistributedSection",
    "FSDP2Config",
    "MegatronFSDPConfig",
    "MixedPrecision",
    "MoEParallelizerConfig",
    "ParallelismSizes",
    "PipelineConfig",
    "TrainConfig",
    "load",
    "parse_distributed_section",
]
