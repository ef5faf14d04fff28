from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from importlib.metadata import version

import pytest
import settings
import tokenizers_zoo
import yaml

from hf_dpkfc import DPKFCConfig
from hf_dpkfc.cli import _COMMANDS, _TRAIN_KEYS, EXAMPLE, _audited_plan, main
from hf_dpkfc.config import _GROUPS, options_by_group
from hf_dpkfc.privacy.plan import Adjacency


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    settings.bert().save_pretrained(folder)
    tokenizers_zoo.build("bert").save_pretrained(folder)
    return folder


def test_plan_prints_epsilon_a_table_and_a_curve(capsys):
    arguments = "plan --n 10000 --batch 256 --epochs 5 --epsilon 2 --delta 1e-5".split()
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "200 (40 per epoch)" in printed
    assert "second opinion" in printed
    assert printed.count("█") > 50
    assert len([line for line in printed.splitlines() if line.startswith("     ")]) >= 5


def test_plan_computes_epsilon_from_sigma(capsys):
    assert main("plan --n 1000 --batch 10 --steps 1000 --sigma 1 --delta 1e-5".split()) == 0
    assert "2.101" in capsys.readouterr().out


def test_plan_without_noise_says_that_epsilon_is_infinite(capsys):
    assert main("plan --n 1000 --batch 10 --steps 5 --sigma 0".split()) == 0
    assert "infinite from the first step on" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        "plan --n 100 --batch 256 --steps 5 --epsilon 1",
        "plan --n 100 --batch 10 --steps 5 --epsilon -1",
        "plan --n 0 --batch 10 --epochs 5 --sigma 1",
        "plan --n 100 --batch 10 --steps 0 --sigma 1",
        "inspect no/such/model/anywhere",
        "train no_such_file.yaml",
    ],
)
def test_a_refusal_is_one_clear_error(arguments, capsys):
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("hf-dpkfc: ")
    assert "Way out:" in error


PLAN = "plan --n 1000 --batch 10 --steps 1000 --sigma 1 --delta 1e-5"


def test_plan_states_the_adjacency_that_is_asked_for(capsys):
    assert main(PLAN.split()) == 0
    zero_out = capsys.readouterr().out
    assert main(f"{PLAN} --adjacency add-remove".split()) == 0
    add_remove = capsys.readouterr().out
    assert Adjacency.ZERO_OUT in zero_out
    assert add_remove == zero_out.replace(Adjacency.ZERO_OUT, Adjacency.ADD_REMOVE)


def printed_and_exited(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 0
    return capsys.readouterr().out


def test_the_version_is_the_packages(capsys):
    assert printed_and_exited(["--version"], capsys) == f"hf-dpkfc {version('hf-dpkfc')}\n"


@pytest.mark.parametrize("command", ["", *_COMMANDS])
def test_help_is_plain_text(command, capsys):
    assert "``" not in printed_and_exited([*command.split(), "--help"], capsys)


@pytest.mark.parametrize("command", _COMMANDS)
def test_no_argument_is_left_without_help(command):
    parser = argparse.ArgumentParser()
    declare, _ = _COMMANDS[command]
    declare(parser)
    assert [action.dest for action in parser._actions if not action.help] == []


def test_train_help_tells_every_option_of_ours(capsys):
    printed = " ".join(printed_and_exited(["train", "--help"], capsys).split())
    for name in DPKFCConfig.__annotations__:
        option = DPKFCConfig.__dataclass_fields__[name]
        assert f"{name}: " in printed
        assert option.metadata["help"] in printed
        assert ", ".join(option.metadata.get("choices", ())) in printed


def test_every_option_stands_in_the_group_of_what_it_can_change():
    groups = list(options_by_group().values())
    assert [options[0].name for options in groups] == list(_GROUPS)
    names = [option.name for options in groups for option in options]
    assert names == list(DPKFCConfig.__annotations__)


def test_the_example_in_trains_help_is_a_configuration(tmp_path, capsys):
    assert EXAMPLE.splitlines()[0] in printed_and_exited(["train", "--help"], capsys)
    options = yaml.safe_load(EXAMPLE)
    task = {name: options.pop(name) for name in _TRAIN_KEYS if name in options}
    assert task["labels"] == ["negative", "positive"]
    assert DPKFCConfig(**options | {"output_dir": str(tmp_path)}).target_epsilon == 3.0


@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [
        ("--help", {"torch", "transformers", "opacus", "scipy", "numpy", "matplotlib"}),
        ("--version", {"torch", "transformers", "opacus", "scipy", "numpy", "matplotlib"}),
        (PLAN, {"transformers", "accelerate", "peft", "datasets", "matplotlib"}),
    ],
)
def test_a_command_imports_only_what_it_needs(arguments, unneeded):
    code = (
        "import sys; from contextlib import suppress; from hf_dpkfc.cli import main\n"
        f"with suppress(SystemExit): main({arguments.split()!r})\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0
    assert not unneeded & set(process.stderr.split())


@pytest.mark.parametrize("delta", [1e-9, 1e-5, 0.3, 0.6])
def test_an_audit_is_of_a_plan_that_delta_allows(delta):
    args = argparse.Namespace(sigma=1.0, rate=1.0, steps=3, delta=delta)
    plan = _audited_plan(args)
    assert (plan.delta, plan.sampling_rate) == (delta, 1.0)


def test_inspect_prints_every_route(checkpoint, capsys):
    assert main(["inspect", str(checkpoint)]) == 0
    printed = capsys.readouterr().out
    assert "bert.pooler.dense.weight" in printed
    assert "0 refused" in printed


def write_rows(path, count):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "topic"])
        writer.writerows(
            [["the time of day" if i % 2 else "people and work", f"t{i % 2}"] for i in range(count)]
        )


