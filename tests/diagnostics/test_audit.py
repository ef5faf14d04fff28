"""U1: audits of the real step and of a whole training; correct code passes, broken code doesn't.

Confidence is 1 − 1e-6 where correct code is audited: that is the test's false-alarm probability.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import settings

from hf_dpkfc import PrivacyPlan, engine
from hf_dpkfc.cli import main
from hf_dpkfc.diagnostics.audit import CONFIDENCE, audit_step, audit_training, tiny_stage
from hf_dpkfc.errors import ConfigurationError, PublishingError
from hf_dpkfc.mechanism.noise import privatize
from hf_dpkfc.privacy.accounting import calibrate
from hf_dpkfc.publishing.statement import PrivacyStatement
from hf_dpkfc.publishing.verify import verify

GATE = 1 - 1e-6
DELTA = 1e-5
# ε ≈ 1.8: 248 of 256 guesses refute it, which a tenth of the noise allows.
TRAINING = PrivacyPlan(4.0, 1.0, 50, 100, 10, DELTA)


def weaken(monkeypatch, factor):
    """The real step with a share of its noise."""

    def weaker(clipped_sum, noise_multiplier, expected_batch_size, randomness):
        return privatize(clipped_sum, factor * noise_multiplier, expected_batch_size, randomness)

    monkeypatch.setattr(engine, "privatize", weaker)


def audited(target, trials, confidence=GATE):
    return audit_step(calibrate(target, 1.0, 1, DELTA), num_trials=trials, confidence=confidence)


@pytest.mark.statistical
def test_a_correct_step_stays_below_its_claim():
    assert audited(8.0, 800).holds


@pytest.mark.statistical
def test_half_the_noise_is_caught(monkeypatch):
    weaken(monkeypatch, 0.5)
    assert not audited(8.0, 800).holds


# Trials that show half the noise at 99.99 % with five standard deviations to spare (3e-7).
TRIALS = {1.0: 8000, 2.0: 2500, 4.0: 1100, 8.0: 800}


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("target", TRIALS)
def test_a_correct_step_stays_below_its_claim_at_every_epsilon(target, figure):
    result = audited(target, TRIALS[target])
    figure(f"ε {target:g}: μ ≥ {result.bound:.3f}, claim {result.claim:.3f}")
    assert result.holds


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("target", TRIALS)
def test_half_the_noise_is_caught_at_every_epsilon(target, monkeypatch, figure):
    weaken(monkeypatch, 0.5)
    result = audited(target, TRIALS[target], CONFIDENCE)
    figure(f"ε {target:g}, half noise: μ ≥ {result.bound:.3f} > {result.claim:.3f}")
    assert not result.holds


@pytest.mark.slow
@pytest.mark.statistical
def test_a_correct_training_stays_below_its_claim(figure):
    result = audit_training(TRAINING, confidence=GATE)
    figure(f"training: ε ≥ {result.bound:.2f}, claim {result.claim:.2f}")
    assert result.holds


@pytest.mark.slow
@pytest.mark.statistical
def test_a_tenth_of_the_noise_is_caught_in_one_training(monkeypatch, figure):
    weaken(monkeypatch, 0.1)
    result = audit_training(TRAINING, confidence=GATE)
    figure(f"training, a tenth of the noise: ε ≥ {result.bound:.2f} > {result.claim:.2f}")
    assert not result.holds


@pytest.mark.parametrize("clip_norm", [0.01, 1.0, 1000.0])
def test_canaries_are_clipped_and_can_be_told_apart(clip_norm):
    stage = tiny_stage(16, clip_norm=clip_norm)
    maps = stage.geometry.fit(0, stage.query)
    directions = stage.unsafe_directions(maps, clip_norm) / clip_norm
    gram = (directions @ directions.T).numpy()
    assert np.diag(gram) == pytest.approx(np.ones(16), abs=2e-3)
    assert np.linalg.eigvalsh(gram).min() > 0.2


@pytest.mark.parametrize(
    ("sigma", "options", "match"),
    [
        (0.0, {}, "noise_multiplier=0.0"),
        (1.0, {"num_trials": 2}, "num_trials=2"),
        (1.0, {"confidence": 1.0}, "confidence=1.0"),
    ],
)
def test_an_audit_without_claim_or_trials_is_refused(sigma, options, match):
    with pytest.raises(ConfigurationError, match=match):
        audit_step(sigma, **options)


@pytest.fixture
def trained(tmp_path):
    trainer = settings.trainer(tmp_path / "model", max_steps=2)
    trainer.train()
    trainer.create_model_card()
    return tmp_path / "model"


def test_the_command_draws_prints_and_goes_on_the_card(trained, tmp_path, capsys):
    out = tmp_path / "audit"
    command = ["audit", "--attach", str(trained), "--trials", "400", "--out", str(out)]
    assert main(command) == 0
    assert "the claim holds" in capsys.readouterr().out
    assert (out / "step_scores.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((out / "step_audit.json").read_text())
    statement = PrivacyStatement.load(trained)
    assert statement.audit == result
    assert f"400 trials: lower bound {result['bound']:.4g}" in (trained / "README.md").read_text()
    numbers = [check for check in verify(str(trained)) if check.what != "files"]
    assert all(check.holds for check in numbers)


def test_a_refuted_claim_is_said_and_never_on_a_card(trained, tmp_path, monkeypatch, capsys):
    weaken(monkeypatch, 0.05)
    command = ["audit", "--attach", str(trained), "--trials", "400", "--out", str(tmp_path / "a")]
    assert main(command) == 2
    printed = capsys.readouterr()
    assert "THE CLAIM IS REFUTED" in printed.out
    assert "its audit refutes the claim" in printed.err
    statement = PrivacyStatement.load(trained)
    with pytest.raises(PublishingError, match="its audit refutes the claim"):
        statement.require_publishable()
    with pytest.raises(PublishingError, match="its audit refutes the claim"):
        settings.trainer(trained, max_steps=2).create_model_card()


@pytest.mark.slow
def test_the_command_audits_a_training(tmp_path, capsys):
    command = f"audit --sigma 2 --kind training --steps 5 --out {tmp_path}".split()
    assert main(command) == 0
    assert "one-run audit of 5 steps" in capsys.readouterr().out
    assert (tmp_path / "training_scores.png").exists()
