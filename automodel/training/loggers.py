"""Metric loggers besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow.

Their libraries are optional and imported on first use.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from automodel.config.schema import LoggerConfig

_LOG = logging.getLogger(__name__)
# MLflow refuses longer values of a parameter; the whole config is an artifact of the run anyway.
_MLFLOW_VALUE_LENGTH = 500
_MLFLOW_BATCH = 100


class MetricLogger(Protocol):
    """Where the numbers of a step go."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record ``values`` by name for a step, from 1."""

    def close(self) -> None:
        """Write out what is pending and end the record."""


def build_loggers(config: LoggerConfig, run_dir: Path, full_config: Mapping[str, Any]) -> list[MetricLogger]:
    """The loggers that ``config`` names. Call on rank 0 only.

    A logger that fails later, because a server is gone or a disk is full, is reported once and left
    out from then on: it must not cost the run.

    Args:
        config: which logger, and its project, name and address.
        run_dir: the run folder; what a logger writes locally goes there.
        full_config: the composed config as plain containers, recorded with the run.

    Raises:
        Exception: whatever the library raises when it is absent or cannot start, e.g. without credentials.
    """
    if config.name == "tensorboard":
        return [_Guarded(config.name, _TensorBoard(run_dir, full_config))]
    if config.name == "wandb":
        return [_Guarded(config.name, _WandB(config, run_dir, full_config))]
    if config.name == "mlflow":
        return [_Guarded(config.name, _MLflow(config, run_dir, full_config))]
    return []


class _Guarded:
    """Keeps a logger's failure away from the run."""

    def __init__(self, name: str, inner: MetricLogger) -> None:
        self._name = name
        self._inner: MetricLogger | None = inner

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._inner is None:
            return
        try:
            self._inner.log(step, values)
        except Exception as error:
            self._inner = None
            _LOG.warning("logger %s failed in step %d and is off from here: %r", self._name, step, error)

    def close(self) -> None:
        if self._inner is None:
            return
        try:
            self._inner.close()
        except Exception as error:
            _LOG.warning("logger %s failed to close: %r", self._name, error)
        self._inner = None


class _TensorBoard:
    """Event files in ``<run_dir>/tensorboard``."""

    def __init__(self, run_dir: Path, full_config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))
        # Four spaces: a code block in the Markdown that TensorBoard shows.
        lines = json.dumps(full_config, indent=2, default=str).splitlines()
        self._writer.add_text("config", "\n".join("    " + line for line in lines))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """A Weights & Biases run; its files are in ``<run_dir>/wandb``."""

    def __init__(self, config: LoggerConfig, run_dir: Path, full_config: Mapping[str, Any]) -> None:
        import wandb

        # Its capture of the console would write over the progress bar.
        settings = wandb.Settings(console="off", silent=True)
        self._run = wandb.init(
            project=config.project,
            name=config.run_name,
            dir=str(run_dir),
            mode=config.mode,
            config=dict(full_config),
            settings=settings,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """A run in the experiment ``logger.project``, through the client alone: no global active run."""

    def __init__(self, config: LoggerConfig, run_dir: Path, full_config: Mapping[str, Any]) -> None:
        uri = config.tracking_uri or (run_dir / "mlruns").resolve().as_uri()
        if uri.startswith("file:") or "://" not in uri:
            # MLflow 3 asks for this consent before it writes plain files, the one store that needs no server.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(config.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(config.project)
        self._run_id = self._client.create_run(experiment_id, run_name=config.run_name).info.run_id
        parameters = [Param(name, value[:_MLFLOW_VALUE_LENGTH]) for name, value in _flatten(full_config).items()]
        for start in range(0, len(parameters), _MLFLOW_BATCH):
            self._client.log_batch(self._run_id, params=parameters[start : start + _MLFLOW_BATCH])
        self._client.log_dict(self._run_id, dict(full_config), "config.json")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(name, value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings to dotted names; other values as text."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = str(value)
    return flat
