"""The write-ahead ledger: a step is charged, on disk, before its noise is drawn.

One line per release, each MACed together with the line before it; beside the key lies a head with
the number of lines and the last MAC, so that a file cut at a line's end shows. Bytes after the last
newline are a torn write: their noise was never drawn.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from hf_dpkfc.errors import BudgetError, LedgerError
from hf_dpkfc.privacy.plan import PrivacyPlan

# (message) -> MAC, keyed; the ledger never holds the key itself.
Mac = Callable[[bytes], bytes]

LEDGER_NAME = "privacy_ledger.jsonl"  # in a run's folder and in its checkpoints
VERSION = 2
SAMPLER = "poisson"


class PrivacyLedger:
    """The releases of one run under one plan.

    Guarantees: every release is on disk before its noise exists; an identical replay isn't
    charged twice; nothing beyond ``plan.steps`` is ever granted; one process at a time.

    Args:
        path: The ledger file, created if absent.
        head_path: The head, beside the key.
        plan: The plan that is charged.
        mac: Keyed MAC.
        claims_privacy: False where the factors see private records; for a whole run or not at all.
        description: What a card says of the whole run, by option; the same in every launch.

    Raises:
        LedgerError: If the file is in use, damaged, shortened, or another plan's or key's.
    """

    def __init__(
        self,
        path: str | Path,
        head_path: str | Path,
        plan: PrivacyPlan,
        mac: Mac,
        claims_privacy: bool = True,
        description: Mapping[str, str] | None = None,
    ) -> None:
        self.path, self.head_path, self.plan = Path(path), Path(head_path), plan
        self.claims_privacy = claims_privacy
        self.description = dict(description or {})
        self._mac = mac
        self._digests: dict[int, tuple[str, ...]] = {}  # by step; all that is kept of a release
        self._last_mac = ""
        self._num_lines = 0
        self._file = open(self.path, "a+b")
        self._lock()
        lines = self._complete_lines()
        if lines or self.head_path.exists():
            self._read(lines)
        if not lines:
            self._write_head()
            self._write_line(
                {
                    "version": VERSION,
                    "sampler": SAMPLER,
                    "plan": plan.to_dict(),
                    "claims_privacy": claims_privacy,
                    "description": self.description,
                }
            )

    @property
    def num_releases(self) -> int:
        """Releases charged so far: every line but the header."""
        return self._num_lines - 1

    @property
    def charged_steps(self) -> list[int]:
        """The step of every release; twice where it was charged twice."""
        return [step for step, digests in self._digests.items() for _ in digests]

    def has(self, step: int, digest: str) -> bool:
        """Whether this very release is charged already."""
        return digest in self._digests.get(step, ())

    def has_step(self, step: int) -> bool:
        """Whether any release of this step is charged already."""
        return step in self._digests

    def charge(self, step: int, digest: str) -> bool:
        """Charge a release before its noise is drawn; False if it is a replay, which is free.

        Raises:
            BudgetError: If the plan has no release left.
        """
        if self.has(step, digest):
            return False
        if self.num_releases >= self.plan.steps:
            raise BudgetError(
                f"All {self.plan.steps} releases of the plan are charged.",
                why=f"one more would spend more than ε = {self.plan.epsilon:.4g}.",
                way_out="stop here: the model as it is carries the guarantee.",
            )
        self._write_line({"step": step, "digest": digest})
        self._remember(step, digest)
        return True

    def close(self) -> None:
        """Let go of the file and its lock."""
        self._file.close()

    def __enter__(self) -> PrivacyLedger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _remember(self, step: int, digest: str) -> None:
        self._digests[step] = (*self._digests.get(step, ()), digest)

    def _lock(self) -> None:
        try:
            _lock(self._file, self.path)
        except LedgerError:
            self._file.close()
            raise

    def _complete_lines(self) -> list[bytes]:
        """Whole lines; a torn last one is cut off."""
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            self._file.truncate(len(whole))
            os.fsync(self._file.fileno())
        return whole.splitlines()

    def _write_line(self, entry: dict[str, Any]) -> None:
        """Append, fsync, then advance the head, fsync: in this order nothing is ever lost."""
        self._last_mac = self._mac_of(entry)
        line = _canonical(entry | {"mac": self._last_mac})
        self._file.write(line + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._num_lines += 1
        self._write_head()

    def _write_head(self) -> None:
        body = _canonical({"lines": self._num_lines, "mac": self._last_mac})
        seal = self._mac(b"head" + body).hex()
        temporary = self.head_path.with_suffix(".tmp")
        with open(temporary, "wb") as file:
            file.write(body + b"\n" + seal.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.head_path)
        _fsync_folder(self.head_path.parent)

    def _mac_of(self, entry: dict[str, Any]) -> str:
        return self._mac(self._last_mac.encode() + _canonical(entry)).hex()

    def _read(self, lines: list[bytes]) -> None:
        """Check every line's MAC, the plan and the head, and count the charges."""
        macs = [""]
        for number, line in enumerate(lines):
            entry = self._verified(line, number)
            macs.append(self._last_mac)
            if number == 0:
                self._require_same_plan(entry)
            else:
                self._remember(entry["step"], entry["digest"])
        self._num_lines = len(lines)
        self._require_head(macs)
        self._write_head()

    def _verified(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            entry = json.loads(line)
            mac = entry.pop("mac")
            genuine = hmac.compare_digest(mac, self._mac_of(entry)) and line == _canonical(
                entry | {"mac": mac}
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._damaged(f"line {number + 1} isn't an entry") from error
        if not genuine:
            raise self._damaged(f"line {number + 1} has a wrong MAC")
        self._last_mac = mac
        return entry

    def _require_same_plan(self, header: dict[str, Any]) -> None:
        if header.get("version") != VERSION or header.get("sampler") != SAMPLER:
            raise self._damaged("it was written by another version")
        if header.get("claims_privacy") is not self.claims_privacy:
            raise LedgerError(
                f"{self.path} belongs to a run with another kind of probe.",
                why="probe='oracle' claims no ε, and a run claims it from its first step or not "
                "at all.",
                way_out="resume with the probe that the run was started with, or start a new run "
                "in another output_dir.",
            )
        told, ours = header["description"], self.description
        changed = [f"{k} was {told.get(k)!r}" for k, v in ours.items() if told.get(k) != v]
        if changed:
            raise LedgerError(
                f"{self.path} belongs to a run with other options: {', '.join(changed)}.",
                why="the card describes every step of a run, and these would be true of some only.",
                way_out="resume with the options that the run was started with, or start a new "
                "run in another output_dir.",
            )
        if header["plan"] != self.plan.to_dict():
            changed = [k for k, v in self.plan.to_dict().items() if header["plan"].get(k) != v]
            raise LedgerError(
                f"{self.path} belongs to another plan: {', '.join(changed)} differ.",
                why="ε is a property of the whole plan; charges under two plans don't add up to "
                "either.",
                way_out="resume with the options that the run was started with, or start a new "
                "run in another output_dir.",
            )

    def _require_head(self, macs: list[str]) -> None:
        """The head may be one line behind (killed between the two writes), never ahead."""
        try:
            body, seal = self.head_path.read_bytes().split(b"\n")
            genuine = hmac.compare_digest(seal.decode(), self._mac(b"head" + body).hex())
            head = json.loads(body)
        except (OSError, ValueError) as error:
            raise self._damaged(f"its head {self.head_path} is missing or unreadable") from error
        behind = len(macs) - 1 - head["lines"]
        if not genuine or behind not in (0, 1) or macs[head["lines"]] != head["mac"]:
            raise self._damaged("it doesn't match its head: lines were removed or replaced")

    def _damaged(self, what: str) -> LedgerError:
        return LedgerError(
            f"{self.path} can't be trusted: {what}.",
            why="a charge may be missing, so the ε that was spent is unknown.",
            way_out="restore the ledger, its key and its head from the same moment, or start a "
            "new run in another output_dir and don't release this one's model.",
        )


def require_unused(path: Path) -> None:
    """Raise unless no process holds this ledger."""
    with open(path, "rb") as file:
        _lock(file, path)


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise LedgerError(
            f"{path} is in use by another process.",
            why="two runs on one ledger would each spend the budget that the other counts on.",
            way_out="wait for the other run, or use another output_dir.",
        ) from error


def _canonical(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry, sort_keys=True, ensure_ascii=False).encode()


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
