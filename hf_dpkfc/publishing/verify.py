"""Verification of a published statement by anyone: ε recomputed, card compared, files listed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hf_dpkfc.errors import DPKFCError, PublishingError
from hf_dpkfc.privacy.ledger import LEDGER_NAME
from hf_dpkfc.publishing.card import (
    formal_claim,
    privacy_section,
    read_card,
    split_metadata,
    stated_section,
    typed_block,
)
from hf_dpkfc.publishing.statement import STATEMENT_NAME, PrivacyStatement
from hf_dpkfc.publishing.upload import HUBS_OWN, PUSH_ERRORS, is_allowed

TOLERANCE = 1e-6
LIMIT = (
    "Weights aren't compared with the statement's weights_sha256: that takes the loaded model, "
    "and DPKFCTrainer does it before it publishes."
)
# What a download leaves beside the published files.
_CLIENTS_OWN = (".git/", ".cache/huggingface/")


@dataclass(frozen=True)
class Check:
    """One line of a verification."""

    what: str
    holds: bool
    detail: str

    def __str__(self) -> str:
        return f"{'ok  ' if self.holds else 'FAIL'}  {self.what}: {self.detail}"


@dataclass(frozen=True)
class _Publication:
    """What is verified.

    Attributes:
        folder: Of card and statement, on disk.
        files: The names of everything beside them.
        is_run: A run's ``output_dir``, of which only allowed files would be published.
    """

    folder: Path
    files: list[str]
    is_run: bool = False


def verify(repo_or_folder: str, token: str | None = None) -> list[Check]:
    """All checks of a published model, in a folder or on the Hub; see :data:`LIMIT`."""
    folder = Path(repo_or_folder)
    is_local = folder.is_dir()
    return list(_checks(_on_disk(folder) if is_local else _on_the_hub(repo_or_folder, token)))


def _on_disk(folder: Path) -> _Publication:
    found = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    files = sorted(name for name in found if not name.startswith(_CLIENTS_OWN))
    return _Publication(folder, files, is_run=LEDGER_NAME in files)


def _on_the_hub(repo_id: str, token: str | None) -> _Publication:
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        files = api.list_repo_files(repo_id)
        present = [name for name in ("README.md", STATEMENT_NAME) if name in files]
        paths = [api.hf_hub_download(repo_id, name) for name in present]
    except PUSH_ERRORS as error:
        raise PublishingError(
            f"{repo_id!r} is neither a folder nor a repository that can be read.",
            why=str(error).strip().splitlines()[0],
            way_out="give a folder, or a Hub id and a token that may read it.",
        ) from error
    if not paths:
        raise PublishingError(
            f"{repo_id!r} holds neither a card nor a {STATEMENT_NAME}.",
            why="there is no guarantee to verify.",
            way_out="verify a model that was published with DPKFCTrainer.push_to_hub().",
        )
    return _Publication(Path(paths[0]).parent, files)


def _checks(publication: _Publication) -> Iterator[Check]:
    yield _check_files(publication)
    try:
        statement = PrivacyStatement.load(publication.folder).require_publishable()
    except DPKFCError as error:
        yield Check("statement", False, f"{error.what} {error.why}")
        return
    if publication.is_run:
        yield _check_ledger(statement, publication.folder / LEDGER_NAME)
    yield from _check_numbers(statement, publication.folder)
    yield from _check_card(statement, publication.folder / "README.md")


def _check_files(publication: _Publication) -> Check:
    forbidden = [n for n in publication.files if not is_allowed(n) and n not in HUBS_OWN]
    if publication.is_run:
        detail = f"a run's folder; {len(forbidden)} stay here and aren't published by push_to_hub"
        return Check("files", True, detail)
    detail = ", ".join(forbidden) or f"{len(publication.files)}, all allowed"
    return Check("files", not forbidden, detail)


def _check_ledger(statement: PrivacyStatement, path: Path) -> Check:
    is_quoted = hashlib.sha256(path.read_bytes()).hexdigest() == statement.ledger_sha256
    verb = "is" if is_quoted else "isn't"
    return Check("ledger", is_quoted, f"{path.name} {verb} the file that the statement quotes")


def _check_numbers(statement: PrivacyStatement, folder: Path) -> Iterator[Check]:
    plan = statement.plan
    published = json.loads((folder / STATEMENT_NAME).read_text())
    second = published.get("second_opinion")
    for accountant, claimed, recomputed in (
        (plan.accountant, published.get("epsilon"), plan.epsilon),
        (
            statement.other_accountant,
            second.get("epsilon") if isinstance(second, dict) else None,
            statement.second_opinion,
        ),
    ):
        holds = claimed is None if recomputed is None else _equal(claimed, recomputed)
        detail = f"claimed {claimed}, recomputed {recomputed}"
        yield Check(f"ε ({accountant.upper()})", holds, detail)
    yield Check(
        "releases",
        statement.num_releases <= plan.steps,
        f"{statement.num_releases} of {plan.steps} planned",
    )


def _check_card(statement: PrivacyStatement, path: Path) -> Iterator[Check]:
    try:
        text = read_card(path)
        metadata, body = split_metadata(text or "")
    except DPKFCError as error:
        yield Check("card", False, f"{error.what} {error.why}")
        return
    section, block = stated_section(body), metadata.get("differential_privacy")
    if not section and block is None:
        lack = "there is no README.md" if text is None else "README.md says nothing of privacy"
        way_out = "`hf-dpkfc card FOLDER` writes the card, and push_to_hub does"
        yield Check("card", False, f"{lack}; {way_out}")
        return
    yield _check_text(statement, section)
    yield from _check_metadata(statement, block)


def _check_text(statement: PrivacyStatement, stated: str) -> Check:
    """Word for word where this version wrote it; another version's only for its claim."""
    claim = formal_claim(statement)
    written_by = statement.versions.get("hf-dpkfc")
    if written_by != version("hf-dpkfc"):
        detail = f"{claim} (written by hf-dpkfc {written_by}: the rest wasn't compared)"
        return Check("card's text", claim in stated, detail)
    differing = _first_difference(stated.strip(), privacy_section(statement).strip())
    return Check("card's text", differing is None, differing or f"{claim}, and all else")


def _first_difference(stated: str, expected: str) -> str | None:
    """The first line that isn't as the statement has it; None if there is none."""
    ours, theirs = expected.splitlines(), stated.splitlines()
    for number, line in enumerate(ours):
        if number >= len(theirs) or theirs[number] != line:
            found = theirs[number] if number < len(theirs) else "nothing"
            return f"it says {found[:100]!r}, the statement {line[:100]!r}"
    return None if len(theirs) == len(ours) else f"it adds {theirs[len(ours)][:100]!r}"


def _check_metadata(statement: PrivacyStatement, block: Any) -> Iterator[Check]:
    block = block if isinstance(block, dict) else {}
    for name, value in typed_block(statement).items():
        stated = block.get(name)
        holds = _equal(stated, value) if isinstance(value, float) else stated == value
        yield Check(f"card's {name}", holds, f"{stated} against {value}")


def _equal(claimed: object, recomputed: float) -> bool:
    if not isinstance(claimed, int | float) or not math.isfinite(claimed):
        return False
    return abs(claimed - recomputed) <= TOLERANCE * max(1.0, abs(recomputed))
