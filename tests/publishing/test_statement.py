from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
import yaml

from hf_dpkfc import PrivacyPlan
from hf_dpkfc.cli import main
from hf_dpkfc.errors import PublishingError
from hf_dpkfc.privacy.ledger import LEDGER_NAME
from hf_dpkfc.publishing.card import END, START, CardFacts, render_card, split_metadata
from hf_dpkfc.publishing.statement import PrivacyStatement
from hf_dpkfc.publishing.verify import verify

STATEMENT = PrivacyStatement(
    plan=PrivacyPlan(1.5, 1.0, 256, 10_000, 100, 1e-5, target_epsilon=2.0),
    num_releases=100,
    ledger_sha256="ab" * 32,
    claims_privacy=True,
    preconditioner={"kind": "kfac", "probe": "auto", "is_data_free": True},
    randomness="Philox, keyed with 256 bits from the operating system",
    world_size=1,
    logged_unsafe_metrics=False,
    versions={"hf-dpkfc": "0.1.0"},
)
FACTS = CardFacts("Mine", "org/base", ("org/data",), {"accuracy": 0.9}, "text-classification")
CARDS = sorted((Path(__file__).parents[2] / "model_cards").glob("*/privacy_statement.json"))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_releases": 101}, "101 releases, the plan allows 100"),
        ({"num_releases": 0}, "no release"),
        ({"claims_privacy": False}, "oracle"),
        ({"plan": dataclasses.replace(STATEMENT.plan, noise_multiplier=0.0)}, "ε is inf"),
    ],
)
def test_a_statement_without_guarantee_is_refused(change, match):
    broken = dataclasses.replace(STATEMENT, **change)
    with pytest.raises(PublishingError, match=match):
        broken.require_publishable()
    with pytest.raises(PublishingError, match=match):
        render_card(broken, FACTS)


def test_json_round_trip():
    assert PrivacyStatement.from_json(STATEMENT.to_json()) == STATEMENT


def changed(**fields):
    return json.dumps(json.loads(STATEMENT.to_json()) | fields)


MALFORMED = [
    {"audit": {}},
    {"audit": [1]},
    {"audit": {"method": "m", "confidence": 0.9, "bound": "low", "claim": 1.0}},
    {"audit": {"method": "m", "confidence": 0.9, "bound": 0, "claim": 1, "num_trials": "9"}},
    {"num_releases": "9"},
    {"num_releases": None},
    {"preconditioner": {}},
    {"versions": None},
    {"dp_optimizer": {"name": "disk"}},
    {"dp_optimizer": {"name": "unknown"}},
]


@pytest.mark.parametrize("fields", MALFORMED, ids=json.dumps)
def test_a_malformed_statement_is_one_typed_error(tmp_path, fields, capsys):
    (tmp_path / "privacy_statement.json").write_text(changed(**fields))
    with pytest.raises(PublishingError, match="can't be read"):
        PrivacyStatement.load(tmp_path)
    assert main(["verify", str(tmp_path)]) == 1
    assert main(["card", str(tmp_path)]) == 2


def test_a_card_that_is_no_text_is_one_typed_error(tmp_path, capsys):
    STATEMENT.save(tmp_path)
    (tmp_path / "README.md").write_bytes(b"\xff\xfe\x00")
    assert main(["verify", str(tmp_path)]) == 1
    assert main(["card", str(tmp_path)]) == 2
    assert "UTF-8" in capsys.readouterr().err


@pytest.fixture
def published(tmp_path):
    STATEMENT.save(tmp_path)
    (tmp_path / "README.md").write_text(render_card(STATEMENT, FACTS))
    return tmp_path


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("**Guarantee.** ε = ", "**Guarantee.** ε = 0.01, not "),
        ("a factor of e^", "a factor of e^0.01, not "),
        ("Second opinion (PRV): ε = ", "Second opinion (PRV): ε = 0.1, not "),
        ("100 taken", "1 taken"),
        ("noise_multiplier: 1.5", "noise_multiplier: 10.0"),
        ("adjacency: zero-out", "adjacency: replace-one"),
        ("unit: one row of the training set", "unit: one person with all rows"),
        ("steps: 100", "steps: 1"),
    ],
)
def test_verify_sees_every_changed_word_of_the_claim(published, old, new):
    path = published / "README.md"
    assert all(check.holds for check in verify(str(published)))
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert not all(check.holds for check in verify(str(published)))


