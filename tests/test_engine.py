"""When the geometry is renewed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_dpkfc.curvature.fit import CurvatureOptions
from hf_dpkfc.curvature.preconditioner import Preconditioner, ScalarMap
from hf_dpkfc.engine import Geometry

HEAD = Preconditioner({"head": ScalarMap()}, "kfac")
DEEP = Preconditioner({"body": ScalarMap(), "head": ScalarMap()}, "kfac")
WAITING = replace(HEAD, awaits_signal=True)


def refreshes(refresh_steps, current, num_steps):
    geometry = Geometry(CurvatureOptions(), None, refresh_steps, seed=0)
    return [step for step in range(num_steps) if geometry.is_due(step, current)]


def test_the_first_refreshes_come_early():
    assert refreshes(50, DEEP, 151) == [0, 1, 2, 4, 8, 16, 32, 50, 100, 150]


def test_a_head_alone_is_refreshed_at_its_steps_only():
    assert refreshes(50, HEAD, 151) == [0, 50, 100, 150]


def test_a_layer_that_waits_for_signal_is_looked_at_again_at_powers_of_two():
    assert refreshes(10, WAITING, 41) == [0, 1, 2, 4, 8, 10, 16, 20, 30, 32, 40]


@pytest.mark.parametrize("step", [0, 3, 7])
def test_a_run_without_a_preconditioner_gets_one_at_any_step(step):
    geometry = Geometry(CurvatureOptions(), None, 50, seed=0)
    assert geometry.is_due(step, None)
