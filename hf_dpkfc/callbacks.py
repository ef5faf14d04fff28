"""What goes with a private run: ε on the bar, the stop in time, own checkpoints, diagnostics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import (
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import logging

from hf_dpkfc.config import DPKFCConfig
from hf_dpkfc.curvature.probes import Probe
from hf_dpkfc.diagnostics.record import (
    DIAGNOSTICS_NAME,
    DiagnosticsLog,
    Observatory,
    contrast_of,
    summary,
)
from hf_dpkfc.diagnostics.rundata import evaluation_metrics
from hf_dpkfc.engine import PrivateRun
from hf_dpkfc.errors import ConfigurationError, PublishingError

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
    """Stops training before a step that the ledger would refuse; on all processes alike.

    And refuses a step that was taken behind the ledger's back: a subclass that replaces
    ``training_step`` would otherwise train without noise under a private plan.
    """

    def __init__(self, run: Callable[[], PrivateRun | None]) -> None:
        self.run = run

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look back at this step, and ask for the next one."""
        run = self.run()
        if run is None:
            return
        run.require_charged(state.global_step - 1)
        if state.global_step >= state.max_steps:
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


class OwnBestCheckpointCallback(TrainerCallback):
    """Forgets a best checkpoint that this run didn't write.

    HF names the best one by its step. Where that step wasn't saved, a folder that another run left
    there would be loaded at the end, and its weights would get this run's claim.
    """

    def __init__(self, is_ours: Callable[[Path], bool]) -> None:
        self.is_ours = is_ours

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What a resumed state remembers."""
        self._forget_others(state)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What HF has just chosen."""
        self._forget_others(state)

    def _forget_others(self, state: TrainerState) -> None:
        best = state.best_model_checkpoint
        if best is not None and not self.is_ours(Path(best)):
            logger.warning("%s isn't this run's: it won't be loaded as its best checkpoint.", best)
            state.best_model_checkpoint = None


class DiagnosticsCallback(TrainerCallback):
    """Looks at the geometry on probes during training: spectra, alignment, signal against noise.

    Scalars go to the training logs under ``precond/``, all of it to ``diagnostics.jsonl`` in the
    run's folder, which ``hf-dpkfc report`` reads. A look costs about four refreshes of the
    preconditioner. No private record is read and no random state moves, so the weights are the
    same with and without it.

    Args:
        every: Steps between two looks; there is one after the first step, too.
        sources: Other probes to compare the run's with, by name; they must be data-free or
            public. Without any, the run's probe is compared with its own unstructured form.
    """

    def __init__(self, every: int, sources: Mapping[str, Probe] | None = None) -> None:
        if every < 1:
            raise ConfigurationError(
                f"diagnostics_steps={every}.",
                why="it is a number of steps.",
                way_out="choose 1 or more, or None for no diagnostics.",
            )
        self.every = every
        self.sources = sources
        self._run: Callable[[], PrivateRun | None] = lambda: None
        self._log: Callable[[dict[str, float]], None] = lambda logs: None
        self._file: DiagnosticsLog | None = None

    def watch(
        self, run: Callable[[], PrivateRun | None], log: Callable[[dict[str, float]], None]
    ) -> None:
        """Told by the trainer: where the run is, and where scalars go."""
        self._run, self._log = run, log

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the log; a resumed run keeps the lines up to its checkpoint."""
        run = self._run()
        if run is None or run.ledger is None:  # only rank 0 has the ledger
            return
        self._file = DiagnosticsLog(run.ledger.path.with_name(DIAGNOSTICS_NAME))
        why_blind = _why_blind(args, run)
        self._file.start({"note": why_blind} if why_blind else {}, state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look every so many steps."""
        run, step = self._run(), state.global_step
        if run is None or self._file is None or _why_blind(args, run) is not None:
            return
        if step == 1 or step % self.every == 0:
            assert run.preconditioner is not None
            seed = run.geometry.seed_at(step)
            entry = self._observatory(run).look(run.preconditioner, step, seed)
            self._file.append(entry)
            # HF forgets that a step wants its log once anything is logged: on this rank alone, so
            # that the others would wait for it forever.
            wants_log = control.should_log
            self._log(summary(entry))
            control.should_log = wants_log

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep metrics of held-out records."""
        held_out = evaluation_metrics(metrics or {})
        if self._file is not None and held_out:
            entry = {"kind": "evaluation", "step": state.global_step, "metrics": held_out}
            self._file.append(entry)

    def _observatory(self, run: PrivateRun) -> Observatory:
        plan, query, probe = run.plan, run.query, run.geometry.probe
        assert probe is not None
        return Observatory(
            model=query.model,
            probe=probe,
            options=run.geometry.options,
            clip_norm=plan.clip_norm,
            noise_std=plan.noise_multiplier * plan.clip_norm / plan.expected_batch_size,
            sources=contrast_of(probe) if self.sources is None else self.sources,
            per_example_loss=query.per_example_loss,
            table=query.table,
        )


def _why_blind(args: TrainingArguments, run: PrivateRun) -> str | None:
    """Why there is nothing to look at without private records; None if there is."""
    if run.geometry.probe is None:
        return "No diagnostics: no synthetic inputs can be made for this model."
    if isinstance(args, DPKFCConfig) and args.probe == "oracle":
        return "No diagnostics: probe='oracle' sees private records, and these are data-free."
    return None
