from __future__ import annotations

import pytest

from hf_dpkfc import PrivacyPlan
from hf_dpkfc.privacy.ledger import LEDGER_NAME
from hf_dpkfc.runs import TRAINER_STATE_NAME, KeyStore, RunFolder

PLAN = PrivacyPlan(1.0, 1.0, 10, 100, 8, 1e-5)
TORN = b'{"digest": "torn'


def launch(folder, num_releases=0):
    """A new run that ends after so many releases, its key still there."""
    run = RunFolder(folder, folder)
    _, ledger = run.open(PLAN, continues=False)
    with ledger:
        for step in range(num_releases):
            ledger.charge(step, f"digest {step}")
    return run


def test_a_destroyed_key_leaves_no_folder(tmp_path):
    keys = launch(tmp_path).keys
    keys.destroy()
    assert not keys.folder.exists()
    keys.destroy()


def test_a_destroyed_key_leaves_what_else_lies_in_its_folder(tmp_path):
    keys = KeyStore(tmp_path / "keys")
    keys.create()
    (keys.folder / "notes.txt").write_text("mine")
    keys.destroy()
    assert [path.name for path in keys.folder.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("rest", [b"", TORN], ids=["header", "torn charge"])
def test_a_launch_that_released_nothing_cost_nothing(tmp_path, caplog, rest):
    path = launch(tmp_path).ledger_path
    path.write_bytes(path.read_bytes() + rest)
    launch(tmp_path)
    assert list(tmp_path.glob("privacy_ledger*")) == [path]
    assert not caplog.records


def test_a_launch_that_released_something_keeps_its_ledger_and_says_so(tmp_path, caplog):
    charged = launch(tmp_path, num_releases=1).ledger_path.read_bytes()
    launch(tmp_path)
    kept = next(tmp_path.glob("privacy_ledger-*.jsonl"))
    assert kept.read_bytes() == charged
    assert kept.name in caplog.text


@pytest.mark.parametrize(
    ("copy", "state", "is_ours"),
    [
        (slice(None), '{"global_step": 2}', True),
        (slice(0, -1), '{"global_step": 1}', True),
        (slice(1, None), '{"global_step": 2}', False),
        (slice(None), '{"global_st', False),
    ],
    ids=["whole", "earlier", "another run's", "torn"],
)
def test_a_checkpoint_is_ours_if_it_is_whole_and_begins_our_ledger(tmp_path, copy, state, is_ours):
    run = launch(tmp_path, num_releases=2)
    checkpoint = tmp_path / "checkpoint-2"
    checkpoint.mkdir()
    lines = run.ledger_path.read_bytes().splitlines(keepends=True)
    (checkpoint / LEDGER_NAME).write_bytes(b"".join(lines[copy]))
    (checkpoint / TRAINER_STATE_NAME).write_text(state)
    assert run.is_ours(checkpoint) is is_ours
    assert not run.is_ours(tmp_path / "checkpoint-3")
