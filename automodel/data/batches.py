"""From the samples of a step to the micro-batches of one data-parallel rank.

The samples of a step are cut into micro-batches of ``local_batch_size`` in their order, and micro-batch m goes to
rank m modulo dp_size. So the set of micro-batches, each one's samples and its dropout seed are the same whatever
the number of ranks. All ranks get the same number of micro-batches of the same shape: rows that are missing, at
the end of an epoch, are padding whose labels are all -100 and which therefore contribute zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from automodel.data.dataset import IGNORED_LABEL, TokenDataset
from automodel.data.sampler import EpochSampler
from automodel.data.seeds import stable_seed

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward.

    Attributes:
        input_ids: int64 [local_batch_size, seq_length], on the CPU; padding rows are zeros.
        labels: int64 [local_batch_size, seq_length], already shifted, -100 where not trained.
        num_label_tokens: labels that are not -100.
        sample_ids: the samples of the real rows, which come first; empty in a micro-batch of padding.
        seed: for dropout; a function of the run's seed, the epoch and the place of the first sample in it.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    num_label_tokens: int
    sample_ids: list[int]
    seed: int


@dataclass(frozen=True)
class StepBatch:
    """One rank's part of a step.

    Attributes:
        micro_batches: as many on every rank.
        epoch: from 0.
        num_label_tokens: of this rank.
        sample_ids: of this rank.
    """

    micro_batches: list[MicroBatch]
    epoch: int
    num_label_tokens: int
    sample_ids: list[int]


class TrainLoader:
    """One rank's steps.

    Args:
        dataset: all samples; the same on every rank.
        sampler: their order; each rank has its own, at the same place.
        global_batch_size: samples of a step, over all ranks.
        local_batch_size: rows of a micro-batch.
        dp_rank: this rank's place among those that read different samples.
        dp_size: their number.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        sampler: EpochSampler,
        global_batch_size: int,
        local_batch_size: int,
        dp_rank: int,
        dp_size: int,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.global_batch_size = global_batch_size
        self.local_batch_size = local_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch, the shorter last one included."""
        return _ceil_divide(self.sampler.num_samples, self.global_batch_size)

    def next_step(self) -> StepBatch:
        """The next step's micro-batches of this rank; epochs follow one another without end."""
        batch = self.sampler.next_global_batch(self.global_batch_size)
        micro_batches = [
            _micro_batch(
                self.dataset,
                positions,
                self.local_batch_size,
                stable_seed("dropout", self.sampler.seed, batch.epoch, batch.position + offset),
            )
            for offset, positions in _windows(batch.indices, self.local_batch_size, self.dp_rank, self.dp_size)
        ]
        return StepBatch(
            micro_batches=micro_batches,
            epoch=batch.epoch,
            num_label_tokens=sum(micro_batch.num_label_tokens for micro_batch in micro_batches),
            sample_ids=[sample for micro_batch in micro_batches for sample in micro_batch.sample_ids],
        )

    def state_dict(self) -> dict[str, int]:
        """Where the next step begins; the same on every rank and under every layout."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where :meth:`state_dict` was taken.

        Raises:
            ConfigError: the dataset has another size now.
        """
        self.sampler.load_state_dict(state)


def validation_batches(
    dataset: TokenDataset, local_batch_size: int, dp_rank: int, dp_size: int
) -> Iterator[MicroBatch]:
    """This rank's micro-batches of one pass over ``dataset``: each sample on one rank, as many batches on all."""
    indices = np.arange(len(dataset))
    for offset, positions in _windows(indices, local_batch_size, dp_rank, dp_size):
        yield _micro_batch(dataset, positions, local_batch_size, stable_seed("validation", dataset.seed, offset))


def _windows(
    indices: np.ndarray, local_batch_size: int, dp_rank: int, dp_size: int
) -> Iterator[tuple[int, np.ndarray]]:
    """(offset of its first sample, its samples) of each micro-batch of a rank; empty where it is all padding."""
    rounds = _ceil_divide(_ceil_divide(len(indices), local_batch_size), dp_size)
    for number in range(dp_rank, rounds * dp_size, dp_size):
        offset = number * local_batch_size
        yield offset, indices[offset : offset + local_batch_size]


def _micro_batch(dataset: TokenDataset, positions: Sequence[int] | np.ndarray, rows: int, seed: int) -> MicroBatch:
    import torch

    input_ids = np.zeros((rows, dataset.seq_length), dtype=np.int64)
    labels = np.full((rows, dataset.seq_length), IGNORED_LABEL, dtype=np.int64)
    for row, position in enumerate(positions):
        sample = dataset[int(position)]
        input_ids[row] = sample["input_ids"]
        labels[row] = sample["labels"]
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        num_label_tokens=int((labels != IGNORED_LABEL).sum()),
        sample_ids=[dataset.sample_id(int(position)) for position in positions],
        seed=seed,
    )


def _ceil_divide(count: int, size: int) -> int:
    return -(-count // size)
