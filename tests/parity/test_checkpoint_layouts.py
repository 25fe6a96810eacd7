"""A checkpoint of any layout goes on under any other: the same bits in every tensor, the same samples, the same losses.

A vocabulary of 67, five layers and a tied head: no size divides evenly.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.cases import TINY_LLAMA, Case
from tests.parity.checkpoint_cases import Part, run_part, whole_tensors
from tests.parity.ranks import Ranks

# 16 samples a step and 40 in an epoch: steps of 16, 16 and 8 samples. Step 4 is in the middle of epoch 2.
STEPS, FIRST, SECOND = 6, 2, 4
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "momentum": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "adamw": {"name": "adamw", "lr": 1e-3, "eps": 1e-6, "weight_decay": 0.1},
}
# name -> (world size, distributed section, samples of a local batch)
LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {
    "one_process": (1, {}, 2),
    "fsdp2": (2, {}, 2),
    "ddp2": (2, {"strategy": "ddp"}, 2),
    "tp2": (2, {"tp_size": 2}, 2),
    "pp2": (2, {"pp_size": 2}, 8),
    "pp2_two_stages_a_rank": (2, {"pp_size": 2, "pipeline": {"pp_schedule": "v_schedule"}}, 8),
    "hsdp_2x2": (4, {"dp_replicate_size": 2}, 2),
    "fsdp2_tp2": (4, {"tp_size": 2}, 2),
    "fsdp2_tp2_sequence_parallel": (4, {"tp_size": 2, "sequence_parallel": True}, 2),
    "fsdp2_pp2": (4, {"pp_size": 2}, 8),
    "tp2_pp2": (4, {"tp_size": 2, "pp_size": 2}, 8),
}
SAVED = "fsdp2_tp2"


def case_of(layout: str, optimizer: str = "momentum", fault: str | None = None, **model: Any) -> tuple[int, Case]:
    world_size, distributed, local_batch_size = LAYOUTS[layout]
    case = Case(
        model={**TINY_LLAMA, "num_hidden_layers": 5, "tie_word_embeddings": True, **model},
        distributed=distributed,
        settings={
            "optimizer": OPTIMIZERS[optimizer],
            "lr_scheduler": {"name": "cosine", "warmup_steps": 1},
            "training": {"local_batch_size": local_batch_size, "val_at_end": False},
            "data": {"log_sample_ids": True, "mask_labels": 0.33},
        },
        num_samples=40,
        steps=STEPS,
        fault=fault,
    )
    return world_size, case


Runner = Callable[..., Part]


@pytest.fixture(scope="module")
def part(ranks: Callable[[int], Ranks]) -> Runner:
    def run(
        layout: str,
        run_dir: Path,
        until: int,
        resume: Path | None = None,
        optimizer: str = "momentum",
        fault: str | None = None,
    ) -> Part:
        world_size, case = case_of(layout, optimizer)
        arguments = (case, world_size, str(run_dir), until, str(resume) if resume else None)
        if world_size == 1:
            return run_part(*arguments)
        return ranks(world_size).run("tests.parity.checkpoint_cases:run_part", *arguments, fault=fault)

    return run


@pytest.fixture(scope="module", params=list(OPTIMIZERS))
def optimizer(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def straight(part: Runner, optimizer: str, tmp_path_factory: pytest.TempPathFactory) -> Part:
    """All steps on one process."""
    return part("one_process", tmp_path_factory.mktemp("straight"), STEPS, optimizer=optimizer)


@pytest.fixture(scope="module")
def saved(part: Runner, optimizer: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with the first steps, at fsdp2 x tp2."""
    run_dir = tmp_path_factory.mktemp("saved")
    part(SAVED, run_dir, FIRST, optimizer=optimizer)
    return run_dir


def step(run_dir: Path, number: int) -> Path:
    return run_dir / "checkpoints" / f"step_{number}"


def differences(ours: Part, theirs: Part, first: int) -> list[str]:
    """What of the steps after ``first`` is not as in the straight run."""
    found = []
    for index, number in enumerate(ours.steps):
        straight = number - 1
        if number != first + index + 1:
            found.append(f"step {number} in place {index}")
        if ours.sample_ids[index] != theirs.sample_ids[straight]:
            found.append(f"step {number} has other samples")
        if not abs(ours.losses[index] - theirs.losses[straight]) <= 1e-5:
            found.append(f"step {number}: loss {ours.losses[index]} instead of {theirs.losses[straight]}")
        if not abs(ours.norms[index] - theirs.norms[straight]) <= 1e-4 * theirs.norms[straight]:
            found.append(f"step {number}: norm {ours.norms[index]} instead of {theirs.norms[straight]}")
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back_again(
    layout: str, part: Runner, optimizer: str, saved: Path, straight: Part, tmp_path: Path
) -> None:
    there = part(layout, tmp_path / "there", SECOND, step(saved, FIRST), optimizer)
    assert there.steps == [3, 4]
    assert differences(there, straight, FIRST) == []
    back = part(SAVED, tmp_path / "back", STEPS, step(tmp_path / "there", SECOND), optimizer)
    assert back.steps == [5, 6]
    assert differences(back, straight, SECOND) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loading_and_saving_elsewhere_keeps_every_bit(
    layout: str, part: Runner, optimizer: str, saved: Path, tmp_path: Path
) -> None:
    part(layout, tmp_path, FIRST, step(saved, FIRST), optimizer)
    theirs, ours = whole_tensors(saved, FIRST), whole_tensors(tmp_path, FIRST)
    assert ours.keys() == theirs.keys(), "one set of names whatever the layout"
    assert not [key for key in ours if not torch.equal(ours[key], theirs[key])]
    assert not [key for key in ours if ours[key].isnan().any()], "every element was written"
    assert "model.lm_head.weight" not in ours, "a tied parameter once"


@pytest.mark.parametrize("fault", ["without_optimizer_state", "one_shard_for_all"])
def test_a_broken_load_is_noticed(fault: str, part: Runner, optimizer: str, saved: Path, straight: Part) -> None:
    broken = part(
        "fsdp2",
        saved.parent / f"broken_{fault}_{optimizer}",
        SECOND,
        step(saved, FIRST),
        optimizer,
        fault=f"tests.parity.checkpoint_cases:{fault}",
    )
    assert differences(broken, straight, FIRST)


def test_every_rank_writes_its_own_share(saved: Path) -> None:
    files = sorted(step(saved, FIRST).glob("*.safetensors"))
    assert [file.name for file in files] == [f"rank_{rank}.safetensors" for rank in range(4)]
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) < 1.3 * min(sizes)
    tensors = whole_tensors(saved, FIRST)
    state = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    generators = 4 * torch.get_rng_state().numel()
    assert sum(sizes) < 1.1 * state + generators, "nothing is written twice"
