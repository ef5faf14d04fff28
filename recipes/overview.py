"""One row for each task: what Synthetic DP-KFC gains, against its target, from the committed JSON.

Tasks without results stand in the table too, with the command that makes them.

    python recipes/overview.py      # renders every task's page, then this table and its plot
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tables
from tables import RESULTS, Runs, accuracies

COMMAND = "python recipes/compare.py"
PLOT = "overview.svg"


@dataclass(frozen=True)
class Gain:
    """What an arm has over another one at an ε.

    Attributes:
        points: Difference of the mean test accuracies, in points.
        error: Its standard error.
    """

    points: float
    error: float

    @classmethod
    def of(cls, ours: Sequence[float], base: Sequence[float]) -> Gain:
        """From the accuracies of several seeds each."""
        squares = (statistics.variance(v) / len(v) for v in (ours, base) if len(v) > 1)
        return cls(statistics.mean(ours) - statistics.mean(base), sum(squares) ** 0.5)


@dataclass(frozen=True)
class Target:
    """What ``ours`` was to reach at an ε: an accuracy, or a gain over ``base``, or both."""

    epsilon: float
    accuracy: float | None = None
    gain: float | None = None

    def verdict(self, ours: Sequence[float], base: Sequence[float]) -> str:
        """The target and whether the table's figures reach it; a gain with its standard error."""
        mean = round(statistics.mean(ours), 1)
        found = Gain(round(mean - round(statistics.mean(base), 1), 1), Gain.of(ours, base).error)
        parts = []
        if self.accuracy is not None:
            parts.append(f"≥ {self.accuracy:g} {_reached(mean >= self.accuracy)}")
        if self.gain is not None:
            reached = _reached(found.points >= self.gain)
            parts.append(f"{self.gain:+g} {reached} ({found.points:+.1f} ± {found.error:.1f})")
        return f"ε {self.epsilon:g}: " + ", ".join(parts)


def _reached(is_reached: bool) -> str:
    return "reached" if is_reached else "**missed**"


@dataclass(frozen=True)
class Row:
    """A task, the two arms that are compared on it, and how to run them.

    Attributes:
        folder: Of its results.
        subject: What it is called.
        recipe: With its options, as compare.py takes them.
        epsilons: Wanted.
        methods: Wanted; empty for the paper's.
        targets: Of ``ours``.
        base: The arm without geometry.
        ours: The arm with it.
    """

    folder: str
    subject: str
    recipe: str
    epsilons: tuple[float, ...]
    methods: str = ""
    targets: tuple[Target, ...] = ()
    base: str = "none"
    ours: str = "synthetic"

    def command(self, epsilons: Sequence[float]) -> str:
        """What runs it."""
        methods = f" --methods {self.methods}" if self.methods else ""
        shown = " ".join(f"{epsilon:g}" for epsilon in epsilons)
        return f"{COMMAND} {self.recipe}{methods} --epsilons {shown}"

    def cell(self, runs: Runs, epsilon: float) -> str:
        """Base → ours."""
        pair = (accuracies(runs, m, epsilon) for m in (self.base, self.ours))
        shown = [tables.spread(values) if values else "–" for values in pair]
        return "–" if shown == ["–", "–"] else " → ".join(shown)

    def verdicts(self, runs: Runs) -> str:
        """Of its targets, as far as they were run."""
        pairs = (
            (t, *(accuracies(runs, m, t.epsilon) for m in (self.ours, self.base)))
            for t in self.targets
        )
        return "; ".join(t.verdict(ours, base) for t, ours, base in pairs if ours and base)


def _text_row(data: str, title: str, mode: str, options: str, methods: str, **more: Any) -> Row:
    recipe = f"stackoverflow_bert --data {data} --model minilm --train {mode} {options}"
    subject = f"{title}, MiniLM, {MODES[mode]}"
    return Row(f"{data}_{mode}", subject, f"{recipe}--data-dir DIR", methods=methods, **more)


