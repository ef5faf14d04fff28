"""compare.py: the same effort for every arm, one file per run, and nothing is done twice."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import compare
import images
import pytest
import tables
import task
import torch
from methods import GRIDS, METHODS, SIX_POINTS, Setting
from task import Task, Trials, final_path, options_of, tuning_path

from hf_dpkfc.publishing.verify import verify

RECIPES = Path(__file__).parents[2] / "recipes"
RESULTS = RECIPES / "results"
NUM_POINTS = len(SIX_POINTS["sgd"])


class CountedRecipe:
    """A recipe whose runs are invented, and counted."""

    name = "counted"
    command = "python recipes/compare.py counted"

    def task(self):
        rows = images.noise_images(4, 1, seed=0)
        return Task(
            name="counted",
            title="Counted",
            train=rows,
            validation=rows,
            test=rows,
            public=None,
            build_model=torch.nn.Identity,
            optimizer="sgd",
            epochs=1,
            batch_size=2,
            micro_batch=2,
            probe="pink",
            trials=Trials(4, 1),
        )


def comparison(tmp_path, methods=("none", "synthetic"), seeds=(0, 1)):
    arms = tuple(compare.Arm(method, 1.0) for method in methods)
    return compare.Comparison(CountedRecipe(), arms, seeds, tmp_path, tmp_path / "cards")


def invented(setting, accuracy):
    return setting._asdict() | {"validation_accuracy": accuracy}


@pytest.mark.parametrize("grids", GRIDS, ids=["six", "eight", "three"])
def test_every_family_has_the_same_number_of_trials(grids):
    assert len({len(set(grid)) for grid in grids.values()}) == 1


def test_every_arm_is_tried_at_every_point_of_its_grid(tmp_path):
    missing = list(comparison(tmp_path).missing_trials())
    assert len(missing) == len(set(missing)) == 2 * NUM_POINTS


def test_a_trial_that_is_there_is_not_made_again(tmp_path):
    asked = comparison(tmp_path)
    arm, setting = next(asked.missing_trials())
    asked.save_trial(arm, invented(setting, 0.5))
    assert (arm, setting) not in list(asked.missing_trials())
    assert len(list(asked.missing_trials())) == 2 * NUM_POINTS - 1


def test_results_of_another_model_are_not_taken_for_this_ones(tmp_path):
    arguments = ("--data", "complaints", "--train", "head")
    folder = tmp_path / "complaints_head"
    shutil.copytree(RESULTS / "complaints_head", folder)
    small = compare.Recipe("stackoverflow_bert", (*arguments, "--model=minilm", "--data-dir", "X"))
    arms = (compare.Arm("none", 1.0),)
    title = json.loads((folder / "none_eps1_seed0.json").read_text())["task_title"]
    own = compare.Comparison(_Titled(small, title), arms, (0,), tmp_path, tmp_path)
    own.require_own_folder()
    other = compare.Recipe("stackoverflow_bert", (*arguments, "--model", "bert"))
    for recipe, named in ((other, title), (small, "5 epochs")):
        with pytest.raises(SystemExit, match="Move it away"):
            replace(own, recipe=_Titled(recipe, named)).require_own_folder()


class _Titled:
    """A recipe that needn't load its data to be asked for its title."""

    def __init__(self, recipe, title):
        self.options, self.command, self.title = recipe.options, recipe.command, title

    def task(self):
        return replace(CountedRecipe().task(), name="complaints_head", title=self.title)


def test_a_table_names_the_command_that_makes_it():
    run = {"command": "python recipes/compare.py r --methods none --epsilons 1 --seeds 0"}
    runs = {(m, e): [run] for m, e in [("none", 1.0), ("disk", 1.0), ("none", 3.0), ("none", 8.0)]}
    assert tables._commands(runs) == [
        "python recipes/compare.py r --methods none disk --epsilons 1",
        "python recipes/compare.py r --methods none --epsilons 3 8",
    ]


@pytest.mark.parametrize("given", [("--data-dir", "/home/alice"), ("--data-dir=/home/alice",)])
def test_no_command_names_a_folder_of_this_machine(given):
    assert "alice" not in compare.Recipe("mnist_cnn", given).command


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
def test_the_public_proxy_holds_no_private_image(data, monkeypatch):
    recipe = importlib.import_module("cifar100_vit")
    loaded = []

    def load(name, split, data_dir):
        loaded.append(name)
        return images.noise_images(6_000, 3, seed=0, size=4, num_labels=recipe.NUM_LABELS[name])

    monkeypatch.setattr(images, "load", load)
    proxy = recipe._proxy(options_of(recipe).parse_args(["--data", data]))
    assert data not in loaded
    assert int(proxy.labels.max()) < recipe.NUM_LABELS[data]


class _Asked(Exception):
    """Instead of training: what was asked for."""


def asked_of_a_trial(monkeypatch, counted, setting):
    """What a trial asks its trainer for: options, and the number of records."""

    def trainer(task, method, setting, seed, train, trainer_options, scratch):
        raise _Asked(trainer_options, len(train))

    monkeypatch.setattr(task, "_trainer", trainer)
    with pytest.raises(_Asked) as asked:
        task.run_trial(counted, "none", 1.0, setting)
    return asked.value.args


