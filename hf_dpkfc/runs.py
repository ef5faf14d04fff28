"""The files of a run: ledger in ``output_dir``, key and head elsewhere, checkpoints."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hf_dpkfc.errors import ConfigurationError, LedgerError
from hf_dpkfc.mechanism.randomness import SecretKey
from hf_dpkfc.privacy.ledger import LEDGER_NAME, PrivacyLedger, require_unused
from hf_dpkfc.privacy.plan import PrivacyPlan

logger = logging.getLogger(__name__)

PRECONDITIONER_NAME = "preconditioner.safetensors"
FILTER_NAME = "kalman_filter.safetensors"
TRAINER_STATE_NAME = "trainer_state.json"
TUNING_NAME = "privacy_tuning.json"


@dataclass(frozen=True)
class KeyStore:
    """The folder of a run's key and of its ledger's head: outside ``output_dir``, owner only.

    Key and checkpoints together would give un-noised sums, so they never lie in one place, and
    the key is destroyed when training ends.
    """

    folder: Path

    @property
    def key_path(self) -> Path:
        """The key's file."""
        return self.folder / "key"

    @property
    def head_path(self) -> Path:
        """The head of the ledger."""
        return self.folder / "ledger-head"

    def create(self) -> SecretKey:
        """A new key; whatever was here belonged to an earlier run."""
        key = SecretKey.generate()
        try:
            self.destroy()
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            key.store(self.key_path)
        except OSError as error:
            raise ConfigurationError(
                f"The run's key can't be written below {self.folder}.",
                why=str(error),
                way_out="set privacy_key_path to a folder of yours outside output_dir.",
            ) from error
        return key

    def load(self) -> SecretKey | None:
        """The key of the run that is being resumed, if it still exists."""
        return SecretKey.load(self.key_path) if self.key_path.exists() else None

    def destroy(self) -> None:
        """Overwrite and remove the key, and with it the head, and the folder once it is empty."""
        if self.key_path.exists():
            self.key_path.write_bytes(bytes(self.key_path.stat().st_size))
            self.key_path.unlink()
        self.head_path.unlink(missing_ok=True)
        if self.folder.exists() and not any(self.folder.iterdir()):
            self.folder.rmdir()