MODES = {"head": "head only", "lora": "LoRA", "full": "everything"}
TWO_POINTS = (Target(1, gain=2), Target(3, gain=2))
ONE_POINT = (Target(1, gain=1), Target(3, gain=1))
HEAD_ARMS = "none public synthetic oracle"
MNIST = Row(
    "mnist",
    "MNIST, the paper's CNN",
    "mnist_cnn --data-dir DIR --jobs 2",
    (1, 3, 8),
    targets=(Target(1, accuracy=94.2),),
)
FASHION = Row(
    "fashion_mnist",
    "FashionMNIST ← MNIST, the paper's CNN",
    "fashion_transfer --data-dir DIR --jobs 2",
    (1, 3, 8),
    targets=(Target(1, accuracy=87.8),),
)
ADAMBC = {"base": "adambc", "ours": "synthetic-adambc"}
ROWS: tuple[Row, ...] = (
    MNIST,
    replace(
        MNIST,
        subject="MNIST, the same with DP-AdamBC",
        targets=(Target(1, accuracy=95.5),),
        **ADAMBC,
    ),
    FASHION,
    replace(FASHION, subject="FashionMNIST, the same with DP-AdamBC", targets=(), **ADAMBC),
    _text_row(
        "complaints",
        "Consumer complaints",
        "head",
        "",
        HEAD_ARMS,
        epsilons=(1, 3),
        targets=TWO_POINTS,
    ),
    _text_row(
        "complaints",
        "Consumer complaints",
        "lora",
        "--length 32 --epochs 3 --batch-size 256 --head-rate 10 ",
        "none public synthetic synthetic-inputs words oracle",
        epsilons=(1, 3),
        targets=ONE_POINT,
    ),
    _text_row(
        "rotten_tomatoes",
        "Rotten Tomatoes",
        "head",
        "",
        HEAD_ARMS,
        epsilons=(1, 3),
        targets=TWO_POINTS,
    ),
    _text_row(
        "rotten_tomatoes",
        "Rotten Tomatoes",
        "lora",
        "",
        "none public synthetic synthetic-inputs oracle",
        epsilons=(3,),
        targets=ONE_POINT[1:],
    ),
    _text_row(
        "rotten_tomatoes",
        "Rotten Tomatoes",
        "full",
        "--batch-size 256 --head-rate 10 ",
        "none synthetic",
        epsilons=(3,),
    ),
    Row(
        "imdb_logreg",
        "IMDB, TF-IDF and logistic regression",
        "imdb_logreg --data-dir DIR --jobs 2",
        (1, 3),
        methods=HEAD_ARMS,
    ),
    Row(
        "pathmnist",
        "PathMNIST ← MNIST, the paper's CNN",
        "fashion_transfer --target path --data-dir DIR",
        (1,),
    ),
    Row("cifar100_full", "CIFAR-100, DeiT-tiny, end to end", "cifar100_vit", (1, 3, 8)),
    Row("cifar100_head", "CIFAR-100, DeiT-tiny, head", "cifar100_vit --train head", (1, 3, 8)),
    Row(
        "stackoverflow-tags_head",
        "StackOverflow, main tag, BERT-base, head (public proxy AG News)",
        "stackoverflow_bert --task tags",
        (1, 3, 8),
    ),
    Row(
        "stackoverflow-next-word_head",
        "StackOverflow, next word, BERT-base, head (public proxy AG News)",
        "stackoverflow_bert --task next-word",
        (1, 3, 8),
    ),
)


def table(results: Path = RESULTS) -> str:
    """Every row, run or not."""
    epsilons = sorted({epsilon for row in ROWS for epsilon in row.epsilons})
    header = ["task", *(f"ε = {epsilon:g}" for epsilon in epsilons), "target", "recipe and results"]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for row in ROWS:
        runs = tables.runs_in(results / row.folder)
        cells = [row.cell(runs, epsilon) for epsilon in epsilons]
        lines.append("| " + " | ".join([row.subject, *cells, *_facts(row, runs)]) + " |")
    return "\n".join(lines)


def _facts(row: Row, runs: Runs) -> tuple[str, str]:
    """Targets, and the page of what was run or the command of what wasn't."""
    missing = [e for e in row.epsilons if not any((m, e) in runs for m in (row.base, row.ours))]
    page = f"[all methods](recipes/results/{row.folder}/README.md)"
    if not missing:
        return row.verdicts(runs), page
    at = "" if missing == list(row.epsilons) else f" at ε {', '.join(f'{e:g}' for e in missing)}"
    command = f"not run here{at}: `{row.command(missing)}`"
    return row.verdicts(runs), command if not runs else f"{page}; {command}"


# ---- The plot ----

POINTS = {"ours": "Synthetic DP-KFC", "public": "Public DP-KFC", "oracle": "Oracle (ε not claimed)"}


def gains(row: Row, runs: Runs, epsilon: float) -> Iterator[tuple[str, Gain]]:
    """By what is shown of a row: its own arm, and the others that it can be compared with."""
    arms = {"ours": row.ours}
    if row.base == "none":
        arms |= {"public": "public", "oracle": "oracle"}
    base = accuracies(runs, row.base, epsilon)
    for name, method in arms.items():
        ours = accuracies(runs, method, epsilon)
        if ours and base:
            yield name, Gain.of(ours, base)


def plot(path: Path, results: Path = RESULTS) -> None:
    """Gains over the same run without geometry, with one standard error."""
    from matplotlib.figure import Figure

    shown = [
        (f"{row.subject}, ε {epsilon:g}", dict(gains(row, runs, epsilon)))
        for row in ROWS
        for runs in [tables.runs_in(results / row.folder)]
        for epsilon in row.epsilons
    ]
    shown = [(label, found) for label, found in shown if found][::-1]
    figure = Figure(figsize=(8, 1 + 0.32 * len(shown)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color="grey", linewidth=1)
    for offset, (name, title) in zip((0.18, 0.0, -0.18), POINTS.items(), strict=True):
        places = [(at + offset, f[name]) for at, (_, f) in enumerate(shown) if name in f]
        axes.errorbar(
            [gain.points for _, gain in places],
            [at for at, _ in places],
            xerr=[gain.error for _, gain in places],
            fmt="o" if name == "ours" else "d",
            markersize=6 if name == "ours" else 4,
            capsize=2,
            label=title,
        )
    axes.set_yticks(range(len(shown)), [label for label, _ in shown], fontsize="small")
    axes.set(xlabel="points of test accuracy over the same without geometry (± standard error)")
    figure.legend(fontsize="small", loc="outside upper right", ncols=len(POINTS))
    tables.save(figure, path)


def main() -> None:
    for folder in tables.folders_in(RESULTS):
        tables.write(folder, tables.title_of(tables.runs_in(folder)))
    plot(RESULTS / PLOT)
    print(table())


if __name__ == "__main__":
    main()
