"""Methods × ε × seeds on one recipe: tunes every arm alike, runs, resumes, writes table and plot.

    python recipes/compare.py mnist_cnn --data-dir DIR --epsilons 1 3 8 --seeds 0 1 2 --jobs 2
    python recipes/compare.py mnist_cnn --methods none synthetic --epsilons 1

Every arm gets one trial for each point of its grid (methods.py) at every ε, then one full run
for each seed with the point that was best on validation. Each result is one JSON file
under recipes/results/TASK, written when it is there: what exists is skipped, so an
interrupted comparison goes on where it stopped. The first Synthetic DP-KFC run at each ε leaves its
privacy card and statement in model_cards/. Options that compare.py doesn't know go to the
recipe.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import tables
from methods import METHODS, PAPER_METHODS, Setting
from task import (
    CARDS,
    RESULTS,
    Task,
    best_of,
    final_path,
    options_of,
    run_final,
    run_trial,
    trial_settings,
    tuning_path,
    write_json,
)
from tqdm import tqdm


@dataclass(frozen=True)
class Recipe:
    """A recipe with its options; workers load the same task from it."""

    name: str
    arguments: tuple[str, ...]

    @lru_cache  # noqa: B019 - one per process, and it lives as long
    def task(self) -> Task:
        """The task, loaded once per process."""
        module = importlib.import_module(self.name)
        return module.load(options_of(module).parse_args(self.arguments))

    @property
    def command(self) -> str:
        """How a comparison on it is called."""
        return f"python recipes/compare.py {self.shown}"

    @property
    def shown(self) -> str:
        """Its name and options, without this machine's folders."""
        text = shlex.join([self.name, *self.arguments])
        return re.sub(r"(?<=--data-dir[ =])('[^']*'|\S+)", "DIR", text)

    @classmethod
    def in_command(cls, command: str) -> Recipe:
        """The recipe of a command that stands in a result."""
        options, arguments = parser().parse_known_args(shlex.split(command)[2:])
        return cls(options.recipe, tuple(arguments))

    @property
    def options(self) -> dict[str, Any]:
        """What was asked for, wherever the data lay."""
        given = options_of(importlib.import_module(self.name)).parse_args(self.arguments)
        return {name: value for name, value in vars(given).items() if name != "data_dir"}


@dataclass(frozen=True)
class Arm:
    """A method at an ε."""

    method: str
    epsilon: float


@dataclass(frozen=True)
class Comparison:
    """What has been asked for, and where its results go."""

    recipe: Recipe
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    results: Path
    cards: Path

    def card_folder(self, arm: Arm, seed: int) -> Path | None:
        """Where a run's card goes: one for each ε, that of the first data-free DP-KFC run."""
        if (arm.method, seed) != ("synthetic", self.seeds[0]):
            return None
        return self.cards / f"{self.task.name}_eps{arm.epsilon:g}"

    @property
    def task(self) -> Task:
        """The recipe's task."""
        return self.recipe.task()

    def require_own_folder(self) -> None:
        """Refuse a folder with results of another model, length or number of epochs."""
        for path in sorted((self.results / self.task.name).rglob("*_eps*.json")):
            found = json.loads(path.read_text())
            is_same = Recipe.in_command(found["command"]).options == self.recipe.options
            if not is_same or found.get("task_title", self.task.title) != self.task.title:
                raise SystemExit(
                    f"{path} is a result of\n  {found['command']}\nand would be taken for one of\n"
                    f"  {self.recipe.command}\nMove it away, or give another --results."
                )

    def trials_of(self, arm: Arm) -> list[dict[str, Any]]:
        """Trials of the grid that are there; none where they were made with other lengths."""
        path = tuning_path(self.results, self.task, arm.method, arm.epsilon)
        if not path.exists():
            return []
        tuning = json.loads(path.read_text())
        if tuning["settings"] != trial_settings(self.task):
            return []
        grid = self.task.grid(arm.method)
        return [trial for trial in tuning["trials"] if _setting_of(trial) in grid]

    def missing_trials(self) -> Iterator[tuple[Arm, Setting]]:
        """Points of the arms' grids without a trial."""
        for arm in self.arms:
            done = {_setting_of(trial) for trial in self.trials_of(arm)}
            yield from ((arm, s) for s in self.task.grid(arm.method) if s not in done)

    def missing_runs(self) -> Iterator[tuple[Arm, int]]:
        """Final runs without a result, or with one that other trials chose the setting of."""
        pairs = ((arm, seed) for seed in self.seeds for arm in self.arms)
        return (pair for pair in pairs if not self._is_done(*pair))

    def _is_done(self, arm: Arm, seed: int) -> bool:
        path = self._final_path(arm, seed)
        return path.exists() and json.loads(path.read_text())["trials"] == self.trials_of(arm)

    def save_trial(self, arm: Arm, trial: dict[str, Any]) -> None:
        """Add one trial to its arm's file, in the order of the grid."""
        order = {setting: at for at, setting in enumerate(self.task.grid(arm.method))}
        write_json(
            tuning_path(self.results, self.task, arm.method, arm.epsilon),
            {
                "task": self.task.name,
                "method": arm.method,
                "epsilon": arm.epsilon,
                "settings": trial_settings(self.task),
                "command": self._command(arm),
                "trials": sorted(
                    [*self.trials_of(arm), trial], key=lambda t: order[_setting_of(t)]
                ),
            },
        )

    def chosen(self, arm: Arm) -> Setting:
        """The best point of a complete grid."""
        trials = self.trials_of(arm)
        assert len(trials) == len(self.task.grid(arm.method)), f"{arm} isn't tuned yet"
        return best_of(trials)

    def save_run(self, arm: Arm, seed: int, result: dict[str, Any]) -> None:
        """One final run with the trials that chose its setting."""
        command = self._command(arm) + f" --seeds {seed}"
        content = result | {"command": command, "trials": self.trials_of(arm)}
        write_json(self._final_path(arm, seed), content)

    def _final_path(self, arm: Arm, seed: int) -> Path:
        return final_path(self.results, self.task, arm.method, arm.epsilon, seed)

    def _command(self, arm: Arm) -> str:
        return f"{self.recipe.command} --methods {arm.method} --epsilons {arm.epsilon:g}"


