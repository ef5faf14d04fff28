"""The options: Hugging Face's TrainingArguments plus ours, grouped by what they can change."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field
from typing import Any

from transformers import TrainingArguments

from hf_dpkfc.curvature.catalogue import PROBES, ProbeOptions
from hf_dpkfc.curvature.fit import APPROXIMATIONS, KINDS, LABELS, SIDES, CurvatureOptions
from hf_dpkfc.engine import Geometry
from hf_dpkfc.errors import ConfigurationError
from hf_dpkfc.optimizers.adambc import DEFAULT_FLOOR
from hf_dpkfc.optimizers.disk import KalmanFilter, lookahead_weight
from hf_dpkfc.privacy.accounting import ACCOUNTANTS
from hf_dpkfc.privacy.plan import DEFAULT_UNIT, PrivacyPlan

DP_OPTIMIZERS = ("adambc", "disk")
# Beyond this, DiSK's pair is a difference of two almost equal gradients, magnified.
MAX_LOOKAHEAD_WEIGHT = 64.0
# HF's defaults (which one, depends on torch): with them nobody has asked for another optimizer.
_DEFAULT_OPTIMS = ("adamw_torch", "adamw_torch_fused")


def _option(default: Any, text: str, choices: tuple[str, ...] | None = None) -> Any:
    metadata = {"help": text} | ({"choices": list(choices)} if choices else {})
    return field(default=default, metadata=metadata)


@dataclass
class DPKFCConfig(TrainingArguments):
    """TrainingArguments for :class:`hf_dpkfc.DPKFCTrainer`.

    ``hf-dpkfc train --help`` prints each of our options with its meaning, default and choices, by
    what it can change: the guarantee, utility or neither. All others are Hugging Face's.

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
    target_delta: float | None = _option(
        None, "δ, at most 1/N for a data set of N units; by default 1/(10 N)."
    )
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
    probe_refresh_steps: int = _option(
        50,
        "Steps between two fits of the preconditioner; where more than a head trains, it is also "
        "fitted at steps 1, 2, 4, 8, … before the first of them.",
    )
    damping: float = _option(1.0, "Added to each factor, relative to its mean eigenvalue.")
    kfac_approx: str = _option("reduce", "K-FAC's treatment of positions.", APPROXIMATIONS)
    kfac_sides: str = _option(
        "both",
        "What K-FAC multiplies a gradient with: the roots of its layer's inputs and of its output "
        "gradients, or that of the inputs alone.",
        SIDES,
    )
    rank: int | None = _option(64, "Eigendirections kept per factor; null (None) is exact.")
    max_factor_dim: int = _option(4096, "Wider factors fall back to low rank, with a note.")
    layer_balance: float = _option(
        1.0,
        "How preconditioned layers share the clip norm: 1 as their raw gradients do, 0 equally.",
    )
    pink_alpha: float = _option(1.0, "Pink noise: amplitude falls as frequency^-pink_alpha.")
    zipf_exponent: float = _option(
        1.0,
        "Token probes: probability falls as rank^-zipf_exponent, or grows as "
        "frequency^zipf_exponent where frequencies are listed ('words').",
    )
    probe_language: str = _option(
        "en", "probe='words': the language of the words, as wordfreq names it (en, de, fr, …)."
    )
    dp_optimizer: str | None = _option(
        None,
        "What is done with the noisy mean gradient. By default it goes to the optimizer that "
        "optim names. 'adambc' is DP-AdamBC, an optimizer of its own in optim's place (it takes "
        "adam_beta1, adam_beta2 and weight_decay; adambc_floor takes the place of adam_epsilon). "
        "'disk' takes two gradients per example and filters their noisy mean before your own "
        "optimizer gets it; a step takes about twice the time and memory.",
        DP_OPTIMIZERS,
    )
    adambc_floor: float = _option(
        DEFAULT_FLOOR,
        "DP-AdamBC: smallest second moment left after the noise's variance is taken off, on the "
        "squared scale (γ' in Tang et al. 2024). The default is that of the authors' code, whose "
        "examples take 1e-9 (CIFAR-10) and 7e-9 (QNLI), with the smaller a smaller learning rate.",
    )
    disk_kappa: float = _option(
        0.7, "DiSK: weight of the new noisy mean in the filter, in (0, 1]; 1 filters nothing."
    )
    disk_gamma: float = _option(
        0.5,
        "DiSK: how far beyond the present weights, in units of the last update, the second "
        "gradient is taken. Its share is w = (1 − κ)/(κγ); w = 1 needs no first gradient, and w "
        "above 64 is refused.",
    )

    # HF clips to 1.0 by default; here the gradient is private already and its norm mostly noise.
    max_grad_norm: float = _option(0.0, "Clips the already private gradient; 0.0 leaves it alone.")

    # --- neither ---
    log_unsafe_metrics: bool = _option(
        False,
        "Log un-noised facts about private batches (loss, clipped share, size) under unsafe/. "
        "They aren't covered by the guarantee, and the card says so.",
    )
    diagnostics_steps: int | None = _option(
        None,
        "Steps between two data-free looks at spectra, alignment and signal-to-noise, for the "
        "logs and for hf-dpkfc report; null (None) for none.",
    )

    def __post_init__(self) -> None:
        self.__dict__.update(self._read_options())
        super().__post_init__()
        self.validate()

    def validate(self) -> None:
        """Refuse what can't be honoured; also after a search has put other values in.

        Raises:
            ConfigurationError: Naming the option, its value, the reason and the way out.
        """
        self._refuse_incompatible()
        self._require_one_noise()
        self._require_legal_values()
        self._require_plans_numbers()
        self._require_moderate_lookahead()
        self.curvature_options()
        self.probe_options()

    def _read_options(self) -> dict[str, Any]:
        """Options in their declared types: YAML reads ``1e-5`` as a string."""
        types = DPKFCConfig.__annotations__ | _HF_TYPES
        return {name: _read(name, kind, getattr(self, name)) for name, kind in types.items()}

    @property
    def claims_privacy(self) -> bool:
        """False where factors see private records: then no ε is claimed, anywhere."""
        return self.probe != "oracle" or self.preconditioner == "none"

    def curvature_options(self) -> CurvatureOptions:
        """The options of the data-free stream."""
        return CurvatureOptions(
            kind=self.preconditioner,
            approx=self.kfac_approx,
            sides=self.kfac_sides,
            damping=self.damping,
            rank=self.rank,
            max_factor_dim=self.max_factor_dim,
            layer_balance=self.layer_balance,
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
            self.probe_language,
        )

    def preconditioner_facts(self) -> dict[str, Any]:
        """What a statement says about the geometry."""
        return {name: getattr(self, option) for name, option in self._stated_geometry()}

    def stated_options(self) -> dict[str, str]:
        """What a statement says of every step, by option: a run keeps it to its end."""
        geometry = [option for _, option in self._stated_geometry()]
        options = [*geometry, "secure_rng", "log_unsafe_metrics"]
        return {
            **{option: str(getattr(self, option)) for option in options},
            "dp_optimizer": str(self.dp_optimizer_facts()),
        }

    def _stated_geometry(self) -> list[tuple[str, str]]:
        """Names in a statement, and the options behind them."""
        language = [("probe_language", "probe_language")] if self.probe == "words" else []
        return [
            ("kind", "preconditioner"),
            ("probe", "probe"),
            *language,
            ("approx", "kfac_approx"),
            ("sides", "kfac_sides"),
            ("damping", "damping"),
            ("rank", "rank"),
        ]

    def geometry(self, probe: Any) -> Geometry:
        """When and from what the preconditioner is renewed."""
        return Geometry(self.curvature_options(), probe, self.probe_refresh_steps, self.seed)

    def kalman_filter(self) -> KalmanFilter | None:
        """DiSK's filter at its start; None for other optimizers."""
        if self.dp_optimizer != "disk":
            return None
        return KalmanFilter(self.disk_kappa, self.disk_gamma)

    def dp_optimizer_facts(self) -> dict[str, Any] | None:
        """What a statement says about the optimizer; None where it is plain torch."""
        if self.dp_optimizer == "adambc":
            return {"name": "adambc", "floor": self.adambc_floor}
        if self.dp_optimizer == "disk":
            return {"name": "disk", "kappa": self.disk_kappa, "gamma": self.disk_gamma}
        return None

    def _require_one_noise(self) -> None:
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise ConfigurationError(
                f"target_epsilon={self.target_epsilon}, noise_multiplier={self.noise_multiplier}.",
                why="one of them determines the other.",
                way_out="give exactly one: target_epsilon to have the noise calibrated, or "
                "noise_multiplier to set it.",
            )

    def _require_legal_values(self) -> None:
        for name in (*DPKFCConfig.__annotations__, *_HF_TYPES):
            value, legal = getattr(self, name), _legal(name)
            if value is not None and legal is not None and value not in legal:
                raise ConfigurationError(
                    f"{name}={value!r}.",
                    why="it isn't among the option's values.",
                    way_out=f"give {_takes(name)}.",
                )

    def _require_plans_numbers(self) -> None:
        """Refuse what no plan could hold, long before the run's own plan is made."""
        PrivacyPlan(
            noise_multiplier=1.0 if self.noise_multiplier is None else self.noise_multiplier,
            clip_norm=self.clip_norm,
            expected_batch_size=1,
            dataset_size=1,
            steps=1,
            delta=0.5,
            target_epsilon=self.target_epsilon,
        )

    def _require_moderate_lookahead(self) -> None:
        weight = lookahead_weight(self.disk_kappa, self.disk_gamma)
        if weight > MAX_LOOKAHEAD_WEIGHT:
            least = (1 - self.disk_kappa) / (self.disk_kappa * MAX_LOOKAHEAD_WEIGHT)
            raise ConfigurationError(
                f"disk_gamma={self.disk_gamma!r} with disk_kappa={self.disk_kappa!r}.",
                why=f"w = (1 − κ)/(κγ) is {weight:.4g}: beyond {MAX_LOOKAHEAD_WEIGHT:g}, the two "
                "gradients are almost equal, and their difference is magnified.",
                way_out=f"choose disk_gamma above {least:.3g}, or a larger disk_kappa.",
            )

    def _refuse_incompatible(self) -> None:
        """Hugging Face options that would break a promise, each with its reason."""
        rules = [*self._incompatible().items(), *self._incompatible_with_dp_optimizer().items()]
        for name, (is_set, why, way_out) in rules:
            if is_set:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r} can't be used here.", why=why, way_out=way_out
                )

    def _incompatible(self) -> dict[str, tuple[bool, str, str]]:
        optim = _name(self.optim)
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
            "enable_jit_checkpoint": (
                bool(getattr(self, "enable_jit_checkpoint", False)),
                "it ends training as if it were done, and a key is destroyed when training is "
                "done: the run could never go on.",
                "set save_steps: after kill -9 a run goes on where it was, at no cost.",
            ),
            "parallelism_config": (
                getattr(self, "parallelism_config", None) is not None,
                "records are shared out by process; processes that share one record's tensors or "
                "sequence would each count it.",
                "use DDP (accelerate launch).",
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

    def _incompatible_with_dp_optimizer(self) -> dict[str, tuple[bool, str, str]]:
        is_adambc = self.dp_optimizer == "adambc"
        takes_its_place = (
            "dp_optimizer='adambc' is an optimizer of its own and takes optim's place."
        )
        return {
            "max_grad_norm": (
                self.dp_optimizer is not None and self.max_grad_norm > 0,
                f"dp_optimizer={self.dp_optimizer!r} relies on the noise being what the plan says, "
                "and clipping the noisy gradient again would change it.",
                "leave it at 0.0: each example's gradient is clipped already.",
            ),
            "optim": (
                is_adambc and _name(self.optim) not in _DEFAULT_OPTIMS,
                takes_its_place,
                "leave optim at its default, or set dp_optimizer=None.",
            ),
            "optim_args": (
                is_adambc and bool(self.optim_args),
                takes_its_place,
                "set adam_beta1, adam_beta2, weight_decay and adambc_floor instead.",
            ),
        }


# What a group of options can change, by the group's first one.
_GROUPS = {
    "target_epsilon": "the guarantee",
    "preconditioner": "utility only, except that probe='oracle' voids the guarantee",
    "log_unsafe_metrics": "neither",
}


def options_by_group() -> dict[str, list[Field[Any]]]:
    """Our options, and HF's with a default of ours, by what they can change."""
    groups: dict[str, list[Field[Any]]] = {}
    group = ""
    for name in DPKFCConfig.__annotations__:
        group = _GROUPS.get(name, group)
        groups.setdefault(group, []).append(DPKFCConfig.__dataclass_fields__[name])
    return groups


def _name(optim: Any) -> str:
    return str(getattr(optim, "value", optim))


def _read(name: str, declared: str, value: Any) -> Any:
    """One option's value in its declared type, of which ``| None`` may be a part."""
    kind, _, optional = declared.partition(" | ")
    if value is None and optional:
        return None
    try:
        return _READERS[kind](value)
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        raise ConfigurationError(
            f"{name}={value!r}.",
            why=f"its type is {declared}.",
            way_out=f"give {_takes(name)}.",
        ) from error


def _read_number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)


