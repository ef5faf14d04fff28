"""DPKFCTrainer: Hugging Face's Trainer whose gradients are differentially private."""

from __future__ import annotations

import copy
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import EvalPrediction, ProgressCallback, Trainer, TrainerCallback
from transformers.trainer_utils import HubStrategy, PredictionOutput, TrainOutput
from transformers.utils import logging

from hf_dpkfc.callbacks import (
    BudgetCallback,
    DiagnosticsCallback,
    OwnBestCheckpointCallback,
    PrivacyProgressCallback,
    PublishingCallback,
)
from hf_dpkfc.config import DPKFCConfig
from hf_dpkfc.curvature.catalogue import ProbeOptions, build_probe, resolved
from hf_dpkfc.curvature.fit import probing
from hf_dpkfc.curvature.preconditioner import Preconditioner
from hf_dpkfc.curvature.probes import Probe
from hf_dpkfc.engine import Peers, PrivateRun, Query, weights_digest
from hf_dpkfc.errors import (
    BudgetError,
    ConfigurationError,
    DPKFCError,
    ProbeError,
    PublishingError,
    UnsupportedTaskError,
)
from hf_dpkfc.layers.layout import accumulation_dtype
from hf_dpkfc.layers.routes import inspect_model
from hf_dpkfc.loading import Collate, lengths_of, logical_steps, neighbours, used_columns
from hf_dpkfc.losses import CustomLoss, TaskLoss, require_heads_own_loss, task_of
from hf_dpkfc.mechanism.independence import check_independence
from hf_dpkfc.mechanism.randomness import SecretKey
from hf_dpkfc.optimizers.adambc import DPAdamBC, noise_variance_of
from hf_dpkfc.optimizers.disk import KalmanFilter
from hf_dpkfc.privacy.ledger import LEDGER_NAME, PrivacyLedger
from hf_dpkfc.privacy.plan import Adjacency, PrivacyPlan, default_delta, steps_in
from hf_dpkfc.processes import AcceleratePeers
from hf_dpkfc.publication import CardOptions, Publication, finished_statement
from hf_dpkfc.publishing.statement import (
    FAST_RANDOMNESS,
    SECURE_RANDOMNESS,
    PrivacyStatement,
)
from hf_dpkfc.refusals import (
    note_training,
    refuse_batch_losses,
    refuse_data,
    refuse_launch,
    refuse_second_optimizer,
    refuse_trained,
    require_config,
)
from hf_dpkfc.runs import (
    FILTER_NAME,
    PRECONDITIONER_NAME,
    TUNING_NAME,
    RunFolder,
    step_of,
)
from hf_dpkfc.tuning import TuningCost, exponent_of, search_space

logger = logging.get_logger(__name__)

# What HF logs of the training batches. training_step returns zero, so these would be empty words.
_MEANINGLESS_LOGS = ("loss", "train_loss", "total_flos")


