"""What is measured on probes during a training, and the file in which it is kept for the report."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from hf_dpkfc.curvature.fit import CurvatureOptions, estimate_factors
from hf_dpkfc.curvature.preconditioner import Preconditioner
from hf_dpkfc.curvature.probes import PinkNoiseProbe, Probe, UniformTokenProbe, ZipfTokenProbe
from hf_dpkfc.diagnostics.alignment import Agreement, align
from hf_dpkfc.diagnostics.signal import probe_signals
from hf_dpkfc.diagnostics.spectra import LayerSpectra, Spectrum, layer_spectra, thinned
from hf_dpkfc.layers.capture import PerExampleLoss
from hf_dpkfc.layers.routes import RouteTable

DIAGNOSTICS_NAME = "diagnostics.jsonl"
FORMAT = 1

# Points kept of each spectrum: enough for a curve, and a BERT's 74 layers stay below 150 kB a line.
SPECTRUM_POINTS = 32

Entry = dict[str, Any]


@dataclass(frozen=True)
class Observatory:
    """Everything that is needed to look at a model's geometry, none of it private.

    Attributes:
        model: Unwrapped.
        probe: The run's own; never one that holds private records.
        options: The run's own.
        clip_norm: C.
        noise_std: σ·C/B, the noise on each coordinate of the noisy mean.
        sources: Other probes to compare with, by name, at the same weights.
        per_example_loss: (model, inputs) -> [batch]; by default that of the model's task.
        table: The table of routes, if the caller has it.
    """

    model: nn.Module
    probe: Probe
    options: CurvatureOptions
    clip_norm: float
    noise_std: float
    sources: Mapping[str, Probe] = field(default_factory=dict)
    per_example_loss: PerExampleLoss | None = None
    table: RouteTable | None = None

    def look(self, preconditioner: Preconditioner, step: int, seed: int) -> Entry:
        """One line of the log: spectra, alignment and signals at the present weights."""
        mine = self._factors(self.probe, seed)
        spectra, notes = layer_spectra(mine, self.options.damping)
        alignment = {}
        # The run's own factors use the streams seed and seed + 1.
        for name, probe in {"another draw": self.probe, **self.sources}.items():
            layers, _ = align(mine, self._factors(probe, seed + 2))
            alignment[name] = {
                layer.name: {side: _pair(getattr(layer, side)) for side in "AGF"}
                for layer in layers
            }
        return {
            "kind": "diagnostics",
            "step": step,
            "layers": {layer.name: _spectra(layer) for layer in spectra},
            "alignment": alignment,
            "signals": self._signals(preconditioner, seed + 3),
            "condition_number": _short(preconditioner.condition()),
            "notes": notes,
        }

    def _factors(self, probe: Probe, seed: int) -> Any:
        return estimate_factors(
            self.model,
            probe,
            self.options,
            seed=seed,
            per_example_loss=self.per_example_loss,
            table=self.table,
        )

    def _signals(self, preconditioner: Preconditioner, seed: int) -> dict[str, Any]:
        """SNR and share of each layer on probes, with and without the preconditioner."""
        with_it, without = (
            probe_signals(
                self.model,
                self.probe,
                maps,
                self.clip_norm,
                batch_size=self.options.batch_size,
                seed=seed,
                per_example_loss=self.per_example_loss,
                table=self.table,
            )
            for maps in (preconditioner, Preconditioner.identity())
        )
        return {
            one.name: {
                "num_parameters": one.num_parameters,
                "snr": self._snr(one),
                "snr_without": self._snr(other),
                "share": _short(one.share),
                "share_without": _short(other.share),
            }
            for one, other in zip(with_it, without, strict=True)
        }

    def _snr(self, signal: Any) -> float | None:
        """Per example: labels of probes are random, so their mean gradient says nothing."""
        return None if self.noise_std == 0 else _short(signal.snr_per_example(self.noise_std))


def contrast_of(probe: Probe) -> dict[str, Probe]:
    """The same probe without its structure: white for pink noise, uniform for Zipf tokens."""
    if isinstance(probe, PinkNoiseProbe) and probe.alpha != 0:
        return {"white noise": dataclasses.replace(probe, alpha=0.0)}
    if isinstance(probe, ZipfTokenProbe) and probe.exponent != 0:
        own = (probe.template, probe.payload_ids, probe.labels, probe.min_length, probe.max_length)
        return {"uniform tokens": UniformTokenProbe(*own)}
    return {}


def summary(entry: Entry) -> dict[str, float]:
    """The scalars of an entry that go to the training logs; medians are over layers."""
    logs: dict[str, float] = {"precond/condition_number": entry["condition_number"]}
    layers = list(entry["layers"].values())
    for side in "AG":
        for key in ("effective_rank", "condition_number", "damping_over_largest"):
            values = [layer[side][key] for layer in layers]
            if values:
                logs[f"precond/{key}_{side}"] = statistics.median(values)
    for source, agreed in entry["alignment"].items():
        cosines = [layer["F"][0] for layer in agreed.values()]
        if cosines:
            logs[f"precond/cosine_F/{source.replace(' ', '_')}"] = statistics.median(cosines)
    return logs | _signal_summary(entry["signals"].values())


def _signal_summary(signals: Any) -> dict[str, float]:
    """Geometric mean of the layers' gains in SNR."""
    gains = [s["snr"] / s["snr_without"] for s in signals if s["snr"] and s["snr_without"]]
    if not gains:
        return {}
    return {"precond/snr_gain": math.exp(statistics.fmean(map(math.log, gains)))}