def _read_count(value: Any) -> int:
    number = _read_number(value)
    if not number.is_integer():
        raise ValueError
    return int(number)


def _read_switch(value: Any) -> bool:
    return {"true": True, "false": False}[str(value).lower()]


def _read_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


_READERS: dict[str, Callable[[Any], Any]] = {
    "float": _read_number,
    "int": _read_count,
    "bool": _read_switch,
    "str": _read_text,
}


# Options of HF that the guarantee depends on; the others are HF's to check, in its own words.
_HF_TYPES = {
    "per_device_train_batch_size": "int",
    "gradient_accumulation_steps": "int",
    "num_train_epochs": "float",
    "max_steps": "int",
    "seed": "int",
}


@dataclass(frozen=True)
class Range:
    """The finite numbers between two bounds; NaN is in none."""

    low: float = -math.inf
    high: float = math.inf
    includes_low: bool = False
    includes_high: bool = False

    def __contains__(self, value: float) -> bool:
        is_above = value >= self.low if self.includes_low else value > self.low
        is_below = value <= self.high if self.includes_high else value < self.high
        return math.isfinite(value) and is_above and is_below

    def of(self, name: str) -> str:
        """In words, for the option of that name."""
        if self == Range():
            return "a finite number"
        low = f"{self.low:g} {'≤' if self.includes_low else '<'} " if self.low > -math.inf else ""
        high = (
            f" {'≤' if self.includes_high else '<'} {self.high:g}" if self.high < math.inf else ""
        )
        return f"a finite number, {low}{name}{high}"


