from __future__ import annotations

import models
import pytest
import torch
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    MBartConfig,
    MBartForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
    XLNetConfig,
    XLNetLMHeadModel,
)

from hf_dpkfc.errors import UnsupportedTaskError
from hf_dpkfc.losses import Task, TaskLoss, require_heads_own_loss, task_of

SMALL = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


def text(labels, **extra):
    inputs = models.inputs_for("bert")
    inputs.pop("labels")
    return inputs | ({"labels": labels} if labels is not None else {}) | extra


def bert(cls, **config):
    torch.manual_seed(0)
    return cls(BertConfig(**SMALL, **config)).double().eval()


CASES = {
    "single": (
        lambda: bert(BertForSequenceClassification, num_labels=3),
        text(torch.tensor([0, 1, 2, 0])),
    ),
    "multi": (
        lambda: bert(
            BertForSequenceClassification,
            num_labels=3,
            problem_type="multi_label_classification",
        ),
        text(torch.ones(4, 3).double()),
    ),
    "regression": (
        lambda: bert(BertForSequenceClassification, num_labels=1),
        text(torch.tensor([0.5, 1.0, -1.0, 0.0]).double()),
    ),
    "token": (
        lambda: bert(BertForTokenClassification, num_labels=5),
        text(torch.arange(36).view(4, 9) % 5),
    ),
    "span": (
        lambda: bert(BertForQuestionAnswering),
        text(
            None,
            start_positions=torch.tensor([1, 2, 3, 4]),
            end_positions=torch.tensor([2, 2, 5, 4]),
        ),
    ),
    "mlm": (lambda: models.build("bert-mlm"), models.inputs_for("bert-mlm")),
    "causal": (lambda: models.build("gpt2"), models.inputs_for("gpt2")),
}


@pytest.mark.parametrize("case", CASES)
def test_a_single_examples_loss_is_hugging_faces_own(case):
    build, inputs = CASES[case]
    inputs = {k: v[:, :6] if v.dim() == 2 and v.shape[1] == 9 else v for k, v in inputs.items()}
    model = build()
    loss = TaskLoss(task_of(model))
    together = loss(model, inputs)
    for i, one in enumerate(models.singles(inputs)):
        hf = model(**one).loss
        torch.testing.assert_close(loss(model, one)[0], hf, check_dtype=False)
        torch.testing.assert_close(together[i], hf, check_dtype=False)


def test_padding_does_not_move_a_span_loss():
    model = bert(BertForQuestionAnswering)
    ids, ends = (
        torch.tensor([[7, 8, 9]]),
        {"start_positions": torch.tensor([1]), "end_positions": torch.tensor([2])},
    )
    loss = TaskLoss(Task.SPAN)
    plain = loss(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | ends)
    pad = torch.zeros(1, 4, dtype=torch.long)
    padded = {
        "input_ids": torch.cat([ids, pad], 1),
        "attention_mask": torch.cat([torch.ones_like(ids), pad], 1),
    }
    torch.testing.assert_close(plain, loss(model, padded | ends))


def test_an_answer_beyond_the_examples_own_tokens_is_ignored():
    model = bert(BertForQuestionAnswering)
    inputs = {
        "input_ids": torch.tensor([[7, 8, 9, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0, 0]]),
        "start_positions": torch.tensor([4]),
        "end_positions": torch.tensor([7]),
    }
    assert TaskLoss(Task.SPAN)(model, inputs).item() == 0.0


def test_an_unknown_head_gets_an_error_that_shows_how():
    with pytest.raises(UnsupportedTaskError, match=r"BertModel[\s\S]*per_example_loss"):
        task_of(bert(BertModel))


def test_left_padding_does_not_move_a_causal_loss():
    model = models.build("gpt2")
    ids = torch.tensor([[7, 8, 9, 10]])
    loss = TaskLoss(Task.CAUSAL_LM)
    plain = loss(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
    pad = torch.zeros(1, 3, dtype=torch.long)
    padded = loss(
        model,
        {
            "input_ids": torch.cat([pad, ids], 1),
            "attention_mask": torch.cat([pad, torch.ones_like(ids)], 1),
            "labels": torch.cat([pad - 100, ids], 1),
        },
    )
    torch.testing.assert_close(plain, padded)


def test_float_labels_of_a_single_label_head_are_refused_with_the_way_out():
    loss = TaskLoss(Task.SINGLE_LABEL)
    with pytest.raises(UnsupportedTaskError, match="problem_type"):
        loss(models.build("bert"), {"labels": torch.zeros(2, 3)})


@pytest.mark.parametrize(
    ("task", "missing"), [(Task.SPAN, "start_positions"), (Task.CAUSAL_LM, "labels")]
)
def test_a_batch_without_targets_is_refused_by_their_name(task, missing):
    with pytest.raises(UnsupportedTaskError, match=missing):
        TaskLoss(task)(models.build("bert"), {"input_ids": torch.zeros(1, 2, dtype=torch.long)})


@pytest.mark.parametrize("case", CASES)
def test_known_heads_agree_with_their_own_loss(case):
    build, inputs = CASES[case]
    inputs = {k: v[:, :6] if v.dim() == 2 and v.shape[1] == 9 else v for k, v in inputs.items()}
    model = build()
    before = model.config.problem_type
    require_heads_own_loss(model, TaskLoss(task_of(model)), models.singles(inputs))
    assert model.config.problem_type == before


TINY = {"vocab_size": 60, "d_model": 16, "dropout": 0.0, "attention_dropout": 0.0}


@pytest.mark.parametrize(
    "build",
    [
        lambda: XLNetLMHeadModel(XLNetConfig(**TINY, n_layer=1, n_head=2, d_inner=16)),
        lambda: MBartForCausalLM(
            MBartConfig(**TINY, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16)
        ),
    ],
    ids=["XLNetLMHeadModel", "MBartForCausalLM"],
)
def test_a_head_that_shifts_its_labels_otherwise_is_refused_by_name(build):
    torch.manual_seed(0)
    model = build().double().eval()
    ids = torch.tensor([[7, 8, 9, 10, 11]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    with pytest.raises(UnsupportedTaskError, match=type(model).__name__):
        require_heads_own_loss(model, TaskLoss(task_of(model)), [inputs])


def test_robertas_positions_begin_where_it_says():
    torch.manual_seed(0)
    config = RobertaConfig(**SMALL, is_decoder=True, pad_token_id=1, max_position_embeddings=20)
    model = RobertaForCausalLM(config).double().eval()
    ids = torch.tensor([[7, 8, 9, 10]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    ours, theirs = TaskLoss(Task.CAUSAL_LM)(model, inputs)[0], model(**inputs).loss
    torch.testing.assert_close(ours, theirs, check_dtype=False)


def test_a_target_is_not_rounded_to_the_models_precision():
    """In bf16, 1003 is 1004: its distance to a prediction of 1000 would be 16 instead of 9."""
    model = bert(BertForSequenceClassification, num_labels=1).to(torch.bfloat16)
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.fill_(1000.0)
    inputs = text(torch.tensor([1003.0] * 4))
    torch.testing.assert_close(TaskLoss(Task.REGRESSION)(model, inputs), torch.full((4,), 9.0))
