"""What a probe is worth in accuracy: a linear head on frozen features, every arm tuned alike.

Features are the CLS token of the checkpoint's last layer, or the last token where it has none; each
arm's preconditioner comes from those of its own sequences. Every arm gets twelve trials on
validation records, four learning rates by three dampings (three clip norms where there is nothing
to damp), three runs each, and the best setting is then tested with several seeds.

    python recipes/probe_accuracy.py --epsilon 1 --seeds 5
    python recipes/probe_accuracy.py --model smollm2 --data imdb --epsilon 1 --seeds 5
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import offline
import tables
import torch
import torch.nn.functional as F
from probe_alignment import PUBLIC, RESULTS, load_model, load_text, text_batches
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoTokenizer

from hf_dpkfc import (
    CurvatureOptions,
    Preconditioner,
    PrivacyPlan,
    PublicDataProbe,
    fit_preconditioner,
)
from hf_dpkfc.core import (
    Clipper,
    CustomLoss,
    PoissonSampler,
    SecretKey,
    StepRandomness,
    inspect_model,
    privatize,
)
from hf_dpkfc.curvature.catalogue import ProbeOptions, build_probe
from hf_dpkfc.errors import ProbeError

MAX_LENGTH = 40
BATCH, STEPS, DELTA = 256, 60, 1e-5
NUM_TRAIN, NUM_HELD_OUT, NUM_PROBES = 5000, 1000, 640
LEARNING_RATES = (0.01, 0.03, 0.1, 0.3)
DAMPINGS = (0.03, 0.3, 1.0)
CLIP_NORMS = (0.1, 1.0, 10.0)
RUNS_PER_TRIAL = 3  # the choice between single runs would mostly be one between their noises
ACCURACY = RESULTS / "accuracy"


@dataclass(frozen=True)
class Features:
    """Frozen features with labels."""

    x: Tensor
    y: Tensor

    def part(self, start: int, count: int) -> Features:
        """A range of the records."""
        return Features(self.x[start : start + count], self.y[start : start + count])


@dataclass(frozen=True)
class Backbone:
    """A frozen checkpoint.

    Attributes:
        model: Under a fresh head.
        tokenizer: Its own.
    """

    model: nn.Module
    tokenizer: Any

    @classmethod
    def named(cls, name: str) -> Backbone:
        """One of the checkpoints that need no Hub."""
        folder = str(offline.CHECKPOINTS[name]())
        return cls(load_model(folder).eval(), AutoTokenizer.from_pretrained(folder))

    def features(self, batches: Iterable[dict[str, Tensor]]) -> Features:
        """What a head would read, in a fixed random order."""
        found = [(self._pooled(batch), batch["labels"]) for batch in tqdm(batches, leave=False)]
        x, y = (torch.cat(parts) for parts in zip(*found, strict=True))
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        return Features(x[order], y[order])

    @torch.no_grad()
    def _pooled(self, batch: dict[str, Tensor]) -> Tensor:
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        hidden = self.model.base_model(**inputs).last_hidden_state
        if self.tokenizer.cls_token is not None:
            return hidden[:, 0]
        ends = batch["attention_mask"].cumsum(1).argmax(1)  # the last token, on whichever side
        return hidden[torch.arange(len(hidden)), ends]


class Head(nn.Module):
    """A linear classifier that starts at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Logits."""
        return self.linear(x)


LOSS = CustomLoss(
    lambda logits, inputs: F.cross_entropy(logits, inputs["labels"], reduction="none")
)


def preconditioner_of(found: Features | None, damping: float) -> Preconditioner:
    """From the features of an arm's sequences; the identity without any."""
    if found is None:
        return Preconditioner.identity()
    rows = list(zip(found.x, found.y, strict=True))

    def collate(chosen: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        x, y = zip(*chosen, strict=True)
        return {"x": torch.stack(x), "labels": torch.stack(y)}

    options = CurvatureOptions(damping=damping, rank=None)
    head = Head(found.x.shape[1])
    return fit_preconditioner(head, PublicDataProbe(rows, collate), options, per_example_loss=LOSS)


def accuracy(
    train: Features, test: Features, geometry: Preconditioner, rate: float, clip: float, plan
) -> float:
    """Test accuracy after one private run with DP-Adam; its noise is fresh."""
    head = Head(train.x.shape[1])
    clipper = Clipper(head, inspect_model(head), geometry, LOSS, clip)
    sampler = PoissonSampler(len(train.x), plan.sampling_rate, BATCH)
    parameters, key = dict(head.named_parameters()), SecretKey.generate()
    optimizer = torch.optim.Adam(parameters.values(), lr=rate)
    # At a constant rate the threshold between the classes drifts until the last step.
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, plan.steps)
    for step in range(plan.steps):
        randomness = StepRandomness(key, step, b"benchmark")
        parts = [
            ({"x": train.x[at], "labels": train.y[at]}, len(at))
            for at in sampler.micro_batches(randomness)
        ]
        private = privatize(clipper.sum_of(parts), plan.noise_multiplier, BATCH, randomness)
        for name, gradient in private.items():
            parameters[name].grad = gradient
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return float((head(test.x, test.y).argmax(1) == test.y).double().mean())


