"""The README's blocks are true: Python runs, and what a command prints is what it prints."""

from __future__ import annotations

import re
from pathlib import Path

import settings
import tokenizers_zoo

from hf_dpkfc.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_every_python_block_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {
        "model": settings.bert(),
        "tokenizer": tokenizers_zoo.build("bert"),
        "train": settings.text_data(70),
        "test": settings.text_data(10, seed=1),
    }
    # The tiny model has no 64 eigendirections, and reporting integrations don't belong in a test.
    shrink = "target_epsilon=1.0, rank=8, probe_batch_size=8, report_to='none', use_cpu=True,"
    assert len(blocks("python")) == 3
    for block in blocks("python"):
        exec(block.replace("target_epsilon=1.0,", shrink), names)


def test_the_printed_plan_is_what_the_command_prints(capsys):
    (block,) = [b for b in blocks("console") if "hf-dpkfc plan" in b]
    command, expected = block.split("\n", 1)
    main(command.removeprefix("$ hf-dpkfc ").split())
    assert capsys.readouterr().out.startswith(expected.strip())


def test_the_results_are_those_of_the_committed_json(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "recipes"))
    import readme_table

    for mark, content in readme_table.render().items():
        assert f"<!-- {mark} -->\n\n{content}\n\n<!-- /{mark} -->" in README


def test_the_test_command_is_the_one_that_ci_calls():
    assert "$ make test\n" in README
    assert "make test\n" in (Path(__file__).parents[1] / ".ci/run").read_text()


def test_every_claim_links_to_a_test_that_exists():
    links = re.findall(r"\]\((tests/[^)#]+)(?:#(\w+))?\)", README)
    assert len(links) > 20
    for path, name in links:
        source = (Path(__file__).parents[1] / path).read_text()
        assert not name or f"def {name}(" in source, name
