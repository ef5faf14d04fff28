from __future__ import annotations

from types import SimpleNamespace

import probe_accuracy
import pytest
import torch
from probe_accuracy import Backbone

MASKS = {"right": [[1, 1, 1, 0], [1, 1, 0, 0]], "left": [[0, 1, 1, 1], [0, 0, 1, 1]]}


def pooled_positions(cls_token, padding_side):
    """Where the features of two padded sequences are read, if a hidden state is its position."""
    mask = torch.tensor(MASKS[padding_side])
    hidden = torch.arange(4.0).expand(2, 4).unsqueeze(-1)
    outputs = SimpleNamespace(last_hidden_state=hidden)
    model = SimpleNamespace(base_model=lambda attention_mask: outputs)
    backbone = Backbone(model, SimpleNamespace(cls_token=cls_token))
    found = backbone.features([{"attention_mask": mask, "labels": torch.tensor([0, 1])}])
    return [float(found.x[found.y == label]) for label in (0, 1)]


def test_features_are_the_cls_tokens_where_the_tokenizer_has_one():
    assert pooled_positions("[CLS]", "right") == [0, 0]


@pytest.mark.parametrize(("side", "ends"), [("right", [2, 1]), ("left", [3, 3])])
def test_features_of_a_causal_model_are_its_last_tokens(side, ends):
    assert pooled_positions(None, side) == ends


def test_the_page_holds_the_committed_results():
    page = (probe_accuracy.RESULTS / "README.md").read_text()
    assert probe_accuracy.render() in page


def test_an_arm_that_a_checkpoint_cannot_have_stands_as_a_dash():
    one = {"model": "a", "data": "x", "epsilon": 1.0, "arms": {"zipf": {"test": [0.5, 0.7]}}}
    two = one | {"model": "b", "arms": {"sampled": {"test": [0.25]}}}
    rows = probe_accuracy.table([one, two]).splitlines()[2:]
    assert rows == ["| zipf | 60.0 ± 14.1 | – |", "| sampled | – | 25.0 |"]
