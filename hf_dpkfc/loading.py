"""What stands between HF's training loop and the private records: steps, not batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from hf_dpkfc.curvature.probes import Batch, Probe
from hf_dpkfc.errors import ConfigurationError, RecordError
from hf_dpkfc.global_state import seeded_global_state
from hf_dpkfc.losses import TARGETS, unwrapped


class _Steps(Dataset[dict[str, Any]]):
    """As long as the public data set, for HF's counts; its items are step numbers only."""

    def __init__(self, public_size: int) -> None:
        self.public_size = public_size

    def __len__(self) -> int:
        return self.public_size

    def __getitem__(self, step: int) -> dict[str, Any]:
        return {"logical_step": step}


class _StepSampler(Sampler[list[int]]):
    """One item per logical step of an epoch, so that a resumed run skips numbers, not records."""

    def __init__(self, steps_per_epoch: int) -> None:
        self.steps_per_epoch = steps_per_epoch

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter([step] for step in range(self.steps_per_epoch))


def logical_steps(steps_per_epoch: int, public_size: int) -> DataLoader[dict[str, Any]]:
    """The loader that HF's loop iterates: records are drawn inside ``training_step``.

    It holds no record, so nothing that HF counts or prefetches can depend on one, and an empty
    draw is a step like any other.
    """
    return DataLoader(
        _Steps(public_size),
        batch_sampler=_StepSampler(steps_per_epoch),
        collate_fn=lambda items: items[0],
    )


@dataclass(frozen=True)
class Collate:
    """From records to model inputs on the device, through the user's collator.

    Attributes:
        collator: The trainer's ``data_collator``.
        columns: Columns to keep; None keeps all (``remove_unused_columns=False``).
        device: Where the model is.
    """

    collator: Callable[[list[Any]], Any]
    columns: frozenset[str] | None
    device: torch.device

    def __call__(self, records: list[Any]) -> Mapping[str, Any]:
        """One micro-batch."""
        kept = [self._kept(record) for record in records]
        try:
            inputs = dict(self.collator(kept))
        except Exception as error:  # the user's code: whatever it raises, the batch isn't there
            raise RecordError(
                "The data_collator can't make a batch of train_dataset's records.",
                why=f"{type(error).__name__}: {error}",
                way_out="give every record the columns that collator and model need (for text "
                "input_ids and labels), as numbers.",
            ) from error
        return send_to_device(inputs, self.device)

    def _kept(self, record: Any) -> Any:
        if self.columns is None or not isinstance(record, Mapping):
            return record
        return {name: value for name, value in record.items() if name in self.columns}


def lengths_of(dataset: Sequence[Any]) -> Callable[[int], int] | None:
    """From an index to the number of its record's tokens; None where records hold none."""
    if not len(dataset) or not _num_tokens(dataset[0]):
        return None
    return cache(lambda index: _num_tokens(dataset[index]))


def _num_tokens(record: Any) -> int:
    """Zero where there are none; a record that is malformed is the collator's to refuse."""
    try:
        return len(record["input_ids"])
    except (TypeError, KeyError, IndexError):
        return 0


def used_columns(model: nn.Module, label_names: Sequence[str]) -> frozenset[str]:
    """The columns that ``remove_unused_columns`` leaves: the model's arguments and its targets."""
    arguments = inspect.signature(unwrapped(model).forward).parameters
    return frozenset({*arguments, *label_names, *TARGETS, "label", "label_ids"})


def neighbours(
    probe: Probe, collate: Callable[[list[Any]], Mapping[str, Any]], device: torch.device
) -> tuple[Mapping[str, Any], list[Mapping[str, Any]], bool]:
    """Three probes together and one at a time, through the user's collator where it takes them.

    Returns:
        The batch, the single examples, and whether the collator was used. A collator that wants
        other columns, or that draws at random (masked LM), can't be checked with probes.

    Raises:
        ConfigurationError: If the collator draws from a random generator of its own.
    """
    batch = _mixed_batch(probe)
    records = [_record(batch, i) for i in range(len(next(iter(batch.values()))))]
    # A collator for language models makes the labels itself, and pads no column of that name.
    unlabelled = [{k: v for k, v in record.items() if k not in TARGETS} for record in records]
    for candidates in (records, unlabelled):
        collated = _collated(candidates, collate)
        if collated is not None and _has_targets(collated[0]):
            return *collated, True
    singles = [{k: _trimmed(batch, k, i) for k in batch} for i in range(len(records))]
    return send_to_device(batch, device), send_to_device(singles, device), False


def _collated(
    records: list[Any], collate: Callable[[list[Any]], Mapping[str, Any]]
) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]] | None:
    """The batch and its single examples; None where the collator refuses or draws at random.

    Raises:
        ConfigurationError: If it draws from a generator of its own.
    """
    try:
        together, again, otherwise = (_drawn(records, collate, seed) for seed in (1, 1, 2))
        alone = [_drawn([record], collate, 1) for record in records]
        repeats, is_deterministic = _equal(together, again), _equal(together, otherwise)
    except Exception:  # the user's code: whatever it raises, it doesn't take probes
        return None
    if not repeats:
        raise ConfigurationError(
            "The data_collator draws from a random generator of its own.",
            why="one record more would shift what the others get, in a way that whoever knows its "
            "seed could follow: a step would be more sensitive than C.",
            way_out="leave its seed at None (as in DataCollatorForLanguageModeling), so that it "
            "draws from the step's secret.",
        )
    return (together, alone) if is_deterministic else None


def _drawn(
    records: list[Any], collate: Callable[[list[Any]], Mapping[str, Any]], seed: int
) -> Mapping[str, Any]:
    """A batch, with this seed behind whatever draws from global state."""
    with seeded_global_state(np.full(8, seed, dtype=np.uint32)):
        return collate(records)


def _equal(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one)


def _has_targets(inputs: Mapping[str, Any]) -> bool:
    return any(name in inputs for name in TARGETS)


def _mixed_batch(probe: Probe) -> Batch:
    """Three probes of different lengths (lengths are sorted within a draw, so take every third)."""
    batch = next(iter(probe.batches(1, 9, torch.Generator().manual_seed(0))))
    return {name: value[::3] for name, value in batch.items()}


def _real(batch: Batch, i: int, value: Tensor) -> Tensor:
    """A token-level row without its padding; other rows as they are."""
    mask = batch.get("attention_mask")
    if mask is None or mask.dim() != 2 or value.shape != mask.shape:
        return value[i]
    return value[i][mask[i].bool()]


def _record(batch: Batch, i: int) -> dict[str, Any]:
    """One probe as a data set would hold it."""
    rows = {name: _real(batch, i, value) for name, value in batch.items()}
    return {n: row if "pixel" in n else row.tolist() for n, row in rows.items()}


def _trimmed(batch: Batch, name: str, i: int) -> Tensor:
    return _real(batch, i, batch[name]).unsqueeze(0)
