"""P1 to P3: kill -9, resume, and what changed in between."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import processes
import pytest
import settings
import test_distributed
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from hf_dpkfc import engine
from hf_dpkfc.errors import ConfigurationError, LedgerError
from hf_dpkfc.publishing.statement import PrivacyStatement

STEPS = 12
OPTIONS = {
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": 3,
    "probe_refresh_steps": 5,
    "noise_multiplier": 1.0,
}

# Five kills, each after new steps, need room.
LONGER = OPTIONS | {"max_steps": 2 * STEPS}

pytestmark = pytest.mark.slow


def never_killed(folder, options):
    result = processes.run(folder / "run", options=options)
    return result | {"ledger": (folder / "run/privacy_ledger.jsonl").read_bytes()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return never_killed(tmp_path_factory.mktemp("whole"), OPTIONS)


@pytest.fixture(scope="module")
def longer_uninterrupted(tmp_path_factory):
    return never_killed(tmp_path_factory.mktemp("longer"), LONGER)


def assert_as_if_never_killed(folder, uninterrupted, options=OPTIONS):
    result = processes.run(folder, "--resume", options=options)
    assert isinstance(result, dict), result[-3000:]
    assert result["weights"] == uninterrupted["weights"]
    assert result["releases"] == options["max_steps"]
    assert (folder / "privacy_ledger.jsonl").read_bytes() == uninterrupted["ledger"]


@pytest.mark.parametrize("seed", range(4))
def test_kill_9_at_random_points_changes_nothing(tmp_path, longer_uninterrupted, seed, figure):
    """Killed five times each: in a step, a checkpoint, a ledger write, wherever it happens to be.

    Each time one or two new steps are waited for, so that no kill strikes an idle process, and
    then up to a few steps' time, so that it strikes anywhere inside of one.
    """
    rng = random.Random(seed)
    folder = tmp_path / "run"
    flags = []
    for _ in range(5):
        lines = processes.ledger_lines(folder) + rng.randint(1, 2)
        delay = rng.uniform(0, 0.05)
        assert processes.run_and_kill(folder, *flags, lines=lines, delay=delay, options=LONGER)
        flags = ["--resume"]
    assert_as_if_never_killed(folder, longer_uninterrupted, LONGER)
    figure("5 of 5 kills")


@pytest.mark.parametrize(
    "place",
    [
        "ledger-line:1",
        "ledger-line:6",
        "ledger-head:1",
        "ledger-head:7",
        "checkpoint-preconditioner:1",
        "checkpoint-preconditioner:2",
        "checkpoint-state:2",
    ],
)
def test_a_kill_inside_a_write_loses_no_charge_and_tears_no_file(
    tmp_path, uninterrupted, place, figure
):
    folder = tmp_path / "run"
    assert processes.run_until_killed(folder, place, options=OPTIONS)
    assert_as_if_never_killed(folder, uninterrupted)
    figure(f"{place} survived")


def test_a_kill_during_a_push_publishes_nothing_by_halves(tmp_path, uninterrupted, hub, figure):
    pushing = OPTIONS | {
        "push_to_hub": True,
        "hub_strategy": "every_save",
        "hub_model_id": "tester/killed",
    }
    folder = tmp_path / "run"
    assert processes.run_until_killed(folder, "push:2", options=pushing)
    first = dict(hub.repos["tester/killed"].files)
    assert {"README.md", "privacy_statement.json", "model.safetensors"} <= set(first)
    assert len(hub.repos["tester/killed"].commits) == 1
    assert_as_if_never_killed(folder, uninterrupted, pushing)
    assert hub.repos["tester/killed"].files["model.safetensors"] != first["model.safetensors"]
    figure("push: one whole commit, then resumed")


def test_another_number_of_processes_is_charged(tmp_path):
    """B is kept, 8 = 4 × 2; sums are rounded in another order, so nothing may be replayed."""
    folder = interrupted(tmp_path)
    lost = lost_steps(folder)
    result = processes.run(
        folder,
        "--resume",
        options=OPTIONS | {"per_device_train_batch_size": 4},
        launcher=test_distributed.launcher(2),
    )
    assert isinstance(result, dict), result[-3000:]
    assert (result["releases"], result["step"]) == (STEPS, STEPS - lost)


def test_another_version_of_the_code_is_charged(tmp_path, monkeypatch):
    options = {"save_strategy": "steps", "save_steps": 2}
    with pytest.raises(KeyboardInterrupt):
        settings.trainer(tmp_path, callbacks=[Interrupt()], **options).train()
    monkeypatch.setattr(engine, "CODE_VERSION", "hf-dpkfc 99")
    trainer = settings.trainer(tmp_path, **options)
    trainer.train(resume_from_checkpoint=True)
    assert trainer._run.ledger.charged_steps == [0, 1, 2, 2]


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
    [{"lr_scheduler_type": "constant"}, {"layer_balance": 0.5}, {"seed": 7}],
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
    charged = trainer._run.ledger.charged_steps
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


DISK = OPTIONS | {"dp_optimizer": "disk", "save_steps": 4}


def test_kill_9_under_disk_changes_nothing(tmp_path):
    """The last update and the filter are part of a step: both come back from the checkpoint."""
    whole = processes.run(tmp_path / "whole", options=DISK)
    folder = tmp_path / "run"
    assert processes.run_and_kill(folder, lines=8, delay=0.01, options=DISK)
    assert (folder / "checkpoint-4/kalman_filter.safetensors").exists()
    result = processes.run(folder, "--resume", options=DISK)
    assert result["weights"] == whole["weights"]
    assert result["releases"] == STEPS


@pytest.mark.parametrize(
    "other",
    [{"gamma": 0.6}, {"kappa": 0.8}, {"previous": {}}],
    ids=lambda other: next(iter(other)),
)
def test_another_filter_is_another_query(tmp_path, other):
    trainer = settings.trainer(tmp_path, max_steps=1, dp_optimizer="disk")
    trainer.train()
    before = trainer._run._digest()
    trainer._run.filter = replace(trainer._run.filter, **other)
    assert trainer._run._digest() != before


def test_a_lost_displacement_is_charged(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "dp_optimizer": "disk"}
    with pytest.raises(KeyboardInterrupt):
        settings.trainer(tmp_path, callbacks=[Interrupt()], **options).train()
    (tmp_path / "checkpoint-2/kalman_filter.safetensors").unlink()
    trainer = settings.trainer(tmp_path, **options)
    trainer.train(resume_from_checkpoint=True)
    assert trainer._run.ledger.charged_steps == [0, 1, 2, 2]


def test_adambc_resumes_to_the_same_weights(tmp_path):
    options = OPTIONS | {"dp_optimizer": "adambc"}
    whole = processes.run(tmp_path / "whole", options=options)
    assert processes.run_and_kill(tmp_path / "run", lines=9, delay=0.01, options=options)
    result = processes.run(tmp_path / "run", "--resume", options=options)
    assert result["weights"] == whole["weights"]


def test_private_evaluations_before_an_interruption_are_on_the_statement(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "data": settings.text_data()}
    evaluating = {"eval_strategy": "steps", "eval_steps": 1}
    with pytest.raises(KeyboardInterrupt):
        settings.trainer(
            tmp_path,
            callbacks=[Interrupt()],
            eval_dataset=options["data"],
            **options,
            **evaluating,
        ).train()
    settings.trainer(tmp_path, **options).train(resume_from_checkpoint=True)
    assert PrivacyStatement.load(tmp_path).logged_unsafe_metrics


def test_an_interrupted_run_is_resumed_in_the_same_process(tmp_path):
    """Also while somebody keeps the exception, and with it the trainer, as IPython does."""
    options = {"save_strategy": "steps", "save_steps": 2}
    with pytest.raises(KeyboardInterrupt) as kept:
        settings.trainer(tmp_path, callbacks=[Interrupt()], **options).train()
    resumed = settings.trainer(tmp_path, **options)
    resumed.train(resume_from_checkpoint=tmp_path / "checkpoint-2")
    assert kept.value is not None
    assert resumed._num_releases == 4


def test_a_run_is_replayed_from_its_start_with_the_weights_of_its_start_only(tmp_path):
    model = settings.bert()
    with pytest.raises(KeyboardInterrupt):
        settings.trainer(tmp_path, model, callbacks=[Interrupt()]).train()
    with pytest.raises(ConfigurationError, match="load the base checkpoint again"):
        settings.trainer(tmp_path, model).train(resume_from_checkpoint=True)
    replayed = settings.trainer(tmp_path)
    replayed.train(resume_from_checkpoint=True)
    assert replayed._num_releases == 4


@pytest.fixture(scope="module")
def stated_run(tmp_path_factory):
    """An interrupted run, which every refused resumption leaves as it was."""
    folder = tmp_path_factory.mktemp("stated")
    options = {"save_strategy": "steps", "save_steps": 2, "probe": "words", "dp_optimizer": "disk"}
    options["privacy_key_path"] = str(tmp_path_factory.mktemp("keys"))
    with pytest.raises(KeyboardInterrupt):
        settings.trainer(folder, callbacks=[Interrupt()], **options).train()
    return folder, options


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"probe": "uniform"}, "probe was 'words'"),
        ({"probe_language": "de"}, "probe_language was 'en'"),
        ({"preconditioner": "none"}, "preconditioner was 'kfac'"),
        ({"kfac_approx": "expand"}, "kfac_approx was 'reduce'"),
        ({"kfac_sides": "inputs"}, "kfac_sides was 'both'"),
        ({"damping": 0.5}, "damping was '1.0'"),
        ({"rank": None}, "rank was '8'"),
        ({"dp_optimizer": None}, "dp_optimizer was .*'disk'"),
        ({"disk_kappa": 0.8}, "dp_optimizer was .*'kappa': 0.7"),
        ({"secure_rng": True}, "secure_rng was 'False'"),
        ({"log_unsafe_metrics": True}, "log_unsafe_metrics was 'False'"),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else "",
)
def test_what_the_card_says_of_every_step_cannot_change_on_resume(stated_run, change, named):
    folder, options = stated_run
    with pytest.raises(LedgerError, match=named):
        settings.trainer(folder, **options | change).train(resume_from_checkpoint=True)


def test_another_generator_is_another_query(tmp_path):
    """Also where both draws are empty, so that records and sums don't tell them apart."""
    trainer = settings.trainer(tmp_path, max_steps=1)
    trainer.train()
    fast = trainer._run._digest()
    trainer._run.secure = True
    assert trainer._run._digest() != fast


def test_an_oracle_run_is_not_resumed_into_a_claim(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    with pytest.raises(KeyboardInterrupt):
        settings.trainer(tmp_path, callbacks=[Interrupt()], probe="oracle", **options).train()
    with pytest.raises(LedgerError, match="another kind of probe"):
        settings.trainer(tmp_path, **options).train(resume_from_checkpoint=True)
