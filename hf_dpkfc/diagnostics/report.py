"""One self-contained HTML page about a run: no script, no request; for screen, phone and paper."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_dpkfc.diagnostics.page import grid, image, page, paragraph, table
from hf_dpkfc.diagnostics.plots import dumbbell_figure, line_figure
from hf_dpkfc.diagnostics.record import Entry
from hf_dpkfc.diagnostics.rundata import RunData, read_run
from hf_dpkfc.errors import ConfigurationError

REPORT_NAME = "report.html"

# A figure with more rows than this can't be read; the table has all of them.
MAX_ROWS = 40
# Curves in one figure of spectra.
MAX_CURVES = 5
# Of the curve of ε; PRV takes a second for each.
EPSILON_POINTS = {"rdp": 40, "prv": 8}


def write_report(folder: Path, target: Path | None = None) -> Path:
    """Write the page of a run, by default into its folder, and return the file.

    Raises:
        ConfigurationError: If the folder holds nothing of a run, or the file can't be written.
    """
    text = render_report(read_run(folder))
    path = target or folder / REPORT_NAME
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigurationError(
            f"{path} can't be written.", why=str(error), way_out="choose another --output."
        ) from error
    return path


def render_report(data: RunData) -> str:
    """The page of a run. A section that can't be drawn says why, and the others are there."""
    sections: Mapping[str, Callable[[RunData], str]] = {
        "Privacy": _privacy,
        "Accuracy": _accuracy,
        "Signal against noise": _signal,
        "Spectra of the factors": _spectra,
        "Alignment": _alignment,
        "Layer by layer": _layers,
    }
    messages = list(data.messages)
    body = "".join(_section(title, build, data, messages) for title, build in sections.items())
    title = f"hf_dpkfc: {data.folder.absolute().name}"
    return page(title, messages, body)


def _section(
    title: str, build: Callable[[RunData], str], data: RunData, messages: list[str]
) -> str:
    try:
        content = build(data)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        messages.append(f"{title}: can't be drawn from what this run left ({error!r}).")
        return ""
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


# ---- Sections ----


def _privacy(data: RunData) -> str:
    plan, spent, statement = data.plan, data.num_releases, data.statement
    if plan is None:
        return "" if data.tuning is None else _tuning(data)
    if not data.claims_privacy or (statement is not None and not statement.claims_privacy):
        return paragraph("No ε is claimed: the preconditioner saw private records.")
    rows = [line.split("  ", 1) for line in str(plan).splitlines()]
    facts = [[name.strip(), text.strip()] for name, text in rows]
    if spent is not None:
        facts.append(["charged", f"{spent} of {plan.steps} releases"])
        facts.append(["ε spent", f"{plan.epsilon_at(spent):.4g}"])
    if statement is not None:
        geometry = ", ".join(f"{k} {v}" for k, v in statement.preconditioner.items())
        facts.append(["preconditioner", geometry])
    if statement is not None and statement.logged_unsafe_metrics:
        facts.append(["logs", "hold un-noised facts about private batches (log_unsafe_metrics)"])
    return grid(table(facts), _epsilon_figure(data)) + _tuning(data)


def _epsilon_figure(data: RunData) -> str:
    plan = data.plan
    if plan is None or not math.isfinite(plan.epsilon):
        return paragraph("ε is infinite: there is no curve to draw.")
    spent = plan.steps if data.num_releases is None else min(data.num_releases, plan.steps)
    count = EPSILON_POINTS[plan.accountant]
    points = sorted({round(plan.steps * i / count) for i in range(count + 1)})
    curve = [(n, plan.epsilon_at(n)) for n in points]
    series = {
        "planned": curve,
        "spent": [p for p in curve if p[0] <= spent] + [(spent, plan.epsilon_at(spent))],
    }
    figure = line_figure(
        series,
        x_label="step",
        y_label="ε",
        title=f"ε over steps at δ = {plan.delta:.2g}",
        styles=(1, 0),
    )
    return image(
        figure,
        f"ε rises to {plan.epsilon:.3g} over {plan.steps} steps; {plan.epsilon_at(spent):.3g} "
        f"is spent after {spent}.",
    )


def _tuning(data: RunData) -> str:
    if data.tuning is None:
        return paragraph(
            "Tuning, preprocessing and evaluation aren't covered by this ε: it is one run's."
        )
    return paragraph(str(data.tuning["statement"]))


