from __future__ import annotations

import json

import models
import pytest
import tokenizers_zoo
import torch

from hf_dpkfc import CurvatureOptions, PinkNoiseProbe, Preconditioner, ZipfTokenProbe
from hf_dpkfc.curvature.fit import estimate_factors, fit_preconditioner
from hf_dpkfc.diagnostics.record import (
    DiagnosticsLog,
    Observatory,
    contrast_of,
    read_log,
    summary,
)
from hf_dpkfc.diagnostics.spectra import layer_spectra

OPTIONS = CurvatureOptions(num_batches=1, batch_size=8, rank=8)


def bert_probe(model):
    return ZipfTokenProbe.for_model(model, tokenizers_zoo.build("bert"), max_length=12)


@pytest.fixture(scope="module")
def look():
    model = models.build("bert").float()
    probe = bert_probe(model)
    observatory = Observatory(model, probe, OPTIONS, 1.0, 0.1, contrast_of(probe))
    fitted = fit_preconditioner(model, probe, OPTIONS, seed=5)
    return json.loads(json.dumps(observatory.look(fitted, step=5, seed=5)))


def test_a_look_has_the_spectra_of_the_runs_own_factors(look):
    model = models.build("bert").float()
    spectra, notes = layer_spectra(estimate_factors(model, bert_probe(model), OPTIONS, seed=5), 1.0)
    assert list(look["layers"]) == [layer.name for layer in spectra]
    expected = {layer.name: layer.A.effective_rank for layer in spectra}
    measured = {name: layer["A"]["effective_rank"] for name, layer in look["layers"].items()}
    assert measured == pytest.approx(expected, rel=1e-4)
    assert look["notes"] == notes


def test_a_look_compares_with_another_draw_and_with_the_unstructured_probe(look):
    assert list(look["alignment"]) == ["another draw", "uniform tokens"]


def test_the_summary_holds_finite_numbers_only(look):
    logs = summary(look)
    assert {"precond/effective_rank_A", "precond/snr_gain", "precond/condition_number"} <= set(logs)
    assert torch.isfinite(torch.tensor(list(logs.values()))).all()


def test_a_run_without_noise_has_no_snr():
    model = models.build("bert").float()
    observatory = Observatory(model, bert_probe(model), OPTIONS, 1.0, noise_std=0.0)
    entry = observatory.look(Preconditioner.identity(), 1, 1)
    assert {signal["snr"] for signal in entry["signals"].values()} == {None}
    assert "precond/snr_gain" not in summary(entry)


def test_the_contrast_of_pink_noise_is_white():
    probe = PinkNoiseProbe.for_model(models.build("cnn"))
    (name, contrast), *_ = contrast_of(probe).items()
    assert name == "white noise"
    assert contrast.alpha == 0.0
    assert contrast_of(contrast) == {}


def test_a_resumed_log_keeps_lines_up_to_its_checkpoint(tmp_path):
    log = DiagnosticsLog(tmp_path / "d.jsonl")
    log.start({}, 0)
    for step in (1, 2, 3):
        log.append({"kind": "diagnostics", "step": step})
    with open(log.path, "a") as file:
        file.write('{"kind": "diagn')
    log.start({}, 2)
    log.append({"kind": "diagnostics", "step": 3})
    content = read_log(log.path)
    assert [entry["step"] for entry in content.entries] == [1, 2, 3]
    assert content.header["kind"] == "header"
    assert not content.problems


def test_a_new_run_begins_a_new_log(tmp_path):
    log = DiagnosticsLog(tmp_path / "d.jsonl")
    log.start({}, 0)
    log.append({"kind": "diagnostics", "step": 1})
    log.start({}, 0)
    assert read_log(log.path).entries == []


@pytest.mark.parametrize("line", ["not json", "[1]", '{"step": 1}', "3", '{"kind":'])
def test_a_line_that_cant_be_read_is_named(tmp_path, line):
    log = DiagnosticsLog(tmp_path / "d.jsonl")
    log.start({}, 0)
    with open(log.path, "a") as file:
        file.write(line + "\n")
    log.append({"kind": "diagnostics", "step": 1})
    content = read_log(log.path)
    assert content.problems == ["d.jsonl: line 2 can't be read and is left out."]
    assert len(content.entries) == 1
