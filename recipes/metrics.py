"""``compute_metrics`` for the recipes, by ``evaluate``'s local metric modules."""

from __future__ import annotations

from pathlib import Path

import evaluate
from transformers import EvalPrediction

_ACCURACY = evaluate.load(str(Path(__file__).with_name("accuracy.py")))


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy of the largest logit."""
    return _ACCURACY.compute(
        predictions=prediction.predictions.argmax(-1), references=prediction.label_ids
    )