@dataclass(frozen=True)
class RunFolder:
    """Where one run keeps its ledger, and where its key lies.

    Attributes:
        folder: ``output_dir``, or a trial's folder below it.
        output_dir: The folder that holds checkpoints, in which no key may lie.
        key_path: Below which the key's folder lies; None for ``$XDG_STATE_HOME``.
    """

    folder: Path
    output_dir: Path
    key_path: str | None = None

    @property
    def ledger_path(self) -> Path:
        """The live ledger, which wins over any checkpoint's copy."""
        return self.folder / LEDGER_NAME

    @property
    def keys(self) -> KeyStore:
        """Where the key lies.

        Raises:
            ConfigurationError: If that is inside ``output_dir``.
        """
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
        base = Path(self.key_path).expanduser() if self.key_path else state / "hf_dpkfc"
        # One folder per run: two runs with one key path must not destroy each other's key.
        folder = base / hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:16]
        if folder.resolve().is_relative_to(self.output_dir.resolve()):
            raise ConfigurationError(
                f"privacy_key_path={str(folder)!r} is inside output_dir.",
                why="key and checkpoints together give un-noised sums of private gradients.",
                way_out="choose a folder outside output_dir.",
            )
        return KeyStore(folder)

    def ledger_digest(self) -> str:
        """SHA-256 of the ledger file."""
        return hashlib.sha256(self.ledger_path.read_bytes()).hexdigest()

    def run_digest(self) -> str:
        """SHA-256 of the ledger's first line: the same through a whole run, and no other run's."""
        return hashlib.sha256(self.ledger_path.read_bytes().partition(b"\n")[0]).hexdigest()

    def holds(self, plan: PrivacyPlan, num_releases: int, claims_privacy: bool) -> bool:
        """Whether the ledger's own lines say this plan, this claim and this many releases."""
        try:
            header, *charges = self.ledger_path.read_bytes().splitlines()
            written = json.loads(header)
            claim = (written["plan"], written["claims_privacy"])
        except (ValueError, KeyError, TypeError):
            return False
        return claim == (plan.to_dict(), claims_privacy) and len(charges) == num_releases

    def open(
        self,
        plan: PrivacyPlan,
        *,
        continues: bool,
        claims_privacy: bool = True,
        description: Mapping[str, str] | None = None,
    ) -> tuple[SecretKey, PrivacyLedger]:
        """Key and ledger of a new run, or of the one that is continued.

        Raises:
            LedgerError: If the run to be continued can't be.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if continues:
            key = self._existing_key()
        else:
            self._set_aside_earlier_ledger()
            key = self.keys.create()
        ledger = PrivacyLedger(
            self.ledger_path,
            self.keys.head_path,
            plan,
            lambda message: key.mac(message, purpose="ledger"),
            claims_privacy,
            description,
        )
        return key, ledger

    def _existing_key(self) -> SecretKey:
        key = self.keys.load()
        if key is None:
            raise LedgerError(
                f"The key of {self.ledger_path} isn't in {self.keys.folder}.",
                why="a key is destroyed when its training ends; without it the ledger can't be "
                "continued and lost steps can't be replayed.",
                way_out="if training had ended, the model is finished. Otherwise set "
                "privacy_key_path and output_dir as they were when the run began (the key's "
                "folder is named after output_dir), or start a new run.",
            )
        return key

    def _set_aside_earlier_ledger(self) -> None:
        """An earlier run's ledger is kept under another name if its cost was real."""
        path = self.ledger_path
        if not path.exists():
            return
        require_unused(path)
        if path.read_bytes().count(b"\n") < 2:  # a header, and at most a torn charge, which is free
            path.unlink()
            return
        kept = path.with_name(f"{path.stem}-{self.ledger_digest()[:12]}{path.suffix}")
        path.rename(kept)
        logger.warning(
            "An earlier run in this folder spent budget of its own; its ledger is kept as %s. "
            "Costs of runs on the same records add up.",
            kept.name,
        )

    def last_checkpoint(self) -> str | None:
        """The last checkpoint that was written whole.

        A run that was killed before its first one is resumed from step 0 (None): with its key and
        ledger, the steps that it took are replayed and cost nothing more.

        Raises:
            ConfigurationError: If there is no run to resume.
        """
        found = [p for p in self.output_dir.glob("checkpoint-*") if self.is_ours(p)]
        if found:
            return str(max(found, key=lambda p: step_of(str(p))))
        if not self.ledger_path.exists():
            raise ConfigurationError(
                f"There is nothing to resume in {self.output_dir}.",
                why="resume_from_checkpoint=True asks for a run that was interrupted.",
                way_out="start without it.",
            )
        logger.warning("No complete checkpoint: the interrupted run is replayed from its start.")
        return None

    def require_ours(self, checkpoint: str) -> None:
        """Refuse a checkpoint that this run didn't write: its weights cost another budget.

        Raises:
            LedgerError: If its copy of the ledger isn't the beginning of ours.
        """
        if not self.is_ours(Path(checkpoint)):
            raise LedgerError(
                f"{checkpoint} isn't a whole checkpoint of the run in {self.folder}.",
                why="its weights were paid for under another ledger, or it was torn.",
                way_out="resume from a checkpoint of the interrupted run, or start a new run.",
            )

    def is_ours(self, checkpoint: Path) -> bool:
        """Whether this run wrote a checkpoint: whole, its ledger's copy the beginning of ours."""
        try:
            copy = (checkpoint / LEDGER_NAME).read_bytes()
            return _is_complete(checkpoint) and self.ledger_path.read_bytes().startswith(copy)
        except OSError:
            return False


def step_of(checkpoint: str | None) -> int:
    """The step at which a checkpoint goes on."""
    if checkpoint is None:
        return 0
    return int(json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text())["global_step"])


def _is_complete(checkpoint: Path) -> bool:
    """HF writes trainer_state.json last; a kill before or inside leaves it absent or torn."""
    try:
        step_of(str(checkpoint))
    except (OSError, ValueError, KeyError):
        return False
    return True
