"""H1 to H5: what is pushed, what comes back, and what happens when the Hub breaks."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import hub_server
import models
import peft
import pytest
import settings
import tokenizers_zoo
import torch
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
)

from hf_dpkfc import DPKFCTrainer
from hf_dpkfc.cli import main
from hf_dpkfc.errors import PublishingError
from hf_dpkfc.publication import CardOptions
from hf_dpkfc.publishing import upload
from hf_dpkfc.publishing.card import split_metadata
from hf_dpkfc.publishing.statement import PrivacyStatement
from hf_dpkfc.publishing.upload import is_allowed

pytestmark = pytest.mark.hub


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(upload.time, "sleep", lambda seconds: None)


def trained(folder, model=None, **options):
    options = {"hub_token": hub_server.TOKEN, "hub_model_id": "tester/private-model"} | options
    trainer = settings.trainer(folder, model, max_steps=2, **options)
    trainer.train()
    return trainer


def pushed(hub):
    return hub.repos["tester/private-model"]


@pytest.mark.parametrize("private", [False, True])
def test_a_model_comes_back_with_equal_weights_and_a_card(hub, tmp_path, private):
    trainer = trained(tmp_path, hub_private_repo=private)
    trainer.push_to_hub()
    assert pushed(hub).private is private
    back = AutoModelForSequenceClassification.from_pretrained("tester/private-model")
    assert torch.equal(settings.weights(back), settings.weights(trainer.model))
    assert AutoTokenizer.from_pretrained("tester/private-model").vocab_size > 0
    assert b"If you were in the training data" in pushed(hub).files["README.md"]


@pytest.mark.parametrize(
    ("private", "name"), [(False, "default"), (True, "default"), (False, "mine")]
)
def test_a_lora_adapter_comes_back_through_peft(hub, tmp_path, private, name):
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    base = settings.bert()
    base.name_or_path = base.config._name_or_path = "/home/alice/checkpoint"
    model = peft.get_peft_model(base, config, adapter_name=name)
    trainer = trained(tmp_path, model, rank=None, hub_private_repo=private)
    trainer.push_to_hub()
    assert pushed(hub).private is private
    assert b"alice" not in b"".join(pushed(hub).files.values())
    assert "adapter_model.safetensors" in pushed(hub).files
    assert "model.safetensors" not in pushed(hub).files
    back = peft.PeftModel.from_pretrained(
        settings.bert(), "tester/private-model", adapter_name=name
    )
    ours = {n: p for n, p in trainer.model.named_parameters() if "lora" in n}
    theirs = dict(back.named_parameters())
    assert ours
    assert all(torch.equal(p, theirs[n]) for n, p in ours.items())


@pytest.mark.parametrize("strategy", ["end", "every_save", "checkpoint", "all_checkpoints"])
def test_nothing_but_the_allow_list_leaves_under_any_strategy(hub, tmp_path, strategy):
    secrets = {
        "training_args.bin": b"SECRET",
        "notes.txt": b"SECRET",
        "patients.csv": b"SECRET",
        ".env": b"SECRET",
        "optimizer.pt": b"SECRET",
    }
    for name, content in secrets.items():
        (tmp_path / name).write_bytes(content)
    trainer = trained(
        tmp_path, push_to_hub=True, hub_strategy=strategy, save_strategy="steps", save_steps=1
    )
    trainer.save_model()
    files = pushed(hub).files
    assert all(is_allowed(name) for name in files)
    assert {"README.md", "privacy_statement.json", "model.safetensors"} <= set(files)
    everything = b"".join(files.values()) + b"".join(hub.objects.values())
    assert b"SECRET" not in everything
    assert hub_server.TOKEN.encode() not in everything
    assert len(pushed(hub).commits) == (1 if strategy == "end" else 3)


def test_the_statement_says_nothing_of_seed_key_or_data(hub, tmp_path):
    trained(tmp_path, seed=987654).push_to_hub()
    text = pushed(hub).files["privacy_statement.json"].decode()
    assert "987654" not in text
    assert "seed" not in text
    assert "987654" not in pushed(hub).files["README.md"].decode()
    statement = json.loads(text)
    assert statement["num_releases"] == 2
    assert statement["epsilon"] <= 3.0


CALLS = ["/api/repos/create", "/preupload/", "/objects/batch", "PUT /lfs/", "POST /lfs/"]
CALLS += ["/commit/"]
CALLS += ["/resolve/", "/api/validate-yaml"]


@pytest.mark.parametrize("fault", [503, 429, "drop"])
@pytest.mark.parametrize("call", CALLS)
def test_a_passing_fault_is_retried(hub, tmp_path, call, fault):
    trainer = trained(tmp_path)
    hub.fail(call, fault, times=1)
    trainer.push_to_hub()
    assert len(pushed(hub).files) > 4


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (call, fault)
        for call in ("/api/repos/create", "/preupload/", "/commit/")
        for fault in (401, 403, 404)
    ]
    + [("/preupload/", 409), ("/commit/", 409), ("PUT /lfs/", 403)],
)
def test_a_lasting_fault_is_one_clear_error_and_nothing_is_published(hub, tmp_path, call, fault):
    trainer = trained(tmp_path)
    hub.fail(call, fault, times=99)
    with pytest.raises(PublishingError, match=r"on the Hub \(HTTP 40[1349]\)[\s\S]*safe on disk"):
        trainer.push_to_hub()
    assert all(not repo.files for repo in hub.repos.values())


def test_a_hub_that_stays_down_is_given_up_with_nothing_published(hub, tmp_path):
    trainer = trained(tmp_path)
    hub.fail("/preupload/", "drop", times=99)
    with pytest.raises(PublishingError, match="Nothing was published"):
        trainer.push_to_hub()
    assert not pushed(hub).files


@pytest.mark.parametrize(("fault", "arrived"), [("drop", False), ("mute", True)])
def test_a_commit_without_an_answer_is_whole_or_not_there_and_nobody_says_which(
    hub, tmp_path, fault, arrived
):
    trainer = trained(tmp_path)
    hub.fail("/commit/", fault, times=99)
    with pytest.raises(PublishingError, match="Either all of it was published or nothing"):
        trainer.push_to_hub()
    assert bool(pushed(hub).files) is arrived


@pytest.mark.parametrize("call", ["/commit/", "PUT /lfs/"])
def test_a_failed_push_in_between_does_not_cost_the_training(hub, tmp_path, call):
    hub.fail(call, 403, times=99)
    trainer = trained(
        tmp_path, push_to_hub=True, hub_strategy="every_save", save_strategy="steps", save_steps=1
    )
    assert trainer.state.global_step == 2


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"noise_multiplier": 0.0}, "ε is inf"),
        ({"probe": "oracle"}, "oracle"),
    ],
)
def test_a_model_without_guarantee_is_not_published(hub, tmp_path, options, match):
    trainer = trained(tmp_path, **options)
    with pytest.raises(PublishingError, match=match):
        trainer.push_to_hub()
    assert not hub.repos


def test_a_model_that_was_never_trained_is_not_published(hub, tmp_path):
    with pytest.raises(PublishingError, match="no privacy_ledger"):
        settings.trainer(tmp_path).push_to_hub()


def test_a_ledger_changed_after_training_is_not_published(hub, tmp_path):
    trainer = trained(tmp_path)
    path = tmp_path / "privacy_ledger.jsonl"
    path.write_bytes(b"\n".join(path.read_bytes().splitlines()[:-1]) + b"\n")
    with pytest.raises(PublishingError, match="isn't the ledger"):
        trainer.push_to_hub()
    assert not hub.repos


def test_an_oracle_run_is_not_published_under_a_changed_statement(hub, tmp_path):
    trained(tmp_path, probe="oracle").save_model()
    path = tmp_path / "privacy_statement.json"
    path.write_text(path.read_text().replace('"claims_privacy": false', '"claims_privacy": true'))
    back = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with pytest.raises(PublishingError, match="isn't the ledger"):
        settings.trainer(tmp_path, back, hub_token=hub_server.TOKEN).push_to_hub()


def test_a_missing_token_is_said(hub, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(PublishingError, match="token"):
        trained(tmp_path, hub_token=None).push_to_hub()


def test_a_wrong_repo_id_is_said(hub, tmp_path):
    with pytest.raises(PublishingError, match="not a valid/id"):
        trained(tmp_path, hub_model_id="not a valid/id/at all").push_to_hub()


def test_a_readme_written_by_hand_is_kept(hub, tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n\nAll by hand.\n")
    trainer = trained(tmp_path)
    trainer.push_to_hub()
    trainer.push_to_hub()
    text = pushed(hub).files["README.md"].decode()
    assert "All by hand." in text
    assert "license: mit" in text
    assert text.count("## Privacy") == 1


def test_a_readme_written_on_the_hub_is_kept(hub, tmp_path):
    hub.repos["tester/private-model"] = hub_server.Repo(
        files={"README.md": b"# On the Hub\n\nBy a colleague.\n"}, commits=["1" * 40]
    )
    trained(tmp_path).push_to_hub()
    assert b"By a colleague." in pushed(hub).files["README.md"]


def on_the_hub(hub, text):
    hub.repos["tester/private-model"] = hub_server.Repo(
        files={"README.md": text.encode()}, commits=["1" * 40]
    )


def test_a_readme_on_the_hub_is_kept_without_an_owner_in_the_id(hub, tmp_path):
    on_the_hub(hub, "# On the Hub\n\nBy a colleague.\n")
    trained(tmp_path, hub_model_id="private-model").push_to_hub()
    assert b"By a colleague." in pushed(hub).files["README.md"]


def test_what_was_added_on_the_hub_since_the_last_push_is_kept(hub, tmp_path):
    trainer = trained(tmp_path)
    trainer.push_to_hub()
    edited = pushed(hub).files["README.md"].decode() + "\n## Added in the browser\n"
    pushed(hub).files["README.md"] = edited.encode()
    pushed(hub).commits.append("2" * 40)
    trainer.push_to_hub()
    assert b"## Added in the browser" in pushed(hub).files["README.md"]


def test_a_readme_that_cannot_be_seen_is_not_overwritten(hub, tmp_path):
    on_the_hub(hub, "# On the Hub\n\nBy a colleague.\n")
    trainer = trained(tmp_path)
    hub.fail("/resolve/", 503, times=99)
    with pytest.raises(PublishingError, match="read the card"):
        trainer.push_to_hub()
    assert pushed(hub).files["README.md"] == b"# On the Hub\n\nBy a colleague.\n"


def test_a_readme_with_a_broken_header_is_said_and_kept(hub, tmp_path):
    text = "---\ntags: [a\n---\n# Mine\n"
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(PublishingError, match="header of README"):
        trained(tmp_path).push_to_hub()
    assert (tmp_path / "README.md").read_text() == text
    assert not hub.repos


def test_the_last_evaluation_is_the_one_on_the_card(hub, tmp_path):
    trainer = trained(tmp_path, eval_dataset=settings.text_data(10, seed=4))
    for value in (0.25, 0.75):
        trainer.compute_metrics = lambda _, v=value: {"score": v, "f1": float("nan")}
        trainer.evaluate()
        trainer.push_to_hub()
    text = pushed(hub).files["README.md"].decode()
    assert "| score | 0.7500 |" in text
    assert "0.2500" not in text
    assert "nan" not in text


def test_the_evaluation_on_the_card_is_that_of_the_published_weights(hub, tmp_path):
    """The best checkpoint is loaded at the end; the last one's evaluation isn't its own."""
    calls = itertools.count(1)
    trainer = settings.trainer(
        tmp_path,
        max_steps=3,
        eval_dataset=settings.text_data(10, seed=4),
        compute_metrics=lambda _: {"call": float(next(calls))},
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="call",
        greater_is_better=False,
    )
    trainer.train()
    trainer.create_model_card()
    assert "| call | 1.0000 |" in (tmp_path / "README.md").read_text()


def test_a_second_training_in_a_folder_keeps_nothing_of_the_first_ones_card(hub, tmp_path):
    """Also under the same plan, with the same ε."""
    first = trained(tmp_path, eval_dataset=settings.text_data(10, seed=4))
    first.compute_metrics = lambda _: {"score": 0.9}
    first.evaluate()
    first.create_model_card(finetuned_from="org/first", dataset="first-set")
    assert "0.9000" in (tmp_path / "README.md").read_text()
    trained(tmp_path).create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "first" not in card
    assert "0.9000" not in card


def test_a_model_that_nobody_could_load_again_is_refused_by_name(hub, tmp_path):
    trainer = trained(tmp_path)
    publication = replace(trainer._publication(CardOptions()), model=nn.Linear(2, 2))
    with pytest.raises(PublishingError, match="Linear can't be published"):
        publication.push("tester/other", token=None, private=None, revision=None, message="x")


def test_hugging_faces_card_options_reach_the_card(hub, tmp_path):
    trained(tmp_path).push_to_hub(
        license="mit",
        language="en",
        tags="mine",
        dataset_tags="glue",
        dataset="GLUE SST2",
        finetuned_from="/home/somebody",
    )
    metadata, _ = split_metadata(pushed(hub).files["README.md"].decode())
    assert (metadata["license"], metadata["language"], metadata["datasets"]) == (
        "mit",
        "en",
        ["glue"],
    )
    assert "mine" in metadata["tags"]
    assert "base_model" not in metadata


def test_weights_that_the_ledger_does_not_cover_are_not_published(hub, tmp_path):
    """Another model under a finished run's statement would carry a false card."""
    trained(tmp_path).save_model()
    options = {"hub_token": hub_server.TOKEN, "hub_model_id": "tester/private-model"}
    with pytest.raises(PublishingError, match="aren't those"):
        settings.trainer(tmp_path, max_steps=2, **options).push_to_hub()
    assert not hub.repos
    back = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    settings.trainer(tmp_path, back, max_steps=2, **options).push_to_hub()
    assert pushed(hub).files