def _accuracy(data: RunData) -> str:
    names = sorted({name for _, metrics in data.evaluations for name in metrics} - {"epoch"})
    if not names:
        return paragraph("No evaluation was logged: pass eval_dataset= and eval_strategy.")
    # Accuracy and its like first; a loss has another scale and gets a figure of its own.
    figures = []
    for wanted in ([n for n in names if n != "loss"], [n for n in names if n == "loss"]):
        series = {
            name: [(step, m[name]) for step, m in data.evaluations if name in m] for name in wanted
        }
        if series:
            title = "Evaluation: " + ", ".join(wanted)
            label = wanted[0] if len(wanted) == 1 else "metric"
            last = ", ".join(f"{name} {points[-1][1]:.4g}" for name, points in series.items())
            figure = line_figure(series, x_label="step", y_label=label, title=title)
            figures.append(image(figure, f"{title} over steps; at the end {last}."))
    last_step, metrics = data.evaluations[-1]
    shown = ", ".join(f"{n} = {metrics[n]:.4g}" for n in names if n in metrics)
    return paragraph(f"After {last_step} steps: {shown}.") + grid(*figures)


def _signal(data: RunData) -> str:
    if not data.looks:
        return ""
    look = data.looks[-1]
    measured = {n: s for n, s in look["signals"].items() if s["share"] > 0 < s["share_without"]}
    names = _most_parameters(measured)
    short = _short_names(names)
    figures = []
    if all(measured[n]["snr"] for n in names):
        rows = [(short[n], measured[n]["snr_without"], measured[n]["snr"]) for n in names]
        figures.append(
            image(
                dumbbell_figure(
                    rows, x_label="SNR per example", title="Signal against noise, on probes"
                ),
                _spread("The SNR of layers", rows),
            )
        )
    rows = [(short[n], measured[n]["share_without"], measured[n]["share"]) for n in names]
    figures.append(
        image(
            dumbbell_figure(
                rows, x_label="mean share of ‖Ug‖²", title="Share in the clip norm, on probes"
            ),
            _spread("The share of layers in the clip norm", rows),
        )
    )
    left_out = len(look["signals"]) - len(names)
    note = (
        f"After {look['step']} steps. SNR is the root mean square of a layer's clipped probe "
        "gradients against the norm of its noise, σ·C/B·√d."
    )
    if left_out:
        note += f" {left_out} smaller or silent layers are only in the table below."
    return paragraph(note) + grid(*figures)


def _spread(what: str, rows: Sequence[tuple[str, float, float]]) -> str:
    before, after = ([row[i] for row in rows] for i in (1, 2))
    return (
        f"{what} spans {min(before):.2g} to {max(before):.2g} without the preconditioner, "
        f"{min(after):.2g} to {max(after):.2g} with it."
    )


def _most_parameters(signals: Mapping[str, Any]) -> list[str]:
    """At most MAX_ROWS layers, the largest ones, in the model's order."""
    largest = sorted(signals, key=lambda n: -signals[n]["num_parameters"])[:MAX_ROWS]
    return [name for name in signals if name in set(largest)]


def _spectra(data: RunData) -> str:
    if not data.looks:
        return ""
    look = data.looks[-1]
    names = _evenly(list(look["layers"]), MAX_CURVES)
    if not names:
        return paragraph("No layer has factors: nothing is preconditioned by K-FAC.")
    short = _short_names(names)
    figures = []
    for side, meaning in (("A", "inputs"), ("G", "output gradients"), ("F", "A ⊗ G")):
        series = {}
        for name in names:
            layer = look["layers"][name][side]
            points = layer if side == "F" else layer["spectrum"]
            top = points[0][1]
            series[short[name]] = [(rank, v / top) for rank, v in points if v > 1e-12 * top]
        figure = line_figure(
            series,
            x_label="rank",
            y_label="λ/λ_max",
            log_x=True,
            log_y=True,
            title=f"Eigenvalues of {side} ({meaning})",
        )
        figures.append(image(figure, f"Sorted eigenvalues of {side} for {', '.join(series)}."))
    text = f"After {look['step']} steps, on probes; zero eigenvalues aren't drawn."
    return paragraph(text) + grid(*figures, _ranks_figure(data))


