"""P4 and the guarantees of the write-ahead ledger."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys

import pytest

from hf_dpkfc import PrivacyPlan
from hf_dpkfc.errors import BudgetError, LedgerError
from hf_dpkfc.mechanism.randomness import SecretKey
from hf_dpkfc.privacy.ledger import PrivacyLedger

KEY = SecretKey(bytes(32))
PLAN = PrivacyPlan(1.0, 1.0, 10, 100, 8, 1e-5)


def mac(message):
    return KEY.mac(message, purpose="ledger")


def open_ledger(folder, plan=PLAN, authenticate=mac):
    return PrivacyLedger(folder / "ledger.jsonl", folder / "head", plan, authenticate)


def written(folder, count=5):
    with open_ledger(folder) as ledger:
        for step in range(count):
            ledger.charge(step, f"digest {step}")
    return folder / "ledger.jsonl"


def test_charges_survive_reopening(tmp_path):
    written(tmp_path)
    with open_ledger(tmp_path) as ledger:
        assert ledger.charged_steps == [0, 1, 2, 3, 4]
        assert ledger.num_releases == 5


def test_an_identical_replay_is_free_and_anything_else_is_charged(tmp_path):
    written(tmp_path)
    with open_ledger(tmp_path) as ledger:
        assert ledger.charge(4, "digest 4") is False
        assert ledger.num_releases == 5
        assert ledger.charge(4, "another digest") is True
        assert ledger.num_releases == 6


def test_nothing_beyond_the_plan_is_granted(tmp_path):
    written(tmp_path, PLAN.steps)
    with open_ledger(tmp_path) as ledger, pytest.raises(BudgetError, match="All 8 releases"):
        ledger.charge(8, "one more")


def test_random_interruptions_never_overspend(tmp_path, figure):
    """A3: steps, identical replays, changed replays, torn writes and reopenings in any order."""
    spent, most = [], 0
    for case in range(60):
        rng, folder = random.Random(case), tmp_path / str(case)
        folder.mkdir()
        ledger, step = open_ledger(folder), 0
        for _ in range(25):
            action = rng.choice(["next", "replay", "change", "kill", "tear"])
            step += action == "next"
            charged = max(0, step - (action == "replay"))
            with contextlib.suppress(BudgetError):
                ledger.charge(charged, f"{charged} {rng.random() if action == 'change' else ''}")
            if action in ("kill", "tear"):
                ledger.close()
                with open(folder / "ledger.jsonl", "ab") as file:
                    file.write(b'{"digest": "torn' * (action == "tear"))
                before = ledger.num_releases
                ledger = open_ledger(folder)
                assert ledger.num_releases == before
                step = rng.randrange(step + 1)
        spent.append(PLAN.epsilon_at(ledger.num_releases))
        most = max(most, ledger.num_releases)
        ledger.close()
    figure(f"{len(spent)} runs, largest ε spent / planned = {max(spent) / PLAN.epsilon:.3f}")
    assert most == PLAN.steps
    assert max(spent) <= PLAN.epsilon


def test_a_charge_is_on_disk_before_it_is_granted(tmp_path):
    with open_ledger(tmp_path) as ledger:
        ledger.charge(0, "d")
        assert (tmp_path / "ledger.jsonl").read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("cut", [1, 5, 60])
def test_a_torn_last_line_is_survived(tmp_path, cut):
    path = written(tmp_path)
    with open(path, "ab") as file:
        file.write(b'{"digest": "torn", "step": 5, "mac": "0123456789abcdef0123456789abcdef"'[:cut])
    with open_ledger(tmp_path) as ledger:
        assert ledger.num_releases == 5
        ledger.charge(5, "next")
    with open_ledger(tmp_path) as ledger:
        assert ledger.num_releases == 6


def test_a_kill_between_line_and_head_loses_no_charge(tmp_path):
    written(tmp_path, 4)
    head = (tmp_path / "head").read_bytes()
    with open_ledger(tmp_path) as ledger:
        ledger.charge(4, "digest 4")
    (tmp_path / "head").write_bytes(head)
    with open_ledger(tmp_path) as ledger:
        assert ledger.num_releases == 5


def test_a_kill_during_creation_leaves_a_ledger_that_opens(tmp_path):
    with open_ledger(tmp_path):
        pass
    (tmp_path / "ledger.jsonl").write_bytes(b'{"plan": {"acc')
    (tmp_path / "head").unlink()
    with open_ledger(tmp_path) as ledger:
        assert ledger.num_releases == 0


def tamper_bit_flip(lines, rng):
    content = bytearray(b"".join(lines))
    at = rng.randrange(len(content) - 1)  # the last newline alone would be a torn line
    content[at] ^= 1 << rng.randrange(8)
    return bytes(content)


def tamper_truncate(lines, rng):
    return b"".join(lines[: rng.randrange(len(lines) - 1)])


def tamper_reorder(lines, rng):
    i, j = rng.sample(range(len(lines)), 2)
    lines = list(lines)
    lines[i], lines[j] = lines[j], lines[i]
    return b"".join(lines)


def tamper_drop(lines, rng):
    i = rng.randrange(len(lines) - 1)
    return b"".join(lines[:i] + lines[i + 1 :])


def tamper_duplicate(lines, rng):
    i = rng.randrange(1, len(lines))
    return b"".join([*lines, lines[i]])


TAMPERINGS = [tamper_bit_flip, tamper_truncate, tamper_reorder, tamper_drop, tamper_duplicate]


@pytest.mark.parametrize("tamper", TAMPERINGS)
def test_tampering_is_detected(tmp_path, tamper, figure):
    path = written(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    rng = random.Random(0)
    for _ in range(200):
        path.write_bytes(tamper(lines, rng))
        with pytest.raises(LedgerError, match=r"can't be trusted|another plan"):
            open_ledger(tmp_path)
    figure("200 of 200")


def test_a_chain_recomputed_without_the_key_is_detected(tmp_path):
    path = written(tmp_path)
    other = SecretKey(b"\x01" * 32)
    forged = tmp_path / "forged"
    forged.mkdir()
    with open_ledger(forged, authenticate=lambda m: other.mac(m, purpose="ledger")) as ledger:
        ledger.charge(0, "only one")
    path.write_bytes((forged / "ledger.jsonl").read_bytes())
    with pytest.raises(LedgerError, match="wrong MAC"):
        open_ledger(tmp_path)


def test_a_deleted_ledger_is_detected_by_its_head(tmp_path):
    written(tmp_path).unlink()
    with pytest.raises(LedgerError, match="lines were removed"):
        open_ledger(tmp_path)


def test_a_missing_head_is_detected(tmp_path):
    written(tmp_path)
    (tmp_path / "head").unlink()
    with pytest.raises(LedgerError, match="head"):
        open_ledger(tmp_path)


def test_a_ledger_of_another_plan_is_refused_by_what_differs(tmp_path):
    written(tmp_path)
    with pytest.raises(LedgerError, match="clip_norm differ"):
        open_ledger(tmp_path, plan=PrivacyPlan(1.0, 2.0, 10, 100, 8, 1e-5))


def test_a_ledger_in_use_is_refused(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import pathlib, test_ledger as t;"
        "t.open_ledger(pathlib.Path(sys.argv[2]))"
    )
    folder = str(__file__).rsplit("/", 1)[0]
    with open_ledger(tmp_path):
        child = subprocess.run(
            [sys.executable, "-c", code, folder, str(tmp_path)], capture_output=True, text=True
        )
    assert "in use by another process" in child.stderr


def test_a_run_claims_its_epsilon_from_the_first_step_or_not_at_all(tmp_path):
    """Else an oracle run, resumed with data-free probes, would end with a claim."""
    paths = (tmp_path / "ledger.jsonl", tmp_path / "head")
    PrivacyLedger(*paths, PLAN, mac, claims_privacy=False).close()
    with pytest.raises(LedgerError, match="another kind of probe"):
        PrivacyLedger(*paths, PLAN, mac, claims_privacy=True)