def test_a_folder_without_weights_is_not_pushed(hub, tmp_path):
    (tmp_path / "README.md").write_text("# Nothing else\n")
    with pytest.raises(PublishingError, match="no weights"):
        upload.push_folder(tmp_path, "tester/private-model")


def test_a_tokenizer_that_only_the_collator_has_is_pushed(hub, tmp_path):
    tokenizer = tokenizers_zoo.build("bert")
    trainer = DPKFCTrainer(
        model=settings.bert(),
        args=settings.config(
            tmp_path, max_steps=1, hub_token=hub_server.TOKEN, hub_model_id="tester/private-model"
        ),
        train_dataset=settings.text_data(),
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    trainer.train()
    trainer.push_to_hub()
    assert "tokenizer.json" in pushed(hub).files


def test_an_audit_that_was_attached_is_pushed(hub, tmp_path):
    trainer = trained(tmp_path)
    audit = {"method": "planted", "confidence": 0.9, "bound": 0.1, "claim": 0.5}
    replace(PrivacyStatement.load(tmp_path), audit=audit).save(tmp_path)
    trainer.push_to_hub()
    assert b"**Audit.** planted" in pushed(hub).files["README.md"]


@pytest.mark.parametrize(
    ("old", "new"), [('"num_releases": 2', '"num_releases": 1'), ("1.0", "9.0")]
)
def test_a_statement_changed_after_training_is_not_published(hub, tmp_path, old, new):
    trained(tmp_path).save_model()
    path = tmp_path / "privacy_statement.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    back = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with pytest.raises(PublishingError, match="isn't the ledger"):
        settings.trainer(tmp_path, back, hub_token=hub_server.TOKEN).push_to_hub()


def test_verify_sees_a_card_whose_text_was_changed(hub, tmp_path, capsys):
    trained(tmp_path / "out").push_to_hub()
    folder = _local_copy(hub, tmp_path / "copy")
    card = folder / "README.md"
    card.write_text(card.read_text().replace("the training is (2.", "the training is (0."))
    assert main(["verify", str(folder)]) == 1
    assert "FAIL  card's text" in capsys.readouterr().out


def test_verify_accepts_what_was_pushed_and_sees_what_was_not(hub, tmp_path, capsys):
    trained(tmp_path / "out").push_to_hub()
    assert main(["verify", "tester/private-model"]) == 0
    assert "FAIL" not in capsys.readouterr().out
    pushed(hub).files["optimizer.pt"] = b"x"
    pushed(hub).commits.append("2" * 40)
    assert main(["verify", "tester/private-model"]) == 1
    assert "FAIL  files: optimizer.pt" in capsys.readouterr().out


def _local_copy(hub, folder):
    folder.mkdir()
    for name, content in pushed(hub).files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ('"steps": 2', '"steps": 1', "FAIL"),
        ('"epsilon": 2.', '"epsilon": 0.', "FAIL  ε"),
        ('"num_releases": 2', '"num_releases": 9', "FAIL"),
    ],
)
def test_verify_sees_a_statement_that_was_changed(hub, tmp_path, capsys, old, new, line):
    trained(tmp_path / "out").push_to_hub()
    folder = _local_copy(hub, tmp_path / "copy")
    path = folder / "privacy_statement.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert main(["verify", str(folder)]) == 1
    assert line in capsys.readouterr().out


