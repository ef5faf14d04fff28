"""ε on the progress bar, and the stop before the budget is overspent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import logging

from hf_dpkfc.engine import PrivateRun
from hf_dpkfc.errors import PublishingError

logger = logging.get_logger(__name__)


class PrivacyProgressCallback(ProgressCallback):
    """HF's progress bar with the ε spent so far behind it."""

    def __init__(self, epsilon: Callable[[], float]) -> None:
        super().__init__()
        self.epsilon = epsilon

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Advance the bar."""
        super().on_step_end(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_postfix_str(f"ε={self.epsilon():.3g}", refresh=False)


class PublishingCallback(TrainerCallback):
    """Pushes at each save, as ``hub_strategy`` asks, through our own allow-list."""

    def __init__(self, push: Callable[[str], object]) -> None:
        self.push = push

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A push that fails doesn't cost the training."""
        if not state.is_world_process_zero:
            return
        try:
            self.push(f"Training in progress, step {state.global_step}")
        except PublishingError as error:
            logger.warning("%s", error)


class BudgetCallback(TrainerCallback):
    """Stops training before a step that the ledger would refuse; on all processes alike."""

    def __init__(self, run: Callable[[], PrivateRun | None]) -> None:
        self.run = run

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ask for the next step."""
        run = self.run()
        if run is None or state.global_step >= state.max_steps:
            return
        if not run.may_release(state.global_step):
            logger.warning(
                "Training stops at step %d of %d: the steps lost in earlier launches were charged "
                "to the same budget, and all %d releases of the plan are spent.",
                state.global_step,
                state.max_steps,
                run.plan.steps,
            )
            control.should_training_stop = True
