from __future__ import annotations

import math

import models
import pytest
import tokenizers_zoo
import torch

from hf_dpkfc import ZipfTokenProbe
from hf_dpkfc.curvature.factors import ExpandedFactor, FactorPair, ReducedFactor
from hf_dpkfc.curvature.fit import CurvatureOptions, Factors, estimate_factors
from hf_dpkfc.diagnostics.spectra import (
    Spectrum,
    eigenvalues,
    kronecker_eigenvalues,
    layer_spectra,
    thinned,
)
from hf_dpkfc.layers.routes import inspect_model


def random_factor(n, d, seed=0, kind=ReducedFactor):
    rows = torch.randn(n, 1, d, generator=torch.Generator().manual_seed(seed)).double()
    factor = ReducedFactor(averages=True) if kind is ReducedFactor else ExpandedFactor()
    factor.add(rows, torch.ones(n, 1, 1).double())
    return factor


def descending(matrix):
    return torch.linalg.eigvalsh(matrix).flip(0)


@pytest.mark.parametrize("kind", [ReducedFactor, ExpandedFactor])
@pytest.mark.parametrize(("n", "d"), [(3, 7), (7, 3), (5, 5)])
def test_eigenvalues_are_those_of_the_covariance(kind, n, d):
    factor = random_factor(n, d, kind=kind)
    torch.testing.assert_close(eigenvalues(factor), descending(factor.covariance()))


def test_directions_that_no_probe_spans_have_eigenvalue_zero():
    assert torch.equal(eigenvalues(random_factor(3, 7))[3:], torch.zeros(4).double())


def test_kronecker_spectrum_is_that_of_the_formed_product():
    A, G = random_factor(4, 6).covariance(), random_factor(9, 5, seed=1).covariance()
    fast = kronecker_eigenvalues(descending(A), descending(G))
    torch.testing.assert_close(fast, descending(torch.kron(A, G)))


def test_effective_rank_counts_equal_eigenvalues():
    spectrum = Spectrum(torch.tensor([2.0, 2.0, 2.0, 0.0, 0.0]).double(), damping=1.0)
    assert spectrum.effective_rank == pytest.approx(3.0)


def test_condition_number_is_that_of_the_damped_matrix():
    C, damping = random_factor(20, 6).covariance(), 0.3
    damped = C / (C.trace() / 6) + damping * torch.eye(6).double()
    measured = Spectrum(descending(C), damping).condition_number
    assert measured == pytest.approx(float(torch.linalg.cond(damped)))


def test_damping_over_largest_is_one_where_they_meet():
    values = torch.tensor([4.0, 0.0, 0.0, 0.0]).double()
    assert Spectrum(values, damping=4.0).damping_over_largest == pytest.approx(1.0)


def test_a_layer_without_signal_is_named_and_the_others_are_there():
    silent = ReducedFactor(averages=False, rows=[torch.zeros(4, 3).double()])
    good = FactorPair(random_factor(4, 3), random_factor(4, 2))
    factors = Factors({"quiet": FactorPair(random_factor(4, 3), silent), "good": good}, 1e-9)
    spectra, notes = layer_spectra(factors, damping=1.0)
    assert [layer.name for layer in spectra] == ["good"]
    assert notes == ["quiet: no spectrum, no gradient reaches it yet"]


def test_a_models_spectra_have_the_width_of_every_kfac_block():
    model = models.build("bert")
    probe = ZipfTokenProbe.for_model(model, tokenizers_zoo.build("bert"), max_length=12)
    options = CurvatureOptions(num_batches=1, batch_size=8, approx="expand")
    spectra, notes = layer_spectra(estimate_factors(model, probe, options), damping=1.0)
    blocks = {b.name: b for b in inspect_model(model) if b.treatment == "kfac"}
    assert {layer.name for layer in spectra} == set(blocks)
    assert not notes
    sizes = {n: sum(math.prod(s) for s in b.parameters.values()) for n, b in blocks.items()}
    assert {layer.name: len(layer.F) for layer in spectra} == sizes


def test_output_gradients_that_are_left_alone_have_the_identitys_spectrum():
    model = models.build("bert")
    probe = ZipfTokenProbe.for_model(model, tokenizers_zoo.build("bert"), max_length=12)
    options = CurvatureOptions(num_batches=1, batch_size=8, sides="inputs")
    spectra, notes = layer_spectra(estimate_factors(model, probe, options), damping=1.0)
    assert not notes  # key projections among them
    assert all(torch.equal(s.G.values, torch.ones_like(s.G.values)) for s in spectra)
    assert all(s.G.condition_number == 1 for s in spectra)


def test_thinning_keeps_both_ends():
    values = torch.arange(1000, 0, -1).double()
    points = thinned(values, 20)
    assert points[0] == (1, 1000.0)
    assert points[-1] == (1000, 1.0)
    assert len(points) <= 20