def _spectra(layer: LayerSpectra) -> dict[str, Any]:
    return {"A": _spectrum(layer.A), "G": _spectrum(layer.G), "F": _points(layer.F)}


def _spectrum(spectrum: Spectrum) -> dict[str, Any]:
    return {
        "effective_rank": _short(spectrum.effective_rank),
        "condition_number": _short(spectrum.condition_number),
        "damping_over_largest": _short(spectrum.damping_over_largest),
        "spectrum": _points(spectrum.values),
    }


def _points(values: Any) -> list[tuple[int, float]]:
    return [(rank, _short(value)) for rank, value in thinned(values, SPECTRUM_POINTS)]


def _pair(agreement: Agreement) -> tuple[float, float]:
    return _short(agreement.cosine), _short(agreement.relative_error)


def _short(value: float) -> float:
    """Five significant digits: more would be false precision and a larger file."""
    return float(f"{value:.5g}")


@dataclass(frozen=True)
class DiagnosticsLog:
    """A JSON Lines file: a header, then one line per look or evaluation."""

    path: Path

    def start(self, header: Entry, step: int) -> None:
        """Begin anew, but keep what an interrupted launch wrote up to the step it resumes from."""
        entries = read_log(self.path).entries if step > 0 and self.path.exists() else []
        kept = [entry for entry in entries if entry.get("step", math.inf) <= step]
        first = {"kind": "header", "format": FORMAT, "version": version("hf-dpkfc"), **header}
        partial = self.path.with_suffix(".part")
        partial.write_text("".join(_line(entry) for entry in [first, *kept]))
        os.replace(partial, self.path)

    def append(self, entry: Entry) -> None:
        """Add one line."""
        with open(self.path, "a") as file:
            file.write(_line(entry))


def _line(entry: Entry) -> str:
    return json.dumps(entry, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class LogContent:
    """What could be read of a log, and what couldn't."""

    header: Entry
    entries: list[Entry]
    problems: list[str]


def read_log(path: Path) -> LogContent:
    """Every whole line of a log; a line that can't be read is named and left out."""
    entries: list[Entry] = []
    problems: list[str] = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        try:
            entry = json.loads(line)
            entry["kind"]
            entries.append(entry)
        except (ValueError, TypeError, KeyError):
            problems.append(f"{path.name}: line {number} can't be read and is left out.")
    header = next((e for e in entries if e["kind"] == "header"), {})
    return LogContent(header, [e for e in entries if e["kind"] != "header"], problems)