def test_a_trial_is_like_the_beginning_of_the_full_run(monkeypatch):
    """Its σ and its rate are the full run's; annealed in a trial, rates come out too high."""
    counted, setting = CountedRecipe().task(), Setting(0.1, 1.0)
    sigma = counted.plan(1.0, setting).noise_multiplier
    expected = {"noise_multiplier": sigma, "max_steps": 1, "lr_scheduler_type": "constant"}
    assert asked_of_a_trial(monkeypatch, counted, setting)[0] == expected


def test_a_whole_trial_is_like_the_full_run(monkeypatch):
    setting = Setting(0.1, 1.0)
    counted = replace(CountedRecipe().task(), trials=Trials(num_steps=None))
    plan = counted.plan(1.0, setting)
    expected = {"noise_multiplier": plan.noise_multiplier, "max_steps": plan.steps}
    assert asked_of_a_trial(monkeypatch, counted, setting) == (expected, len(counted.train))


def test_whole_trials_of_another_length_are_other_trials():
    whole = replace(CountedRecipe().task(), trials=Trials(num_steps=None))
    longer = replace(whole, epochs=whole.epochs + 1)
    assert task.trial_settings(whole) != task.trial_settings(longer)


def test_trials_of_another_length_are_not_mixed_in(tmp_path):
    asked = comparison(tmp_path)
    arm, setting = next(asked.missing_trials())
    asked.save_trial(arm, invented(setting, 0.5))
    path = tuning_path(tmp_path, asked.task, arm.method, arm.epsilon)
    tuning = json.loads(path.read_text())
    path.write_text(json.dumps(tuning | {"settings": tuning["settings"] | {"steps": 99}}))
    assert len(list(asked.missing_trials())) == 2 * NUM_POINTS


def test_the_best_point_on_validation_is_chosen(tmp_path):
    asked = comparison(tmp_path, methods=("none",))
    for number, (arm, setting) in enumerate(list(asked.missing_trials())):
        asked.save_trial(arm, invented(setting, 0.1 * (number == 4)))
    assert asked.chosen(asked.arms[0]) == SIX_POINTS["sgd"][4]


def test_an_arm_is_not_run_before_its_grid_is_complete(tmp_path):
    asked = comparison(tmp_path)
    arm, setting = next(asked.missing_trials())
    asked.save_trial(arm, invented(setting, 0.5))
    with pytest.raises(AssertionError, match="isn't tuned yet"):
        asked.chosen(arm)


def test_the_first_data_free_run_at_each_epsilon_has_a_card(tmp_path):
    asked = comparison(tmp_path)
    folders = {(arm.method, s): asked.card_folder(arm, s) for arm in asked.arms for s in (0, 1)}
    assert folders.pop(("synthetic", 0)) == tmp_path / "cards/counted_eps1"
    assert set(folders.values()) == {None}


def test_a_run_that_is_there_is_not_made_again(tmp_path):
    asked = comparison(tmp_path)
    asked.save_run(asked.arms[0], 0, {"test_accuracy": 0.5})
    assert list(asked.missing_runs()) == [
        (asked.arms[1], 0),
        (asked.arms[0], 1),
        (asked.arms[1], 1),
    ]


def test_a_run_whose_trials_were_made_again_is_made_again(tmp_path):
    asked = comparison(tmp_path, methods=("none",), seeds=(0,))
    (arm,) = asked.arms
    asked.save_trial(arm, invented(asked.task.grid("none")[0], 0.5))
    asked.save_run(arm, 0, {"test_accuracy": 0.5})
    assert list(asked.missing_runs()) == []
    asked.save_trial(arm, invented(asked.task.grid("none")[1], 0.6))
    assert list(asked.missing_runs()) == [(arm, 0)]


def test_a_batch_that_cannot_be_made_of_whole_pieces_is_refused():
    with pytest.raises(SystemExit, match="whole pieces"):
        replace(CountedRecipe().task(), batch_size=3)


def test_commands_hold_no_folder_of_this_machine():
    recipe = compare.Recipe("mnist_cnn", ("--data-dir", "/somewhere/private", "--smoke"))
    assert recipe.command == "python recipes/compare.py mnist_cnn --data-dir DIR --smoke"


def fake_run(method, epsilon, seed, accuracy):
    return {
        "task_title": "Counted",
        "method": method,
        "title": METHODS[method].title.format(base="SGD", probe="pink"),
        "epsilon": epsilon,
        "seed": seed,
        "test_accuracy": accuracy,
        "command": f"python recipes/compare.py counted --methods {method} --seeds {seed}",
    }


def test_a_table_holds_mean_and_deviation_over_seeds(tmp_path):
    for seed, accuracy in enumerate((0.5, 0.6, 0.7)):
        run = fake_run("none", 1.0, seed, accuracy)
        (tmp_path / f"none_eps1_seed{seed}.json").write_text(json.dumps(run))
    table = tables.write(tmp_path, "Counted")
    assert "| DP-SGD | 60.0 ± 10.0 | 3 |" in table
    assert "(`python recipes/compare.py counted --methods none --epsilons 1`):" in table
    assert table in (tmp_path / "README.md").read_text()
    assert (tmp_path / "accuracy.svg").read_text().startswith("<?xml")


