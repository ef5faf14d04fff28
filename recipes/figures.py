"""The paper's figures again, from real images on two cores: PNG, SVG and the data behind each.

    python recipes/figures.py --data-dir DIR              # all but the surface, a few minutes
    python recipes/figures.py snr slq --again             # compute these anew
    python recipes/figures.py surface                     # 50 short trainings; resumes
    python recipes/figures.py --draw                      # only draw, from the committed JSON

DIR holds mnist/, fashion_mnist/ and cifar10/ as in images.py; without it they come from the Hub.
All sources are compared on the same weights. What uses private images says "unsafe" in its title.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import figure_data
from figure_data import ARMS, CLIP_NORMS, LEARNING_RATES, ORACLE, PROXIES, SYNTHETIC, Data
from matplotlib.figure import Figure

from hf_dpkfc.diagnostics.plots import draw_lines, new_figure, style

RESULTS = Path(__file__).parent / "results/figures"

# The paper's colours: oracle black and dashed, matched proxy blue, mismatched purple, ours orange.
SOURCES = {ORACLE: (6, 1), "FashionMNIST": (0, 0), "CIFAR-10": (3, 3), SYNTHETIC: (1, 0)}
NETWORKS = {"mlp": "MLP", "cnn": "CNN", "vit": "ViT"}
GROUPS = {"attention": "attention", "mlp": "MLP", "rest": "embedding and head"}


def styled(series: dict) -> dict:
    """Colours and line styles of the sources in a set of curves; the figure has the legend."""
    found = [SOURCES[name] for name in series]
    return {"colors": [c for c, _ in found], "styles": [s for _, s in found], "legend": False}


def finish(figure: Figure, axes, title: str) -> Figure:
    """One legend for all panels, below them."""
    lines, names = axes.get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(names))
    figure.suptitle(title)
    return figure


def draw_spectrum(result: dict) -> Figure:
    figure, axes = new_figure(10.5, 3.4, ncols=3)
    for at, (network, entry) in zip(axes, result.items(), strict=True):
        curves = {n: [p for p in c if p[1] > 0] for n, c in entry["curves"].items()}
        floor = max(c[0][1] for c in curves.values()) * 1e-12
        curves = {n: [p for p in c if p[1] > floor] for n, c in curves.items()}
        title = f"{NETWORKS[network]}: {entry['layer']}"
        labels = {"x_label": "rank", "y_label": "eigenvalue of A ⊗ G", "title": title}
        draw_lines(at, curves, log_x=True, log_y=True, **labels, **styled(curves))
    title = "unsafe: spectra by source at initial weights, private = MNIST"
    return finish(figure, axes[0], title)


def draw_tracking_cnn(result: dict) -> Figure:
    rows = [row for row in result["rows"] if "layer" in row]
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    panels = {layer: (lambda row, wanted=layer: row["layer"] == wanted) for layer in layers}
    return _draw_tracking(result, rows, {k: panels[k] for k in (layers[0], layers[-1])}, "CNN")


def draw_tracking_vit(result: dict) -> Figure:
    rows = [row for row in result["rows"] if "layer" in row]
    panels = {
        text: (lambda row, wanted=group: group_of(row["layer"]) == wanted)
        for group, text in GROUPS.items()
    }
    return _draw_tracking(result, rows, panels, "ViT")


def group_of(layer: str) -> str:
    """The paper's three groups of a transformer's layers."""
    if "attention" in layer:
        return "attention"
    return "mlp" if "layer." in layer or "layers." in layer else "rest"


def _draw_tracking(result: dict, rows: list, panels: dict, name: str) -> Figure:
    """Cosine and error of F with the oracle over steps, a row of panels for each set of layers."""
    figure, axes = new_figure(8.5, 2.5 * len(panels) + 0.4, nrows=len(panels), ncols=2)
    for at, (title, belongs) in zip(axes, panels.items(), strict=True):
        for panel, key in zip(at, ("F_cosine", "F_error"), strict=True):
            series = {}
            for source in (*PROXIES, SYNTHETIC):
                mine = [row for row in rows if row["source"] == source and belongs(row)]
                steps = sorted({row["step"] for row in mine})
                series[source] = [
                    (s, statistics.fmean(row[key] for row in mine if row["step"] == s))
                    for s in steps
                ]
            label = "cosine" if key == "F_cosine" else "relative error"
            options = {"x_label": "step", "y_label": label, "title": title}
            draw_lines(panel, series, log_y=key == "F_error", **options, **styled(series))
            if key == "F_cosine":
                panel.set_ylim(0, 1.02)
    return finish(
        figure,
        axes[0][0],
        f"unsafe: A ⊗ G against the private oracle's while a {name} trains on MNIST "
        f"(ε = {result['epsilon']:.2g})",
    )


def draw_snr(result: dict) -> Figure:
    figure, axes = new_figure(10.5, 4.6, ncols=2)
    for at, (network, by_geometry) in zip(axes, result["networks"].items(), strict=True):
        layers = [n for n in next(iter(by_geometry.values())) if n]
        series = {
            name: [(i, snr[layer]) for i, layer in enumerate(layers) if snr[layer] > 0]
            for name, snr in by_geometry.items()
        }
        labels = {"x_label": "", "y_label": "SNR of the mean gradient"}
        draw_lines(
            at,
            series,
            log_y=True,
            title=NETWORKS[network],
            legend=False,
            colors=(0, 2, 1),
            **labels,
        )
        at.set_xticks(range(len(layers)), map(short_name, layers), rotation=90, fontsize=6.5)
    return finish(
        figure,
        axes[0],
        "unsafe: signal against noise per layer at initial weights, CIFAR-10 images, "
        f"ε = {result['epsilon']:.2g}",
    )


def short_name(layer: str) -> str:
    """A layer's name without what every layer of a transformer has in it."""
    for part in ("vit.", "encoder.", "layers.", "layer.", "attention.", "patch_embeddings."):
        layer = layer.replace(part, "")
    return layer.replace("embeddings.", "emb.")


