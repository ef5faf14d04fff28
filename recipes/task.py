"""One private run of a task: what a recipe describes, and the only way in which an arm is trained.

Conventions, the same in every recipe:
- A validation split is held out of training. Rates and clip norms are chosen on it, by trials with
  another seed. A trial is as long as the full run, or short: then it is like the run's beginning
  (same σ, C, batch and rate, fewer records and steps) and its rate stays where it is, since one
  that went down to zero would favour rates too high for a run several times as long. A trial's own
  ε is of no use to anybody and isn't stated.
- The full run trains on the remaining N records with true Poisson sampling and δ = 1/N. Test
  records are touched once, after it.
- ε doesn't cover the choice of rates: all arms are tuned with the same effort, on the same records.
- Noise and sampling come from a secret key, so a run repeats in distribution only; the seed
  decides the initial weights and the probes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from methods import METHODS, SIX_POINTS, Setting
from torch import nn
from torch.utils.data import Dataset, Subset
from transformers import EvalPrediction, PrinterCallback, set_seed

from hf_dpkfc import DPKFCConfig, DPKFCTrainer, PrivacyPlan
from hf_dpkfc.core import steps_in

RESULTS = Path(__file__).parent / "results"
CARDS = Path(__file__).parents[1] / "model_cards"
TRIAL_SEED = 1000  # initial weights of the trials; no final run has them


@dataclass(frozen=True)
class Trials:
    """How short the trials are, and over what.

    Attributes:
        num_records: To train on.
        num_steps: None for trials as long as the full run, on all of its records.
        grid: Settings by optimizer family.
    """

    num_records: int = 10_000
    num_steps: int | None = 80
    grid: Mapping[str, tuple[Setting, ...]] = field(default_factory=lambda: SIX_POINTS)

    @property
    def are_whole(self) -> bool:
        """Whether they are as long as the full run."""
        return self.num_steps is None

    @property
    def schedule(self) -> str:
        """Of the learning rate; a whole trial's is the full run's."""
        return "as the full run" if self.are_whole else "constant"


@dataclass(frozen=True)
class Task:
    """What a recipe describes.

    Attributes:
        name: Folder of its results.
        title: Caption of its table.
        train: Private records; validation and test are none of them.
        validation: Settings are chosen on these.
        test: Seen once per final run.
        public: Records for the public probes.
        build_model: Called under the run's seed.
        optimizer: "sgd" (momentum 0.9) or "adamw"; DP-AdamBC replaces either.
        epochs: Of the full run.
        batch_size: B, expected.
        micro_batch: Examples handled at once; memory and speed only.
        probe: What the synthetic probes are called.
        collator: From records to model inputs.
        processor: Tokenizer or image processor.
        rate_scale: What the grid's learning rates are multiplied with, for all arms.
        head_rate: What the classifier's rate is multiplied with besides, where AdamW trains it.
        trials: How short the trials are.
        options: Further DPKFCConfig options, the same for all arms.
        measure: Further facts about a trained model, for its JSON.
    """

    name: str
    title: str
    train: Dataset
    validation: Dataset
    test: Dataset
    public: Dataset | None
    build_model: Callable[[], nn.Module]
    optimizer: str
    epochs: int
    batch_size: int
    micro_batch: int
    probe: str
    collator: Callable[[list[Any]], Any] | None = None
    processor: Any = None
    rate_scale: float = 1.0
    head_rate: float = 1.0
    trials: Trials = Trials()
    options: Mapping[str, Any] = field(default_factory=dict)
    measure: Callable[[nn.Module], Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        if self.batch_size % self.micro_batch:
            raise SystemExit(
                f"A batch of {self.batch_size} isn't a number of whole pieces of "
                f"{self.micro_batch}: choose a multiple."
            )

    def plan(self, epsilon: float, setting: Setting) -> PrivacyPlan:
        """The full run's."""
        return _plan(epsilon, setting.clip_norm, self.batch_size, len(self.train), self.epochs)

    def method_title(self, method: str) -> str:
        """The row of an arm."""
        base = {"sgd": "SGD", "adamw": "Adam"}[self.optimizer]
        return METHODS[method].title.format(base=base, probe=self.probe)

    def grid(self, method: str) -> tuple[Setting, ...]:
        """What an arm is tuned over."""
        points = self.trials.grid[METHODS[method].family(self.optimizer)]
        return tuple(p.scaled(self.rate_scale) for p in points)


