"""Typed errors: every refusal names the thing, why the promise would break, and the way out."""

from __future__ import annotations

from functools import partial
from typing import Any


class DPKFCError(Exception):
    """Base of all refusals; its message is ``what``, then ``why``, then ``way_out``.

    Args:
        what: The thing that is refused, with the value received.
        why: Which promise (of privacy, exactness or reproducibility) would break.
        way_out: What to do instead.
    """

    def __init__(self, what: str, *, why: str, way_out: str) -> None:
        super().__init__(f"{what}\n  Why: {why}\n  Way out: {way_out}")
        self.what = what
        self.why = why
        self.way_out = way_out

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors cross processes, so they can be pickled although their arguments have names."""
        return partial(type(self), self.what, why=self.why, way_out=self.way_out), ()


class ConfigurationError(DPKFCError, ValueError):
    """An option or argument has a value we can't honour."""


class UnsupportedLayerError(DPKFCError):
    """A trainable parameter has no rule that gives its exact per-sample gradient."""


class ProbeError(DPKFCError, ValueError):
    """Synthetic inputs can't be made for this model, tokenizer or image processor."""


class NeighbourError(DPKFCError):
    """One example's loss or gradient depends on the other examples of its batch."""


class UnsupportedTaskError(DPKFCError):
    """The model's head has no known per-example loss."""


class RecordError(DPKFCError, ValueError):
    """Records don't fit the collator, the model or its loss."""


class BudgetError(DPKFCError):
    """The next step would spend more than the plan allows."""


class LedgerError(DPKFCError):
    """The ledger is damaged, tampered with, in use, or belongs to another plan or key."""


class PublishingError(DPKFCError):
    """Something may not be published, or could not be published whole."""
