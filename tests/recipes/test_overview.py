"""The overview: what is claimed of a task follows from its runs, and what wasn't run is said."""

from __future__ import annotations

import importlib
import json
import shlex

import compare
import overview
import pytest
from overview import Gain, Row, Target
from task import options_of

ROW = Row("counted", "Counted", "counted --data-dir DIR", (1, 3), targets=(Target(1, gain=2),))


def write_runs(results, method, accuracies, epsilon=1.0):
    folder = results / ROW.folder
    folder.mkdir(exist_ok=True)
    for seed, accuracy in enumerate(accuracies):
        run = {"method": method, "epsilon": epsilon, "test_accuracy": accuracy}
        (folder / f"{method}_eps{epsilon:g}_seed{seed}.json").write_text(json.dumps(run))


def test_a_gain_is_a_difference_of_means_with_the_error_of_both():
    gain = Gain.of([71.0, 73.0], [68.0, 70.0])
    assert (gain.points, gain.error) == (3.0, pytest.approx((2 / 2 + 2 / 2) ** 0.5))


def test_a_target_is_judged_by_the_figures_as_shown():
    """70.96 and 69.0 are printed as 71.0 and 69.0: whoever reads the table must come to +2."""
    assert Target(1, gain=2).verdict([70.96], [69.0]) == "ε 1: +2 reached (+2.0 ± 0.0)"
    assert Target(1, gain=2).verdict([70.94], [69.0]) == "ε 1: +2 **missed** (+1.9 ± 0.0)"
    both = Target(3, accuracy=94.2, gain=1).verdict([94.1, 96.1], [91.0, 93.0])
    assert both == "ε 3: ≥ 94.2 reached, +1 reached (+3.1 ± 1.4)"


def test_a_row_holds_both_arms_and_its_target(tmp_path, monkeypatch):
    monkeypatch.setattr(overview, "ROWS", (ROW,))
    for epsilon in ROW.epsilons:
        write_runs(tmp_path, "none", [0.5, 0.6, 0.7], epsilon)
        write_runs(tmp_path, "synthetic", [0.7, 0.7, 0.7], epsilon)
    line = overview.table(tmp_path).splitlines()[-1]
    assert line.startswith("| Counted | 60.0 ± 10.0 → 70.0 ± 0.0 | 60.0 ± 10.0 → 70.0 ± 0.0 |")
    assert (
        "| ε 1: +2 reached (+10.0 ± 5.8) | [all methods](recipes/results/counted/README.md) |"
        in line
    )


def test_a_row_without_results_says_how_to_make_them(tmp_path, monkeypatch):
    monkeypatch.setattr(overview, "ROWS", (ROW,))
    command = "`python recipes/compare.py counted --data-dir DIR --epsilons"
    assert f"|  | not run here: {command} 1 3` |" in overview.table(tmp_path)
    write_runs(tmp_path, "none", [0.5])
    assert f"; not run here at ε 3: {command} 3` |" in overview.table(tmp_path)


@pytest.mark.parametrize("row", overview.ROWS, ids=lambda row: row.subject)
def test_commands_of_rows_are_accepted(row):
    name, *arguments = shlex.split(row.command(row.epsilons))[2:]
    own = options_of(importlib.import_module(name)).parse_known_args(arguments)[1]
    assert compare.parser().parse_args([name, *own]).recipe == name


def test_every_folder_of_results_has_its_row():
    shown = {row.folder for row in overview.ROWS}
    assert {folder.name for folder in overview.tables.folders_in(overview.RESULTS)} <= shown


def test_the_same_runs_give_the_same_plot(tmp_path, monkeypatch):
    monkeypatch.setattr(overview, "ROWS", (ROW,))
    write_runs(tmp_path, "none", [0.5, 0.6])
    write_runs(tmp_path, "synthetic", [0.6, 0.7])
    paths = tmp_path / "a.svg", tmp_path / "b.svg"
    for path in paths:
        overview.plot(path, tmp_path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
