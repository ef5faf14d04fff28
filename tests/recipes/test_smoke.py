"""Every recipe runs offline in under a minute, with data that it makes up itself."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"


def cpu_seconds():
    """Of finished children: a busy machine stretches the clock, not the work."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def smoke(name, *options):
    command = [sys.executable, str(RECIPES / f"{name}.py"), "--smoke", *options]
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    before = cpu_seconds()
    done = subprocess.run(command, capture_output=True, text=True, env=offline)
    assert done.returncode == 0, done.stderr[-2000:]
    assert cpu_seconds() - before < 60
    return json.loads(done.stdout)


@pytest.mark.recipe
@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "mnist_cnn --method synthetic",
        "mnist_cnn --method public",
        "mnist_cnn --method adadps-synthetic",
        "fashion_transfer --method none",
        "fashion_transfer --target path --method synthetic",
        "mnist_cnn --method disk",
        "mnist_cnn --method synthetic-adambc",
        "stackoverflow_bert --train head --method synthetic",
        "stackoverflow_bert --train head --method public",
        "stackoverflow_bert --data complaints --train lora --method synthetic",
        "stackoverflow_bert --data rotten_tomatoes --train full --method none",
        "imdb_logreg --method synthetic",
        "cifar100_vit --train full --method synthetic",
        "cifar100_vit --data cifar10 --train head --method public",
    ],
)
def test_a_smoke_run_keeps_its_budget(command):
    result = smoke(*command.split())
    assert 0 < result["epsilon_spent"] <= result["epsilon"]
    assert 0 <= result["test_accuracy"] <= 1


@pytest.mark.recipe
@pytest.mark.slow
def test_the_oracle_claims_no_epsilon():
    assert smoke("mnist_cnn", "--method", "oracle")["epsilon_spent"] == "not claimed"