def _ranks_figure(data: RunData) -> str:
    """Effective rank and condition number over training, medians over layers."""
    series = {
        f"{text} of {side}": [
            (look["step"], statistics.median(values))
            for look in data.looks
            if (values := [layer[side][key] for layer in look["layers"].values()])
        ]
        for key, text in (
            ("effective_rank", "effective rank"),
            ("condition_number", "condition number"),
        )
        for side in "AG"
    }
    figure = line_figure(
        series,
        x_label="step",
        y_label="median over layers",
        log_y=True,
        title="Effective rank and damped condition number",
        colors=(0, 1, 0, 1),
        styles=(0, 0, 1, 1),
    )
    last = ", ".join(f"{name} {points[-1][1]:.3g}" for name, points in series.items())
    return image(figure, f"At the last step: {last}.")


def _alignment(data: RunData) -> str:
    sources = list(dict.fromkeys(s for look in data.looks for s in look["alignment"]))
    if not sources:
        return ""
    figures = []
    for index, (label, title) in enumerate(
        (("cosine", "Cosine with the run's probe"), ("relative error", "Relative Frobenius error"))
    ):
        series, colors, styles = {}, [], []
        for i, source in enumerate(sources):
            for j, side in enumerate("FAG"):
                points = _medians(data.looks, source, side, index)
                if points:
                    series[f"{side}, {source}"] = points
                    colors.append(i)
                    styles.append(j)
        figure = line_figure(
            series,
            x_label="step",
            y_label=f"{label}, median over layers",
            title=title,
            colors=colors,
            styles=styles,
        )
        last = ", ".join(f"{name} {points[-1][1]:.3g}" for name, points in series.items())
        figures.append(image(figure, f"{title}, at the last step: {last}."))
    text = (
        "Other sources against the run's own probe, at the same weights. “another draw” is the "
        "same probe with other random numbers: how far few probes determine the factors at all."
    )
    return paragraph(text) + grid(*figures)


def _medians(
    looks: Sequence[Entry], source: str, side: str, index: int
) -> list[tuple[float, float]]:
    points = []
    for look in looks:
        values = [layer[side][index] for layer in look["alignment"].get(source, {}).values()]
        if values:
            points.append((look["step"], statistics.median(values)))
    return points


def _layers(data: RunData) -> str:
    if not data.looks:
        return ""
    look = data.looks[-1]
    header = ["layer", "parameters", "eff. rank A", "G", "condition A", "G", "damping/λ_max A", "G"]
    header += ["SNR without", "with", "share without", "with"]
    rows = []
    for name, signal in look["signals"].items():
        layer = look["layers"].get(name)
        row = [name, f"{signal['num_parameters']:,}"]
        for key in ("effective_rank", "condition_number", "damping_over_largest"):
            row += [f"{layer[side][key]:.3g}" if layer else "–" for side in "AG"]
        for key in ("snr_without", "snr", "share_without", "share"):
            row.append("–" if signal[key] is None else f"{signal[key]:.3g}")
        rows.append(row)
    notes = "".join(map(paragraph, look["notes"]))
    text = (
        f"After {look['step']} steps, on probes. – stands where a layer has no K-FAC factor: "
        "norms, embeddings and biases of their own, or a layer named below."
    )
    return paragraph(text) + table(rows, header) + notes


# ---- Names ----


def _evenly(names: list[str], count: int) -> list[str]:
    """The first, the last, and some between."""
    if len(names) <= count:
        return names
    return [names[round(i * (len(names) - 1) / (count - 1))] for i in range(count)]


def _short_names(names: Sequence[str]) -> dict[str, str]:
    """Names without what all of them begin with, and without HF's commonest filler."""
    split = [name.split(".") for name in names]
    shared = 0
    while len(split) > 1 and all(
        len(s) > shared + 1 and s[shared] == split[0][shared] for s in split
    ):
        shared += 1
    parts = [".".join(s[shared:]) for s in split]
    fillers = ("bert.", "vit.", "encoder.layer.", "attention.attention.", "attention.self.")
    shorter = []
    for part in parts:
        for filler in fillers:
            part = part.replace(filler, "att." if filler.startswith("attention") else "")
        shorter.append(part)
    return dict(zip(names, shorter if len(set(shorter)) == len(names) else parts, strict=True))
