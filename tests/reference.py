"""The algorithm as a loop over samples, in the paper's order: what the fast path claims to be.

Nothing here shares code with the fast path's norms or sums: gradients come from autograd, one
example at a time, and are preconditioned by explicit matrices.
"""

from __future__ import annotations

import copy

import torch

from hf_dpkfc.curvature.preconditioner import (
    ElementwiseMap,
    KroneckerMap,
    Preconditioner,
    ScalarMap,
)
from hf_dpkfc.curvature.roots import DenseRoot


def per_sample_gradients(model, names, per_example_loss, examples):
    """Alg. 2, "Compute Gradient": [{parameter: gradient}] for a list of single-example batches."""
    parameters = dict(model.named_parameters())
    result = []
    for inputs in examples:
        loss = per_example_loss(model, inputs).sum()
        grads = torch.autograd.grad(loss, [parameters[n] for n in names], allow_unused=True)
        result.append(
            {
                n: torch.zeros_like(parameters[n]) if g is None else g
                for n, g in zip(names, grads, strict=True)
            }
        )
    return result


def explicit_root(root):
    """U as a matrix: s·I + Q(R − s·I)Qᵀ."""
    if isinstance(root, DenseRoot):
        return root.matrix
    identity = torch.eye(root.dim, dtype=root.basis.dtype)
    return root.s * identity + root.basis @ torch.diag(root.values - root.s) @ root.basis.mT


def transform(linear, matrix):
    """Alg. 2, "Transform": U_G g U_A with explicit matrices."""
    if isinstance(linear, KroneckerMap):
        U_A, U_G = explicit_root(linear.root_A), explicit_root(linear.root_G)
        groups = matrix.reshape(-1, len(U_G), matrix.shape[1])
        return linear.scale * torch.stack([U_G @ g @ U_A for g in groups]).reshape(matrix.shape)
    if isinstance(linear, ElementwiseMap):
        return linear.diagonal * matrix
    assert isinstance(linear, ScalarMap)
    return linear.scale * matrix


def clipped_sum(
    model, table, preconditioner: Preconditioner, per_example_loss, examples, clip_norm
):
    """Σ_i clip_C(U g_i) by parameter name, one example after the other."""
    names = [n for block in table for n in block.parameters]
    gradients = per_sample_gradients(model, names, per_example_loss, examples)
    return sum_of_clipped(table, preconditioner, gradients, clip_norm)


def disk_clipped_sum(
    model, table, preconditioner, per_example_loss, examples, clip_norm, *, previous, kappa, gamma
):
    """DiSK: Σ_i clip_C(U g_i), g_i = w·∇f_i(x + γd) + (1 − w)·∇f_i(x), d = x − previous."""
    names = [n for block in table for n in block.parameters]
    w = (1 - kappa) / (kappa * gamma)
    ahead = copy.deepcopy(model)
    with torch.no_grad():
        for name, x in ahead.named_parameters():
            if name in names:
                x.add_(x - previous[name], alpha=gamma)
    pairs = zip(
        per_sample_gradients(ahead, names, per_example_loss, examples),
        per_sample_gradients(model, names, per_example_loss, examples),
        strict=True,
    )
    combined = [{n: w * there[n] + (1 - w) * here[n] for n in names} for there, here in pairs]
    return sum_of_clipped(table, preconditioner, combined, clip_norm)


def sum_of_clipped(table, preconditioner: Preconditioner, gradients, clip_norm):
    """Alg. 2 from "Transform" on, for a list of gradients."""
    names = [n for block in table for n in block.parameters]
    total = {n: torch.zeros_like(gradients[0][n]) for n in names}
    for gradient in gradients:
        moved = {}
        for block in table:
            matrix = block.join(gradient)
            moved |= block.split(transform(preconditioner[block.name], matrix))
        norm = torch.sqrt(sum(g.square().sum() for g in moved.values()))
        factor = 1 / max(1.0, float(norm) / clip_norm)
        for n in names:
            total[n] += factor * moved[n]
    return total


def inverse_root(C, damping):
    """(C/c̄ + damping·I)^-1/2 by an explicit eigendecomposition."""
    C = C.double()
    eigenvalues, Q = torch.linalg.eigh(C / (C.trace() / len(C)))
    return Q @ torch.diag((eigenvalues.clamp(min=0) + damping).rsqrt()) @ Q.mT