def draw_slq(result: dict) -> Figure:
    figure, axes = new_figure(9, 8.4, nrows=3, ncols=2)
    for at, (network, moments) in zip(axes, result.items(), strict=True):
        for panel, (when, curves) in zip(at, moments.items(), strict=True):
            shown = {n: [p for p in c if p[1] > 0] for n, c in curves.items()}
            title = f"{NETWORKS[network]}, {when} weights"
            labels = {"x_label": "rank", "y_label": "|eigenvalue of H|", "title": title}
            draw_lines(panel, shown, log_x=True, log_y=True, **labels, **styled(shown))
    title = "unsafe: Hessian eigenvalues by Lanczos quadrature, private = MNIST"
    return finish(figure, axes[0][0], title)


def draw_surface(result: dict) -> Figure:
    figure, axes = new_figure(9, 3.8, ncols=2)
    found = {(c["arm"], c["learning_rate"], c["clip_norm"]): c for c in result["cells"]}
    low = min(c["test_accuracy"] for c in result["cells"])
    high = max(c["test_accuracy"] for c in result["cells"])
    for at, arm in zip(axes, ARMS, strict=True):
        grid = [
            [found.get((arm, rate, c), {}).get("test_accuracy", float("nan")) for c in CLIP_NORMS]
            for rate in LEARNING_RATES
        ]
        image = at.imshow(grid, origin="lower", vmin=low, vmax=high, cmap="viridis", aspect="auto")
        for i, row in enumerate(grid):
            for j, value in enumerate(row):
                color = "black" if value > (low + high) / 2 else "white"
                text = "" if value != value else f"{100 * value:.0f}"
                at.text(j, i, text, ha="center", va="center", color=color)
        at.set_xticks(range(len(CLIP_NORMS)), [f"{c:g}" for c in CLIP_NORMS])
        at.set_yticks(range(len(LEARNING_RATES)), [f"{r:g}" for r in LEARNING_RATES])
        at.set(xlabel="clip norm C", ylabel="learning rate", title=arm)
        at.grid(visible=False)
    figure.colorbar(image, ax=axes, label="test accuracy")
    figure.suptitle(f"Test accuracy in % after {result['steps']} steps on MNIST, ε = 2")
    return figure