def write_config(path, **lines):
    path.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    return str(path)


def test_train_runs_a_yaml_file(checkpoint, tmp_path, capsys):
    write_rows(tmp_path / "train.csv", 40)
    write_rows(tmp_path / "test.csv", 10)
    config = write_config(
        tmp_path / "c.yaml",
        model=checkpoint,
        train_file=tmp_path / "train.csv",
        eval_file=tmp_path / "test.csv",
        text_column="text",
        label_column="topic",
        output_dir=tmp_path / "out",
        per_device_train_batch_size=10,
        max_steps=2,
        target_epsilon=2.0,
        target_delta="1e-5",
        learning_rate="5e-4",
        rank="null",
        probe_batch_size=8,
        num_probe_batches=1,
        report_to="none",
        use_cpu="true",
    )
    assert main(["train", config]) == 0
    printed = capsys.readouterr().out
    assert "accuracy on" in printed
    assert "ε spent: " in printed
    assert (tmp_path / "out/model.safetensors").exists()
    assert json.loads((tmp_path / "out/config.json").read_text())["id2label"] == {
        "0": "t0",
        "1": "t1",
    }


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"texts": "a"}, "Unknown options: texts"),
        ({"text_column": "body"}, "text_column='body' isn't a column"),
        ({"model": ""}, "model is missing"),
        ({"train_file": "absent.csv"}, "absent.csv doesn't exist"),
        ({"train_file": "no/such-set"}, "'no/such-set' can't be loaded"),
        ({"labels": "t0"}, "labels='t0'"),
        ({"labels": "[t0]"}, "train_file holds classes"),
        ({"learning_rate": "fast"}, "learning_rate='fast'"),
        ({"max_steps": "many"}, "max_steps='many'"),
        ({"lr_scheduler_type": "zigzag"}, "zigzag"),
        ({"eval_strategy": "epoch"}, "eval_dataset"),
    ],
)
def test_a_wrong_line_is_named(checkpoint, tmp_path, capsys, change, match):
    write_rows(tmp_path / "train.csv", 20)
    lines = {
        "model": checkpoint,
        "train_file": tmp_path / "train.csv",
        "text_column": "text",
        "label_column": "topic",
        "output_dir": tmp_path / "out",
        "target_epsilon": 1.0,
    }
    config = write_config(tmp_path / "c.yaml", **(lines | change))
    assert main(["train", config]) == 2
    assert match in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("text,topic\na day,t0\n,t1\n", "Row 2 of text_column='text'"),
        ("text,topic\na day,t0\nwork,\n", "Row 2 of label_column='topic'"),
        ("text,topic\n1,t0\n2,t1\n", "Row 1 of text_column='text'"),
        ("text,topic\na,t0\nb,t1,more\n", "can't be read as csv"),
        ("", "can't be read as csv"),
    ],
)
def test_a_record_that_cannot_be_used_is_named(checkpoint, tmp_path, capsys, content, match):
    (tmp_path / "train.csv").write_text(content)
    lines = {"model": checkpoint, "train_file": tmp_path / "train.csv", "text_column": "text"}
    lines |= {"label_column": "topic", "output_dir": tmp_path / "out", "target_epsilon": 1.0}
    assert main(["train", write_config(tmp_path / "c.yaml", **lines)]) == 2
    assert match in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "- a\n", "just words", "a: [", "\0"])
def test_a_file_without_options_is_refused(tmp_path, capsys, text):
    (tmp_path / "c.yaml").write_text(text)
    assert main(["train", str(tmp_path / "c.yaml")]) == 2
    assert "Way out:" in capsys.readouterr().err
