"""What a run leaves for those that go on from it, and how a run folder is made ready to be gone on in."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel.config.schema import TrainConfig
from automodel.data import DataBundle
from automodel.distributed.mesh import MeshContext
from automodel.training.checkpoint import folder
from automodel.training.checkpoint.folder import Checkpoint

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunStart:
    """Where a run begins.

    Attributes:
        step: number of steps that are done.
        keep_metrics_bytes: what stays of a metrics.jsonl that is there already; None: all.
    """

    step: int
    keep_metrics_bytes: int | None


def describe_run(config: TrainConfig, run_dir: Path, mesh_context: MeshContext, data: DataBundle) -> dict[str, Any]:
    """What every checkpoint of a run says about it, as JSON values.

    ``composed`` and ``overrides`` are Hydra's own record, so that the run goes on with its own config whatever
    happens to the run folder; None where Hydra did not start the run.
    """
    hydra = run_dir / ".hydra"
    return {
        "world_size": mesh_context.world_size,
        "layout": f"{config.distributed.strategy}: {mesh_context.sizes.describe()}",
        "optimizer": config.optimizer.name,
        "data_fingerprint": data.train.fingerprint,
        "config": dataclasses.asdict(config),
        "composed": _yaml(hydra / "config.yaml"),
        "overrides": _yaml(hydra / "overrides.yaml"),
    }


def _yaml(path: Path) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.load(path), resolve=False) if path.exists() else None


def prepare_run_folder(run_dir: Path, checkpoint: Checkpoint | None, resume: str | None) -> RunStart:
    """Tell where the run begins and clear what does not belong to it any more; rank 0, before anything is written.

    Inside the folder that the checkpoint stands in, metrics.jsonl is cut to the checkpoint's step, and checkpoints
    of later steps are set aside: they belong to a course that the run now leaves.
    """
    folder.clear_leftovers(run_dir)
    if checkpoint is None:
        return RunStart(0, 0 if resume == "auto" else None)
    _LOG.info("going on after step %d from %s", checkpoint.step, checkpoint.path)
    if checkpoint.run_dir != run_dir.resolve():
        return RunStart(checkpoint.step, None)
    for path in folder.set_aside_after(run_dir, checkpoint.step):
        _LOG.warning("a checkpoint of a later step was set aside as %s", path)
    return RunStart(checkpoint.step, int(checkpoint.index["metrics_offset"]))
