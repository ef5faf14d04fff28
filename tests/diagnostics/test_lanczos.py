from __future__ import annotations

import models
import pytest
import torch

from hf_dpkfc import PinkNoiseProbe
from hf_dpkfc.diagnostics.lanczos import (
    gaussian_starts,
    hessian_product,
    lanczos_density,
    probe_density,
    unsafe_density,
)
from hf_dpkfc.losses import TaskLoss, task_of


def small_model():
    model = models.build("vit")
    return models.only_head(model)


def explicit_hessian(model, inputs):
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss = TaskLoss(task_of(model))(model, inputs).mean()
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    flat = torch.cat([g.flatten() for g in first])
    rows = [torch.autograd.grad(x, parameters, retain_graph=True) for x in flat]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def random_symmetric(dim, seed=0):
    M = torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed)).double()
    return M + M.mT


def test_hessian_products_are_those_of_the_explicit_hessian():
    model, inputs = small_model(), models.inputs_for("vit")
    product, dim = hessian_product(model, [inputs])
    H = explicit_hessian(model, inputs)
    v = gaussian_starts(1, dim, 0, torch.float64)[0]
    torch.testing.assert_close(product(v), H @ v)


def test_the_hessian_is_of_the_mean_over_all_batches():
    model, inputs = small_model(), models.inputs_for("vit")
    whole, dim = hessian_product(model, [inputs])
    parts, _ = hessian_product(
        model, [{k: v[:1] for k, v in inputs.items()}, {k: v[1:] for k, v in inputs.items()}]
    )
    v = gaussian_starts(1, dim, 0, torch.float64)[0]
    torch.testing.assert_close(parts(v), whole(v))


def test_attention_has_second_derivatives():
    model = models.build("vit")
    product, dim = hessian_product(model, [models.inputs_for("vit")])
    v, w = gaussian_starts(2, dim, 0, torch.float64)
    assert float(product(v) @ w) == pytest.approx(float(product(w) @ v), rel=1e-9)


@pytest.mark.parametrize("power", range(8))
def test_moments_are_exact_up_to_twice_the_steps(power):
    H = random_symmetric(12)
    start = gaussian_starts(1, 12, 0, torch.float64)
    density = lanczos_density(lambda v: H @ v, start, num_steps=4)
    v = start[0] / start[0].norm()
    expected = float(v @ torch.linalg.matrix_power(H, power) @ v)
    assert density.moment(power) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("power", range(4))
def test_an_orthonormal_set_of_starts_gives_the_hessians_own_moments(power):
    model, inputs = small_model(), models.inputs_for("vit")
    product, dim = hessian_product(model, [inputs])
    density = lanczos_density(product, torch.eye(dim).double(), num_steps=2)
    H = explicit_hessian(model, inputs)
    expected = float(torch.linalg.matrix_power(H, power).trace()) / dim
    assert density.moment(power) == pytest.approx(expected, rel=1e-9)


def test_enough_steps_find_every_eigenvalue():
    H = random_symmetric(10)
    density = lanczos_density(lambda v: H @ v, gaussian_starts(1, 10, 0, torch.float64), 50)
    torch.testing.assert_close(density.nodes[0], torch.linalg.eigvalsh(H))


def test_starts_that_end_early_keep_their_weight():
    H = torch.diag(torch.tensor([3.0, 3.0, 1.0, 1.0]).double())
    starts = torch.tensor([[1.0, 0, 0, 0], [1.0, 1.0, 1.0, 1.0]]).double()
    density = lanczos_density(lambda v: H @ v, starts, num_steps=4)
    torch.testing.assert_close(density.weights.sum(1), torch.ones(2).double())
    assert density.moment(1) == pytest.approx((3.0 + 2.0) / 2)


def test_the_density_integrates_to_one():
    H = random_symmetric(10)
    density = lanczos_density(lambda v: H @ v, gaussian_starts(2, 10, 0, torch.float64), 6)
    grid = torch.linspace(-40, 40, 4001).double()
    assert float(torch.trapezoid(density.density(grid, 0.5), grid)) == pytest.approx(1, abs=1e-6)


def test_sorted_eigenvalues_are_quantiles_of_the_density():
    H = torch.diag(torch.tensor([5.0, 2.0, 2.0, -1.0]).double())
    density = lanczos_density(lambda v: H @ v, torch.eye(4).double(), 4)
    found = density.sorted_eigenvalues(torch.tensor([1, 2, 3, 4]))
    torch.testing.assert_close(found, torch.tensor([5.0, 2.0, 2.0, -1.0]).double())


def test_a_models_density_is_the_same_from_probes_and_from_the_same_batches():
    model = small_model()
    probe = PinkNoiseProbe.for_model(model)
    batches = list(probe.batches(1, 8, torch.Generator().manual_seed(0)))
    one = probe_density(model, probe, num_steps=3, batch_size=8)
    other = unsafe_density(model, batches, num_steps=3)
    torch.testing.assert_close(one.nodes, other.nodes)
