"""Which tokens of a tokenizer are words of its language, and how common each is.

Only the tokenizer is asked: Unigram models store log-probabilities, BPE its merges in order of
frequency, WordPiece its words roughly so. No text is needed and none is here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from hf_dpkfc.errors import ProbeError

# Also the special tokens of a vocabulary that this one was made from: MPNet's holds BERT's as
# ordinary tokens, with the lowest ids.
_PLACEHOLDER = re.compile(
    r"unused|reserved|extra_id|madeupword"
    r"|^\[(pad|unk|cls|sep|mask|bos|eos)\]$|^</?(s|pad|unk|cls|sep|mask|bos|eos)>$|^<\|.*\|>$",
    re.IGNORECASE,
)
_BYTE = re.compile(r"^<0x[0-9A-Fa-f]{2}>$")
_WORD_START = "▁Ġ"


class Kind(IntEnum):
    """What a token is in a written line."""

    WORD = 0  # stands by itself, or begins a word
    CONTINUATION = 1  # goes on with the word before it
    MARK = 2  # holds no letter or digit


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


def count_reliably_ranked(tokenizer: Any, ranked_ids: Sequence[int]) -> int:
    """How many tokens at the head of :func:`ranked_payload_ids` the tokenizer itself ranks.

    The others (WordPiece's continuations and single characters, BPE's single bytes) follow in an
    order that says nothing about their frequency.
    """
    key = _rank_key(tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(list(ranked_ids))
    return sum(not key(token, i)[0] for token, i in zip(tokens, ranked_ids, strict=True))


def token_kinds(tokenizer: Any, ids: Sequence[int]) -> list[Kind]:
    """The kind of each token, by how the tokenizer marks beginnings or continuations of words."""
    tokens = tokenizer.convert_ids_to_tokens(list(ids))
    prefix = _backend_model(tokenizer).get("continuing_subword_prefix")
    marks_starts = not prefix and any(
        token.startswith(tuple(_WORD_START)) and len(token) > 1 for token in tokens
    )

    def kind(token: str) -> Kind:
        if not any(map(str.isalnum, token)):
            return Kind.MARK
        is_start = token.startswith(tuple(_WORD_START))
        continues = token.startswith(prefix) if prefix else marks_starts and not is_start
        return Kind.CONTINUATION if continues else Kind.WORD

    kinds = [kind(token) for token in tokens]
    # Where nothing begins a word (bytes, a lone alphabet), everything stands by itself.
    return kinds if Kind.WORD in kinds else [Kind.WORD] * len(kinds)


def _rank_key(tokenizer: Any) -> Any:
    """(token, id) -> sort key: first whether the rank is unknown, then smaller is commoner."""
    model = _backend_model(tokenizer)
    match model.get("type"):
        case "Unigram":
            log_probability = dict(model["vocab"])
            return lambda token, index: (
                token not in log_probability,
                -log_probability.get(token, 0.0),
                index,
            )
        case "BPE":
            merges = {_merged(m): rank for rank, m in reversed(list(enumerate(model["merges"])))}
            return lambda token, index: (token not in merges, merges.get(token, 0), index)
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
