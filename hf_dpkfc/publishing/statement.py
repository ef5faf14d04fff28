"""The machine-readable privacy statement: enough to recompute ε, no seed, no key, no record."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hf_dpkfc.errors import PublishingError
from hf_dpkfc.privacy.accounting import MAX_PRV_EPSILON
from hf_dpkfc.privacy.plan import PrivacyPlan

STATEMENT_NAME = "privacy_statement.json"
SECURE_RANDOMNESS = "ChaCha20 with summed draws, keyed with 256 bits"
FAST_RANDOMNESS = "Philox, keyed with 256 bits from the operating system"
FORMAT = 1

# What a card reads out of the statement's nested parts, and of what type.
_PARTS: dict[str, dict[str, Any]] = {
    "preconditioner": {"kind": str, "probe": str, "is_data_free": bool},
    "audit": {
        "method": str,
        "confidence": int | float,
        "bound": int | float,
        "claim": int | float,
    },
    "dp_optimizer": {"name": str},
}
# What is read where it stands there.
_OPTIONAL_PARTS: dict[str, dict[str, Any]] = {"audit": {"num_trials": int}}
_OPTIMIZER_NUMBERS = {"adambc": ("floor",), "disk": ("kappa", "gamma")}


@dataclass(frozen=True)
class PrivacyStatement:
    """What a run claims, and what the claim rests on.

    Attributes:
        plan: The frozen plan; its ε is the claim.
        num_releases: Releases charged in the ledger.
        ledger_sha256: Digest of the ledger file.
        claims_privacy: False where the factors saw private records.
        preconditioner: Kind, approximation, sides, damping, rank, probe: how the geometry was made.
        randomness: The generator, never its seed.
        world_size: Number of processes.
        logged_unsafe_metrics: Un-noised facts were logged during training.
        versions: Of the code that ran.
        dp_optimizer: Name and options of what came between noise and weights; None for plain torch.
        audit: Result of an audit, if one was made.
        weights_sha256: Digest of the weights that the releases led to.
        checked_neighbours: Whether examples were seen, on probes, not to depend on each other.
        run_sha256: Digest of the ledger's first line, which tells this training from any other.
        format: Of this file.
    """

    plan: PrivacyPlan
    num_releases: int
    ledger_sha256: str
    claims_privacy: bool
    preconditioner: dict[str, Any]
    randomness: str
    world_size: int
    logged_unsafe_metrics: bool
    versions: dict[str, str]
    dp_optimizer: dict[str, Any] | None = None
    audit: dict[str, Any] | None = None
    weights_sha256: str | None = None
    run_sha256: str | None = None
    checked_neighbours: bool = True
    format: int = field(default=FORMAT)

    def require_publishable(self) -> PrivacyStatement:
        """The statement itself, if there is a guarantee to publish.

        Raises:
            PublishingError: If ε is infinite or not claimed, the ledger is overspent or empty, or
                an audit leaked more than the claim.
        """
        epsilon = self.plan.epsilon
        reasons = {
            "no ε is claimed: the preconditioner saw private records (probe='oracle')": (
                not self.claims_privacy
            ),
            f"ε is {epsilon}": not math.isfinite(epsilon),
            f"the ledger holds {self.num_releases} releases, the plan allows {self.plan.steps}": (
                self.num_releases > self.plan.steps
            ),
            "the ledger holds no release": self.num_releases < 1,
        }
        for reason, holds in reasons.items():
            if holds:
                raise PublishingError(
                    f"This model can't be published: {reason}.",
                    why="a card states a guarantee, and there is none.",
                    way_out="train with a finite target_epsilon and data-free or public probes.",
                )
        if self._is_refuted:
            raise PublishingError(
                "This model can't be published: its audit refutes the claim.",
                why="somebody got more out of its releases than the guarantee allows.",
                way_out="please report it with the audit's JSON; don't release the model.",
            )
        return self

    @property
    def _is_refuted(self) -> bool:
        return self.audit is not None and not self.audit["bound"] <= self.audit["claim"]

    def to_json(self) -> str:
        """As it is published, with ε by two accountants for the reader's convenience."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields |= {"plan": self.plan.to_dict(), **self._epsilons()}
        return json.dumps(fields, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)

    def _epsilons(self) -> dict[str, Any]:
        if not self.claims_privacy:
            return {"epsilon": None, "epsilon_spent": None, "second_opinion": None}
        return {
            "epsilon": self.plan.epsilon,
            "epsilon_spent": self.plan.epsilon_at(self.num_releases),
            "second_opinion": {
                "accountant": self.other_accountant,
                "epsilon": self.second_opinion,
            },
        }

    @property
    def other_accountant(self) -> str:
        """The one that the plan wasn't made with."""
        return "prv" if self.plan.accountant == "rdp" else "rdp"

    @cached_property
    def second_opinion(self) -> float | None:
        """ε of the plan by the other accountant; None where ε is too large for it."""
        if self.plan.epsilon > MAX_PRV_EPSILON:
            return None
        return self.plan.epsilon_at(self.plan.steps, self.other_accountant)

    @property
    def uses_secure_rng(self) -> bool:
        """Whether the generator was the cryptographic one."""
        return self.randomness == SECURE_RANDOMNESS

    @classmethod
    def from_json(cls, text: str) -> PrivacyStatement:
        """Read a published statement; derived numbers in it are not believed but recomputed."""
        try:
            fields = json.loads(text)
            plan = PrivacyPlan(**fields["plan"])
            _require_types(fields)
            own = {f.name for f in dataclasses.fields(cls)} - {"plan"}
            # A field that a later version added has its default; a missing one is a TypeError.
            return cls(plan=plan, **{name: fields[name] for name in own & fields.keys()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PublishingError(
                "The privacy statement can't be read.",
                why=f"{type(error).__name__}: {error}.",
                way_out=f"give the {STATEMENT_NAME} that this library wrote.",
            ) from error

    def save(self, folder: str | Path) -> None:
        """Write it into a folder, whole or not at all."""
        path = Path(folder) / STATEMENT_NAME
        partial = path.with_suffix(".part")
        partial.write_text(self.to_json() + "\n")
        partial.replace(path)

    @classmethod
    def load(cls, folder: str | Path) -> PrivacyStatement:
        """Read it from a folder.

        Raises:
            PublishingError: If there is none: then nothing may be published.
        """
        path = Path(folder) / STATEMENT_NAME
        if not path.exists():
            raise PublishingError(
                f"There is no {STATEMENT_NAME} in {folder}.",
                why="without a finished run and its ledger there is no guarantee to state.",
                way_out="train with DPKFCTrainer first; it writes the statement when it ends.",
            )
        return cls.from_json(path.read_text(errors="replace"))


def _require_types(fields: dict[str, Any]) -> None:
    """Raise a TypeError that names the first field of another type than it was written with."""
    for name, hint in get_type_hints(PrivacyStatement).items():
        if name in fields and name != "plan" and not isinstance(fields[name], _accepted(hint)):
            raise TypeError(f"{name} is {fields[name]!r}")
    for part in _PARTS.keys() & fields.keys():
        inner = fields[part]
        types = {} if inner is None else _PARTS[part] | _optional_types(part, inner)
        if part == "dp_optimizer" and inner is not None:
            types |= dict.fromkeys(_OPTIMIZER_NUMBERS[inner["name"]], int | float)
        for name, kind in types.items():
            if not isinstance(inner[name], kind):
                raise TypeError(f"{part}.{name} is {inner[name]!r}")


def _optional_types(part: str, inner: dict[str, Any]) -> dict[str, Any]:
    optional = _OPTIONAL_PARTS.get(part, {})
    return {name: kind for name, kind in optional.items() if name in inner}


def _accepted(hint: Any) -> tuple[type, ...]:
    """What ``isinstance`` takes for an annotation: dict for dict[str, Any], and so on."""
    parts = (hint,) if get_origin(hint) is dict else get_args(hint) or (hint,)
    return tuple(get_origin(part) or part for part in parts)
