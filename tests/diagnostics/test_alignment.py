from __future__ import annotations

import models
import pytest
import torch

from hf_dpkfc import PinkNoiseProbe
from hf_dpkfc.curvature.factors import ExpandedFactor, FactorPair, IdentityFactor, ReducedFactor
from hf_dpkfc.curvature.fit import CurvatureOptions, Factors, estimate_factors
from hf_dpkfc.diagnostics.alignment import align, inner, unsafe_oracle_factors


def factor(n, d, seed, kind="reduce"):
    rows = torch.randn(n, 1, d, generator=torch.Generator().manual_seed(seed)).double()
    made = {
        "reduce": ReducedFactor(averages=True),
        "expand": ExpandedFactor(),
        "identity": IdentityFactor(d),
    }[kind]
    made.add(rows, torch.ones(n, 1, 1).double())
    return made


def formed(pair):
    return torch.kron(pair.A.covariance(), pair.G.covariance())


@pytest.mark.parametrize(
    "kinds", [("reduce", "reduce"), ("reduce", "expand"), ("identity", "identity")]
)
@pytest.mark.parametrize("n", [3, 30])
def test_inner_product_is_that_of_the_covariances(kinds, n):
    one, other = factor(n, 8, 0, kinds[0]), factor(n + 1, 8, 1, kinds[1])
    explicit = float((one.covariance() * other.covariance()).sum())
    assert inner(one, other) == pytest.approx(explicit, rel=1e-12)


def test_agreement_of_f_is_that_of_the_formed_kronecker_products():
    pairs = [FactorPair(factor(4, 6, s), factor(9, 5, s + 10)) for s in (0, 1)]
    layers, _ = align(Factors({"x": pairs[0]}, 0.0), Factors({"x": pairs[1]}, 0.0))
    one, other = map(formed, pairs)
    cosine = float((one * other).sum() / (one.norm() * other.norm()))
    assert layers[0].F.cosine == pytest.approx(cosine, rel=1e-12)
    error = float((one - other).norm() / one.norm())
    assert layers[0].F.relative_error == pytest.approx(error, rel=1e-12)
    A = [pair.A.covariance() for pair in pairs]
    assert layers[0].A.relative_error == pytest.approx(float((A[0] - A[1]).norm() / A[0].norm()))


def test_a_source_agrees_with_itself():
    pair = FactorPair(factor(4, 6, 0), factor(9, 5, 1))
    layers, _ = align(Factors({"x": pair}, 0.0), Factors({"x": pair}, 0.0))
    assert layers[0].F.cosine == pytest.approx(1.0, abs=1e-12)
    assert layers[0].F.relative_error == pytest.approx(0.0, abs=1e-7)


def test_scale_moves_the_error_and_not_the_cosine():
    one, twice = factor(4, 6, 0), factor(4, 6, 0)
    twice.rows = [2 * rows for rows in twice.rows]
    G = factor(9, 5, 1)
    layers, _ = align(
        Factors({"x": FactorPair(one, G)}, 0.0), Factors({"x": FactorPair(twice, G)}, 0.0)
    )
    assert layers[0].A.cosine == pytest.approx(1.0)
    assert layers[0].A.relative_error == pytest.approx(3.0)


def test_a_layer_that_a_source_lacks_is_named_and_the_others_are_there():
    pairs = {n: FactorPair(factor(4, 6, 0), factor(9, 5, 1)) for n in ("kept", "lost")}
    layers, notes = align(Factors(pairs, 0.0), Factors({"kept": pairs["kept"]}, 0.0))
    assert [layer.name for layer in layers] == ["kept"]
    assert notes == ["lost: no alignment, the other source doesn't reach it"]


def test_the_oracle_sees_the_records_and_their_own_labels():
    model = models.build("cnn")
    inputs = models.inputs_for("cnn", batch=6)
    records = [{k: v[i] for k, v in inputs.items()} for i in range(6)]
    seen = []

    def collate(batch):
        seen.extend(int(record["labels"]) for record in batch)
        return {k: torch.stack([r[k] for r in batch]) for k in batch[0]}

    options = CurvatureOptions(num_batches=2, batch_size=8)
    oracle = unsafe_oracle_factors(model, records, collate, options)
    synthetic = estimate_factors(model, PinkNoiseProbe.for_model(model), options)
    assert len(seen) == 16
    assert not oracle.is_data_free
    assert synthetic.is_data_free
    layers, _ = align(oracle, synthetic)
    assert {layer.name for layer in layers} == set(oracle.pairs)
    assert all(0 < layer.F.cosine < 1 for layer in layers)
