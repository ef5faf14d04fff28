"""U2: every planted bug is killed, by each of the tests that claim to see it."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import mutants
import pytest
from mutants import MUTANTS

KILLERS = sorted({test for mutant in MUTANTS.values() for test in mutant.killers})


def run(tests, mutant=""):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=mutants.PACKAGE,
        env=os.environ | {mutants.VARIABLE: mutant, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_still_fits_the_source(name):
    mutant = MUTANTS[name]
    assert mutant.mutate(mutant.path.read_text()) != mutant.path.read_text()


@pytest.mark.slow
def test_without_a_planted_bug_every_killer_passes():
    result = run(KILLERS)
    assert result.returncode == 0, result.stdout[-3000:]


@pytest.fixture(scope="module")
def results(request):
    """The runs of all selected mutants, two at a time: most of each is imports."""
    calls = (getattr(item, "callspec", None) for item in request.session.items)
    names = {call.params["name"] for call in calls if call and "name" in call.params} & set(MUTANTS)
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run, MUTANTS[name].killers, name) for name in sorted(names)}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_killed(name, results, figure):
    killers = MUTANTS[name].killers
    result = results[name].result()
    summary = result.stdout.strip().splitlines()[-1]
    # 1 is "tests failed"; a mutant that can't be imported would be 2 or more.
    assert result.returncode == 1, result.stdout[-3000:]
    assert " error" not in summary
    failed = {line.split()[1] for line in result.stdout.splitlines() if line.startswith("FAILED")}
    assert all(any(test.startswith(killer) for test in failed) for killer in killers), summary
    figure(f"{name} killed")
