from __future__ import annotations

import pytest
import reference
import torch

from hf_dpkfc.curvature.roots import DenseRoot, LowRankRoot, root_of_covariance, root_of_rows


def rows(n, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(0, -3, d, dtype=torch.float64)
    return torch.randn(n, d, generator=generator, dtype=torch.float64) * scales


@pytest.mark.parametrize("shape", [(5, 40), (30, 40), (80, 40), (40, 40)])
@pytest.mark.parametrize("damping", [0.01, 1.0])
def test_the_exact_root_is_exact(shape, damping):
    X = rows(*shape)
    expected = reference.inverse_root(X.mT @ X / len(X), damping)
    torch.testing.assert_close(reference.explicit_root(root_of_rows(X, damping, None)), expected)


def test_few_rows_give_a_thin_root():
    root = root_of_rows(rows(5, 40), 1.0, None)
    assert isinstance(root, LowRankRoot)
    assert root.basis.shape == (40, 5)


@pytest.mark.parametrize("shape", [(30, 60), (90, 60)])
def test_rank_k_keeps_the_top_and_replaces_the_rest_by_its_mean(shape):
    X, k, damping = rows(*shape), 4, 0.1
    C = X.mT @ X / len(X)
    eigenvalues, Q = torch.linalg.eigh(C)
    flattened = eigenvalues.clone()
    flattened[:-k] = eigenvalues[:-k].mean()
    expected = Q @ torch.diag((flattened / eigenvalues.mean() + damping).rsqrt()) @ Q.mT
    root = root_of_rows(X, damping, k)
    assert root.basis.shape == (60, k)
    torch.testing.assert_close(reference.explicit_root(root), expected)


@pytest.mark.parametrize(
    ("shape", "rank"), [((5, 40), 5), ((5, 40), 20), ((5, 40), 41), ((80, 40), 40), ((80, 40), 64)]
)
def test_a_rank_of_all_rows_or_of_the_whole_width_is_exact(shape, rank):
    X = rows(*shape)
    whole, exact = (dict(root_of_rows(X, 0.1, k).tensors()) for k in (rank, None))
    assert all(torch.equal(whole[name], exact[name]) for name in exact)


def test_subspace_iteration_finds_the_top_of_a_wide_covariance():
    X = rows(200, 1100)
    X[:, :8] *= 10
    C = X.mT @ X / 200
    torch.testing.assert_close(
        reference.explicit_root(root_of_covariance(C, 1.0, 8)),
        reference.explicit_root(root_of_rows(X, 1.0, 8)),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("rank", [4, None])
def test_split_application_equals_the_whole(rank):
    root = root_of_rows(rows(100, 13), 0.1, rank)
    assert isinstance(root, LowRankRoot if rank else DenseRoot)
    main = torch.randn(2, 3, 12, dtype=torch.float64)
    ones = torch.ones(2, 3, 1, dtype=torch.float64)
    whole = root.apply(torch.cat([main, ones], dim=-1))
    torch.testing.assert_close(torch.cat(root.apply_split(main, ones), dim=-1), whole)
    torch.testing.assert_close(whole, torch.cat([main, ones], -1) @ reference.explicit_root(root))


def test_float32_norms_keep_their_precision_where_the_short_form_cancels():
    """Vectors inside the top eigenspace at damping .01: the worst case for s²vvᵀ + (vQ)(R²−s²)…."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(1, 768, generator=generator, dtype=torch.float64)
    root = root_of_rows(direction.expand(4, -1), 0.01, 1)
    scales = torch.rand(256, 1, generator=generator, dtype=torch.float64) + 0.5
    v = scales * root.basis.mT
    exact = (v @ reference.explicit_root(root)).square().sum(1)
    narrow = root.to(torch.device("cpu"), torch.float32)
    stable = narrow.apply(v.float()).square().sum(1).double()
    w = v.float() @ narrow.basis
    short = narrow.s**2 * v.float().square().sum(1)
    short = (short + ((narrow.values**2 - narrow.s**2) * w.square()).sum(1)).double()
    assert (stable / exact - 1).abs().max() < 1e-3
    assert (short / exact - 1).abs().max() > 10 * (stable / exact - 1).abs().max()


def test_eigenvalue_range_is_that_of_the_matrix():
    for rank in (3, None):
        root = root_of_rows(rows(50, 20), 0.1, rank)
        values = torch.linalg.eigvalsh(reference.explicit_root(root))
        low, high = root.eigenvalue_range()
        assert abs(low - values[0]) < 1e-9
        assert abs(high - values[-1]) < 1e-9
