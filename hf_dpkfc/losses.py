"""The loss of each example, from the logits of Hugging Face's heads.

HF's own losses average over the batch (and LM losses over all its tokens), which makes one
example's gradient depend on its neighbours. Here every example is normalised by itself alone.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dpkfc.errors import RecordError, UnsupportedTaskError

IGNORED_LABEL = -100
# Relative; far above bf16's rounding, far below what another shift of labels makes.
LOSS_TOLERANCE = 0.02


class Task(StrEnum):
    """What a head predicts, hence which loss and which labels belong to it."""

    SINGLE_LABEL = "single_label_classification"
    MULTI_LABEL = "multi_label_classification"
    REGRESSION = "regression"
    TOKEN_LABEL = "token_classification"
    SPAN = "question_answering"
    MASKED_LM = "masked_lm"
    CAUSAL_LM = "causal_lm"


_TOKEN_HEADS = {
    "ForTokenClassification": Task.TOKEN_LABEL,
    "ForQuestionAnswering": Task.SPAN,
    "ForMaskedLM": Task.MASKED_LM,
    "ForCausalLM": Task.CAUSAL_LM,
    "LMHeadModel": Task.CAUSAL_LM,
}
_CLASSIFIERS = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForAudioClassification",
    "ForVideoClassification",
)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside a PEFT wrapper, or the model itself."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def task_of(model: nn.Module) -> Task:
    """The task of a model's head, read from its class name and configuration.

    Raises:
        UnsupportedTaskError: For a head without a known per-example loss.
    """
    model = unwrapped(model)
    for cls in type(model).__mro__:
        for suffix, task in _TOKEN_HEADS.items():
            if cls.__name__.endswith(suffix):
                return task
        if cls.__name__.endswith(_CLASSIFIERS):
            return _classification_task(model.config)
    raise UnsupportedTaskError(
        f"No per-example loss is known for {type(model).__name__}.",
        why="each example's own loss gradient is what clipping bounds, and the head's loss "
        "averages over the batch.",
        way_out="pass per_example_loss=fn with fn(outputs, inputs) -> [batch], for instance "
        "lambda out, x: torch.nn.functional.cross_entropy(out.logits, x['labels'], "
        "reduction='none').",
    )


def _classification_task(config: Any) -> Task:
    if config.problem_type is not None:
        return Task(config.problem_type)
    return Task.REGRESSION if config.num_labels == 1 else Task.SINGLE_LABEL


@dataclass(frozen=True)
class TaskLoss:
    """(model, inputs) -> losses [batch] for one of the known tasks."""

    task: Task

    @property
    def name(self) -> str:
        """What tells this loss from another one, the same in every launch."""
        return str(self.task)

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """The loss of each example; 0 for one whose labels are all ignored."""
        targets = {k: v for k, v in inputs.items() if k in (*TARGETS, "attention_mask")}
        self._require_targets(targets)
        features = {k: v for k, v in inputs.items() if k not in TARGETS}
        if self.task is Task.CAUSAL_LM:
            features = _with_position_ids(model, features)
        with _explained("model", features):
            outputs = model(**features)
        with _explained("loss", targets):
            return _LOSSES[self.task](outputs, targets)

    def _require_targets(self, targets: Mapping[str, Tensor]) -> None:
        needed = TARGETS[1:] if self.task is Task.SPAN else TARGETS[:1]
        missing = [name for name in needed if name not in targets]
        if missing:
            raise UnsupportedTaskError(
                f"A batch for {self.task} has no {' and no '.join(missing)}.",
                why="each example's own loss needs its target.",
                way_out=f"let the records and the data_collator give {', '.join(needed)}.",
            )
        if self.task is Task.SINGLE_LABEL and targets["labels"].is_floating_point():
            raise UnsupportedTaskError(
                "The labels are floats, and the head is taken for single-label classification.",
                why="which loss and which probes belong to a head is read off its configuration, "
                "never off the data.",
                way_out="set config.problem_type to 'multi_label_classification' or 'regression', "
                "or give integer labels.",
            )


@dataclass(frozen=True)
class CustomLoss:
    """(model, inputs) -> losses [batch] from a user's ``per_example_loss(outputs, inputs)``."""

    per_example_loss: Callable[[Any, Mapping[str, Any]], Tensor]

    @property
    def name(self) -> str:
        """The function's place and code: an edited loss is another one."""
        function = self.per_example_loss
        code = getattr(function, "__code__", None)
        body = code.co_code + repr(code.co_names).encode() if code else b""
        place = getattr(function, "__qualname__", type(function).__name__)
        return f"{function.__module__}.{place} {hashlib.sha256(body).hexdigest()}"

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """What the user's function makes of the model's outputs.

        The model gets the columns that it takes; those that only the loss reads stay with it.
        """
        accepted = inspect.signature(unwrapped(model).forward).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        unwanted = set() if takes_any else set(inputs) - set(accepted)
        features = {name: value for name, value in inputs.items() if name not in unwanted}
        return self.per_example_loss(model(**features), inputs)


# What a loss reads, and a model may or may not take.
TARGETS = ("labels", "start_positions", "end_positions")


