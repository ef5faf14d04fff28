"""Accuracy as a metric module of ``evaluate``, so that it loads without the Hub."""

from __future__ import annotations

import datasets
import evaluate

DESCRIPTION = "Share of predictions that equal their reference."


class Accuracy(evaluate.Metric):
    """Accuracy over class numbers."""

    def _info(self) -> evaluate.MetricInfo:
        number = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description="predictions and references: class numbers.",
            features=datasets.Features({"predictions": number, "references": number}),
        )

    def _compute(self, predictions, references) -> dict[str, float]:
        equal = [p == r for p, r in zip(predictions, references, strict=True)]
        return {"accuracy": sum(equal) / max(1, len(equal))}