def test_verify_of_another_versions_card_compares_its_claim(tmp_path):
    older = dataclasses.replace(STATEMENT, versions={"hf-dpkfc": "0.0.1"})
    older.save(tmp_path)
    text = render_card(older, FACTS).replace("may still be learnt", "can still be learnt")
    (tmp_path / "README.md").write_text(text)
    assert all(check.holds for check in verify(str(tmp_path)))
    (tmp_path / "README.md").write_text(text.replace("the training is (", "the training is (0."))
    assert not all(check.holds for check in verify(str(tmp_path)))


@pytest.mark.parametrize("name", [".git/config", ".cache/huggingface/download/x.lock"])
def test_verify_passes_over_what_a_download_leaves(published, name):
    (published / name).parent.mkdir(parents=True)
    (published / name).write_text("")
    assert all(check.holds for check in verify(str(published)))


@pytest.fixture
def run_folder(tmp_path):
    """As a training leaves it: with its ledger and a checkpoint."""
    ledger = b'{"plan": {}}\n'
    (tmp_path / LEDGER_NAME).write_bytes(ledger)
    for name in ("optimizer.pt", "trainer_state.json"):
        (tmp_path / "checkpoint-2").mkdir(exist_ok=True)
        (tmp_path / "checkpoint-2" / name).write_text("")
    statement = dataclasses.replace(STATEMENT, ledger_sha256=hashlib.sha256(ledger).hexdigest())
    statement.save(tmp_path)
    (tmp_path / "README.md").write_text(render_card(statement, FACTS))
    return tmp_path


def failures(folder):
    return [check.what for check in verify(str(folder)) if not check.holds]


def test_verify_counts_what_stays_in_a_runs_folder(run_folder, capsys):
    assert main(["verify", str(run_folder)]) == 0
    assert "ok    files: a run's folder; 3 stay here" in capsys.readouterr().out


def test_verify_sees_another_runs_ledger(run_folder):
    (run_folder / LEDGER_NAME).write_text("{}\n")
    assert failures(run_folder) == ["ledger"]


def test_a_checkpoint_without_a_ledger_has_no_business_there(run_folder):
    (run_folder / LEDGER_NAME).unlink()
    assert failures(run_folder) == ["files"]


def test_a_missing_card_is_one_failure_with_a_way_out(published, capsys):
    (published / "README.md").unlink()
    assert failures(published) == ["card"]
    assert main(["verify", str(published)]) == 1
    assert "`hf-dpkfc card FOLDER` writes the card" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "# By hand\n", "---\nlicense: mit\n---\n"])
def test_a_readme_that_says_nothing_of_privacy_is_one_failure(published, text):
    (published / "README.md").write_text(text)
    assert failures(published) == ["card"]


def test_verify_says_that_it_does_not_compare_weights(published, capsys):
    assert main(["verify", str(published)]) == 0
    assert "Weights aren't compared" in capsys.readouterr().out


def test_a_new_training_in_an_old_folder_keeps_none_of_the_old_facts():
    old = render_card(STATEMENT, FACTS)
    plan = dataclasses.replace(STATEMENT.plan, noise_multiplier=2.0)
    new = dataclasses.replace(STATEMENT, plan=plan)
    text = render_card(new, CardFacts("Other"), old)
    assert "# Other" in text
    assert all(fact not in text for fact in ("# Mine", "org/base", "0.9", "text-classification"))