@contextmanager
def _explained(what: str, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Torch's errors about sizes and indices, with the columns that they are about."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (IndexError, RuntimeError) as error:
        columns = ", ".join(
            f"{name} {list(value.shape)}"
            for name, value in inputs.items()
            if isinstance(value, Tensor)
        )
        raise RecordError(
            f"The {what} can't take a batch of records: {columns}.",
            why=f"{type(error).__name__}: {error}",
            way_out="check ids against vocab_size, lengths against max_position_embeddings, and "
            "labels against num_labels.",
        ) from error


def require_heads_own_loss(
    model: nn.Module, loss: TaskLoss, singles: Sequence[Mapping[str, Any]]
) -> None:
    """Raise unless our loss of a single example is what its head computes itself.

    For one example both are its own mean. Heads that shift their labels otherwise, weigh classes or
    add terms of their own would train towards something else than their users evaluate.

    Args:
        model: In eval mode.
        loss: Ours.
        singles: Batches of one example, with targets.

    Raises:
        UnsupportedTaskError: If the two differ.
    """
    with torch.no_grad():
        for inputs in singles:
            theirs = _heads_own_loss(model, inputs)
            if theirs is None:
                return
            ours = loss(model, inputs)[0]
            if (ours - theirs).abs() > LOSS_TOLERANCE * theirs.abs().clamp(min=1.0):
                raise UnsupportedTaskError(
                    f"{type(unwrapped(model)).__name__} gives a probe the loss {theirs:.4g}, and "
                    f"our loss for {loss.task} is {ours:.4g}.",
                    why="the model would be trained towards something else than it is evaluated "
                    "by.",
                    way_out="pass per_example_loss=fn with fn(outputs, inputs) -> [batch].",
                )


def _heads_own_loss(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor | None:
    """Of one example; None where the head computes none."""
    config: Any = getattr(unwrapped(model), "config", None)
    before = getattr(config, "problem_type", None)
    accepted = inspect.signature(unwrapped(model).forward).parameters
    if not all(name in accepted for name in TARGETS if name in inputs):
        return None
    found = getattr(model(**inputs), "loss", None)
    if getattr(config, "problem_type", None) != before:
        config.problem_type = before  # heads write down what they took the labels for
    return found if isinstance(found, Tensor) and found.dim() == 0 else None


def _with_position_ids(model: nn.Module, features: dict[str, Any]) -> dict[str, Any]:
    """Positions counted from the mask: left padding shifts them by the neighbours' lengths.

    Without left padding they are the model's own affair: RoBERTa's begin at padding_idx + 1.
    """
    mask = features.get("attention_mask")
    accepted = inspect.signature(unwrapped(model).forward).parameters
    if mask is None or "position_ids" in features or "position_ids" not in accepted:
        return features
    if mask[:, 0].all():
        return features
    return {**features, "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}


def _wide(logits: Tensor) -> Tensor:
    """In float32 at least, as the targets are: bf16 would round a target of 1003 to 1004."""
    return logits.float() if logits.dtype == torch.bfloat16 else logits


def _flat_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over an example's own labelled positions, [batch]."""
    losses = F.cross_entropy(
        _wide(logits.flatten(0, 1)),
        labels.flatten(),
        reduction="none",
        ignore_index=IGNORED_LABEL,
    ).view(labels.shape)
    return losses.sum(1) / (labels != IGNORED_LABEL).sum(1).clamp(min=1)


def _single_label(outputs: Any, targets: Mapping[str, Tensor]) -> Tensor:
    labels = targets["labels"].view(-1)
    return F.cross_entropy(
        _wide(outputs.logits), labels, reduction="none", ignore_index=IGNORED_LABEL
    )


def _multi_label(outputs: Any, targets: Mapping[str, Tensor]) -> Tensor:
    logits = _wide(outputs.logits)
    labels = targets["labels"].to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(-1)


def _regression(outputs: Any, targets: Mapping[str, Tensor]) -> Tensor:
    logits = _wide(outputs.logits)
    return (logits - targets["labels"].to(logits.dtype).view_as(logits)).square().mean(-1)


def _token_label(outputs: Any, targets: Mapping[str, Tensor]) -> Tensor:
    return _flat_cross_entropy(outputs.logits, targets["labels"])


def _causal_lm(outputs: Any, targets: Mapping[str, Tensor]) -> Tensor:
    """Next-token loss; a token after left padding is nobody's next, however long the padding."""
    # The labels are moved, not the logits: those would be copied whole, vocabulary and all.
    labels = F.pad(targets["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)
    if "attention_mask" in targets:
        labels = labels.masked_fill(targets["attention_mask"] == 0, IGNORED_LABEL)
    return _flat_cross_entropy(outputs.logits, labels)


def _span(outputs: Any, targets: Mapping[str, Tensor]) -> Tensor:
    """Mean of both ends; positions outside the window are ignored, as HF does.

    Unlike in HF, padding is no candidate answer: its share in the softmax would depend on how long
    the neighbours are.
    """
    length = outputs.start_logits.shape[1]
    padding = targets["attention_mask"] == 0 if "attention_mask" in targets else None
    ends = []
    for end in ("start", "end"):
        logits = getattr(outputs, f"{end}_logits")
        if padding is not None:
            logits = logits.masked_fill(padding, torch.finfo(logits.dtype).min)
        position = targets[f"{end}_positions"].view(-1).clamp(0, length)
        if padding is not None:  # an answer beyond the example's own tokens is outside the window
            outside = F.pad(padding, (0, 1), value=True).gather(1, position.unsqueeze(1)).squeeze(1)
            position = position.masked_fill(outside, length)
        ends.append(F.cross_entropy(logits, position, reduction="none", ignore_index=length))
    return (ends[0] + ends[1]) / 2


_LOSSES: Mapping[Task, Callable[[Any, Mapping[str, Tensor]], Tensor]] = {
    Task.SINGLE_LABEL: _single_label,
    Task.MULTI_LABEL: _multi_label,
    Task.REGRESSION: _regression,
    Task.TOKEN_LABEL: _token_label,
    Task.SPAN: _span,
    Task.MASKED_LM: _token_label,
    Task.CAUSAL_LM: _causal_lm,
}