def test_a_table_says_where_its_rows_had_other_options():
    old = fake_run("none", 1.0, 0, 0.5) | {"options": {"bf16": True, "preconditioner": "none"}}
    new = fake_run("synthetic", 1.0, 0, 0.6) | {"options": {"bf16": False, "probe": "auto"}}
    table = tables.markdown({("none", 1.0): [old], ("synthetic", 1.0): [new]}, "Counted")
    said = "Options differ. DP-SGD: `bf16=True`; Synthetic DP-KFC: `bf16=False`."
    assert table.endswith(said)
    alike = tables.markdown({("none", 1.0): [old], ("synthetic", 1.0): [new | old]}, "Counted")
    assert "Options" not in alike


def num_settings(path):
    trials = json.loads(path.read_text())["trials"]
    return len({(trial["learning_rate"], trial["clip_norm"]) for trial in trials})


@pytest.mark.parametrize("folder", sorted(RESULTS.glob("*/tuning")), ids=lambda p: p.parent.name)
def test_every_committed_arm_of_a_task_got_the_same_number_of_trials(folder):
    counts = {num_settings(path) for path in folder.glob("*.json")}
    assert len(counts) == 1
    whole = [json.loads(p.read_text())["settings"]["steps"] is None for p in folder.glob("*.json")]
    assert len(set(whole)) == 1
    assert min(counts) >= (3 if whole[0] else 6)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/*_seed*.json")), ids=lambda p: p.stem)
def test_every_committed_run_used_the_best_of_its_trials(path):
    run = json.loads(path.read_text())
    best = max(run["trials"], key=lambda trial: trial["validation_accuracy"])
    assert (run["learning_rate"], run["clip_norm"]) == (best["learning_rate"], best["clip_norm"])


@pytest.mark.parametrize("folder", tables.folders_in(RESULTS), ids=lambda path: path.name)
def test_committed_tables_are_those_of_the_committed_json(folder):
    runs = tables.runs_in(folder)
    assert tables.markdown(runs, tables.title_of(runs)) in (folder / "README.md").read_text()


def test_the_same_runs_give_the_same_plot(tmp_path):
    (tmp_path / "none_eps1_seed0.json").write_text(json.dumps(fake_run("none", 1.0, 0, 0.5)))
    drawn = []
    for _ in range(2):
        tables.write(tmp_path, "Counted")
        drawn.append((tmp_path / "accuracy.svg").read_bytes())
    assert drawn[0] == drawn[1]


def smoke_comparison(results):
    options = ["--methods", "synthetic", "--seeds", "0", "--smoke", "--results", str(results)]
    options += ["--cards", str(results / "cards")]
    return [sys.executable, str(RECIPES / "compare.py"), "mnist_cnn", *options]


@pytest.mark.recipe
@pytest.mark.slow
def test_a_killed_comparison_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "smoke_mnist/tuning/synthetic_eps1.json"
    process = subprocess.Popen(smoke_comparison(tmp_path), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = json.loads(path.read_text())["trials"]
    subprocess.run(smoke_comparison(tmp_path), check=True, capture_output=True)
    after = json.loads(path.read_text())["trials"]
    assert 0 < len(before) < len(after) == NUM_POINTS
    assert all(trial in after for trial in before)
    final = json.loads((tmp_path / "smoke_mnist/synthetic_eps1_seed0.json").read_text())
    assert final["trials"] == after
    assert 0 < final["epsilon_spent"] <= 1
    assert all(check.holds for check in verify(str(tmp_path / "cards/smoke_mnist_eps1")))


def test_paths_of_different_runs_differ(tmp_path):
    task = CountedRecipe().task()
    paths = {final_path(tmp_path, task, m, e, s) for m in METHODS for e in (1, 3) for s in (0, 1)}
    assert len(paths) == 4 * len(METHODS)


def test_settings_are_pairs_of_rate_and_clip_norm():
    points = [point for grids in GRIDS for grid in grids.values() for point in grid]
    assert all(isinstance(point, Setting) for point in points)


def test_a_head_may_have_a_rate_of_its_own():
    model = torch.nn.ModuleDict(
        {"body": torch.nn.Linear(2, 2), "classifier": torch.nn.Linear(2, 2)}
    )
    model["body"].bias.requires_grad_(False)
    its = replace(CountedRecipe().task(), head_rate=10.0)
    rest, head = task._optimizer(its, "adamw", model, Setting(0.01, 1.0)).param_groups
    assert [id(p) for p in rest["params"]] == [id(model["body"].weight)]
    assert [id(p) for p in head["params"]] == [id(p) for p in model["classifier"].parameters()]
    assert (rest["lr"], head["lr"]) == (0.01, pytest.approx(0.1))
    with pytest.raises(SystemExit, match="head-rate"):
        task._optimizer(its, "adambc", model, Setting(0.01, 1.0))
