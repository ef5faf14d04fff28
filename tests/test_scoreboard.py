"""The scoreboard is what its last run printed, and its rows point to tests that exist."""

from __future__ import annotations

import re

import pytest
import scoreboard


def test_the_committed_table_is_what_the_last_run_renders():
    stored = scoreboard.stored()
    assert scoreboard.render(stored["tests"], stored["day"]) == scoreboard.TABLE.read_text()


@pytest.mark.parametrize("name", scoreboard.ROWS)
def test_a_rows_tests_exist(name):
    for test in scoreboard.ROWS[name].tests:
        path, _, function = test.partition("::")
        source = (scoreboard.FOLDER.parent / path).read_text()
        assert re.search(rf"^def {function or 'test_'}", source, flags=re.MULTILINE)


def test_nothing_failed_in_the_last_run():
    failed = [n for n, r in scoreboard.stored()["tests"].items() if r["outcome"] != "passed"]
    assert failed == []


def test_every_row_was_run():
    stored = scoreboard.stored()["tests"]
    rows = scoreboard.ROWS.items()
    missing = [n for n, row in rows if not any(scoreboard.belongs(t, row) for t in stored)]
    assert missing == []


def test_a_row_that_was_not_run_says_so():
    assert "| not run |" in scoreboard.render({}, "never")


def test_a_failure_shows():
    node = "tests/test_soak.py::test_two_thousand_steps_keep_memory_flat"
    table = scoreboard.render({node: {"outcome": "failed", "seconds": 1, "figures": []}}, "today")
    assert "| 0 of 1 passed |" in table