def compute_surface(data: Data, args: argparse.Namespace) -> dict:
    """Cell by cell, saved after each: an interrupted surface goes on where it was."""
    path = RESULTS / "surface.json"
    known = json.loads(path.read_text())["result"] if path.exists() and not args.again else {}
    cells = known.get("cells", []) if known.get("steps") == args.steps else []
    done = {(c["arm"], c["learning_rate"], c["clip_norm"]) for c in cells}
    todo = [cell for cell in figure_data.surface_cells() if cell not in done]
    for cell in todo[: args.cells]:
        started = time.perf_counter()
        cells.append(figure_data.surface_cell(data, *cell, steps=args.steps))
        save("surface", {"steps": args.steps, "cells": cells}, args)
        seconds = time.perf_counter() - started
        print(f"{cells[-1]}  {seconds:.0f} s", flush=True)
    return {"steps": args.steps, "cells": cells}


# Each: how it is computed, and how it is drawn.
FIGURES: dict[str, tuple[Callable[[Data, argparse.Namespace], dict], Callable[[dict], Figure]]] = {
    "snr": (lambda data, _: figure_data.unsafe_snr(data), draw_snr),
    "spectrum": (lambda data, _: figure_data.unsafe_spectrum(data), draw_spectrum),
    "tracking_cnn": (lambda data, _: figure_data.unsafe_tracking(data, "cnn"), draw_tracking_cnn),
    "tracking_vit": (
        lambda data, _: figure_data.unsafe_tracking(
            data, "vit", optim="adamw_torch", optim_args=None, learning_rate=2e-3
        ),
        draw_tracking_vit,
    ),
    "slq": (lambda data, _: figure_data.unsafe_slq(data), draw_slq),
    "surface": (compute_surface, draw_surface),
}


def save(name: str, result: dict, args: argparse.Namespace) -> None:
    """The numbers, with the command that made them."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    options = f" --steps {args.steps}" if name == "surface" else ""
    command = f"python recipes/figures.py {name}{options}"
    content = {"command": command, "result": _rounded(result)}
    partial = RESULTS / f"{name}.json.part"
    partial.write_text(json.dumps(content, ensure_ascii=False) + "\n")
    partial.replace(RESULTS / f"{name}.json")


def _rounded(value):
    """Five significant digits throughout."""
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def draw(name: str) -> None:
    result = json.loads((RESULTS / f"{name}.json").read_text())["result"]
    with style():
        figure = FIGURES[name][1](result)
        figure.savefig(RESULTS / f"{name}.png", dpi=150)
        figure.savefig(RESULTS / f"{name}.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="FIGURE", help=", ".join(FIGURES))
    parser.add_argument("--data-dir", type=Path, help="folder of the image sets; default: the Hub")
    parser.add_argument("--out", type=Path, default=Path("out/figures"), help="for trainings")
    parser.add_argument("--again", action="store_true", help="compute what is there already")
    parser.add_argument("--draw", action="store_true", help="only draw what is there")
    parser.add_argument("--steps", type=int, default=200, help="of each training of the surface")
    parser.add_argument("--cells", type=int, help="at most so many trainings of the surface now")
    args = parser.parse_args()
    unknown = set(args.names) - set(FIGURES)
    if unknown:
        parser.error(f"no figure {', '.join(sorted(unknown))}; there are {', '.join(FIGURES)}")
    data = Data(args.data_dir, args.out)
    for name in args.names or [n for n in FIGURES if n != "surface" or args.draw]:
        path = RESULTS / f"{name}.json"
        if not args.draw and (args.again or name == "surface" or not path.exists()):
            started = time.perf_counter()
            save(name, FIGURES[name][0](data, args), args)
            print(f"{name}: computed in {time.perf_counter() - started:.0f} s", flush=True)
        if path.exists():
            draw(name)
            print(RESULTS / f"{name}.png", flush=True)


if __name__ == "__main__":
    main()
