"""Speed and memory of a private step against the non-private one and against Opacus.

All arms run in turn in one process, so that a busy machine slows them alike; peak memory is taken
in one process per arm. A step is a logical batch of several micro-batches with everything in it:
forward, backward, clipping, noise and the optimizer's update. All Linear and LayerNorm parameters
train.

    python recipes/throughput.py                      # MiniLM, from the package index
    python recipes/throughput.py --name mpnet         # mpnet/ in $HF_DPKFC_DATA
    python recipes/throughput.py --model ID_OR_FOLDER
    python recipes/throughput.py --trainer            # what DPKFCTrainer adds
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
from offline import CHECKPOINTS
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

from hf_dpkfc import (
    CurvatureOptions,
    DPKFCConfig,
    DPKFCTrainer,
    Preconditioner,
    ZipfTokenProbe,
    fit_preconditioner,
)
from hf_dpkfc.core import Clipper, SecretKey, StepRandomness, TaskLoss, inspect_model, privatize

NOISE_MULTIPLIER = 1.0
OURS = {"ours: none": "none", "ours: kfac rank 64": "rank", "ours: kfac full": "full"}
ARMS = ("non-private", "opacus: hooks", "opacus: ghost", *OURS)


def load(folder: str) -> nn.Module:
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.requires_grad_(True)
    return model.train()


class Bench:
    """One logical step of each arm on the same random token ids."""

    def __init__(self, args: argparse.Namespace, arms: tuple[str, ...]) -> None:
        self.args = args
        self.model = load(args.model)
        self.loss = TaskLoss("single_label_classification")
        shape = (args.micro_batch, args.length)
        ids = torch.randint(1000, 20000, shape, generator=torch.Generator().manual_seed(0))
        self.inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        self.labels = torch.arange(args.micro_batch) % 2
        self.refresh_seconds: dict[str, float] = {}
        self.steps = {arm: self._build(arm) for arm in arms}

    @property
    def batch(self) -> int:
        """Examples in one logical step."""
        return self.args.micro_batch * self.args.accumulation

    def _build(self, arm: str):
        if arm == "non-private":
            return self._plain()
        if arm.startswith("opacus"):
            return self._opacus(ghost=arm.endswith("ghost"))
        return self._ours(arm)

    def _plain(self):
        model = copy.deepcopy(self.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        inputs = self.inputs | {"labels": self.labels}

        def step() -> None:
            for _ in range(self.args.accumulation):
                (self.loss(model, inputs).sum() / self.batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def _opacus(self, ghost: bool):
        wrapper = GradSampleModuleFastGradientClipping if ghost else GradSampleModule
        extra = {"max_grad_norm": 1.0, "use_ghost_clipping": True} if ghost else {}
        model = wrapper(copy.deepcopy(self.model), loss_reduction="mean", **extra)
        kind = DPOptimizerFastGradientClipping if ghost else DPOptimizer
        optimizer = kind(
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4),
            noise_multiplier=NOISE_MULTIPLIER,
            max_grad_norm=1.0,
            expected_batch_size=self.batch,
        )
        criterion = nn.CrossEntropyLoss()
        if ghost:
            criterion = DPLossFastGradientClipping(model, optimizer, criterion)

        def step() -> None:
            for i in range(self.args.accumulation):
                optimizer.signal_skip_step(do_skip=i < self.args.accumulation - 1)
                criterion(model(**self.inputs).logits, self.labels).backward()
                optimizer.step()
                optimizer.zero_grad()

        return step

    def _ours(self, arm: str):
        model = copy.deepcopy(self.model)
        table = inspect_model(model)
        clipper = Clipper(model, table, self._preconditioner(arm, model), self.loss, 1.0)
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        optimizer = torch.optim.SGD(parameters.values(), lr=1e-4)
        randomness = StepRandomness(SecretKey.generate(), 0, b"benchmark")
        inputs = self.inputs | {"labels": self.labels}

        def step() -> None:
            parts = [(inputs, self.args.micro_batch)] * self.args.accumulation
            private = privatize(clipper.sum_of(parts), NOISE_MULTIPLIER, self.batch, randomness)
            for name, gradient in private.items():
                parameters[name].grad = gradient
            optimizer.step()
            optimizer.zero_grad()

        return step

    def _preconditioner(self, arm: str, model: nn.Module) -> Preconditioner:
        if OURS[arm] == "none":
            return Preconditioner.identity()
        rank = 64 if OURS[arm] == "rank" else None
        probe = ZipfTokenProbe.for_model(
            model, AutoTokenizer.from_pretrained(self.args.model), max_length=self.args.length
        )
        # Where only memory is measured, a step's, a quick fit will do.
        batches = {"num_batches": 1} if self.args.memory_of else {}
        options = CurvatureOptions(rank=rank, **batches)
        start = time.perf_counter()
        preconditioner = fit_preconditioner(model, probe, options)
        self.refresh_seconds[arm] = time.perf_counter() - start
        return preconditioner


def measure_speed(args: argparse.Namespace) -> dict:
    bench = Bench(args, ARMS)
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in tqdm(range(args.rounds + 1), desc="rounds"):
        for arm, step in bench.steps.items():
            start = time.perf_counter()
            step()
            seconds[arm].append(time.perf_counter() - start)
    median = {arm: statistics.median(times[1:]) for arm, times in seconds.items()}
    opacus = min(median["opacus: hooks"], median["opacus: ghost"])
    plain_ratios = {
        arm: statistics.median(
            p / t for p, t in zip(seconds["non-private"][1:], times[1:], strict=True)
        )
        for arm, times in seconds.items()
    }
    per_example = median["non-private"] / bench.batch
    return {
        "seconds_per_step": seconds,
        "speed_relative_to_non_private": plain_ratios,
        "speed_relative_to_faster_opacus": {arm: opacus / t for arm, t in median.items()},
        "refresh_in_non_private_steps_of_256": {
            arm: t / (256 * per_example) for arm, t in bench.refresh_seconds.items()
        },
    }


class Interleave(TrainerCallback):
    """Times the trainer's steps, and runs a step of the core after each."""

    def __init__(self, core_step) -> None:
        self.core_step = core_step
        self.trainer_seconds: list[float] = []
        self.core_seconds: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """Stop it, and time the core on as many examples."""
        self.trainer_seconds.append(time.perf_counter() - self.started)
        started = time.perf_counter()
        self.core_step()
        self.core_seconds.append(time.perf_counter() - started)