_AT_LEAST_ONE = Range(low=1, includes_low=True)
_RANGES = {
    "target_delta": Range(0, 1),
    "public_dataset_size": _AT_LEAST_ONE,
    "probe_batch_size": _AT_LEAST_ONE,
    "num_probe_batches": _AT_LEAST_ONE,
    "probe_min_length": _AT_LEAST_ONE,
    "probe_max_length": _AT_LEAST_ONE,
    "probe_refresh_steps": _AT_LEAST_ONE,
    "damping": Range(),  # CurvatureOptions says why it must be positive
    "pink_alpha": Range(),
    "zipf_exponent": Range(),
    "adambc_floor": Range(0),
    "disk_kappa": Range(0, 1, includes_high=True),
    "disk_gamma": Range(0),
    "diagnostics_steps": _AT_LEAST_ONE,
    "per_device_train_batch_size": _AT_LEAST_ONE,
    "gradient_accumulation_steps": _AT_LEAST_ONE,
    "num_train_epochs": Range(),
}


def _legal(name: str) -> Range | list[str] | None:
    """An option's choices or range; None where the type says all, or another object checks."""
    return _RANGES.get(name, _metadata(name).get("choices"))


def _takes(name: str) -> str:
    """What may be given for an option, and what it means."""
    declared = (DPKFCConfig.__annotations__ | _HF_TYPES)[name]
    kind, _, optional = declared.partition(" | ")
    legal = _legal(name)
    if isinstance(legal, Range):
        values = legal.of(name)
    else:
        values = f"one of {', '.join(legal)}" if legal else _KINDS[kind]
    meaning = _metadata(name).get("help", "").rstrip(".")
    return f"{values}{', or null (None)' if optional else ''}. It means: {meaning}"


_KINDS = {"float": "a number", "int": "a whole number", "bool": "true or false", "str": "a text"}


def _metadata(name: str) -> Mapping[str, Any]:
    return DPKFCConfig.__dataclass_fields__[name].metadata
