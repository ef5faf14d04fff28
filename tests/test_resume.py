"""P1 to P3: kill -9, resume, and what changed in between."""

from __future__ import annotations

import random
from pathlib import Path

import processes
import pytest
import settings
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from hf_dpkfc.errors import ConfigurationError, LedgerError

STEPS = 12
OPTIONS = {
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": 3,
    "probe_refresh_steps": 5,
    "noise_multiplier": 1.0,
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    result = processes.run(folder / "run", options=OPTIONS)
    return result | {"ledger": (folder / "run/privacy_ledger.jsonl").read_bytes()}


def test_kill_9_at_random_points_changes_nothing(tmp_path, uninterrupted):
    """Killed four times: in a step, a checkpoint, a ledger write, wherever it happens to be."""
    rng = random.Random(1)
    folder = tmp_path / "run"
    flags = []
    for lines in (2, 5, 8, 11):
        assert processes.run_and_kill(
            folder, *flags, lines=lines, delay=rng.uniform(0, 0.05), options=OPTIONS
        )
        flags = ["--resume"]
    result = processes.run(folder, "--resume", options=OPTIONS)
    assert result["weights"] == uninterrupted["weights"]
    assert result["releases"] == STEPS
    assert (folder / "privacy_ledger.jsonl").read_bytes() == uninterrupted["ledger"]


def interrupted(tmp_path, after=8):
    folder = tmp_path / "run"
    assert processes.run_and_kill(folder, lines=after + 1, delay=0.0, options=OPTIONS)
    return folder


def lost_steps(folder):
    """Releases after the last complete checkpoint."""
    whole = [
        int(p.parent.name.split("-")[1]) for p in folder.glob("checkpoint-*/trainer_state.json")
    ]
    charged = (folder / "privacy_ledger.jsonl").read_bytes().count(b"\n") - 1
    return charged - max(whole)


@pytest.mark.parametrize(
    "change",
    [{"lr_scheduler_type": "constant"}, {"damping": 0.5}, {"seed": 7}],
    ids=lambda change: next(iter(change)),
)
def test_a_change_draws_fresh_noise_and_is_charged(tmp_path, uninterrupted, change):
    """A schedule shows one step later, in the parameters; a probe's option at the next refresh.

    (Learning rate and weight decay are restored from HF's checkpoint: changing them changes
    nothing, and the replay is free.)
    """
    folder = interrupted(tmp_path)
    result = processes.run(folder, "--resume", options=OPTIONS | change)
    assert result["releases"] <= STEPS
    assert result["weights"] != uninterrupted["weights"]


def test_changed_data_is_charged_and_the_run_stops_earlier_and_says_so(tmp_path):
    folder = interrupted(tmp_path)
    lost = lost_steps(folder)
    assert lost > 0
    result = processes.run(folder, "--resume", "--data-seed=5", options=OPTIONS)
    assert result["releases"] == STEPS
    assert result["step"] == STEPS - lost
    assert "drawn afresh and charged again" in result["stderr"]
    assert f"Training stops at step {STEPS - lost} of {STEPS}" in result["stderr"]


@pytest.mark.parametrize(
    "change",
    [
        {"noise_multiplier": 0.9},
        {"per_device_train_batch_size": 4},
        {"clip_norm": 2.0},
        {"max_steps": 20},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_plan_is_refused_with_what_differs(tmp_path, change):
    folder = interrupted(tmp_path, after=4)
    error = processes.run(folder, "--resume", options=OPTIONS | change)
    assert "belongs to another plan" in error


class Interrupt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_resuming_without_the_key_is_refused(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "privacy_key_path": str(tmp_path / "k")}
    with pytest.raises(KeyboardInterrupt):
        settings.trainer(tmp_path / "out", callbacks=[Interrupt()], **options).train()
    next((tmp_path / "k").rglob("key")).unlink()
    with pytest.raises(LedgerError, match="key"):
        settings.trainer(tmp_path / "out", **options).train(resume_from_checkpoint=True)


def test_a_finished_run_cannot_be_resumed(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    settings.trainer(tmp_path, **options).train()
    with pytest.raises(LedgerError, match="destroyed when its training ends"):
        settings.trainer(tmp_path, **options).train(resume_from_checkpoint=True)


def test_nothing_to_resume_is_said(tmp_path):
    with pytest.raises(ConfigurationError, match="nothing to resume"):
        settings.trainer(tmp_path).train(resume_from_checkpoint=True)


def test_a_second_process_on_one_run_is_refused(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "privacy_key_path": str(tmp_path / "k")}

    class Second(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                with pytest.raises(LedgerError, match="in use"):
                    settings.trainer(tmp_path / "out", **options).train(resume_from_checkpoint=True)

    settings.trainer(tmp_path / "out", callbacks=[Second()], **options).train()


def test_a_second_fresh_start_on_one_run_is_refused(tmp_path):
    class Second(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                with pytest.raises(LedgerError, match="in use"):
                    settings.trainer(tmp_path).train()

    trainer = settings.trainer(tmp_path, callbacks=[Second()])
    trainer.train()
    assert trainer._num_releases == 4


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    """Its weights cost another budget: ε = 8 must not be published as ε = 1."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    settings.trainer(tmp_path, target_epsilon=8.0, **saving).train()
    options = saving | {"target_epsilon": 1.0}
    with pytest.raises(KeyboardInterrupt):
        settings.trainer(tmp_path, callbacks=[Interrupt()], **options).train()
    resumed = settings.trainer(tmp_path, **options)
    with pytest.raises(LedgerError, match="isn't a whole checkpoint of the run"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    resumed.train(resume_from_checkpoint=True)
    assert Path(resumed._resume_from).name == "checkpoint-2"


def _smoothed(amount):
    def loss(outputs, inputs):
        return torch.nn.functional.cross_entropy(
            outputs.logits, inputs["labels"], reduction="none", label_smoothing=amount
        )

    return loss


def test_a_constant_changed_inside_a_loss_is_charged(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    with pytest.raises(KeyboardInterrupt):
        settings.trainer(
            tmp_path, callbacks=[Interrupt()], per_example_loss=_smoothed(0.1), **options
        ).train()
    trainer = settings.trainer(tmp_path, per_example_loss=_smoothed(0.2), **options)
    trainer.train(resume_from_checkpoint=True)
    charged = [charge.step for charge in trainer._run.ledger.charges]
    assert charged == [0, 1, 2, 2]


def test_a_torn_checkpoint_is_passed_over(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}

    class Late(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        settings.trainer(tmp_path, callbacks=[Late()], **options).train()
    state = tmp_path / "checkpoint-4/trainer_state.json"
    state.write_text(state.read_text()[:40])
    trainer = settings.trainer(tmp_path, **options)
    trainer.train(resume_from_checkpoint=True)
    assert Path(trainer._resume_from).name == "checkpoint-2"
    assert trainer._num_releases == 6


def test_a_spent_budget_takes_no_further_step(tmp_path):
    """Steps 0 to 2, then step 2 again with other data: four releases, all that the plan has."""
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    with pytest.raises(KeyboardInterrupt):
        settings.trainer(tmp_path, callbacks=[Interrupt()], **options).train()
    other = settings.text_data(seed=5)
    with pytest.raises(KeyboardInterrupt):
        settings.trainer(tmp_path, data=other, callbacks=[Interrupt()], **options).train(
            resume_from_checkpoint=True
        )
    trainer = settings.trainer(tmp_path, data=settings.text_data(seed=6), **options)
    trainer.train(resume_from_checkpoint=True)
    saved = load_file(tmp_path / "checkpoint-2/model.safetensors")
    assert trainer._num_releases == 4
    assert all(torch.equal(saved[n], p) for n, p in trainer.model.named_parameters())
