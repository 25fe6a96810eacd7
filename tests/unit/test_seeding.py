"""Seeding a run's generators gives the numbers of ``torch.manual_seed``."""

from __future__ import annotations

import pytest
import torch

from automodel.model.seeding import seed_generators


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
def test_the_numbers_are_those_of_torch_manual_seed(seed: int) -> None:
    torch.manual_seed(seed)
    expected = torch.randn(5)
    seed_generators(seed)
    assert torch.equal(torch.randn(5), expected)


def test_dropout_follows_the_seed() -> None:
    def dropped(seed: int) -> torch.Tensor:
        seed_generators(seed)
        return torch.nn.functional.dropout(torch.ones(64))

    assert torch.equal(dropped(1), dropped(1))
    assert not torch.equal(dropped(1), dropped(2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_is_seeded_too() -> None:
    torch.manual_seed(3)
    expected = torch.randn(5, device="cuda")
    seed_generators(3)
    assert torch.equal(torch.randn(5, device="cuda"), expected)
