"""Experiments that train Hugging Face language models across many devices.

Public names are imported on first use, so that ``import automodel`` stays free of torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "AutoPipeline": "automodel.distributed.pipeline_parallel",
    "ConfigError": "automodel.config.errors",
    "DDPConfig": "automodel.config.distributed",
    "DDPManager": "automodel.distributed.ddp",
    "FSDP2Config": "automodel.config.distributed",
    "FSDP2Manager": "automodel.distributed.fsdp2",
    "MegatronFSDPConfig": "automodel.config.distributed",
    "MeshAxisName": "automodel.distributed.mesh",
    "MeshContext": "automodel.distributed.mesh",
    "MixedPrecision": "automodel.config.distributed",
    "MoEParallelizerConfig": "automodel.config.distributed",
    "ParallelismSizes": "automodel.config.distributed",
    "PipelineConfig": "automodel.config.distributed",
    "apply_model_infrastructure": "automodel.model.infrastructure",
    "clip_gradients": "automodel.distributed.gradients",
    "create_device_mesh": "automodel.distributed.mesh",
    "global_gradient_norm": "automodel.distributed.gradients",
    "instantiate_infrastructure": "automodel.model.infrastructure",
    "parse_distributed_section": "automodel.config.distributed",
    "setup_distributed": "automodel.distributed.setup",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'automodel' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
