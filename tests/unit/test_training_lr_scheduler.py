"""Schedules against their closed forms, written out by hand."""

import math
import warnings

import pytest
import torch
from torch import nn

from automodel.config.errors import ConfigError
from automodel.config.schema import LRSchedulerConfig
from automodel.training.lr_scheduler import build_lr_scheduler, learning_rate_factor


def make_optimizer(lr: float = 2.0, num_groups: int = 2) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(num_groups)], lr=lr)


def rates(config: LRSchedulerConfig, total_steps: int, lr: float = 2.0, num_steps: int | None = None) -> list[float]:
    """The rate that each step uses, which all groups must share."""
    optimizer = make_optimizer(lr)
    scheduler = build_lr_scheduler(optimizer, config, total_steps)
    used = []
    for _ in range(num_steps or total_steps):
        (rate,) = {group["lr"] for group in optimizer.param_groups}
        used.append(rate)
        optimizer.step()
        scheduler.step()
    return used


def test_constant_stays_after_warmup() -> None:
    assert rates(LRSchedulerConfig("constant", warmup_steps=4), 7) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0]


def test_linear_ends_at_the_floor_in_the_last_step() -> None:
    config = LRSchedulerConfig("linear", warmup_steps=2, min_lr_ratio=0.2)
    assert rates(config, 6) == pytest.approx([1.0, 2.0, 1.6, 1.2, 0.8, 0.4])


def test_cosine_is_half_a_wave_from_peak_to_floor() -> None:
    config = LRSchedulerConfig("cosine", warmup_steps=2, min_lr_ratio=0.1)
    wave = [0.1 + 0.9 * (1 + math.cos(math.pi * p)) / 2 for p in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert rates(config, 6) == pytest.approx([1.0] + [2.0 * factor for factor in wave])


def test_wsd_holds_then_falls_in_the_last_decay_steps() -> None:
    config = LRSchedulerConfig("wsd", warmup_steps=2, min_lr_ratio=0.0, decay_steps=4)
    assert rates(config, 10) == pytest.approx([1, 2, 2, 2, 2, 2, 1.5, 1.0, 0.5, 0.0])


def test_wsd_decays_over_a_tenth_by_default() -> None:
    used = rates(LRSchedulerConfig("wsd", min_lr_ratio=0.5), 40)
    assert used[:36] == [2.0] * 36
    assert used[36:] == pytest.approx([1.75, 1.5, 1.25, 1.0])


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_without_warmup_the_first_step_has_the_full_rate(name: str) -> None:
    assert rates(LRSchedulerConfig(name, warmup_steps=0), 20)[0] == 2.0


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("total_steps", [1, 2, 3, 5])
@pytest.mark.parametrize("warmup_steps", [0, 1, 3, 20])
def test_short_runs_have_positive_rates_up_to_the_full_one(name: str, total_steps: int, warmup_steps: int) -> None:
    used = rates(LRSchedulerConfig(name, warmup_steps=warmup_steps, min_lr_ratio=0.1), total_steps)
    assert all(0.0 < rate <= 2.0 for rate in used)
    if warmup_steps > total_steps:
        assert used == [2.0 * step / warmup_steps for step in range(1, total_steps + 1)]


@pytest.mark.parametrize(("name", "floor"), [("linear", 0.3), ("cosine", 0.3), ("wsd", 0.3), ("constant", 1.0)])
def test_the_floor_holds_past_the_end(name: str, floor: float) -> None:
    config = LRSchedulerConfig(name, warmup_steps=3, min_lr_ratio=0.3)
    assert [learning_rate_factor(config, 30, step) for step in (30, 31, 500)] == [floor] * 3


@pytest.mark.parametrize("decay_steps", [0, 8, 100])
def test_wsd_decay_that_does_not_fit_is_refused(decay_steps: int) -> None:
    config = LRSchedulerConfig("wsd", warmup_steps=3, decay_steps=decay_steps)
    with pytest.raises(ConfigError, match=r"lr_scheduler\.decay_steps[\s\S]*1 to 7"):
        build_lr_scheduler(make_optimizer(), config, 10)


def test_resume_continues_with_the_same_rates_under_other_groups() -> None:
    config = LRSchedulerConfig("cosine", warmup_steps=3)
    whole = rates(config, 12)
    optimizer = make_optimizer()
    scheduler = build_lr_scheduler(optimizer, config, 12)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    state = scheduler.state_dict()
    assert state == {"last_epoch": 5}

    other = make_optimizer(num_groups=4)
    resumed = build_lr_scheduler(other, config, 12)
    resumed.load_state_dict(state)
    assert resumed.get_last_lr() == [whole[5]] * 4
    used = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(7):
            used.append(other.param_groups[-1]["lr"])
            other.step()
            resumed.step()
    assert used == whole[5:]


def test_a_new_learning_rate_given_on_resume_holds() -> None:
    config = LRSchedulerConfig("linear", min_lr_ratio=0.0)
    old = make_optimizer(lr=2.0)
    scheduler = build_lr_scheduler(old, config, 10)
    for _ in range(4):
        old.step()
        scheduler.step()
    new = make_optimizer(lr=1.0)
    resumed = build_lr_scheduler(new, config, 10)
    new.load_state_dict(old.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    assert {group["lr"] for group in new.param_groups} == {1.0 * learning_rate_factor(config, 10, 5)}