@lru_cache
def _plan(epsilon: float, clip_norm: float, batch: int, size: int, epochs: int) -> PrivacyPlan:
    steps = steps_in(epochs, size, batch)
    return PrivacyPlan.calibrated(
        epsilon,
        clip_norm=clip_norm,
        expected_batch_size=batch,
        dataset_size=size,
        steps=steps,
        delta=1 / size,
    )


def trial_settings(task: Task) -> dict[str, Any]:
    """What a task's trials are like: trials with other settings can't be compared."""
    trials = task.trials
    facts = {"steps": trials.num_steps, "seed": TRIAL_SEED, "schedule": trials.schedule}
    if trials.are_whole:
        return facts | {"records": None, "epochs": task.epochs, "of_records": len(task.train)}
    return facts | {"records": trials.num_records}


def run_trial(
    task: Task, method: str, epsilon: float, setting: Setting, seed: int = TRIAL_SEED
) -> dict[str, Any]:
    """Validation accuracy of a trial with the full run's noise."""
    plan = task.plan(epsilon, setting)
    whole, size = task.trials.are_whole, len(task.train)
    trainer_options = {
        "noise_multiplier": plan.noise_multiplier,
        "max_steps": task.trials.num_steps or plan.steps,
        **({} if whole else {"lr_scheduler_type": task.trials.schedule}),
    }
    with tempfile.TemporaryDirectory() as scratch:
        subset = Subset(task.train, range(size if whole else min(task.trials.num_records, size)))
        trainer = _trainer(task, method, setting, seed, subset, trainer_options, scratch)
        trainer.train()
        return setting._asdict() | {"validation_accuracy": _accuracy(trainer, task.validation)}


def run_final(
    task: Task,
    method: str,
    epsilon: float,
    seed: int,
    setting: Setting,
    card_folder: Path | None = None,
) -> dict:
    """The full run: trained once, validated and tested once.

    Args:
        task: What is trained.
        method: Of methods.METHODS.
        epsilon: Target.
        seed: Of the initial weights and the probes.
        setting: What tuning chose.
        card_folder: Where the model's privacy card and statement go; None for none.
    """
    plan = task.plan(epsilon, setting)
    trainer_options = {"target_epsilon": epsilon, "max_steps": plan.steps}
    with tempfile.TemporaryDirectory() as scratch:
        trainer = _trainer(task, method, setting, seed, task.train, trainer_options, scratch)
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
        if trainer.plan.noise_multiplier != plan.noise_multiplier:
            raise SystemExit(f"The trainer's plan isn't the one tuned for:\n{trainer.plan}\n{plan}")
        spent = trainer.epsilon_spent()
        validation, test = (_accuracy(trainer, rows) for rows in (task.validation, task.test))
        if card_folder is not None:
            _keep_card(trainer, f"{task.title}, {task.method_title(method)}", card_folder)
        return {
            "task": task.name,
            "task_title": task.title,
            "method": method,
            "title": task.method_title(method),
            "epsilon": epsilon,
            "epsilon_spent": spent if math.isfinite(spent) else "not claimed",
            "seed": seed,
            **setting._asdict(),
            "head_rate": task.head_rate,
            "validation_accuracy": validation,
            "test_accuracy": test,
            "plan": trainer.plan.to_dict(),
            "optimizer": METHODS[method].family(task.optimizer),
            "options": {**task.options, **METHODS[method].options},
            **(task.measure(trainer.model) if task.measure else {}),
            "seconds": round(seconds, 1),
            "threads": torch.get_num_threads(),
            "versions": {n: version(n) for n in ("hf-dpkfc", "torch", "transformers", "opacus")},
        }


