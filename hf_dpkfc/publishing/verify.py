"""Verification of a published statement by anyone: ε recomputed, card compared, files listed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hf_dpkfc.errors import DPKFCError, PublishingError
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


def verify(repo_or_folder: str, token: str | None = None) -> list[Check]:
    """All checks of a published model, in a folder or on the Hub."""
    folder, files = _local(repo_or_folder, token)
    return list(_checks(folder, files))


def _local(repo_or_folder: str, token: str | None) -> tuple[Path, list[str]]:
    """The card and the statement on disk, and the names of everything that was published."""
    folder = Path(repo_or_folder)
    if folder.is_dir():
        found = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
        return folder, sorted(name for name in found if not name.startswith(_CLIENTS_OWN))
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        files = api.list_repo_files(repo_or_folder)
        present = [name for name in ("README.md", STATEMENT_NAME) if name in files]
        paths = [api.hf_hub_download(repo_or_folder, name) for name in present]
    except PUSH_ERRORS as error:
        raise PublishingError(
            f"{repo_or_folder!r} is neither a folder nor a repository that can be read.",
            why=str(error).strip().splitlines()[0],
            way_out="give a folder, or a Hub id and a token that may read it.",
        ) from error
    if not paths:
        raise PublishingError(
            f"{repo_or_folder!r} holds neither a card nor a {STATEMENT_NAME}.",
            why="there is no guarantee to verify.",
            way_out="verify a model that was published with DPKFCTrainer.push_to_hub().",
        )
    return Path(paths[0]).parent, files


def _checks(folder: Path, files: list[str]) -> Iterator[Check]:
    forbidden = [name for name in files if not is_allowed(name) and name not in HUBS_OWN]
    yield Check("files", not forbidden, ", ".join(forbidden) or f"{len(files)}, all allowed")
    try:
        statement = PrivacyStatement.load(folder).require_publishable()
        metadata, body = split_metadata(read_card(folder / "README.md") or "")
    except DPKFCError as error:
        yield Check("statement and card", False, f"{error.what} {error.why}")
        return
    yield from _check_numbers(statement, folder)
    yield _check_text(statement, stated_section(body))
    yield from _check_metadata(statement, metadata.get("differential_privacy"))


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
