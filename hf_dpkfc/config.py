"""The options: Hugging Face's TrainingArguments plus ours, grouped by what they can change."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from hf_dpkfc.curvature.catalogue import PROBES, ProbeOptions
from hf_dpkfc.curvature.fit import APPROXIMATIONS, KINDS, LABELS, CurvatureOptions
from hf_dpkfc.engine import Geometry
from hf_dpkfc.errors import ConfigurationError
from hf_dpkfc.privacy.accounting import ACCOUNTANTS
from hf_dpkfc.privacy.plan import DEFAULT_UNIT


def _option(default: Any, text: str, choices: tuple[str, ...] | None = None) -> Any:
    metadata = {"help": text} | ({"choices": list(choices)} if choices else {})
    return field(default=default, metadata=metadata)


@dataclass
class DPKFCConfig(TrainingArguments):
    """TrainingArguments for :class:`hf_dpkfc.DPKFCTrainer`; each option's text is in its ``help``.

    Exactly one of ``target_epsilon`` and ``noise_multiplier`` is given. The expected batch is HF's
    own product, per_device_train_batch_size × gradient_accumulation_steps × processes.
    """

    # --- the guarantee ---
    target_epsilon: float | None = _option(
        None, "ε that the whole run may spend; the noise is calibrated to it."
    )
    noise_multiplier: float | None = _option(
        None, "σ, if you set the noise yourself. 0.0 is for debugging: ε is infinite."
    )
    target_delta: float | None = _option(None, "δ; by default 1/(10 N) for a data set of N units.")
    clip_norm: float = _option(
        1.0, "C: each example's preconditioned gradient is clipped to this norm."
    )
    accountant: str = _option("rdp", "How ε is computed, by Opacus.", ACCOUNTANTS)
    public_dataset_size: int | None = _option(
        None,
        "N, where it is public knowledge; the statement is then for adding or removing one unit. "
        "By default N is len(train_dataset) and the statement is for zero-out adjacency.",
    )
    privacy_unit: str = _option(DEFAULT_UNIT, "What one unit of privacy is, for the card.")
    secure_rng: bool = _option(
        False, "Cryptographic randomness (ChaCha20, summed draws) for sampling and noise."
    )
    privacy_key_path: str | None = _option(
        None,
        "Folder of the run's secret key, outside output_dir; by default below "
        "$XDG_STATE_HOME (~/.local/state).",
    )

    # --- utility: none of these can change the guarantee; only probe='oracle' voids it ---
    preconditioner: str = _option(
        "kfac", "Geometry in which gradients are clipped and noised; 'none' is DP-SGD.", KINDS
    )
    probe: str = _option("auto", "Where the factors come from; 'auto' needs no data.", PROBES)
    probe_labels: str = _option(
        "uniform", "Labels of the probes: uniform, or the model's own predictions.", LABELS
    )
    probe_batch_size: int = _option(64, "Probes per batch.")
    num_probe_batches: int = _option(10, "Probe batches per refresh.")
    probe_min_length: int | None = _option(
        None, "Shortest token probe; default: the shortest possible."
    )
    probe_max_length: int | None = _option(
        None, "Longest token probe; default: what tokenizer and model allow, 128 at most."
    )
    probe_refresh_steps: int = _option(50, "Steps between two fits of the preconditioner.")
    damping: float = _option(1.0, "Added to each factor, relative to its mean eigenvalue.")
    kfac_approx: str = _option("reduce", "K-FAC's treatment of positions.", APPROXIMATIONS)
    rank: int | None = _option(64, "Eigendirections kept per factor; null (None) is exact.")
    max_factor_dim: int = _option(4096, "Wider factors fall back to low rank, with a note.")
    pink_alpha: float = _option(1.0, "Pink noise: amplitude falls as frequency^-pink_alpha.")
    zipf_exponent: float = _option(1.0, "Token probes: probability falls as rank^-zipf_exponent.")

    # --- neither ---
    log_unsafe_metrics: bool = _option(
        False,
        "Log un-noised facts about private batches (loss, clipped share, size) under unsafe/. "
        "They aren't covered by the guarantee, and the card says so.",
    )

    # HF clips to 1.0 by default; here the gradient is private already and its norm mostly noise.
    max_grad_norm: float = _option(0.0, "Clips the already private gradient; 0.0 leaves it alone.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_incompatible()
        self._require_one_noise()
        self._require_numbers()
        self.curvature_options()
        self.probe_options()

    @property
    def claims_privacy(self) -> bool:
        """False where factors see private records: then no ε is claimed, anywhere."""
        return self.probe != "oracle" or self.preconditioner == "none"

    def curvature_options(self) -> CurvatureOptions:
        """The options of the data-free stream."""
        return CurvatureOptions(
            kind=self.preconditioner,
            approx=self.kfac_approx,
            damping=self.damping,
            rank=self.rank,
            max_factor_dim=self.max_factor_dim,
            labels=self.probe_labels,
            num_batches=self.num_probe_batches,
            batch_size=self.probe_batch_size,
        )

    def probe_options(self) -> ProbeOptions:
        """The shape of the probes."""
        return ProbeOptions(
            self.probe,
            self.probe_min_length,
            self.probe_max_length,
            self.pink_alpha,
            self.zipf_exponent,
        )

    def geometry(self, probe: Any) -> Geometry:
        """When and from what the preconditioner is renewed."""
        return Geometry(self.curvature_options(), probe, self.probe_refresh_steps, self.seed)

    def _require_one_noise(self) -> None:
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise ConfigurationError(
                f"target_epsilon={self.target_epsilon}, noise_multiplier={self.noise_multiplier}.",
                why="one of them determines the other.",
                way_out="give exactly one: target_epsilon to have the noise calibrated, or "
                "noise_multiplier to set it.",
            )

    def _require_numbers(self) -> None:
        checks = {
            "target_epsilon": _positive(self.target_epsilon),
            "noise_multiplier": self.noise_multiplier is None
            or 0 <= self.noise_multiplier < math.inf,
            "target_delta": self.target_delta is None or 0 < self.target_delta < 1,
            "clip_norm": _positive(self.clip_norm),
            "public_dataset_size": self.public_dataset_size is None
            or self.public_dataset_size >= 1,
            "accountant": self.accountant in ACCOUNTANTS,
            "probe_refresh_steps": self.probe_refresh_steps >= 1,
            "per_device_train_batch_size": self.per_device_train_batch_size >= 1,
            "gradient_accumulation_steps": self.gradient_accumulation_steps >= 1,
            "pink_alpha": math.isfinite(self.pink_alpha),
            "zipf_exponent": math.isfinite(self.zipf_exponent),
        }
        for name, holds in checks.items():
            if not holds:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r}.",
                    why="it is outside the option's range.",
                    way_out=f"see its meaning: {_help(name)}",
                )

    def _refuse_incompatible(self) -> None:
        """Hugging Face options that would break a promise, each with its reason."""
        for name, (is_set, why, way_out) in self._incompatible().items():
            if is_set:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r} can't be used here.", why=why, way_out=way_out
                )

    def _incompatible(self) -> dict[str, tuple[bool, str, str]]:
        optim = str(getattr(self.optim, "value", self.optim))
        sharded = "gradients are taken apart by example, which sharded parameters don't allow yet."
        unset = "leave it at its default."
        return {
            "fp16": (
                self.fp16,
                "its loss scaling skips steps depending on private data.",
                "use bf16=True.",
            ),
            "deepspeed": (bool(self.deepspeed), sharded, "use DDP (accelerate launch)."),
            "fsdp": (bool(self.fsdp), sharded, "use DDP (accelerate launch)."),
            "torch_compile": (
                bool(self.torch_compile),
                "compiled graphs hide the modules' inputs and outputs from us.",
                unset,
            ),
            "auto_find_batch_size": (
                self.auto_find_batch_size,
                "it restarts training after steps were already released.",
                "set per_device_train_batch_size; it only bounds memory, the expected batch can "
                "be kept with gradient_accumulation_steps.",
            ),
            "dataloader_drop_last": (
                self.dataloader_drop_last,
                "batches are Poisson draws, of which none may be dropped.",
                unset,
            ),
            "train_sampling_strategy": (
                self.train_sampling_strategy != "random",
                "privacy is accounted for Poisson sampling, and records are drawn that way.",
                unset,
            ),
            "gradient_checkpointing": (
                self.gradient_checkpointing,
                "one backward pass keeps inputs and output gradients of every layer, so it would "
                "save nothing.",
                "lower per_device_train_batch_size and raise gradient_accumulation_steps.",
            ),
            "use_liger_kernel": (
                self.use_liger_kernel,
                "fused kernels hide the per-example loss.",
                unset,
            ),
            "label_smoothing_factor": (
                self.label_smoothing_factor != 0,
                "HF smooths the mean loss of the batch.",
                "pass per_example_loss= with F.cross_entropy(..., label_smoothing=, "
                "reduction='none').",
            ),
            "neftune_noise_alpha": (
                self.neftune_noise_alpha is not None,
                "its hook changes embeddings behind the captured inputs.",
                unset,
            ),
            "include_num_input_tokens_seen": (
                self.include_num_input_tokens_seen != "no",
                "the number of tokens drawn is private.",
                unset,
            ),
            "skip_memory_metrics": (
                not self.skip_memory_metrics,
                "peak memory tells how large the private batches were.",
                unset,
            ),
            "debug": (
                bool(self.debug),
                "it prints ranges of activations of private records.",
                "debug on public data with the plain Trainer.",
            ),
            "ignore_data_skip": (
                self.ignore_data_skip,
                "a resumed run would count its epochs wrongly.",
                unset,
            ),
            "optim": (
                optim in ("lomo", "adalomo") or optim.endswith("layerwise"),
                "it steps inside the backward pass, before clipping and noise.",
                "choose adamw_torch, sgd or another optimizer that steps afterwards.",
            ),
        }


def _positive(value: float | None) -> bool:
    return value is None or 0 < value < math.inf


def _help(name: str) -> str:
    return str(DPKFCConfig.__dataclass_fields__[name].metadata.get("help", ""))
