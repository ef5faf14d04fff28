"""Probes of a language's own words, each as common as a public list says.

The wordfreq library tells how often each word of some forty languages is written, over several
public sources. It holds counts and no text. Like a pre-trained checkpoint its lists are taken as
public: if private records are among their sources, no guarantee of ours covers that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, cycle, islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_dpkfc.curvature.probes import PayloadDrawer, ZipfTokenProbe, draw_categories
from hf_dpkfc.errors import ProbeError

# What follows a word instead of a space, per 1,000 words of English: V. J. Cook, "Standard
# punctuation and the punctuation of the street" (2013). Half of the quotation marks open.
MARKS = {
    ". ": 65.3,
    ", ": 61.6,
    ' "': 13.35,
    '" ': 13.35,
    " - ": 15.3,
    "? ": 5.6,
    ": ": 3.4,
    "! ": 3.3,
    "; ": 3.2,
}
SEPARATORS = (" ", *MARKS)
SEPARATOR_WEIGHTS = torch.tensor([1000 - sum(MARKS.values()), *MARKS.values()]).double()
SPACELESS = ("ja", "zh")
NUM_CHECKED = 100  # commonest words, of which a tokenizer should know one
_ENDS_SENTENCE = tuple(".?!")
_NUMBER = re.compile(r"[\d.,]*\d[.,]?\d[\d.,]*")  # wordfreq writes the digits of such a word as 0


@dataclass(frozen=True)
class WordTokenProbe(ZipfTokenProbe):
    """Lines of words in no order, with punctuation, as the tokenizer writes them.

    Words are lower-case but where a sentence begins, and English "I"; punctuation stands at English
    rates in every language.

    Attributes:
        tokenizer: Makes tokens of a line.
        language: Whose words.
        exponent: p(word) ∝ frequency^exponent.
    """

    tokenizer: Any = field(kw_only=True, repr=False, compare=False)
    language: str = field(kw_only=True, default="en")
    is_data_free: ClassVar[bool] = True

    @classmethod
    def for_model(
        cls, model: nn.Module, tokenizer: Any, *, language: str = "en", **options: Any
    ) -> WordTokenProbe:
        """As for Zipf, in a language.

        Raises:
            ProbeError: If wordfreq isn't installed or hasn't got the language, or if the tokenizer
                hasn't.
        """
        commonest = word_frequencies(language)[0][:NUM_CHECKED]
        probe = replace(super().for_model(model, tokenizer, **options), language=language)
        probe._payloads(list(commonest))
        return probe

    @classmethod
    def _own_fields(
        cls, model: nn.Module, tokenizer: Any, payload_ids: tuple[int, ...]
    ) -> dict[str, Any]:
        return {"tokenizer": tokenizer}

    def _drawer(self) -> PayloadDrawer:
        words, frequencies = word_frequencies(self.language)
        weights = (frequencies / frequencies.max()).pow(self.exponent)

        def draw(sizes: list[int], generator: torch.Generator) -> list[list[int]]:
            drawn = draw_categories(weights, sum(sizes), generator).split(sizes)
            lines = [self._line([words[i] for i in at.tolist()], generator) for at in drawn]
            payloads = self._payloads(lines)
            # A line goes on in the next one where the tokenizer left words of it out.
            return [
                list(islice(cycle(chain(*payloads[at:], *payloads[:at])), size))
                for at, size in enumerate(sizes)
            ]

        return draw

    def _payloads(self, lines: list[str]) -> list[list[int]]:
        """Admissible tokens of each line: what a tokenizer doesn't know is left out.

        Raises:
            ProbeError: If it knows nothing of any line.
        """
        admissible = frozenset(self.payload_ids)
        encoded = self.tokenizer(lines, add_special_tokens=False, verbose=False)["input_ids"]
        payloads = [[i for i in ids if i in admissible] for ids in encoded]
        if not any(payloads):
            raise ProbeError(
                f"The tokenizer knows no token of {len(lines)} lines of words in "
                f"{self.language!r}.",
                why="probe='words' writes with the tokenizer's own tokens.",
                way_out="set probe_language to a language of the tokenizer, or choose "
                "probe='auto', which asks the tokenizer alone.",
            )
        return payloads

    def _line(self, words: list[str], generator: torch.Generator) -> str:
        """Words with what separates them; one that begins a sentence is capitalised."""
        at = draw_categories(SEPARATOR_WEIGHTS, len(words), generator).tolist()
        parts, begins = [], True
        for word, separator in zip(words, (SEPARATORS[i] for i in at), strict=True):
            written = _with_digits(word, generator)
            capital = begins or (self.language, word) == ("en", "i")
            parts.append(written[:1].upper() + written[1:] if capital else written)
            parts.append(separator.strip() if self.language in SPACELESS else separator)
            begins = separator.startswith(_ENDS_SENTENCE)
        return "".join(parts)


def _with_digits(word: str, generator: torch.Generator) -> str:
    """A number's digits, drawn."""
    if not _NUMBER.fullmatch(word):
        return word
    return re.sub("0", lambda _: str(int(torch.randint(10, (1,), generator=generator))), word)


@lru_cache(maxsize=1)
def word_frequencies(language: str) -> tuple[tuple[str, ...], Tensor]:
    """The words of a language and how often each is written, float64.

    Raises:
        ProbeError: If wordfreq isn't installed, or hasn't got the language.
    """
    try:
        import wordfreq
    except ImportError as error:
        raise ProbeError(
            "probe='words' without the wordfreq library.",
            why="it has the public word frequencies that these probes are drawn by.",
            way_out="pip install 'hf-dpkfc[words]', or choose probe='auto', which asks the "
            "tokenizer alone.",
        ) from error
    known = wordfreq.available_languages("best")
    if language not in known:
        raise ProbeError(
            f"probe_language={language!r}.",
            why="wordfreq has no word frequencies of it.",
            way_out=f"choose one of {', '.join(sorted(known))}, or probe='auto', which asks the "
            "tokenizer alone.",
        )
    listed = wordfreq.get_frequency_dict(language, wordlist="best")
    return tuple(listed), torch.tensor([*listed.values()], dtype=torch.float64)