def test_results_written_by_hand_stay_beside_ours():
    theirs = {"name": "by hand", "results": []}
    header = yaml.safe_dump({"model-index": [theirs], "metrics": ["bleu"], "datasets": "a/b"})
    text = f"---\n{header}---\ntext\n"
    for _ in range(2):
        text = render_card(STATEMENT, FACTS, text)
    metadata, _ = split_metadata(text)
    assert [entry["name"] for entry in metadata["model-index"]] == ["by hand", "Mine"]
    assert metadata["metrics"] == ["bleu", "accuracy"]
    assert metadata["datasets"] == ["a/b", "org/data"]


@pytest.mark.parametrize(("sigma", "is_weak"), [(1.5, False), (0.6, True)])
def test_a_large_epsilon_is_called_weak(sigma, is_weak):
    plan = dataclasses.replace(STATEMENT.plan, noise_multiplier=sigma)
    assert (plan.epsilon > 3) is is_weak
    card = render_card(dataclasses.replace(STATEMENT, plan=plan), FACTS)
    assert ("weak bound" in card) is is_weak


def test_an_epsilon_too_large_for_prv_has_no_second_opinion():
    plan = dataclasses.replace(STATEMENT.plan, noise_multiplier=0.08)
    statement = dataclasses.replace(STATEMENT, plan=plan)
    assert statement.second_opinion is None
    assert "not computed, ε is too large" in render_card(statement, FACTS)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"plan": {}}'])
def test_what_is_no_statement_is_refused(text):
    with pytest.raises(PublishingError, match="can't be read"):
        PrivacyStatement.from_json(text)


def test_a_folder_without_statement_is_refused(tmp_path):
    with pytest.raises(PublishingError, match="no privacy_statement"):
        PrivacyStatement.load(tmp_path)


def test_the_card_makes_sixteen_statements_and_typed_metadata():
    metadata, body = split_metadata(render_card(STATEMENT, FACTS))
    assert all(f"\n{i}. **" in body for i in range(1, 17))
    block = metadata["differential_privacy"]
    assert isinstance(block["delta"], float)
    assert block["epsilon"] == STATEMENT.plan.epsilon
    assert metadata["model-index"][0]["results"][0]["metrics"] == [
        {"type": "accuracy", "value": 0.9}
    ]
    assert {"differential-privacy", "dp-sgd"} <= set(metadata["tags"])


def test_unsafe_metrics_are_on_the_card():
    logged = dataclasses.replace(STATEMENT, logged_unsafe_metrics=True)
    assert "Un-noised training metrics were logged" in render_card(logged, FACTS)
    assert "Un-noised" not in render_card(STATEMENT, FACTS)


def test_public_probes_are_said_to_be_public():
    geometry = {"kind": "kfac", "probe": "public", "is_data_free": False}
    card = render_card(dataclasses.replace(STATEMENT, preconditioner=geometry), FACTS)
    assert "estimated from public records" in card


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"name": "adambc", "floor": 1e-8}, "DP-AdamBC (floor 1e-08), which works on noisy"),
        ({"name": "disk", "kappa": 0.7, "gamma": 0.5}, "gradients at two points"),
    ],
)
def test_a_private_optimizer_is_named_under_mechanism(facts, sentence):
    card = render_card(dataclasses.replace(STATEMENT, dp_optimizer=facts), FACTS)
    (mechanism,) = [line for line in card.splitlines() if "**Mechanism.**" in line]
    assert sentence in mechanism
    assert "Optimizer:" not in render_card(STATEMENT, FACTS)


def test_a_statement_from_before_an_optional_field_can_be_read():
    fields = json.loads(STATEMENT.to_json())
    del fields["dp_optimizer"]
    assert PrivacyStatement.from_json(json.dumps(fields)) == STATEMENT
    del fields["randomness"]
    with pytest.raises(PublishingError, match="randomness"):
        PrivacyStatement.from_json(json.dumps(fields))


def test_no_number_is_stated_where_no_epsilon_is_claimed():
    fields = json.loads(dataclasses.replace(STATEMENT, claims_privacy=False).to_json())
    assert fields["epsilon"] is fields["epsilon_spent"] is fields["second_opinion"] is None


