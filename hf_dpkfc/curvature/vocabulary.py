"""Which tokens of a tokenizer are words of its language, and how common each is.

Only the tokenizer is asked: Unigram models store log-probabilities, BPE its merges in order of
frequency, WordPiece its words roughly so. No text is needed and none is here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from hf_dpkfc.errors import ProbeError

_PLACEHOLDER = re.compile(r"unused|reserved|extra_id|madeupword", re.IGNORECASE)
_BYTE = re.compile(r"^<0x[0-9A-Fa-f]{2}>$")
_WORD_START = "▁Ġ"


def ranked_payload_ids(tokenizer: Any, vocab_size: int | None = None) -> list[int]:
    """Ids of the tokens that may stand in a probe, commonest first.

    Args:
        tokenizer: Any Hugging Face tokenizer.
        vocab_size: Rows of the model's embedding; tokens beyond it can't be embedded.

    Raises:
        ProbeError: If the tokenizer has no vocabulary to draw from.
    """
    vocabulary: Mapping[str, int] = tokenizer.get_vocab() if tokenizer is not None else {}
    structural = (
        set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
        if vocabulary
        else set()
    )
    payload = {
        token: index
        for token, index in vocabulary.items()
        if index not in structural
        and not _PLACEHOLDER.search(token)
        and (vocab_size is None or index < vocab_size)
    }
    if not payload:
        raise ProbeError(
            f"{type(tokenizer).__name__} has no vocabulary to draw probe tokens from.",
            why="a token probe is a sequence of the tokenizer's own tokens; special, added and "
            "unused ones don't count.",
            way_out="pass the checkpoint's tokenizer as processing_class, or probe='public' with "
            "a public_dataset.",
        )
    key = _rank_key(tokenizer)
    return [payload[token] for token in sorted(payload, key=lambda t: key(t, payload[t]))]


def _rank_key(tokenizer: Any) -> Any:
    """(token, id) -> sort key; smaller is commoner."""
    model = _backend_model(tokenizer)
    match model.get("type"):
        case "Unigram":
            log_probability = dict(model["vocab"])
            return lambda token, index: (-log_probability.get(token, -1e9), index)
        case "BPE":
            merges = {_merged(m): rank for rank, m in reversed(list(enumerate(model["merges"])))}
            return lambda token, index: (merges.get(token, len(merges)), index)
        case "WordPiece":
            prefix = model.get("continuing_subword_prefix", "##")
            return lambda token, index: (_piece_class(token, prefix), index)
    return lambda token, index: (_piece_class(token, None), index)


def _backend_model(tokenizer: Any) -> Mapping[str, Any]:
    """The tokenizers library's own description; empty for tokenizers written in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return json.loads(backend.to_str())["model"] if backend is not None else {}


def _merged(merge: Any) -> str:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left + right


def _piece_class(token: str, continuation: str | None) -> int:
    """0 whole word, 1 continuation, 2 single character or byte: ids alone rank "the" 998th."""
    is_continuation = continuation is not None and token.startswith(continuation)
    text = token.removeprefix(continuation or "").lstrip(_WORD_START)
    if len(text) <= 1 or _BYTE.match(token):
        return 2
    return int(is_continuation)
