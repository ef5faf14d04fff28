from __future__ import annotations

from types import SimpleNamespace

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
