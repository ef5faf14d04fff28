"""The allow-list, and a push that happens whole or not at all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from hf_dpkfc.errors import PublishingError
from hf_dpkfc.publishing.statement import STATEMENT_NAME

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Everything that may leave: weights, configuration, tokenizer or processor, card and statement.
ALLOWED = (
    "README.md",
    STATEMENT_NAME,
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "spm.model",
    "source.spm",
    "target.spm",
    "bpe.codes",
    "normalizer.json",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "spm_char.model",
    "prophetnet.tokenizer",
    "entity_vocab.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
# The Hub makes this one itself.
HUBS_OWN = (".gitattributes",)

# HfHubHTTPError's first base is the root of whichever HTTP client the Hub's client stands on.
CONNECTION_ERRORS: tuple[type[Exception], ...] = (OSError, HfHubHTTPError.__bases__[0])

# HFValidationError is a ValueError of the client's own, for ids that can't exist; RuntimeError is
# what it wraps around whatever happened to the upload of one large file.
PUSH_ERRORS: tuple[type[Exception], ...] = (*CONNECTION_ERRORS, ValueError, RuntimeError)

_COMMIT = "commit to"
RETRIED = (408, 429, 500, 502, 503, 504)
MAX_TRIES = 5


def is_allowed(path: str) -> bool:
    """Whether a file of this name may be published."""
    return any(fnmatch(path, pattern) for pattern in ALLOWED)


def create_repository(
    repo_id: str, *, token: str | None = None, private: bool | None = None, pause: float = 1.0
) -> str:
    """The full ``owner/name`` of a repository, created if absent.

    Args:
        repo_id: ``name`` or ``owner/name``.
        token: Hub token; by default the one that is logged in.
        private: Visibility of a new repository.
        pause: Seconds before the first retry, doubled each time.

    Raises:
        PublishingError: For whatever can't be retried, in one sentence.
    """
    api = HfApi(token=token)
    created = _tried(
        lambda: api.create_repo(repo_id, private=private, exist_ok=True), "create", repo_id, pause
    )
    return str(created.repo_id)


def push_folder(
    folder: Path,
    repo_id: str,
    *,
    token: str | None = None,
    revision: str | None = None,
    message: str = "Private fine-tune",
    pause: float = 1.0,
) -> Any:
    """Publish a folder's allowed files in one commit: readers see all of it or nothing.

    Args:
        folder: A staging folder; files that aren't allowed stay here.
        repo_id: An existing ``owner/name``.
        token: Hub token; by default the one that is logged in.
        revision: Branch.
        message: Of the commit.
        pause: Seconds before the first retry, doubled each time.

    Raises:
        PublishingError: For whatever can't be retried, in one sentence.
    """
    files = _allowed_files(folder)
    api = HfApi(token=token)
    operations = [CommitOperationAdd(path_in_repo=p.name, path_or_fileobj=str(p)) for p in files]
    return _tried(
        lambda: api.create_commit(repo_id, operations, commit_message=message, revision=revision),
        _COMMIT,
        repo_id,
        pause,
    )


def _allowed_files(folder: Path) -> list[Path]:
    """What leaves; what stays is named, and a model without weights is no publication."""
    found = sorted(p for p in folder.rglob("*") if p.is_file())
    allowed = [p for p in found if p.parent == folder and is_allowed(p.name)]
    kept = [str(p.relative_to(folder)) for p in found if p not in allowed]
    if kept:
        logger.warning("Not pushed, since it isn't on the allow-list: %s.", ", ".join(kept))
    if not any(p.suffix == ".safetensors" for p in allowed):
        raise PublishingError(
            "There are no weights to publish.",
            why="the model saved none under a name that readers look for.",
            way_out="publish a transformers model or a PEFT adapter, which save safetensors.",
        )
    return allowed


def remote_readme(
    repo_id: str, *, token: str | None = None, revision: str | None = None, pause: float = 1.0
) -> str | None:
    """The README that a repository has now; None if it has none.

    Raises:
        PublishingError: If nobody knows: a push would overwrite what it hasn't seen.
    """
    api = HfApi(token=token)

    def download() -> str | None:
        try:
            # Not from the cache, to which the client falls back when the Hub doesn't answer.
            path = api.hf_hub_download(repo_id, "README.md", revision=revision, force_download=True)
        except (RemoteEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError):
            return None
        except ValueError as error:  # how the client says that a forced download failed, and why
            raise error.__cause__ or error from None
        return Path(path).read_text()

    return _tried(download, "read the card of", repo_id, pause)


def _tried(call: Callable[[], T], what: str, repo_id: str, pause: float) -> T:
    """The call's result, after as many tries as are safe; all our calls can be repeated."""
    for attempt in range(1, MAX_TRIES + 1):
        try:
            return call()
        except PUSH_ERRORS as error:
            cause = _cause(error)
            status = _status(cause)
            is_connection = status is None and isinstance(cause, CONNECTION_ERRORS)
            transient = status in RETRIED or is_connection
            if not transient or attempt == MAX_TRIES:
                # A commit whose answer was lost may have arrived all the same.
                is_unknown = is_connection and what == _COMMIT and _is_of_commit(cause)
                raise _explained(cause, status, what, repo_id, is_unknown) from error
            time.sleep(pause * 2 ** (attempt - 1))
    raise AssertionError("unreachable")


def _cause(error: Exception) -> Exception:
    """What happened, below the client's wrapping."""
    is_wrapped = isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception)
    return error.__cause__ if is_wrapped else error  # type: ignore[return-value]


def _is_of_commit(error: Exception) -> bool:
    """Whether the request that failed was the commit itself, or nobody knows which it was."""
    try:
        return "/commit/" in str(error.request.url)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):  # the HTTP client's word for an error without a request
        return True


def _status(error: Exception) -> int | None:
    response = error.response if isinstance(error, HfHubHTTPError) else None
    return None if response is None else int(response.status_code)


_REASONS = {
    401: ("the token is missing or not valid", "log in with `hf auth login`, or pass token="),
    403: (
        "the token may not write there",
        "use a token with write access, or another hub_model_id",
    ),
    404: ("there is no such owner, repository or branch", "check hub_model_id and hub_revision"),
    409: ("the repository changed at the same moment", "push again"),
}


def _explained(
    error: Exception, status: int | None, what: str, repo_id: str, is_unknown: bool
) -> PublishingError:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    why, way_out = _REASONS.get(
        status or 0, (first_line, "check the connection and push again, which is safe")
    )
    outcome = (
        "Either all of it was published or nothing: the Hub's answer didn't arrive"
        if is_unknown
        else "Nothing was published"
    )
    return PublishingError(
        f"Could not {what} {repo_id!r} on the Hub" + (f" (HTTP {status})." if status else "."),
        why=f"{why}. {outcome}.",
        way_out=f"{way_out}. The trained model is safe on disk.",
    )
