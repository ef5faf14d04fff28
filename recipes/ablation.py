"""What each option of the geometry is worth around the defaults of Synthetic DP-KFC.

One option at a time, with both sides or with the inputs' root alone. Every variant gets the same
trials as tuning does (task.py), with several seeds, on validation records, at the learning rate and
clip norm that tuning chose for the defaults: so a variant that would want another rate is at a
disadvantage, and only clear differences mean anything. Variants that were measured with the same
trials before are kept.

    python recipes/ablation.py fashion_transfer --data-dir DIR --epsilon 1 --seeds 3 --jobs 2
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from compare import Recipe, collect, workers
from methods import METHODS
from task import RESULTS, run_trial, tuned_setting, tuning_path, write_json

VARIANTS: tuple[Mapping[str, Any], ...] = (
    {},
    *({"damping": value} for value in (0.1, 0.3, 3.0, 10.0)),
    *({"rank": value} for value in (16, 32, None)),
    {"kfac_approx": "expand"},
    *({"layer_balance": value} for value in (0.0, 0.5)),
    *({"num_probe_batches": value} for value in (2, 5, 20)),
    {"probe_labels": "model"},
    {"kfac_sides": "inputs"},
    {"kfac_sides": "inputs", "damping": 0.1},
    {"kfac_sides": "inputs", "kfac_approx": "expand"},
    *({"pink_alpha": value} for value in (0.0, 0.5, 1.5)),
)
FIRST_SEED = 2000  # no tuning trial and no final run has these initial weights


def title_of(variant: Mapping[str, Any]) -> str:
    """``option=value``."""
    return ", ".join(f"{k}={v}" for k, v in variant.items()) or "defaults"


def work(recipe: Recipe, epsilon: float, variant: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """One trial with other options."""
    task = recipe.task()
    varied = replace(task, options={**task.options, **variant})
    return run_trial(varied, "synthetic", epsilon, tuned_setting(task, "synthetic", epsilon), seed)


def markdown(rows: Mapping[str, Sequence[float]], caption: str) -> str:
    """One row per variant, and its distance from the defaults with its standard error."""
    base = rows[title_of({})]
    lines = ["| options | validation accuracy, % | against the defaults |", "|---|---|---|"]
    for title, values in rows.items():
        gap = statistics.mean(values) - statistics.mean(base)
        error = (statistics.variance(values) + statistics.variance(base)) / len(values)
        shown = "" if values is base else f"{gap:+.1f} ± {error**0.5:.1f}"
        mean, spread = statistics.mean(values), statistics.stdev(values)
        lines.append(f"| {title} | {mean:.1f} ± {spread:.1f} | {shown} |")
    return caption + "\n\n" + "\n".join(lines) + "\n"


def known_rows(path: Path, conditions: Mapping[str, Any]) -> dict[str, list[float]]:
    """What was measured under the same conditions before."""
    found = json.loads(path.read_text()) if path.exists() else {}
    is_same = all(found.get(name, value) == value for name, value in conditions.items())
    return found.get("accuracies", {}) if is_same else {}


def measure(
    recipe: Recipe, epsilon: float, variants: Sequence[Mapping[str, Any]], seeds: int, jobs: int
) -> dict[str, list[float]]:
    """Validation accuracies in percent, one for each seed, by variant."""
    found: dict[tuple[str, int], float] = {}

    def keep(key: tuple[str, int], trial: dict[str, Any]) -> None:
        found[key] = 100 * trial["validation_accuracy"]

    every_seed = range(FIRST_SEED, FIRST_SEED + seeds)
    with workers(jobs, threads=max(1, (os.cpu_count() or 1) // jobs)) as pool:
        trials = {
            pool.submit(work, recipe, epsilon, variant, seed): (title_of(variant), seed)
            for seed in every_seed
            for variant in variants
        }
        collect(trials, "trials", keep)
    return {t: [found[t, seed] for seed in every_seed] for t in map(title_of, variants)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="mnist_cnn, fashion_transfer, …")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    options, arguments = parser.parse_known_args()
    if options.seeds < 2:
        parser.error("--seeds: a spread needs two at least")
    recipe = Recipe(options.recipe.removesuffix(".py"), tuple(arguments))
    task, epsilon = recipe.task(), options.epsilon
    if not tuning_path(RESULTS, task, "synthetic", epsilon).exists():
        parser.error(f"{task.name} isn't tuned at ε = {epsilon:g}: run compare.py on it first")
    command = f"python recipes/ablation.py {recipe.shown} --epsilon {epsilon:g}"
    conditions = {
        "command": f"{command} --seeds {options.seeds}",
        "task_title": task.title,
        "trials": {"records": task.trials.num_records, "steps": task.trials.num_steps},
        "schedule": task.trials.schedule,
        **tuned_setting(task, "synthetic", epsilon)._asdict(),
    }
    path = RESULTS / "ablation" / f"{task.name}_eps{epsilon:g}.json"
    rows = known_rows(path, conditions)
    missing = [variant for variant in VARIANTS if title_of(variant) not in rows]
    rows |= measure(recipe, epsilon, missing, options.seeds, options.jobs)
    rows = {title: rows[title] for title in map(title_of, VARIANTS)}
    write_json(path, {**conditions, "accuracies": rows})
    caption = (
        f"{task.title}: {METHODS['synthetic'].title}, ε = {epsilon:g}, trials of "
        f"{task.trials.num_steps or 'as many'} steps, {options.seeds} seeds "
        f"(`{conditions['command']}`)."
    )
    table = markdown(rows, caption)
    path.with_suffix(".md").write_text(table)
    print(table)


if __name__ == "__main__":
    sys.exit(main())
