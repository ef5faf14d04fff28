"""Text sources: labels from public lists, contexts whose length tells nothing, clear refusals."""

from __future__ import annotations

import csv
import gzip
import json

import pytest
import texts


def question(**changes):
    words = " ".join(f"word{i}" for i in range(40))
    post = {"PostTypeId": 1, "Title": "How?", "Body": words + " the end", "Tags": ["zsh", "python"]}
    return post | changes


def test_only_questions_count():
    posts = [question(PostTypeId=2), question(), question(PostTypeId="1")]
    assert len(list(texts._questions(posts))) == 2


def test_a_missing_field_is_named():
    post = question()
    del post["Tags"]
    with pytest.raises(SystemExit, match="no field Tags"):
        list(texts._questions([post]))


@pytest.mark.parametrize("tags", [["zsh", "python"], "<zsh><python>", "|zsh|python|"])
def test_the_main_tag_is_the_first_in_the_public_list(tags):
    ((text, label),) = texts.tag_rows([question(Tags=tags)])
    assert texts.TAGS[label] == "python"
    assert text.startswith("How?")


def test_a_question_without_a_listed_tag_is_left_out():
    assert list(texts.tag_rows([question(Tags=["zsh"]), question(Tags=None)])) == []


def test_next_word_contexts_all_have_one_length_and_precede_their_label():
    bodies = [
        " ".join(["w"] * n + ["the"] + ["x"] * m) for n, m in ((32, 0), (40, 9), (100, 3), (31, 50))
    ]
    rows = list(texts.next_word_rows([question(Body=body) for body in bodies]))
    assert len(rows) == 3
    assert {len(text.split()) for text, _ in rows} == {texts.CONTEXT_WORDS}
    assert {texts.NEXT_WORDS[label] for _, label in rows} == {"the"}


def write_csv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def data_dir(tmp_path):
    complaints = [
        {"Consumer complaint narrative": f"text {i}", "Product": texts.PRODUCTS[i % 8]}
        for i in range(1_200)
    ]
    for split in ("train", "test"):
        write_csv(tmp_path / f"complaints/{split}.csv.gz", complaints)
    sources = ["imdb"] * 2_000 + ["rotten_tomatoes"] * 2_400
    reviews = [{"text": f"t{i}", "label": i % 2, "source": s} for i, s in enumerate(sources)]
    write_csv(tmp_path / "rotten_tomatoes/all.csv", reviews)
    return tmp_path


def test_splits_share_no_row_and_public_texts_are_other_texts(data_dir):
    data = texts.rotten_tomatoes(data_dir)
    parts = [{text for text, _ in rows} for rows in (data.train, data.validation, data.test)]
    parts.append(set(data.public))
    assert [len(part) for part in parts] == [400, 1_000, 1_000, 2_000]
    assert len(set.union(*parts)) == 4_400


def test_complaints_keep_their_own_test_file(data_dir):
    data = texts.complaints(data_dir)
    assert (len(data.train), len(data.validation), len(data.test)) == (200, 1_000, 1_200)
    assert data.num_labels == 8


def test_imdb_test_reviews_that_repeat_a_training_review_are_left_out(data_dir):
    reviews = [{"t": f"review {i}", "s": int(i >= 25_000)} for i in range(50_000)]
    reviews[0]["t"] = reviews[12_500]["t"]  # a test review, and a training review
    (data_dir / "imdb").mkdir()
    (data_dir / "imdb/reviews.json").write_text(json.dumps(reviews))
    data = texts.imdb(data_dir)
    assert (len(data.train), len(data.validation), len(data.test)) == (22_500, 2_500, 24_999)
    assert {label for _, label in data.test} == {0, 1}


def test_a_part_of_a_split_has_both_labels_and_is_always_the_same():
    rows = [(f"text {i}", int(i >= 50)) for i in range(100)]
    data = texts.Texts(rows, rows, rows, [], 2)
    part = data.fewer(20, 10, 30)
    assert [len(split) for split in (part.train, part.validation, part.test)] == [20, 10, 30]
    assert {label for _, label in part.test} == {0, 1}
    assert part == data.fewer(20, 10, 30)
