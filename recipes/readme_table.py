"""Renders the README's results from the committed JSON: python recipes/readme_table.py."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import overview
import tables
from tables import RESULTS

README = Path(__file__).parents[1] / "README.md"

TITLES = {
    "minilm": "MiniLM (22.7 M parameters)",
    "mpnet": "MPNet-base (109 M parameters, the shape of BERT-base)",
}


def render() -> Mapping[str, str]:
    """What stands between each pair of the README's marks."""
    return {
        "results": f"{overview.table()}\n\n![gains](recipes/results/{overview.PLOT})",
        "demo": "\n\n".join(_demo()),
        "speed": "\n\n".join(_throughput()),
    }


def _demo() -> list[str]:
    result = json.loads((RESULTS / "quickstart.json").read_text())
    by_arm = defaultdict(list)
    for run in result["runs"]:
        by_arm[run["arm"]].append(run)
    rows = [
        f"| {arm} | {tables.spread([100 * run['accuracy'] for run in runs])} "
        f"| {max(run['epsilon_spent'] for run in runs):.2f} | {len(runs)} |"
        for arm, runs in by_arm.items()
    ]
    title = "The demo: Rotten Tomatoes, MiniLM, HF's standard head on a frozen backbone"
    header = ["| method | test accuracy | ε | seeds |", "|---|---|---|---|"]
    return [f"{title} (`{result['command']}`):", "\n".join(header + rows)]


def _throughput() -> list[str]:
    parts = []
    for name, title in TITLES.items():
        path = RESULTS / "throughput" / f"{name}.json"
        if path.exists():
            parts += _throughput_of(json.loads(path.read_text()), title)
    return parts


def _throughput_of(result: dict, title: str) -> list[str]:
    speed, memory = result["speed"], result["memory"]["relative"]
    plain, opacus = speed["speed_relative_to_non_private"], speed["speed_relative_to_faster_opacus"]
    header = "| step | speed vs. non-private | vs. faster Opacus | peak memory |\n|---|---|---|---|"
    rows = [f"| {a} | {plain[a]:.2f}× | {opacus[a]:.2f}× | {memory[a]:.2f}× |" for a in plain]
    refresh = speed["refresh_in_non_private_steps_of_256"]["ours: kfac rank 64"]
    note = (
        f"One refresh of the rank-64 preconditioner costs {refresh:.1f} non-private steps of 256."
    )
    around = RESULTS / "throughput" / f"{result['settings']['name']}_trainer.json"
    if around.exists():
        trainer = json.loads(around.read_text())
        ratio = 1 + trainer["overhead"]
        note += (
            f" A step of DPKFCTrainer took {ratio:.2f} times the core's (`{trainer['command']}`)."
        )
    caption = f"{title}, T 128, two CPU threads (`{result['command']}`):"
    return [caption, "\n".join([header, *rows]), note]


def main() -> None:
    for mark, content in render().items():
        tables.fill(README, mark, content)


if __name__ == "__main__":
    main()
