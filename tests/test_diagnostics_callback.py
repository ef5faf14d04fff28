from __future__ import annotations

import processes
import pytest
import settings
import test_distributed
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hf_dpkfc import DiagnosticsCallback, UniformTokenProbe
from hf_dpkfc.diagnostics.record import DIAGNOSTICS_NAME, read_log
from hf_dpkfc.errors import ConfigurationError
from hf_dpkfc.mechanism.randomness import SecretKey


class Counting(list):
    """Records that count how often they are read."""

    reads = 0

    def __getitem__(self, at):
        self.reads += 1
        return super().__getitem__(at)


@pytest.fixture
def fixed_key(monkeypatch):
    monkeypatch.setattr(SecretKey, "generate", classmethod(lambda cls: cls(bytes(range(32)))))


def entries(folder, kind="diagnostics"):
    return [e for e in read_log(folder / DIAGNOSTICS_NAME).entries if e["kind"] == kind]


def test_looking_reads_no_record_and_changes_no_weight(tmp_path, fixed_key):
    weights, reads, states = [], [], []
    for name, options in {"with": {"diagnostics_steps": 1}, "without": {}}.items():
        data = Counting(settings.text_data())
        torch.manual_seed(0)
        trainer = settings.trainer(tmp_path / name, data=data, **options)
        trainer.train()
        weights.append(settings.weights(trainer.model))
        reads.append(data.reads)
        states.append(torch.get_rng_state())
    assert len(entries(tmp_path / "with")) == 4
    assert torch.equal(*weights)
    assert reads[0] == reads[1]
    assert torch.equal(*states)


def test_looks_come_after_the_first_step_and_every_so_many(tmp_path):
    settings.trainer(tmp_path, max_steps=5, diagnostics_steps=2).train()
    assert [entry["step"] for entry in entries(tmp_path)] == [1, 2, 4]


def test_a_callback_that_is_added_late_looks_too(tmp_path):
    trainer = settings.trainer(tmp_path, max_steps=2)
    trainer.add_callback(DiagnosticsCallback(1))
    trainer.train()
    assert [entry["step"] for entry in entries(tmp_path)] == [1, 2]


def test_scalars_reach_the_logs_and_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trainer = settings.trainer(tmp_path, diagnostics_steps=2, report_to="tensorboard")
    trainer.train()
    logged = [log for log in trainer.state.log_history if "precond/snr_gain" in log]
    assert [log["step"] for log in logged] == [1, 2, 4]
    folder = next((tmp_path / "board").rglob("events*")).parent
    board = EventAccumulator(str(folder)).Reload()
    assert [e.step for e in board.Scalars("train/precond/condition_number")] == [1, 2, 4]
    assert "train/precond/cosine_F/uniform_tokens" in board.Tags()["scalars"]


def test_a_resumed_run_has_every_look_once(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "diagnostics_steps": 1}

    class Stop(Exception):
        pass

    interrupted = settings.trainer(tmp_path, **options)
    original = interrupted.training_step

    def stop_at_step_4(*args, **kwargs):
        if interrupted.state.global_step == 3:
            raise Stop
        return original(*args, **kwargs)

    interrupted.training_step = stop_at_step_4
    with pytest.raises(Stop):
        interrupted.train()
    interrupted._run.close()
    assert [entry["step"] for entry in entries(tmp_path)] == [1, 2, 3]
    before = entries(tmp_path)
    settings.trainer(tmp_path, **options).train(resume_from_checkpoint=True)
    after = entries(tmp_path)
    assert [entry["step"] for entry in after] == [1, 2, 3, 4, 5, 6]
    assert after[:3] == before


def test_evaluations_on_held_out_records_are_kept_and_others_are_not(tmp_path):
    data = settings.text_data()
    trainer = settings.trainer(
        tmp_path, data=data, diagnostics_steps=4, eval_dataset=settings.text_data(8, seed=3)
    )
    trainer.train()
    trainer.evaluate()
    trainer.evaluate(eval_dataset=data)
    kept = entries(tmp_path, "evaluation")
    assert [entry["step"] for entry in kept] == [4]
    assert set(kept[0]["metrics"]) == {"loss"}


def test_an_oracle_run_has_no_diagnostics_and_says_why(tmp_path):
    settings.trainer(tmp_path, probe="oracle", diagnostics_steps=1).train()
    assert entries(tmp_path) == []
    assert "private records" in read_log(tmp_path / DIAGNOSTICS_NAME).header["note"]


def test_other_sources_can_be_compared_with(tmp_path):
    model = settings.bert()
    trainer = settings.trainer(tmp_path, model=model, max_steps=1)
    probe = UniformTokenProbe.for_model(model, trainer.processing_class, max_length=12)
    trainer = settings.trainer(
        tmp_path, model=model, max_steps=1, callbacks=[DiagnosticsCallback(1, {"mine": probe})]
    )
    trainer.train()
    assert list(entries(tmp_path)[0]["alignment"]) == ["another draw", "mine"]


@pytest.mark.parametrize("kind", ["diagonal", "none"])
def test_other_preconditioners_are_looked_at_too(tmp_path, kind):
    settings.trainer(tmp_path, preconditioner=kind, max_steps=1, diagnostics_steps=1).train()
    assert entries(tmp_path)[0]["layers"]


def test_a_number_of_steps_below_one_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="diagnostics_steps"):
        settings.config(tmp_path, diagnostics_steps=0)
    with pytest.raises(ConfigurationError, match="diagnostics_steps"):
        DiagnosticsCallback(0)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_write_each_look_once(tmp_path):
    options = {"max_steps": 3, "per_device_train_batch_size": 4, "diagnostics_steps": 1}
    launcher = test_distributed.launcher(2)
    result = processes.run(tmp_path / "run", options=options, launcher=launcher)
    assert isinstance(result, dict), result[-3000:]
    assert result["step"] == 3
    assert [entry["step"] for entry in entries(tmp_path / "run")] == [1, 2, 3]


def test_a_look_does_not_swallow_the_steps_own_log(tmp_path):
    trainer = settings.trainer(tmp_path, diagnostics_steps=1)
    trainer.train()
    assert sum("learning_rate" in log for log in trainer.state.log_history) == 4
