"""Poisson sampling: every record enters a step's batch on its own, with one public probability."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from hf_dpkfc.errors import ConfigurationError
from hf_dpkfc.mechanism.randomness import StepRandomness


@dataclass(frozen=True)
class PoissonSampler:
    """Draws logical batches.

    Attributes:
        num_records: Length of the private data set.
        rate: q, a public constant; never derived from the drawn size.
        max_micro_batch: Most examples that a process handles at once.
        rank: This process.
        world_size: Number of processes; all draw the same batch and take every world_size-th.
    """

    num_records: int
    rate: float
    max_micro_batch: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ConfigurationError(
                f"sampling rate {self.rate}.",
                why="it is a probability: expected batch size over public_dataset_size.",
                way_out="lower per_device_train_batch_size × gradient_accumulation_steps × "
                "processes below the data set's size.",
            )

    def draw(self, randomness: StepRandomness) -> np.ndarray:
        """Indices of the step's whole batch; may be empty."""
        uniform = randomness.stream("sampling").uniform(self.num_records)
        return np.flatnonzero(uniform < self.rate)

    def micro_batches(
        self, randomness: StepRandomness, length_of: Callable[[int], int] | None = None
    ) -> Iterator[list[int]]:
        """This process's share of the batch in pieces that fit the device; none if it is empty.

        Args:
            randomness: The step's.
            length_of: Tokens of a record. Records of like length then share a piece, which saves
                padding; the batch, and so its sum, is the same.
        """
        mine = self.draw(randomness)[self.rank :: self.world_size].tolist()
        if length_of is not None:
            mine.sort(key=length_of)
        for start in range(0, len(mine), self.max_micro_batch):
            yield mine[start : start + self.max_micro_batch]
