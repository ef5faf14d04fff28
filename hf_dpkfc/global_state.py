"""The global random state of torch, NumPy and Python: set for a while, then put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded_global_state(seed: np.ndarray) -> Iterator[None]:
    """Whatever draws from global state draws from this seed, [words] uint32, inside the block."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        _seed_torch(int(seed[0]) << 32 | int(seed[1]))
        np.random.seed(seed)
        random.seed(seed.tobytes())
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _seed_torch(seed: int) -> None:
    # Without accelerators torch.manual_seed would format a stack trace for each kind of them.
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
