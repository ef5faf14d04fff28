from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
import settings
from torch import nn

from hf_dpkfc.cli import main
from hf_dpkfc.diagnostics.record import DIAGNOSTICS_NAME
from hf_dpkfc.diagnostics.report import write_report
from hf_dpkfc.diagnostics.rundata import evaluation_metrics, read_run
from hf_dpkfc.errors import ConfigurationError
from hf_dpkfc.publication import CardOptions
from hf_dpkfc.runs import LEDGER_NAME

SECTIONS = [
    "Privacy",
    "Accuracy",
    "Signal against noise",
    "Spectra of the factors",
    "Alignment",
    "Layer by layer",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with diagnostics and one evaluation; tests copy what they change."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        trainer = settings.trainer(
            folder,
            diagnostics_steps=2,
            eval_dataset=settings.text_data(8, seed=3),
            compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == 0).mean())},
        )
        trainer.train()
        trainer.evaluate()
    return folder


@pytest.fixture
def run(finished, tmp_path):
    for path in finished.glob("*.json*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def page_of(folder):
    return write_report(folder).read_text()


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.sources, self.alts = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        values = dict(attrs)
        self.sources += [values[k] for k in ("src", "href", "srcset", "action") if k in values]
        self.alts += [values.get("alt")] if tag == "img" else []


def titles(page):
    return re.findall(r"<h2>(.*?)</h2>", page)


def test_a_report_has_every_section_and_no_message(run):
    page = page_of(run)
    assert titles(page) == SECTIONS
    assert "<aside>" not in page
    assert "accuracy = " in page
    assert "4 of 4 releases" in page


def test_a_report_asks_the_network_for_nothing(run):
    text = page_of(run)
    page = Page(text)
    assert page.sources
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    style = re.search(r"<style>(.*?)</style>", text, re.S).group(1)
    assert "url(" not in style
    assert "@import" not in style


def test_every_picture_says_in_words_what_it_shows(run):
    alts = Page(page_of(run)).alts
    assert len(alts) >= 9
    assert all(alt and len(alt) > 20 for alt in alts)


def test_the_same_run_gives_the_same_bytes(run):
    assert page_of(run) == page_of(run)


def test_a_folder_without_results_is_refused(tmp_path, capsys):
    with pytest.raises(ConfigurationError, match="no results"):
        read_run(tmp_path)
    assert main(["report", str(tmp_path)]) == 2
    assert "Way out:" in capsys.readouterr().err


def test_the_command_writes_the_page(run, capsys):
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")


def test_a_page_that_cant_be_written_is_refused(run, capsys):
    assert main(["report", str(run), "--output", str(run / "no/such/folder.html")]) == 2
    assert "can't be written" in capsys.readouterr().err


def change_header(run, **changes):
    path = run / DIAGNOSTICS_NAME
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(first) | changes), *rest]) + "\n")


def test_a_run_of_another_version_gets_a_message_and_the_rest(run):
    change_header(run, version="9.9.9", format=7)
    page = page_of(run)
    assert "written by hf-dpkfc 9.9.9" in page
    assert "has format 7" in page
    assert titles(page) == SECTIONS


def test_a_layer_without_a_factor_is_named_and_has_dashes(run):
    path = run / DIAGNOSTICS_NAME
    *lines, last_look, evaluation = path.read_text().splitlines()
    look = json.loads(last_look)
    silent = next(iter(look["layers"]))
    del look["layers"][silent]
    look["notes"] = [f"{silent}: no spectrum, no gradient reaches it yet"]
    path.write_text("\n".join([*lines, json.dumps(look), evaluation]) + "\n")
    page = page_of(run)
    assert f"{silent}: no spectrum, no gradient reaches it yet" in page
    assert re.search(rf"<td>{re.escape(silent)}</td><td>[\d,]+</td><td>–</td>", page)
    assert titles(page) == SECTIONS


def test_a_look_of_another_shape_costs_its_sections_only(run):
    path = run / DIAGNOSTICS_NAME
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for look in lines:
        look.update({"signals": {"x": {"snr": 1}}} if look["kind"] == "diagnostics" else {})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(run)
    assert "Signal against noise: can&#x27;t be drawn" in page
    assert titles(page) == ["Privacy", "Accuracy", "Spectra of the factors", "Alignment"]