class DPKFCTrainer(Trainer):
    """Private fine-tuning through HF's own doors.

    Args:
        model: As Trainer's; not needed with ``model_init``.
        args: A :class:`hf_dpkfc.DPKFCConfig`; it isn't modified.
        data_collator: As Trainer's. It must treat each record on its own, and draw at random, if
            it does, from global state.
        train_dataset: The private records, with ``__len__`` and ``__getitem__``.
        eval_dataset: Records that the guarantee doesn't cover.
        processing_class: Tokenizer, image processor or processor; probes are made from it.
        model_init: As Trainer's.
        compute_loss_func: Refused: it returns one loss for the whole batch.
        compute_metrics: As Trainer's.
        callbacks: As Trainer's.
        optimizers: As Trainer's.
        optimizer_cls_and_kwargs: As Trainer's.
        preprocess_logits_for_metrics: As Trainer's.
        per_example_loss: ``fn(outputs, inputs) -> [batch]`` for heads that we don't know.
        public_dataset: Public records for ``probe="public"``.

    Guarantees:
        The weights after training are (ε, δ)-differentially private with respect to
        ``train_dataset``, as ``trainer.plan`` states; so is everything that is logged, unless it
        is under ``unsafe/``. Records of ``eval_dataset`` aren't covered.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: DPKFCConfig | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        *,
        per_example_loss: Callable[[Any, Mapping[str, Any]], Tensor] | None = None,
        public_dataset: Any = None,
    ) -> None:
        self.per_example_loss = per_example_loss
        self.public_dataset = public_dataset
        self._run: PrivateRun | None = None
        self._finished: PrivacyStatement | None = None
        self._num_releases = 0
        self._continues = False
        self._starts = False
        self._resume_from: str | None = None
        self._trial_number: int | None = None
        self._spent = self._spent_earlier = TuningCost.nothing()
        self._has_evaluated_private = False
        self._is_checked = False
        self._evaluations: dict[str, dict[str, float]] = {}
        super().__init__(
            model=model,
            args=self._own_copy(require_config(args)),
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        self.args.gradient_accumulation_steps = self._accumulation
        self.model_accepts_loss_kwargs = False
        refuse_batch_losses(self)
        refuse_launch(self)
        refuse_data(self.train_dataset, self.eval_dataset, public_dataset, self.args)
        refuse_second_optimizer(self)
        self._install_callbacks()
        self._warn_of_what_is_not_covered()

    # ---- The public face ----

    @property
    def plan(self) -> PrivacyPlan:
        """The plan: of the run under way, else of the run that ``train()`` would start."""
        return self._run.plan if self._run is not None else self._make_plan()

    @property
    def preconditioner(self) -> Preconditioner | None:
        """The preconditioner in force; None before the first step."""
        return self._run.preconditioner if self._run is not None else None

    def epsilon_spent(self, accountant: str | None = None) -> float:
        """ε of the releases charged so far, infinite where nothing is claimed.

        Args:
            accountant: "rdp" or "prv"; by default the plan's.
        """
        if self._run is None:
            return 0.0
        if not self.args.claims_privacy:
            return math.inf
        return self._run.plan.epsilon_at(self._num_releases, accountant)

    # ---- HF's doors ----

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train privately; calibrated before the first step, stopped before it would overspend."""
        self._trial_number = getattr(trial, "number", None)
        self._continues = bool(resume_from_checkpoint)
        self._resume_from = self._checkpoint_to_resume(resume_from_checkpoint)
        self._starts = True
        self._accumulation = self.args.gradient_accumulation_steps
        try:
            output = super().train(self._resume_from, trial, ignore_keys_for_eval)
        except BaseException:
            self._abandon()
            raise
        finally:  # what HF's loop saw as 1 is the caller's again, to read and to change
            self.args.gradient_accumulation_steps = self._accumulation
        self._finish_run()
        return _without_loss(output)

    def _checkpoint_to_resume(self, asked: str | os.PathLike[str] | bool | None) -> str | None:
        """A checkpoint of this very run; None for its start."""
        if not isinstance(asked, str | os.PathLike):
            return self._files.last_checkpoint() if asked else None
        checkpoint = os.fspath(asked)
        self._files.require_ours(checkpoint)
        return checkpoint

    def get_train_dataloader(self) -> DataLoader[dict[str, Any]]:
        """HF's loop gets steps, not records; called by ``train()``, it opens the run first."""
        if self._starts:
            self._starts = False
            self._open_run()
        plan = self.plan
        return logical_steps(plan.steps_per_epoch, plan.dataset_size)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """HF's optimizer with HF's parameter groups; with ``dp_optimizer="adambc"``, DP-AdamBC."""
        if self.args.dp_optimizer == "adambc":
            self.optimizer_cls_and_kwargs = (DPAdamBC, self._adambc_arguments())
        return super().create_optimizer(model)

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """One release: the noisy mean gradient goes to ``.grad``; the loss returned is zero."""
        assert self._run is not None
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        noisy_mean = self._run.release(self.state.global_step)
        if noisy_mean is None:
            logger.warning("All releases of the plan are spent: training stops without this step.")
            self.control.should_training_stop = True
            return torch.zeros((), device=self.args.device)
        self._num_releases = self._run.num_releases
        parameters = dict(self._run.query.model.named_parameters())
        for name, gradient in noisy_mean.items():
            parameters[name].grad = gradient.to(parameters[name].dtype)
        return torch.zeros((), device=self.args.device)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """HF's logs without what would come from private batches, and with ε."""
        logs = {name: value for name, value in logs.items() if name not in _MEANINGLESS_LOGS}
        if self._run is not None and self.is_in_train:
            logs |= {"privacy/epsilon": self.epsilon_spent(), "privacy/delta": self.plan.delta}
            if self.args.log_unsafe_metrics:
                logs |= self._unsafe_logs()
        super().log(logs, start_time)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """HF's files; in a checkpoint also preconditioner, filter and a copy of the ledger."""
        super().save_model(output_dir, _internal_call)
        if self._wants_push and not _internal_call:
            self.push_to_hub(commit_message="Model save")
        if _internal_call and self._run is not None and self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            if self._run.preconditioner is not None:
                self._run.preconditioner.save(folder / PRECONDITIONER_NAME)
            if self._run.filter is not None:
                self._run.filter.save(folder / FILTER_NAME)
            shutil.copyfile(self._files.ledger_path, folder / LEDGER_NAME)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """HF's evaluation. Evaluation records aren't covered by the guarantee."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):  # HF goes through a dictionary of sets by their names
            chosen = self.eval_dataset[chosen]
        prefix = self._prefix_for(chosen, metric_key_prefix)
        metrics = super().evaluate(eval_dataset, ignore_keys, prefix)
        # By the weights that they are true of, for the card.
        self._evaluations.setdefault(self._weights_digest(), {}).update(metrics)
        return metrics

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
    ) -> PredictionOutput:
        """HF's prediction. What is predicted for training records is private."""
        prefix = self._prefix_for(test_dataset, metric_key_prefix)
        return super().predict(test_dataset, ignore_keys, prefix)

    def add_callback(self, callback: Any) -> None:
        """HF's; diagnostics added late look at the run like those given at the start."""
        super().add_callback(callback)
        self._watch_with(self.callback_handler.callbacks[-1])

    def _watch_with(self, callback: Any) -> None:
        if isinstance(callback, DiagnosticsCallback):
            callback.watch(lambda: self._run, self.log)

    def _prefix_for(self, dataset: Any, prefix: str) -> str:
        """The metrics' prefix: one that says so where they come from private records."""
        if dataset is None or dataset is not self.train_dataset:
            return prefix
        logger.warning(
            "Evaluating on the training set: these metrics are computed from private records "
            "without noise. They are named unsafe_train and kept off the card."
        )
        self._note_private_evaluation()
        return "unsafe_train"

    def _note_private_evaluation(self) -> None:
        """The statement says so, also one that was written already."""
        self._has_evaluated_private = True
        if self._finished is not None:
            self._finished = replace(self._finished, logged_unsafe_metrics=True)
            self._save_finished()

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: Any = None,
        hp_name: Callable[[Any], str] | None = None,
        **backend_options: Any,
    ) -> Any:
        """HF's search. Every trial trains on the same records, and their costs add up.

        Args:
            hp_space: From a trial to options; by default :func:`hf_dpkfc.search_space`, for the
                kind of probe that this trainer has.
            compute_objective: As HF's.
            n_trials: As HF's; ``privacy_tuning.json`` states what they cost together.
            direction: As HF's.
            backend: As HF's.
            hp_name: As HF's.
            **backend_options: The search backend's own.
        """
        self._spent = TuningCost.nothing()
        self._spent_earlier = TuningCost.load(self._tuning_path)
        if self.model is None:  # HF let go of it after the last search
            self.model: Any = self.call_model_init()
        space = hp_space or partial(search_space, exponent=exponent_of(self._probe()))
        try:
            return super().hyperparameter_search(
                space,
                compute_objective,
                n_trials=n_trials,
                direction=direction,
                backend=backend,
                hp_name=hp_name,
                **backend_options,
            )
        finally:  # trials of a search that was broken off have cost what they cost
            if self._spent.num_trials:
                logger.warning("%s", self._spent_earlier + self._spent)

    @property
    def _tuning_path(self) -> Path:
        return Path(self.args.output_dir) / TUNING_NAME

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write the privacy card into ``output_dir``; a README written by hand is kept.

        The arguments are HF's; :class:`hf_dpkfc.publication.CardOptions` says what each becomes.
        """
        options = CardOptions(
            model_name=model_name,
            finetuned_from=finetuned_from,
            dataset=dataset,
            dataset_tags=dataset_tags,
            tasks=tasks,
            license=license,
            language=language,
            tags=tags,
            dataset_args=dataset_args,
        )
        if self.is_world_process_zero():
            self._publication(options).write_card()

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **card_options: Any,
    ) -> Any:
        """Publish weights, configuration, tokenizer, card and statement in one commit.

        Args:
            commit_message: Of the commit.
            blocking: For compatibility: a push always waits until it is whole.
            token: Hub token; by default ``args.hub_token`` or the one that is logged in.
            revision: Branch.
            **card_options: As for :meth:`create_model_card`.

        Raises:
            PublishingError: If there is no guarantee to state, or the Hub refuses.
        """
        if not self.is_world_process_zero():
            return None
        return self._publication(CardOptions(**card_options)).push(
            self.args.hub_model_id or Path(self.args.output_dir).absolute().name,
            token=token or self.args.hub_token,
            private=self.args.hub_private_repo,
            revision=revision or self.args.hub_revision,
            message=commit_message or "End of training",
        )

    # ---- The constructor's chapters ----

    def _own_copy(self, args: DPKFCConfig) -> DPKFCConfig:
        """Our own args: one loader item per step for HF's loop, no pushes behind our back."""
        own = copy.copy(args)
        self._wants_push = args.push_to_hub
        own.push_to_hub = False
        self._accumulation = args.gradient_accumulation_steps
        own.gradient_accumulation_steps = 1
        if self._accumulation > 1:
            logger.warning(
                "gradient_accumulation_steps=%d enters the expected batch; HF's loop sees one item "
                "per logical step.",
                self._accumulation,
            )
        return own

    def _install_callbacks(self) -> None:
        if self.pop_callback(ProgressCallback) is not None:
            # RDP's bound, whatever the plan's accountant: PRV takes a second, and this is per step.
            self.add_callback(PrivacyProgressCallback(lambda: self.epsilon_spent("rdp")))
        self.add_callback(BudgetCallback(lambda: self._run))
        self.add_callback(OwnBestCheckpointCallback(lambda path: self._files.is_ours(path)))
        if self.args.diagnostics_steps is not None:
            self.add_callback(DiagnosticsCallback(self.args.diagnostics_steps))
        for callback in self.callback_handler.callbacks:
            self._watch_with(callback)
        if self._wants_push and self.args.hub_strategy != HubStrategy.END:
            self.add_callback(PublishingCallback(self.push_to_hub))

    def _warn_of_what_is_not_covered(self) -> None:
        if self.args.noise_multiplier == 0:
            logger.warning("noise_multiplier=0: ε is infinite. Nothing here is private.")
        if not self.args.claims_privacy:
            logger.warning(
                "probe='oracle': the preconditioner sees private records. No ε is claimed."
            )
        if self.args.load_best_model_at_end:
            logger.warning(
                "load_best_model_at_end chooses by evaluation records, which the guarantee for "
                "train_dataset doesn't cover."
            )
        earlier = Path(getattr(getattr(self.model, "config", None), "_name_or_path", "") or ".")
        if (earlier / LEDGER_NAME).exists() and not earlier.samefile("."):
            logger.warning(
                "The model comes from %s, where it was trained privately. If that was on the same "
                "records, its ε adds to this run's, which doesn't count it.",
                earlier,
            )
        if self.args.dataloader_num_workers:
            logger.warning(
                "dataloader_num_workers has no effect on training: records are drawn and collated "
                "inside each step."
            )

    # ---- The run ----

    @property
    def _files(self) -> RunFolder:
        """The run's files; a trial of a search has a folder of its own."""
        output_dir = Path(self.args.output_dir)
        trial = self._trial_number
        folder = output_dir if trial is None else output_dir / f"run-{trial}"
        return RunFolder(folder, output_dir, self.args.privacy_key_path)

    def _make_plan(self) -> PrivacyPlan:
        """From public constants alone: options, number of processes, and the public size."""
        args = self.args
        is_empty = self.train_dataset is None or not len(self.train_dataset)
        # With a public size an empty set is a neighbour like any other, and trains on noise.
        if self.train_dataset is None or (is_empty and not args.public_dataset_size):
            raise ConfigurationError(
                f"train_dataset is {'missing' if self.train_dataset is None else 'empty'}.",
                why="there is nothing to train on and no size to plan with.",
                way_out="pass train_dataset= with at least one record.",
            )
        size = args.public_dataset_size or len(self.train_dataset)
        batch = (
            args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        )
        epochs = args.num_train_epochs
        fields = {
            "clip_norm": args.clip_norm,
            "expected_batch_size": batch,
            "dataset_size": size,
            "steps": args.max_steps if args.max_steps > 0 else steps_in(epochs, size, batch),
            "delta": args.target_delta or default_delta(size),
            "accountant": args.accountant,
            "adjacency": Adjacency.ADD_REMOVE if args.public_dataset_size else Adjacency.ZERO_OUT,
            "privacy_unit": args.privacy_unit,
        }
        if args.target_epsilon is not None:
            return PrivacyPlan.calibrated(args.target_epsilon, **fields)
        return PrivacyPlan(noise_multiplier=args.noise_multiplier, **fields)

    def _open_run(self) -> None:
        self.args.validate()  # a search has written its choices past the constructor's checks
        if self._resume_from is None:
            refuse_trained(self.model)
        plan, query, probe = self._make_plan(), self._query(), self._probe()
        # A search may have chosen it; HF's loop counts one item per logical step.
        self._accumulation = self.args.gradient_accumulation_steps
        self.args.gradient_accumulation_steps = 1
        peers: Peers = AcceleratePeers(
            self.args.process_index, self.args.world_size, self.accelerator
        )
        self._check_independence(query, probe)
        key, ledger = self._open_ledger(plan, peers)
        is_deterministic = self.args.device.type == "cpu"
        self._run = PrivateRun(
            plan=plan,
            key=key,
            ledger=ledger,
            query=query,
            geometry=self.args.geometry(probe),
            peers=peers,
            secure=self.args.secure_rng,
            nonce=b"" if is_deterministic else peers.broadcast(os.urandom(16)),
            filter=self._filter(),
            preconditioner=self._saved_preconditioner(),
        )
        note_training(self.model)
        self._num_releases = self._run.num_releases
        self._count_cost(plan)
        reservation = "" if self.args.claims_privacy else " (probe='oracle': its ε isn't claimed)"
        logger.info("Privacy plan%s\n%s", reservation, plan)
        if not self._run.may_release(step_of(self._resume_from)):
            raise BudgetError(
                f"All {plan.steps} releases of the plan are charged already.",
                why="steps lost in earlier launches were charged to the same budget.",
                way_out="use the last checkpoint: it carries the guarantee.",
            )

    def _count_cost(self, plan: PrivacyPlan) -> None:
        """A trial's cost is on disk before its first release: a search may be killed."""
        self._spent += TuningCost.of([plan], claims_privacy=self.args.claims_privacy)
        if self._trial_number is not None and self.is_world_process_zero():
            (self._spent_earlier + self._spent).save(self._tuning_path)

    def _adambc_arguments(self) -> dict[str, Any]:
        """From HF's options and the plan: B is the public constant, never a drawn size."""
        args, plan = self.args, self.plan
        return {
            "lr": args.learning_rate,
            "betas": (args.adam_beta1, args.adam_beta2),
            "noise_variance": noise_variance_of(
                plan.noise_multiplier, plan.clip_norm, plan.expected_batch_size
            ),
            "floor": args.adambc_floor,
        }

    def _query(self) -> Query:
        model = self.accelerator.unwrap_model(self.model)
        table = inspect_model(model).require_covered()
        loss = self._loss()

        def with_autocast(module: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
            with self.compute_loss_context_manager():
                return loss(module, inputs)

        return Query(
            model=model,
            table=table,
            per_example_loss=with_autocast,
            loss_name=loss.name,
            dataset=self.train_dataset,
            collate=self._collate(),
            max_micro_batch=self.args.per_device_train_batch_size,
            length_of=lengths_of(self.train_dataset),
        )

    def _loss(self) -> CustomLoss | TaskLoss:
        """The loss of each example, in the model's own precision."""
        if self.per_example_loss is not None:
            return CustomLoss(self.per_example_loss)
        return TaskLoss(task_of(self.accelerator.unwrap_model(self.model)))

    def _collate(self) -> Collate:
        keeps_all = not self.args.remove_unused_columns
        columns = None if keeps_all else used_columns(self.model, self.label_names)
        return Collate(self.data_collator, columns, self.args.device)

    @property
    def _processor(self) -> Any:
        """Tokenizer or image processor, where anybody has one."""
        return self.processing_class or getattr(self.data_collator, "tokenizer", None)

    def _probe(self) -> Probe | None:
        """The probe; None where nothing is preconditioned and none can be had."""
        try:
            return self._build_probe(self.args.probe_options())
        except (ProbeError, ConfigurationError, UnsupportedTaskError) as error:
            if self.args.preconditioner == "none":
                return None
            if isinstance(error, UnsupportedTaskError):
                raise _no_labels(error) from error
            raise

    def _build_probe(self, options: ProbeOptions) -> Probe:
        is_oracle = options.name == "oracle"
        return build_probe(
            options,
            self.accelerator.unwrap_model(self.model),
            self._processor,
            records=self.train_dataset if is_oracle else self.public_dataset,
            collate=self._collate(),
            keeps_labels=self.per_example_loss is not None,
        )

    def _check_independence(self, query: Query, probe: Probe | None) -> None:
        """Once per launch, on probes: an example's loss and gradient are its own."""
        probe = self._checking_probe(probe)
        self._is_checked = probe is not None
        if probe is None:
            logger.warning(
                "The neighbour check was skipped, and the card will say so: no synthetic inputs "
                "can be made for this model. Make sure that no example's loss depends on the "
                "others in its batch, or pass public_dataset= to have it checked."
            )
            return
        together, alone, through_collator = neighbours(probe, query.collate, self.args.device)
        if not through_collator:
            logger.warning(
                "The neighbour check ran without your data_collator, which doesn't take probes or "
                "draws at random. Make sure that it treats each record on its own."
            )
        loss = self._loss()
        with probing(query.model), _labels_explained(loss):
            check_independence(query.model, query.table, loss, together, alone)
            if isinstance(loss, TaskLoss):
                require_heads_own_loss(query.model, loss, alone)

    def _checking_probe(self, probe: Probe | None) -> Probe | None:
        """Inputs that hold no private record: the geometry's, synthetic ones, or public records.

        A user's own loss may want labels that only records have, so public ones go first there.
        """
        has_labels = self.per_example_loss is not None and self.public_dataset is not None
        if probe is not None and self.args.probe != "oracle" and not has_labels:
            return probe
        for name in ("public", "auto"):
            with suppress(ProbeError, ConfigurationError, UnsupportedTaskError):
                return self._build_probe(replace(self.args.probe_options(), name=name))
        return None

    def _open_ledger(
        self, plan: PrivacyPlan, peers: Peers
    ) -> tuple[SecretKey, PrivacyLedger | None]:
        """Key and ledger on rank 0; the key is then everybody's."""
        if self._run is not None:
            self._run.close()
        key, ledger = None, None
        failure: Exception | None = None
        if peers.rank == 0:
            try:
                key, ledger = self._files.open(
                    plan,
                    continues=self._continues,
                    claims_privacy=self.args.claims_privacy,
                    description=self.args.stated_options(),
                )
            except Exception as error:  # every rank must hear of it, or the others wait forever
                failure = error
        failure = peers.broadcast(failure)
        if failure is not None:
            raise failure
        return peers.broadcast(key), ledger

    def _abandon(self) -> None:
        """Training broke off: the ledger is let go; a trial is never resumed, so its key goes."""
        if self._run is None:
            return
        self._run.close()
        if self._trial_number is not None and self.args.process_index == 0:
            self._files.keys.destroy()

    def _finish_run(self) -> None:
        """Training has ended: the key goes, so that checkpoints can never give un-noised sums."""
        assert self._run is not None
        if self.args.process_index == 0:
            self._finished = self._statement_of(self._run)
            self._save_finished()
            self._files.keys.destroy()
        self._run.close()
        self._leave_together()

    def _save_finished(self) -> None:
        assert self._finished is not None
        if math.isfinite(self._finished.plan.epsilon):
            self._finished.save(self._files.folder)

    def _leave_together(self) -> None:
        """No process returns from ``train()`` before the statement is on disk."""
        if self.args.world_size == 1:
            return
        self.accelerator.wait_for_everyone()
        # gloo's threads want the GIL to let go of the last collective's tensors. If the interpreter
        # exits first, they abort the process, and the launcher kills rank 0 while it saves.
        time.sleep(0.1)

    # ---- Publishing ----

    def _statement(self) -> PrivacyStatement:
        """The claim, with what was computed from private records without noise since."""
        statement = self._training_statement()
        is_unsafe = statement.logged_unsafe_metrics or self._has_evaluated_private
        return replace(statement, logged_unsafe_metrics=is_unsafe)

    def _training_statement(self) -> PrivacyStatement:
        """Of the run in this process, else the one that a finished run left in the folder."""
        if self._run is not None and self.is_in_train:
            return self._statement_of(self._run)
        return finished_statement(self._files, self._finished)

    def _statement_of(self, run: PrivateRun) -> PrivacyStatement:
        args = self.args
        maps = run.preconditioner
        return PrivacyStatement(
            plan=run.plan,
            num_releases=self._num_releases,
            ledger_sha256=self._files.ledger_digest(),
            claims_privacy=args.claims_privacy,
            preconditioner={
                **args.preconditioner_facts(),
                "probe": self._probe_name(),
                "is_data_free": maps is None or maps.is_data_free,
            },
            randomness=SECURE_RANDOMNESS if args.secure_rng else FAST_RANDOMNESS,
            world_size=args.world_size,
            logged_unsafe_metrics=args.log_unsafe_metrics
            or self._has_evaluated_private
            # A resumed run may have evaluated training records before it was interrupted.
            or any(name.startswith("unsafe") for log in self.state.log_history for name in log),
            dp_optimizer=args.dp_optimizer_facts(),
            versions={name: version(name) for name in ("hf-dpkfc", "torch", "opacus")},
            weights_sha256=self._weights_digest(),
            run_sha256=self._files.run_digest(),
            checked_neighbours=self._is_checked,
        )

    def _probe_name(self) -> str:
        """What the geometry was made from; the option's word where there is none."""
        if self.args.preconditioner == "none":
            return self.args.probe
        model = self.accelerator.unwrap_model(self.model)
        return resolved(self.args.probe, model, self._processor)

    def _weights_digest(self) -> str:
        """Of the model as it is now."""
        return weights_digest(self.accelerator.unwrap_model(self.model))

    def _publication(self, options: CardOptions) -> Publication:
        """What would be published now."""
        model = self.accelerator.unwrap_model(self.model)
        statement = self._statement().require_publishable()
        digest = self._weights_digest()
        if statement.weights_sha256 not in (None, digest):
            raise PublishingError(
                "The model's weights aren't those that the private training led to.",
                why="the ledger says nothing of what was done to them since, or of other weights.",
                way_out="publish from the trainer that trained, or load the trained checkpoint "
                f"from {self.args.output_dir} first.",
            )
        name = Path(self.args.output_dir).absolute().name
        facts = options.facts(model, name, self._evaluations.get(digest, {}))
        return Publication(statement, facts, model, self._processor, Path(self.args.output_dir))

    # ---- Resuming and logs ----

    def _saved_preconditioner(self) -> Preconditioner | None:
        if self._resume_from is None:
            return None
        path = Path(self._resume_from) / PRECONDITIONER_NAME
        if not path.exists():
            return None
        dtype = accumulation_dtype(next(self.model.parameters()).dtype)
        return Preconditioner.load(path).to(self.args.device, dtype)

    def _filter(self) -> KalmanFilter | None:
        """DiSK's filter, as the checkpoint left it where a run is resumed."""
        kalman = self.args.kalman_filter()
        path = None if self._resume_from is None else Path(self._resume_from) / FILTER_NAME
        if kalman is not None and path is not None and path.exists():
            kalman.restore(path, self.args.device)
        return kalman

    def _unsafe_logs(self) -> dict[str, float]:
        assert self._run is not None
        unsafe = self._run.unsafe
        count = max(1, unsafe.num_examples)
        return {
            "unsafe/train_loss": unsafe.total_loss / count,
            "unsafe/clip_fraction": unsafe.num_clipped / count,
            "unsafe/batch_size": unsafe.num_examples,
        }


@contextmanager
def _labels_explained(loss: CustomLoss | TaskLoss) -> Iterator[None]:
    """What a user's own loss raises over a probe's labels, with the way to other labels."""
    try:
        yield
    except DPKFCError:
        raise
    except Exception as error:  # the user's code may raise anything
        if isinstance(loss, TaskLoss):
            raise
        raise ProbeError(
            "per_example_loss can't take the probes' labels.",
            why=f"they are made for the model's head, and the loss raised "
            f"{type(error).__name__}: {error}",
            way_out="pass public_dataset=, whose records bring their labels, with probe='public' "
            "or preconditioner='none'.",
        ) from error


def _no_labels(error: UnsupportedTaskError) -> ProbeError:
    return ProbeError(
        f"{error.what} Nor are its labels known, so probe='auto' can't make any.",
        why="the factors need inputs with labels that your per_example_loss understands.",
        way_out="pass probe='public' with public_dataset=, whose records bring their labels, or "
        "preconditioner='none'.",
    )


def _without_loss(output: TrainOutput) -> TrainOutput:
    metrics = {k: v for k, v in output.metrics.items() if k not in _MEANINGLESS_LOGS}
    return output._replace(training_loss=0.0, metrics=metrics)