def _setting_of(trial: dict[str, Any]) -> Setting:
    return Setting(trial["learning_rate"], trial["clip_norm"])


# ---- Workers ----


def _start_worker(threads: int) -> None:
    """Own threads, own half of the machine; ends when its parent is gone."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work_trial(recipe: Recipe, arm: Arm, setting: Setting) -> dict[str, Any]:
    return run_trial(recipe.task(), arm.method, arm.epsilon, setting)


def _work_final(
    recipe: Recipe, arm: Arm, seed: int, setting: Setting, card_folder: Path | None
) -> dict[str, Any]:
    return run_final(recipe.task(), arm.method, arm.epsilon, seed, setting, card_folder)


def workers(jobs: int, threads: int) -> ProcessPoolExecutor:
    """Processes that share the machine."""
    # Activations are freed and wanted again every step: glibc would return them to the kernel in
    # between, and clearing fresh pages takes a third of a small network's step.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**32))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**32))
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, context, _start_worker, (threads,))


def compare(comparison: Comparison, jobs: int, threads: int) -> None:
    """Fill in what is missing: trials first, then final runs; each is saved when it is done."""
    comparison.require_own_folder()
    with workers(jobs, threads) as pool:
        recipe = comparison.recipe
        trials = {
            pool.submit(_work_trial, recipe, arm, setting): arm
            for arm, setting in comparison.missing_trials()
        }
        collect(trials, "trials", lambda arm, trial: comparison.save_trial(arm, trial))
        runs = {
            pool.submit(
                _work_final,
                recipe,
                arm,
                seed,
                comparison.chosen(arm),
                comparison.card_folder(arm, seed),
            ): (arm, seed)
            for arm, seed in comparison.missing_runs()
        }
        collect(runs, "runs", lambda key, result: comparison.save_run(*key, result))


def collect(jobs: dict[Future, Any], what: str, save: Callable[[Any, dict], None]) -> None:
    """Save each result when it is there, with a progress bar; an error cancels the rest."""
    with tqdm(total=len(jobs), desc=what, unit="run", disable=not jobs) as bar:
        try:
            for future in as_completed(jobs):
                result = future.result()
                save(jobs[future], result)
                score = result.get("test_accuracy", result["validation_accuracy"])
                bar.set_postfix_str(f"{jobs[future]}: {score:.4f}")
                bar.update()
        except BaseException:
            for future in jobs:
                future.cancel()
            raise


# ---- Command line ----


def parser() -> argparse.ArgumentParser:
    """What is compared; the recipe takes its own options besides."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("recipe", help="mnist_cnn, fashion_transfer, …")
    result.add_argument("--methods", nargs="+", choices=METHODS, default=PAPER_METHODS)
    result.add_argument("--epsilons", nargs="+", type=float, default=[1.0])
    result.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    result.add_argument("--jobs", type=int, default=1, help="runs at once")
    result.add_argument("--threads", type=int, help="of each run; default: the cores shared out")
    result.add_argument("--results", type=Path, default=RESULTS)
    result.add_argument("--cards", type=Path, default=CARDS, help="where privacy cards go")
    return result


def main(argv: Sequence[str] | None = None) -> None:
    options, arguments = parser().parse_known_args(argv)
    recipe = Recipe(options.recipe.removesuffix(".py"), tuple(arguments))
    threads = options.threads or max(1, (os.cpu_count() or 1) // options.jobs)
    for epsilon in options.epsilons:
        arms = tuple(Arm(method, epsilon) for method in options.methods)
        seeds = tuple(options.seeds)
        comparison = Comparison(recipe, arms, seeds, options.results, options.cards)
        compare(comparison, options.jobs, threads)
    folder = options.results / recipe.task().name
    print(tables.write(folder, recipe.task().title))


if __name__ == "__main__":
    sys.exit(main())