def test_verify_sees_a_card_that_was_changed(hub, tmp_path, capsys):
    trained(tmp_path / "out").push_to_hub()
    folder = _local_copy(hub, tmp_path / "copy")
    card = folder / "README.md"
    card.write_text(card.read_text().replace("epsilon: 2.", "epsilon: 0."))
    assert main(["verify", str(folder)]) == 1
    assert "FAIL  card's epsilon" in capsys.readouterr().out


def test_card_renders_again_from_the_folder(hub, tmp_path, capsys):
    trained(tmp_path / "out").push_to_hub()
    folder = _local_copy(hub, tmp_path / "copy")
    before = (folder / "README.md").read_text()
    assert main(["card", str(folder)]) == 0
    assert (folder / "README.md").read_text() == before


def test_verify_of_nothing_is_said(capsys, hub):
    assert main(["verify", "tester/absent"]) == 2
    assert "neither a folder nor a repository" in capsys.readouterr().err


def test_models_of_vision_have_their_card_too(hub, tmp_path):
    data = [{"pixel_values": torch.randn(2, 8, 8), "labels": i % 3} for i in range(40)]
    from transformers import DefaultDataCollator

    trainer = trained(
        tmp_path, models.build("vit").float(), data=data, data_collator=DefaultDataCollator()
    )
    trainer.push_to_hub()
    assert b"pipeline_tag: image-classification" in pushed(hub).files["README.md"]