def measure_trainer(args: argparse.Namespace) -> dict:
    """What DPKFCTrainer adds to the core's step: draw, collate, digest, ledger, HF's loop."""
    bench = Bench(args, ("ours: kfac rank 64",))
    core = Interleave(bench.steps["ours: kfac rank 64"])
    rows = [
        {"input_ids": bench.inputs["input_ids"][i % args.micro_batch], "labels": i % 2}
        for i in range(bench.batch)
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = DPKFCConfig(
            output_dir=folder + "/out",
            privacy_key_path=folder + "/key",
            per_device_train_batch_size=args.micro_batch,
            gradient_accumulation_steps=args.accumulation,  # the whole set: every draw is equal
            max_steps=args.rounds + 1,
            noise_multiplier=NOISE_MULTIPLIER,
            probe_refresh_steps=args.rounds + 2,
            optim="sgd",
            save_strategy="no",
            report_to="none",
        )
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        DPKFCTrainer(
            model=load(args.model),
            args=config,
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=[core],
        ).train()
    pairs = zip(core.trainer_seconds[1:], core.core_seconds[1:], strict=True)
    return {
        "seconds_per_step": {"trainer": core.trainer_seconds, "core": core.core_seconds},
        "overhead": statistics.median(t / c for t, c in pairs) - 1,
    }


def measure_memory(args: argparse.Namespace) -> dict:
    """Peak resident memory of a step above that of the loaded model, in MiB, by arm."""
    peaks = {}
    for arm in tqdm(ARMS, desc="memory"):
        command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", arm]
        command += ["--accumulation", "2"]  # the first must be gone when the second comes
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        peaks[arm] = float(output.strip().splitlines()[-1])
    return {"peak_mib": peaks, "relative": {a: p / peaks["non-private"] for a, p in peaks.items()}}


def print_peak_of(args: argparse.Namespace) -> None:
    """The mode of the child processes: one arm, two steps, one number."""
    bench = Bench(args, (args.memory_of,))
    ctypes.CDLL(None).malloc_trim(0)  # give back what set-up has freed
    Path("/proc/self/clear_refs").write_text("5")  # and forget its peak
    before = _memory_mib("VmRSS")
    for _ in range(2):
        bench.steps[args.memory_of]()
    print(_memory_mib("VmHWM") - before)


def _memory_mib(field: str) -> float:
    """One field of this process's memory statistics, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", default="minilm", help="of the result; minilm and mpnet load one")
    parser.add_argument("--model", help="Hub id or folder (default: the checkpoint of that name)")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trainer", action="store_true", help="only DPKFCTrainer's overhead")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/throughput")
    parser.add_argument("--memory-of", choices=ARMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.model is None and args.name not in CHECKPOINTS:
        parser.error(f"--name {args.name} needs a --model (known: {', '.join(CHECKPOINTS)})")
    shown = f" --model {args.model}" if args.model else ""
    args.model = args.model or str(CHECKPOINTS[args.name]())
    if args.memory_of:
        print_peak_of(args)
        return
    name = args.name
    settings = {k: v for k, v in vars(args).items() if k not in ("memory_of", "out", "model")}
    result = {
        "command": f"python recipes/throughput.py --name {name}{shown} --length {args.length} "
        f"--micro-batch {args.micro_batch} --accumulation {args.accumulation} "
        f"--rounds {args.rounds}" + (" --trainer" if args.trainer else ""),
        "settings": settings | {"name": name},
        "machine": {"threads": torch.get_num_threads(), "processor": platform.machine()},
        "versions": {p: version(p) for p in ("torch", "transformers", "opacus", "hf-dpkfc")},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    if args.trainer:
        result |= measure_trainer(args)
        print(f"the trainer around the core: {100 * result['overhead']:+.1f} %")
        (args.out / f"{name}_trainer.json").write_text(json.dumps(result, indent=1) + "\n")
        return
    result |= {"memory": measure_memory(args), "speed": measure_speed(args)}
    (args.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    speed = result["speed"]
    print(f"{'arm':20} {'vs non-private':>15} {'vs Opacus':>10} {'memory':>8}")
    for arm in ARMS:
        print(
            f"{arm:20} {speed['speed_relative_to_non_private'][arm]:14.2f}× "
            f"{speed['speed_relative_to_faster_opacus'][arm]:9.2f}× "
            f"{result['memory']['relative'][arm]:7.2f}×"
        )
    for arm, steps in speed["refresh_in_non_private_steps_of_256"].items():
        print(f"one refresh of {arm}: {steps:.2f} non-private steps of 256 examples")


if __name__ == "__main__":
    main()