@pytest.mark.parametrize(
    ("trials", "said"), [({}, ""), ({"num_trials": 8000}, ", 8000 trials")], ids=["older", ""]
)
def test_an_audit_is_quoted(trials, said):
    audit = {"method": "step audit", "confidence": 0.9999, "bound": 0.5, "claim": 0.67} | trials
    card = render_card(dataclasses.replace(STATEMENT, audit=audit), FACTS)
    assert f"step audit at confidence 0.9999{said}: lower bound 0.5" in card


@pytest.mark.parametrize("probe", ["structured", "sampled"])
def test_the_card_says_that_the_checkpoint_shaped_the_probes(probe):
    geometry = STATEMENT.preconditioner | {"probe": probe}
    card = render_card(dataclasses.replace(STATEMENT, preconditioner=geometry), FACTS)
    assert "the pre-trained checkpoint, which is public" in card
    assert "which is public" not in render_card(STATEMENT, FACTS)


def test_the_card_says_where_word_frequencies_are_from():
    geometry = STATEMENT.preconditioner | {"probe": "words", "probe_language": "de"}
    card = render_card(dataclasses.replace(STATEMENT, preconditioner=geometry), FACTS)
    assert "the public word frequencies of wordfreq (language: de)" in card
    assert "wordfreq" not in render_card(STATEMENT, FACTS)


def test_rendering_twice_changes_nothing():
    once = render_card(STATEMENT, FACTS)
    assert render_card(STATEMENT, FACTS, once) == once


def test_a_new_evaluation_replaces_the_old_one():
    once = render_card(STATEMENT, FACTS)
    again = render_card(STATEMENT, dataclasses.replace(FACTS, metrics={"accuracy": 0.5}), once)
    assert "| accuracy | 0.5000 |" in again
    assert "| accuracy | 0.9000 |" not in again


def test_what_the_author_wrote_in_the_header_is_kept():
    existing = "---\ntags: mine\nbase_model: a/b\nlicense: mit\npipeline_tag: other\n---\ntext\n"
    metadata, _ = split_metadata(render_card(STATEMENT, FACTS, existing))
    assert (metadata["base_model"], metadata["license"]) == ("a/b", "mit")
    assert metadata["pipeline_tag"] == "other"
    assert metadata["tags"][0] == "mine"


@pytest.mark.parametrize("existing", [f"text {START} old claim", f"text {END}"])
def test_half_a_section_is_refused(existing):
    with pytest.raises(PublishingError, match="half of a privacy section"):
        render_card(STATEMENT, FACTS, existing)


@pytest.mark.parametrize("header", ["a: [", "- a", "words"])
def test_a_header_that_the_hub_cannot_read_is_refused(header):
    with pytest.raises(PublishingError, match="header of README"):
        split_metadata(f"---\n{header}\n---\nbody\n")


@pytest.mark.parametrize("text", ["---\n---\nbody", "---\na: 1\n---"])
def test_short_headers_are_headers(text):
    assert not split_metadata(text)[1].startswith("---")


def test_a_statement_without_the_newer_fields_is_read():
    fields = json.loads(STATEMENT.to_json())
    del fields["weights_sha256"]
    assert PrivacyStatement.from_json(json.dumps(fields)) == STATEMENT


def test_a_header_that_is_no_header_is_body():
    assert split_metadata("# Title\n---\n") == ({}, "# Title\n---\n")
    assert yaml.safe_load("1.0e-05") == 1e-05


@pytest.mark.parametrize("path", CARDS, ids=lambda p: p.parent.name)
def test_a_committed_card_is_what_its_statement_renders(path):
    statement = PrivacyStatement.load(path.parent)
    card = (path.parent / "README.md").read_text()
    assert render_card(statement, CardFacts(path.parent.name), card) == card
    assert all(check.holds for check in verify(str(path.parent)))
