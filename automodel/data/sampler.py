"""The order of samples: a function of the seed and the epoch, resumable at any step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from automodel.config.errors import ConfigError
from automodel.data.seeds import random_permutation


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one step, over all ranks.

    Attributes:
        indices: sample indices [samples], int64.
        epoch: from 0.
        position: place of the first sample in the epoch's order.
    """

    indices: np.ndarray
    epoch: int
    position: int


class EpochSampler:
    """Every sample once an epoch, in an order that nothing but (seed, epoch) decides.

    Args:
        num_samples: size of the dataset, at least 1.
        seed: the run's.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        if num_samples < 1:
            raise ValueError("a sampler needs at least one sample")
        self.num_samples = num_samples
        self.seed = seed
        self.epoch = 0
        self.position = 0
        self._order = self._permutation(0)

    def next_global_batch(self, size: int) -> GlobalBatch:
        """The next ``size`` samples. The last batch of an epoch is shorter: a batch never spans two epochs."""
        indices = self._order[self.position : self.position + size]
        batch = GlobalBatch(indices, self.epoch, self.position)
        self.position += len(indices)
        if self.position == self.num_samples:
            self.epoch += 1
            self.position = 0
            self._order = self._permutation(self.epoch)
        return batch

    def state_dict(self) -> dict[str, int]:
        """Where the next batch begins, as plain numbers."""
        return {"epoch": self.epoch, "position": self.position, "num_samples": self.num_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where :meth:`state_dict` was taken, under whatever layout and batch size.

        Raises:
            ConfigError: the state belongs to a dataset of another size.
        """
        if state["num_samples"] != self.num_samples:
            raise ConfigError(
                "data",
                f"{self.num_samples} samples",
                f"the checkpoint was saved over {state['num_samples']} samples, so going on would train on others",
                "the same files, tokenizer and training.seq_length as before, or a new run",
            )
        self.epoch = int(state["epoch"])
        self.position = int(state["position"])
        self._order = self._permutation(self.epoch)

    def _permutation(self, epoch: int) -> np.ndarray:
        return random_permutation(self.num_samples, "sample order", self.seed, epoch)
