"""Renders a task's table (mean ± standard deviation over seeds) and ε–accuracy plot from its JSON.

python recipes/overview.py renders every task again, without running anything.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from methods import METHODS

RESULTS = Path(__file__).parent / "results"

Runs = Mapping[tuple[str, float], list[dict[str, Any]]]


def runs_in(folder: Path) -> Runs:
    """Final runs by method and ε."""
    runs = defaultdict(list)
    for path in sorted(folder.glob("*_seed*.json")):
        run = json.loads(path.read_text())
        runs[run["method"], run["epsilon"]].append(run)
    return runs


def accuracies(runs: Runs, method: str, epsilon: float) -> list[float]:
    """Test accuracies of a method at an ε, in percent; none if it wasn't run."""
    return [100 * run["test_accuracy"] for run in runs.get((method, epsilon), [])]


def markdown(runs: Runs, title: str) -> str:
    """One row per method that was run, one column per ε."""
    epsilons = sorted({epsilon for _, epsilon in runs})
    methods = [method for method in METHODS if any(method == m for m, _ in runs)]
    header = ["method", *(f"ε = {epsilon:g}" for epsilon in epsilons), "seeds"]
    rows = [
        [
            _title(runs, method),
            *(_cell(runs, method, epsilon) for epsilon in epsilons),
            "/".join(str(len(runs[method, e])) for e in epsilons if (method, e) in runs),
        ]
        for method in methods
    ]
    lines = ["| " + " | ".join(row) + " |" for row in [header, *rows]]
    lines.insert(1, "|" + "---|" * len(header))
    commands = " and ".join(f"`{command}`" for command in _commands(runs))
    caption = f"{title}{_rank_note(runs)}. Test accuracy, % ({commands}):"
    return "\n\n".join([caption, "\n".join(lines), *_options_note(runs)])


def _options_note(runs: Runs) -> list[str]:
    """What differs between rows besides their methods: runs of another day or machine."""
    titles: dict[frozenset[tuple[str, Any]], dict[str, None]] = defaultdict(dict)
    for method in METHODS:
        own = METHODS[method].options
        for run in (run for (m, _), rs in runs.items() if m == method for run in rs):
            given = ((k, v) for k, v in run.get("options", {}).items() if k not in own)
            titles[frozenset(given)][_title(runs, method)] = None
    common = frozenset.intersection(*titles)
    groups = [
        f"{' and '.join(rows)}: " + (_shown(given - common) or "none of the others'")
        for given, rows in titles.items()
    ]
    return [] if len(groups) == 1 else [f"Options differ. {'; '.join(groups)}."]


def _shown(options: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in sorted(options))


def _commands(runs: Runs) -> list[str]:
    """What makes the table: one command for all ε that have the same methods."""
    recipe = next(iter(runs.values()))[0]["command"].partition(" --methods")[0]
    methods = defaultdict(list)
    for epsilon in sorted({epsilon for _, epsilon in runs}):
        methods[" ".join(m for m in METHODS if (m, epsilon) in runs)].append(f"{epsilon:g}")
    return [f"{recipe} --methods {m} --epsilons {' '.join(e)}" for m, e in methods.items()]


def _rank_note(runs: Runs) -> str:
    """How many directions a head's inputs have: with few, there is much to gain by geometry."""
    ranks = {run.get("effective_rank_of_head_inputs") for rs in runs.values() for run in rs}
    known = sorted(rank for rank in ranks if rank is not None)
    return f" (effective rank of the head's inputs {known[0]:.1f})" if known else ""


def _cell(runs: Runs, method: str, epsilon: float) -> str:
    key = (method, epsilon)
    return spread(accuracies(runs, *key)) if key in runs else "–"


def spread(values: list[float]) -> str:
    """Mean ± standard deviation, of several; a single value alone."""
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def fill(page: Path, mark: str, content: str) -> None:
    """Put content between a page's marks, <!-- mark --> and <!-- /mark -->."""
    start, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    block = f"{start}\n\n{content}\n\n{end}"
    text, found = re.subn(f"{start}.*?{end}", lambda _: block, page.read_text(), flags=re.DOTALL)
    if not found:
        raise SystemExit(f"{page} has no place for it: {start} … {end}")
    page.write_text(text)


def plot(runs: Runs, title: str, path: Path) -> None:
    """ε against test accuracy, with one standard deviation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for method in METHODS:
        epsilons = sorted(e for m, e in runs if m == method)
        if not epsilons:
            continue
        values = [accuracies(runs, method, e) for e in epsilons]
        means = [statistics.mean(v) for v in values]
        deviations = [statistics.stdev(v) if len(v) > 1 else 0.0 for v in values]
        label = _title(runs, method)
        axes.errorbar(epsilons, means, deviations, marker="o", capsize=3, label=label)
    axes.set(xlabel="ε", ylabel="test accuracy, %", title=title, xscale="log")
    ticks = sorted({epsilon for _, epsilon in runs})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.legend(fontsize="small")
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """As SVG; the same runs give the same file."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "hf_dpkfc"}):
        figure.savefig(path, metadata={"Date": None})


def write(folder: Path, title: str) -> str:
    """Write README.md and accuracy.svg beside the JSON, and return the table."""
    runs = runs_in(folder)
    if not runs:
        return f"{folder.name}: no runs yet"
    table = markdown(runs, title)
    (folder / "README.md").write_text(f"# {folder.name}\n\n{table}\n\n![accuracy](accuracy.svg)\n")
    plot(runs, title, folder / "accuracy.svg")
    return table


def folders_in(results: Path) -> list[Path]:
    """Folders of tasks with final runs."""
    return sorted({path.parent for path in results.glob("*/*_seed*.json")})


def title_of(runs: Runs) -> str:
    """The task's, as its runs have it."""
    return next(iter(runs.values()))[0]["task_title"]


def _title(runs: Runs, method: str) -> str:
    return next(rs[0]["title"] for (m, _), rs in runs.items() if m == method)
