"""Verification of a published statement by anyone: ε recomputed, card compared, files listed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_dpkfc.errors import DPKFCError, PublishingError
from hf_dpkfc.publishing.card import formal_claim, split_metadata, stated_section
from hf_dpkfc.publishing.statement import STATEMENT_NAME, PrivacyStatement
from hf_dpkfc.publishing.upload import HUBS_OWN, PUSH_ERRORS, is_allowed

TOLERANCE = 1e-6


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
        return folder, sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
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
        statement = PrivacyStatement.load(folder)
        statement.require_publishable()
    except DPKFCError as error:
        yield Check("statement", False, error.what)
        return
    yield from _check_numbers(statement, folder)


def _check_numbers(statement: PrivacyStatement, folder: Path) -> Iterator[Check]:
    plan = statement.plan
    published = json.loads((folder / STATEMENT_NAME).read_text())
    second = published.get("second_opinion")
    for accountant, claimed in (
        (plan.accountant, published.get("epsilon")),
        (statement.other_accountant, second.get("epsilon") if isinstance(second, dict) else None),
    ):
        recomputed = plan.epsilon_at(plan.steps, accountant)
        yield Check(
            f"ε ({accountant.upper()})",
            _equal(claimed, recomputed),
            f"claimed {claimed}, recomputed {recomputed:.6g}",
        )
    yield Check(
        "releases",
        statement.num_releases <= plan.steps,
        f"{statement.num_releases} of {plan.steps} planned",
    )
    readme = folder / "README.md"
    metadata, body = split_metadata(readme.read_text() if readme.exists() else "")
    claim = formal_claim(statement)
    is_stated = claim in stated_section(body)
    yield Check("card's text", is_stated, f"{claim}{'' if is_stated else ' is not what it says'}")
    block = metadata.get("differential_privacy")
    block = block if isinstance(block, dict) else {}
    for name, value in (("epsilon", plan.epsilon), ("delta", plan.delta)):
        stated = block.get(name)
        yield Check(f"card's {name}", _equal(stated, value), f"{stated} against {value:.6g}")


def _equal(claimed: object, recomputed: float) -> bool:
    if not isinstance(claimed, int | float) or not math.isfinite(claimed):
        return False
    return abs(claimed - recomputed) <= TOLERANCE * max(1.0, abs(recomputed))