def test_a_run_without_diagnostics_says_how_to_get_them(run):
    (run / DIAGNOSTICS_NAME).unlink()
    page = page_of(run)
    assert "diagnostics_steps=50" in page
    assert titles(page) == ["Privacy", "Accuracy"]


def test_evaluations_come_from_hfs_state_where_there_are_no_diagnostics(run):
    (run / DIAGNOSTICS_NAME).unlink()
    history = [{"step": 3, "eval_accuracy": 0.75, "eval_runtime": 1.0, "unsafe_train_loss": 1.0}]
    (run / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    assert read_run(run).evaluations == [(3, {"accuracy": 0.75})]


@pytest.mark.parametrize(
    "name",
    [
        "eval_runtime",
        "eval_samples_per_second",
        "eval_tokens_per_second",
        "eval_model_preparation_time",
        "eval_jit_compilation_time",
        "eval_second_runtime",
        "eval_epoch",
        "epoch",
        "unsafe_train_loss",
        "test_accuracy",
    ],
)
def test_what_is_no_metric_of_held_out_records_is_in_neither_report_nor_card(name):
    evaluation = {"eval_accuracy": 0.75, "eval_overtime": 2, name: 1.0}
    metrics = {"accuracy": 0.75, "overtime": 2.0}
    assert evaluation_metrics(evaluation) == metrics
    assert CardOptions().facts(nn.Linear(1, 1), "name", evaluation).metrics == metrics


def test_a_changed_ledger_is_told(run):
    with open(run / LEDGER_NAME, "a") as file:
        file.write("{}\n")
    assert "isn&#x27;t the file that" in page_of(run)


@pytest.mark.parametrize("name", [LEDGER_NAME, "privacy_statement.json", DIAGNOSTICS_NAME])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe{", b"{}", b"[]\n[]\n", b'{"plan": 3}\n'])
def test_a_damaged_file_is_a_message_and_not_a_traceback(run, name, content):
    (run / name).write_bytes(content)
    assert any(name in message for message in read_run(run).messages)


@pytest.mark.parametrize("name", [LEDGER_NAME, "privacy_statement.json", DIAGNOSTICS_NAME])
def test_a_damaged_file_costs_its_sections_only(run, name):
    (run / name).write_bytes(b"[]\n[]\n")
    page = page_of(run)
    assert name in page
    assert "Privacy" in titles(page)


def test_a_run_whose_factors_saw_records_shows_no_epsilon(run):
    path = run / "privacy_statement.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"claims_privacy": False}))
    page = page_of(run)
    assert "No ε is claimed" in page
    assert "ε spent" not in page


def test_an_interrupted_run_whose_factors_saw_records_shows_no_epsilon(run):
    (run / "privacy_statement.json").unlink()
    path = run / "privacy_ledger.jsonl"
    text = path.read_text()
    assert '"claims_privacy": true' in text
    path.write_text(text.replace('"claims_privacy": true', '"claims_privacy": false'))
    page = page_of(run)
    assert "No ε is claimed" in page
    assert "ε spent" not in page


def test_an_empty_ledger_is_told_and_counts_nothing(run):
    (run / "privacy_ledger.jsonl").write_text("")
    page = page_of(run)
    assert "can&#x27;t be read" in page
    assert "ε spent" not in page


def test_a_report_of_a_search_states_its_cost(run):
    (run / "privacy_tuning.json").write_text(json.dumps({"statement": "7 trials spend ε = 9"}))
    assert "7 trials spend ε = 9" in page_of(run)


def test_a_trials_report_states_the_cost_of_its_search(run):
    trial = run / "run-0"
    trial.mkdir()
    (run / LEDGER_NAME).rename(trial / LEDGER_NAME)
    (run / "privacy_tuning.json").write_text(json.dumps({"statement": "7 trials spend ε = 9"}))
    assert "7 trials spend ε = 9" in page_of(trial)


def test_the_folder_of_a_search_alone_has_a_report(tmp_path):
    (tmp_path / "privacy_tuning.json").write_text(json.dumps({"statement": "7 trials"}))
    assert "7 trials" in page_of(tmp_path)


def test_names_in_a_run_are_escaped(run):
    path = run / DIAGNOSTICS_NAME
    path.write_text(path.read_text().replace('"notes": []', '"notes": ["<script>x</script>"]'))
    assert "<script>" not in page_of(run)
