"""R1: a long training keeps its memory."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import settings
import torch
from transformers import TrainerCallback

STEPS = 2000
PAGE = 4096


class Memory(TrainerCallback):
    """Resident megabytes, every 50 steps."""

    def __init__(self):
        self.samples = {}

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % 50 == 0:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.samples[state.global_step] = pages * PAGE / 2**20


@pytest.fixture
def one_thread():
    """Steps of a tiny model: threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_two_thousand_steps_keep_memory_flat(tmp_path, figure):
    memory = Memory()
    settings.trainer(
        tmp_path,
        max_steps=STEPS,
        logging_steps=STEPS,
        per_device_train_batch_size=4,
        noise_multiplier=5.0,
        callbacks=[memory],
    ).train()
    # The lowest of a window: what is held, not what an allocator happens to keep for later.
    early = min(mb for step, mb in memory.samples.items() if 500 <= step < 1000)
    late = min(mb for step, mb in memory.samples.items() if 1500 <= step < 2000)
    figure(f"{late - early:+.2f} MB per 1,000 steps")
    assert late - early < 1.0
