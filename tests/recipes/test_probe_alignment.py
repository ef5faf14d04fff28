from __future__ import annotations

import json

import probe_alignment
import pytest
from probe_alignment import FIGURES, RESULTS


def test_a_layer_that_one_probe_has_no_figures_of_is_missing_there_after_reading(tmp_path):
    figures = dict.fromkeys(FIGURES, 0.5)
    layers = {"text": {"zipf": {"a": figures}, "public": {"a": figures, "b": figures}}}
    result = {"command": "python …", "layers": layers}
    probe_alignment.write(tmp_path / "x.json", result)
    assert probe_alignment.read(tmp_path / "x.json") == result
    assert json.loads((tmp_path / "x.json").read_text())["layer_names"] == ["a", "b"]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_the_page_holds_the_committed_table(path):
    page = (RESULTS / "README.md").read_text()
    assert probe_alignment.table(probe_alignment.read(path)) in page