def repeated(times: int, *run) -> list[float]:
    """Accuracies of that many runs, each with its own noise."""
    return [accuracy(*run) for _ in range(times)]


def tuned(arm: Features | None, train: Features, validation: Features, plan) -> dict[str, float]:
    """The best of twelve settings, by the mean of a few runs of each."""
    shapes = [(1.0, c) for c in CLIP_NORMS] if arm is None else [(d, 1.0) for d in DAMPINGS]
    trials = []
    for (damping, clip), rate in itertools.product(shapes, LEARNING_RATES):
        geometry = preconditioner_of(arm, damping)
        runs = repeated(RUNS_PER_TRIAL, train, validation, geometry, rate, clip, plan)
        setting = {"learning_rate": rate, "damping": damping, "clip_norm": clip}
        trials.append({"validation": statistics.mean(runs), **setting})
    return max(trials, key=lambda trial: trial["validation"])


def arms(backbone: Backbone, data: str, train: Features) -> dict[str, Features | None]:
    """Sequences' features by arm; None is plain DP-Adam."""
    found: dict[str, Features | None] = {"none": None}
    for name in ("uniform", "zipf", "structured", "words", "sampled"):
        options = ProbeOptions(name, max_length=MAX_LENGTH)
        try:
            probe = build_probe(options, backbone.model, backbone.tokenizer)
        except ProbeError as error:  # a checkpoint without a language-model head can't be sampled
            print(f"{name} left out. {error}", flush=True)
            continue
        generator = torch.Generator().manual_seed(0)
        found[name] = backbone.features(probe.batches(NUM_PROBES // 64, 64, generator))
    public = text_batches(load_text(PUBLIC[data]), backbone.tokenizer, 0, NUM_PROBES, MAX_LENGTH)
    return found | {"public": backbone.features(public), "oracle": train.part(0, NUM_PROBES)}


def measured(backbone: Backbone, data: str, epsilon: float, num_seeds: int) -> dict[str, Any]:
    """Every arm's setting and test accuracies."""
    count = NUM_TRAIN + 2 * NUM_HELD_OUT
    batches = text_batches(load_text(data), backbone.tokenizer, 0, count, MAX_LENGTH)
    records = backbone.features(batches)
    train = records.part(0, NUM_TRAIN)
    validation = records.part(NUM_TRAIN, NUM_HELD_OUT)
    test = records.part(NUM_TRAIN + NUM_HELD_OUT, NUM_HELD_OUT)
    plan = PrivacyPlan.calibrated(
        epsilon,
        clip_norm=1.0,
        expected_batch_size=BATCH,
        dataset_size=NUM_TRAIN,
        steps=STEPS,
        delta=DELTA,
    )
    results = {}
    for name, found in tqdm(arms(backbone, data, train).items(), desc="arms"):
        best = tuned(found, train, validation, plan)
        geometry = preconditioner_of(found, best["damping"])
        setting = best["learning_rate"], best["clip_norm"]
        results[name] = best | {"test": repeated(num_seeds, train, test, geometry, *setting, plan)}
    return results


def table(results: Iterable[dict[str, Any]]) -> str:
    """Test accuracies in Markdown: a row per arm, a column per checkpoint and text."""
    columns = {f"{r['model']}, {r['data']}, ε {r['epsilon']:g}": r["arms"] for r in results}
    names = dict.fromkeys(name for found in columns.values() for name in found)
    lines = ["| probe | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in names:
        cells = (
            tables.spread([100 * x for x in found[name]["test"]]) if name in found else "–"
            for found in columns.values()
        )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def render() -> str:
    """The table of all committed results, and what made them."""
    results = [json.loads(path.read_text()) for path in sorted(ACCURACY.glob("*.json"))]
    return "\n\n".join([*(f"`{r['command']}`" for r in results), table(results)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=offline.CHECKPOINTS, default="minilm")
    parser.add_argument("--data", choices=PUBLIC, default="rotten_tomatoes")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=5, help="test runs per arm")
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error("--seeds: a spread needs two at least")
    found = measured(Backbone.named(args.model), args.data, args.epsilon, args.seeds)
    command = (
        f"python recipes/probe_accuracy.py --model {args.model} --data {args.data} "
        f"--epsilon {args.epsilon:g} --seeds {args.seeds}"
    )
    facts = {"model": args.model, "data": args.data, "epsilon": args.epsilon}
    ACCURACY.mkdir(parents=True, exist_ok=True)
    path = ACCURACY / f"{args.model}_{args.data}_epsilon_{args.epsilon:g}.json"
    path.write_text(json.dumps({"command": command, **facts, "arms": found}, indent=1) + "\n")
    print(render())
    tables.fill(RESULTS / "README.md", "accuracy", render())


if __name__ == "__main__":
    main()
