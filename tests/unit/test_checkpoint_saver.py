"""Saving and loading on one process: the moment of an asynchronous save, failures, and what the files are made of."""

from __future__ import annotations

import json
import logging
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from automodel.config.errors import ConfigError
from automodel.config.schema import CheckpointConfig
from automodel.training.checkpoint import storage
from automodel.training.checkpoint.folder import read_checkpoint, step_folder, steps_in
from automodel.training.checkpoint.loader import load_checkpoint
from automodel.training.checkpoint.pieces import Staging
from automodel.training.checkpoint.saver import CheckpointError, CheckpointSaver, SaveRequest

DESCRIPTION = {"world_size": 1, "optimizer": "adamw"}


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def saver_of(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **config: Any) -> CheckpointSaver:
    return CheckpointSaver(CheckpointConfig(**config), folder, model, optimizer, 0, 1, None, DESCRIPTION)


def request(number: int) -> SaveRequest:
    return SaveRequest(number, {"step": number}, metrics_offset=0, val_loss=None)


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [value for parameter in model.parameters() for _, value in sorted(optimizer.state[parameter].items())]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *state)]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class Gate:
    """Holds the writing of tensors until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        original = storage.write_safetensors

        def write(*arguments: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(30)
            return original(*arguments)

        monkeypatch.setattr(storage, "write_safetensors", write)


@pytest.mark.parametrize("copies", [True, False], ids=["copied", "control_not_copied"])
def test_an_asynchronous_save_holds_the_weights_of_its_moment(
    copies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    saver = saver_of(tmp_path, model, optimizer, async_save=True)
    gate = Gate(monkeypatch)
    if not copies:
        monkeypatch.setattr(Staging, "copy", lambda self, pieces: pieces)
    moment = values(model, optimizer)
    saver.save(request(1))
    assert gate.reached.wait(30)
    assert steps_in(tmp_path) == [], "training goes on before anything is written"
    for _ in range(3):
        step(model, optimizer)
    assert not same(values(model, optimizer), moment)
    gate.opened.set()
    saver.wait()
    other, other_optimizer = trained(seed=1)
    load_checkpoint(read_checkpoint(step_folder(tmp_path, 1)), other, other_optimizer, 0, 1, None)
    assert same(values(other, other_optimizer), moment) is copies


def test_the_next_save_waits_for_the_one_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    saver = saver_of(tmp_path, model, optimizer, async_save=True)
    gate = Gate(monkeypatch)
    saver.save(request(1))
    threading.Timer(0.2, gate.opened.set).start()
    saver.save(request(2), final=True)
    assert steps_in(tmp_path) == [1, 2]


def test_a_load_is_the_save_bit_for_bit_and_steps_on_alike(tmp_path: Path) -> None:
    model, optimizer = trained()
    saver_of(tmp_path, model, optimizer).save(request(1))
    other, other_optimizer = trained(seed=1)
    load_checkpoint(read_checkpoint(step_folder(tmp_path, 1)), other, other_optimizer, 0, 1, None)
    assert same(values(other, other_optimizer), values(model, optimizer))
    # The generator's state came along, so that both draw the same inputs.
    torch.manual_seed(0)
    state = torch.get_rng_state()
    step(model, optimizer)
    torch.set_rng_state(state)
    step(other, other_optimizer)
    assert same(values(other, other_optimizer), values(model, optimizer))


def test_the_generators_state_is_restored(tmp_path: Path) -> None:
    model, optimizer = trained()
    saver_of(tmp_path, model, optimizer).save(request(1))
    expected = torch.rand(3)
    load_checkpoint(read_checkpoint(step_folder(tmp_path, 1)), model, optimizer, 0, 1, None)
    assert torch.equal(torch.rand(3), expected)


def test_no_file_is_a_pickle(tmp_path: Path) -> None:
    model, optimizer = trained()
    saver_of(tmp_path, model, optimizer).save(request(1))
    files = sorted(path for path in step_folder(tmp_path, 1).iterdir())
    assert [path.name for path in files] == ["checkpoint.json", "complete", "rank_0.safetensors"]
    for path in files:
        with pytest.raises((pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError, AttributeError)):
            pickle.loads(path.read_bytes())
    assert json.loads(files[0].read_text())["step"] == 1
    assert "optimizer.0.weight.exp_avg@0,0" in load_file(files[2])


def test_loading_never_unpickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    saver_of(tmp_path, model, optimizer).save(request(1))

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    load_checkpoint(read_checkpoint(step_folder(tmp_path, 1)), model, optimizer, 0, 1, None)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_failure_stops_and_names_the_path(async_save: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    saver = saver_of(tmp_path, model, optimizer, async_save=async_save)
    saver.save(request(1), final=True)

    def fail(path: Path, tensors: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(storage, "write_safetensors", fail)
    with pytest.raises(CheckpointError, match=r"step_2 was not saved: rank 0: .*No space left on device"):
        saver.save(request(2), final=True)
    assert steps_in(tmp_path) == [1]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_1"]
    read_checkpoint(step_folder(tmp_path, 1))


def test_a_failure_is_a_warning_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = trained()
    saver = saver_of(tmp_path, model, optimizer, on_failure="warn")
    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
        broken.setattr(storage, "write_safetensors", lambda *_: 1 / 0)
        saver.save(request(1))
    assert "step_1 was not saved: rank 0: division by zero" in caplog.text
    saver.save(request(1))
    assert steps_in(tmp_path) == [1], "the next attempt may work"


def test_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    saver_of(tmp_path, model, optimizer).save(request(1))
    path = step_folder(tmp_path, 1) / "rank_0.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 4
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"rank_0\.safetensors is damaged"):
        load_checkpoint(read_checkpoint(step_folder(tmp_path, 1)), model, optimizer, 0, 1, None)


def test_half_precision_and_whole_numbers_come_back_as_they_are(tmp_path: Path) -> None:
    tensors = {
        "bfloat16": torch.randn(3, 5).bfloat16(),
        "scalar": torch.tensor(2.5),
        "integers": torch.arange(7),
        "transposed": torch.randn(4, 6).t(),
        "bytes": torch.get_rng_state(),
    }
    storage.write_safetensors(tmp_path / "file.safetensors", tensors)
    loaded = load_file(tmp_path / "file.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name
        assert loaded[name].dtype == tensor.dtype
