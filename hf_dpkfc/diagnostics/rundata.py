"""What a run left in its folder; whatever is missing or odd becomes a message."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hf_dpkfc.diagnostics.record import DIAGNOSTICS_NAME, FORMAT, Entry, read_log
from hf_dpkfc.errors import ConfigurationError, DPKFCError
from hf_dpkfc.privacy.ledger import LEDGER_NAME
from hf_dpkfc.privacy.plan import PrivacyPlan
from hf_dpkfc.publishing.statement import STATEMENT_NAME, PrivacyStatement
from hf_dpkfc.runs import TRAINER_STATE_NAME, TUNING_NAME, RunFolder

# Of an evaluation: what tells about the machine or the training, not about the model.
_NO_METRIC_SUFFIXES = ("_time", "_runtime", "_per_second", "_epoch")


@dataclass
class RunData:
    """The parts of a run that could be read.

    Attributes:
        folder: Of the run.
        plan: From the statement, else from the ledger.
        num_releases: Charged in the ledger.
        claims_privacy: False where the factors saw private records.
        statement: What a finished run claims.
        looks: Diagnostics, in order of steps.
        evaluations: (step, metrics), in order of steps.
        tuning: What the search cost that this run is, or belongs to.
        messages: What is missing, damaged or from another version.
    """

    folder: Path
    plan: PrivacyPlan | None = None
    num_releases: int | None = None
    claims_privacy: bool = True
    statement: PrivacyStatement | None = None
    looks: list[Entry] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    tuning: dict[str, Any] | None = None
    messages: list[str] = field(default_factory=list)


def read_run(folder: Path) -> RunData:
    """Everything a report can show of a run.

    Raises:
        ConfigurationError: If the folder holds nothing of a run.
    """
    known = (LEDGER_NAME, STATEMENT_NAME, DIAGNOSTICS_NAME, TUNING_NAME)
    if not any((folder / name).exists() for name in known):
        raise ConfigurationError(
            f"There are no results in {folder}.",
            why=f"a run leaves {', '.join(known[:3])} in its output_dir, and none is here.",
            way_out="give the output_dir of a run of DPKFCTrainer (a trial of a search has its "
            "own, run-N, below it).",
        )
    data = RunData(folder)
    _read_statement(data)
    _read_ledger(data)
    _read_diagnostics(data)
    _read_trainer_state(data)
    _read_tuning(data)
    return data


def _read_statement(data: RunData) -> None:
    path = data.folder / STATEMENT_NAME
    if not path.exists():
        data.messages.append(f"No {STATEMENT_NAME}: the run hasn't ended, or claims no finite ε.")
        return
    try:
        data.statement = PrivacyStatement.from_json(path.read_text(errors="replace"))
        data.plan = data.statement.plan
    except DPKFCError as error:
        data.messages.append(f"{STATEMENT_NAME}: {error.what} {error.why}")


def _read_ledger(data: RunData) -> None:
    """The plan and the number of charges; its MACs can't be checked without the run's key."""
    run = RunFolder(data.folder, data.folder)
    if not run.ledger_path.exists():
        data.messages.append(f"No {LEDGER_NAME}: what was spent isn't known.")
        return
    lines = run.ledger_path.read_text(errors="replace").splitlines()
    try:
        header = json.loads(lines[0])
        data.plan = data.plan or PrivacyPlan(**header["plan"])
        data.num_releases = len(lines) - 1
        data.claims_privacy = bool(header["claims_privacy"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        data.messages.append(f"{LEDGER_NAME} can't be read: {error!r}.")
    claimed = data.statement
    if claimed is not None and claimed.ledger_sha256 != run.ledger_digest():
        data.messages.append(f"{LEDGER_NAME} isn't the file that {STATEMENT_NAME} quotes.")


def _read_diagnostics(data: RunData) -> None:
    path = data.folder / DIAGNOSTICS_NAME
    if not path.exists():
        data.messages.append(
            f"No {DIAGNOSTICS_NAME}: train with diagnostics_steps=50 to see spectra, alignment "
            "and signal against noise."
        )
        return
    log = read_log(path)
    data.messages += log.problems
    if log.header.get("format") != FORMAT:
        data.messages.append(
            f"{DIAGNOSTICS_NAME} has format {log.header.get('format')}, this version reads "
            f"{FORMAT}: what can't be read is left out."
        )
    written_by = log.header.get("version")
    if written_by != version("hf-dpkfc"):
        data.messages.append(
            f"{DIAGNOSTICS_NAME} was written by hf-dpkfc {written_by}, this is "
            f"{version('hf-dpkfc')}: what can't be read is left out."
        )
    if "note" in log.header:
        data.messages.append(str(log.header["note"]))
    data.looks = [entry for entry in log.entries if _is_readable(entry, data.messages)]
    for entry in log.entries:
        if entry["kind"] == "evaluation":
            data.evaluations.append((entry["step"], entry["metrics"]))


def _is_readable(entry: Entry, messages: list[str]) -> bool:
    """Whether an entry is a look with all its parts."""
    if entry["kind"] != "diagnostics":
        return False
    missing = {"step", "layers", "alignment", "signals", "notes"} - set(entry)
    if missing:
        messages.append(
            f"A line of {DIAGNOSTICS_NAME} is left out, it lacks {', '.join(sorted(missing))}."
        )
    return not missing


def _read_trainer_state(data: RunData) -> None:
    """Evaluations from HF's own state, where no diagnostics were kept."""
    if data.evaluations:
        return
    path = next(_trainer_states(data.folder), None)
    if path is None:
        return
    try:
        history = json.loads(path.read_text())["log_history"]
        for log in history:
            metrics = evaluation_metrics(log)
            if metrics:
                data.evaluations.append((int(log["step"]), metrics))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        data.messages.append(f"{path.name} can't be read: {error!r}.")


def _trainer_states(folder: Path) -> Iterator[Path]:
    """The run's own, else the last checkpoint's."""
    found = [folder / TRAINER_STATE_NAME, *folder.glob(f"checkpoint-*/{TRAINER_STATE_NAME}")]
    yield from sorted((p for p in found if p.exists()), key=lambda p: -p.stat().st_mtime)


def evaluation_metrics(logs: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an evaluation on held-out records, without timings; for report and card.

    Metrics of training records (``unsafe_train_``) aren't among them.
    """
    return {
        name.removeprefix("eval_"): float(value)
        for name, value in logs.items()
        if name.startswith("eval_")
        and isinstance(value, int | float)
        and not name.endswith(_NO_METRIC_SUFFIXES)
    }


def _read_tuning(data: RunData) -> None:
    """Of a search in this folder, or in the one above where this is a trial's."""
    path = data.folder / TUNING_NAME
    if not path.exists() and data.folder.absolute().name.startswith("run-"):
        path = data.folder.absolute().parent / TUNING_NAME
    if path.exists():
        try:
            data.tuning = dict(json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            data.messages.append(f"{TUNING_NAME} can't be read: {error!r}.")