def _trainer(
    task: Task,
    method: str,
    setting: Setting,
    seed: int,
    train: Dataset,
    trainer_options: Mapping[str, Any],
    scratch: str,
) -> DPKFCTrainer:
    set_seed(seed)
    arm = METHODS[method]
    config = DPKFCConfig(
        output_dir=str(Path(scratch, "run")),
        privacy_key_path=str(Path(scratch, "key")),
        per_device_train_batch_size=task.micro_batch,
        gradient_accumulation_steps=task.batch_size // task.micro_batch,
        per_device_eval_batch_size=500,
        target_delta=1 / len(task.train),
        learning_rate=setting.learning_rate,
        clip_norm=setting.clip_norm,
        seed=seed,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        **{**task.options, **arm.options, **trainer_options},
    )
    model = task.build_model()
    trainer = DPKFCTrainer(
        model=model,
        args=config,
        train_dataset=train,
        eval_dataset=task.validation,
        data_collator=task.collator,
        processing_class=task.processor,
        compute_metrics=_correct,
        public_dataset=task.public if arm.needs_public else None,
        optimizers=(_optimizer(task, arm.family(task.optimizer), model, setting), None),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _optimizer(
    task: Task, family: str, model: nn.Module, setting: Setting
) -> torch.optim.Optimizer | None:
    """SGD with momentum, or AdamW whose classifier has a rate of its own; None is the trainer's."""
    rate = setting.learning_rate
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if family == "sgd":
        return torch.optim.SGD(trained.values(), lr=rate, momentum=0.9)
    if task.head_rate == 1:
        return None
    if family != "adamw":
        raise SystemExit(f"{family} has one rate for all parameters: leave --head-rate at 1.")
    head = [p for name, p in trained.items() if "classifier" in name]
    rest = [p for name, p in trained.items() if "classifier" not in name]
    groups = [{"params": rest}, {"params": head, "lr": rate * task.head_rate}]
    return torch.optim.AdamW(groups, lr=rate, weight_decay=0.0)


def _correct(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def _accuracy(trainer: DPKFCTrainer, records: Dataset) -> float:
    return trainer.evaluate(records)["eval_accuracy"]


def _keep_card(trainer: DPKFCTrainer, model_name: str, folder: Path) -> None:
    """The card of a run, with its test accuracy, and the statement that it renders."""
    trainer.create_model_card(model_name=model_name)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("README.md", "privacy_statement.json"):
        shutil.copyfile(Path(trainer.args.output_dir, name), folder / name)


# ---- Results on disk ----


def tuning_path(results: Path, task: Task, method: str, epsilon: float) -> Path:
    """The trials of an arm."""
    return results / task.name / "tuning" / f"{method}_eps{epsilon:g}.json"


def final_path(results: Path, task: Task, method: str, epsilon: float, seed: int) -> Path:
    """One final run."""
    return results / task.name / f"{method}_eps{epsilon:g}_seed{seed}.json"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.part")
    partial.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    os.replace(partial, path)


def best_of(trials: list[Mapping[str, Any]]) -> Setting:
    """The setting with the highest validation accuracy; the first of equals."""
    best = max(trials, key=lambda trial: trial["validation_accuracy"])
    return Setting(best["learning_rate"], best["clip_norm"])


# ---- A recipe's command line ----


def options_of(recipe: Any) -> argparse.ArgumentParser:
    """What every recipe takes, and its own."""
    parser = argparse.ArgumentParser(description=recipe.__doc__.splitlines()[0], add_help=False)
    parser.add_argument("--data-dir", type=Path, help="folder of local files; default: the Hub")
    parser.add_argument("--smoke", action="store_true", help="seconds, offline, made-up data")
    recipe.add_options(parser)
    return parser


def main(recipe: Any) -> None:
    """Run one arm of a recipe once."""
    parser = argparse.ArgumentParser(
        description=recipe.__doc__, parents=[options_of(recipe)], formatter_class=_Formatter
    )
    parser.add_argument("--method", choices=METHODS, default="synthetic")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, help="default: what tuning chose")
    parser.add_argument("--clip-norm", type=float, help="default: what tuning chose")
    options = parser.parse_args()
    task = recipe.load(options)
    tuned = tuned_setting(task, options.method, options.epsilon)
    setting = Setting(
        options.learning_rate or tuned.learning_rate, options.clip_norm or tuned.clip_norm
    )
    result = run_final(task, options.method, options.epsilon, options.seed, setting)
    print(json.dumps(result, indent=1, ensure_ascii=False))


def tuned_setting(task: Task, method: str, epsilon: float) -> Setting:
    """The committed choice, else the middle of the grid."""
    path = tuning_path(RESULTS, task, method, epsilon)
    if path.exists():
        return best_of(json.loads(path.read_text())["trials"])
    points = task.grid(method)
    return points[len(points) // 2]


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """The docstring as it stands."""
