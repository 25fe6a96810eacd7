"""Metric loggers: TensorBoard for real, failures kept away from the run, absent libraries refused."""

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from automodel.config.schema import LoggerConfig
from automodel.training.loggers import _flatten, _Guarded, build_loggers


class FullDisk:
    """A logger whose every write fails, as on a full disk."""

    def __init__(self) -> None:
        self.calls = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.calls += 1
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        self.calls += 1
        raise OSError(28, "No space left on device")


def test_no_logger_by_default(tmp_path: Path) -> None:
    assert build_loggers(LoggerConfig(), tmp_path, {}) == []
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_events_read_back(tmp_path: Path) -> None:
    (logger,) = build_loggers(LoggerConfig("tensorboard"), tmp_path, {"seed": 7, "data": {"files": "<b>*"}})
    logger.log(1, {"loss": 5.5, "lr": 0.25})
    logger.log(2, {"loss": 4.5, "lr": 0.125})
    logger.log(2, {"val_loss": 4.75})
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 5.5), (2, 4.5)]
    assert [(event.step, event.value) for event in events.Scalars("lr")] == [(1, 0.25), (2, 0.125)]
    assert [(event.step, event.value) for event in events.Scalars("val_loss")] == [(2, 4.75)]
    (text,) = events.Tensors("config/text_summary")
    assert b'"seed": 7' in text.tensor_proto.string_val[0]


def test_tensorboard_events_are_on_disk_after_each_step(tmp_path: Path) -> None:
    (logger,) = build_loggers(LoggerConfig("tensorboard"), tmp_path, {})
    logger.log(1, {"loss": 5.5})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("loss")] == [5.5]
    logger.close()


def test_a_failing_logger_is_reported_once_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    inner = FullDisk()
    logger = _Guarded("tensorboard", inner)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            logger.log(step, {"loss": 1.0})
        logger.close()
    assert inner.calls == 1
    assert len(caplog.records) == 1
    assert "tensorboard failed in step 1" in caplog.text
    assert "No space left" in caplog.text


def test_a_logger_that_fails_to_close_does_not_cost_the_run(caplog: pytest.LogCaptureFixture) -> None:
    logger = _Guarded("mlflow", FullDisk())
    logger.close()
    logger.close()
    assert [record.getMessage() for record in caplog.records] == [
        "logger mlflow failed to close: OSError(28, 'No space left on device')"
    ]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_offline_runs_of_optional_loggers_leave_files_in_the_run_folder(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name)
    (logger,) = build_loggers(LoggerConfig(name, mode="offline", run_name="test"), tmp_path, {"seed": 7})
    logger.log(1, {"loss": 5.5})
    logger.close()
    pattern = "wandb/offline-run-*/*.wandb" if name == "wandb" else "mlruns/*/*/metrics/loss"
    (file,) = tmp_path.glob(pattern)
    assert b"5.5" in file.read_bytes()


def test_nested_settings_become_dotted_names() -> None:
    assert _flatten({"a": {"b": {"c": 1}}, "d": [1, 2], "e": None}) == {"a.b.c": "1", "d": "[1, 2]", "e": "None"}
