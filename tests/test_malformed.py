"""C1: whatever is wrong with options or records, one typed error names it.

The boundary: DPKFCConfig checks its own options and those of TrainingArguments that the guarantee
depends on. Anything else in TrainingArguments is Hugging Face's to check, in its own words.
"""

from __future__ import annotations

import math

import pytest
import settings
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hf_dpkfc import DPKFCConfig, DPKFCTrainer
from hf_dpkfc.cli import main
from hf_dpkfc.errors import ConfigurationError, DPKFCError

# Numbers in text are read as numbers, and "true" as a switch: YAML writes some of them so.
TEXT = st.text(max_size=8).map(lambda text: text + "?")
WRONG_TYPES = st.one_of(
    st.lists(st.integers(), max_size=2),
    st.dictionaries(TEXT, TEXT, max_size=1),
    st.binary().map(lambda content: content + b"?"),
)
BROKEN = st.floats().filter(lambda number: not number.is_integer())
NOT_A_NUMBER = st.one_of(WRONG_TYPES, TEXT, st.booleans(), st.complex_numbers())
NOT_FINITE = st.sampled_from([math.nan, math.inf, -math.inf])
NEGATIVE = st.floats(max_value=-1e-300, allow_nan=False)
NOT_POSITIVE = st.one_of(NOT_A_NUMBER, NOT_FINITE, NEGATIVE, st.just(0.0))
BELOW_ONE = st.one_of(NOT_A_NUMBER, st.integers(max_value=0), BROKEN)
NO_CHOICE = st.one_of(WRONG_TYPES, st.integers(), TEXT, st.none())

MALFORMED = {
    "target_epsilon": NOT_POSITIVE,
    "clip_norm": NOT_POSITIVE | st.none(),
    "damping": NOT_POSITIVE | st.none(),
    "target_delta": NOT_POSITIVE | st.floats(min_value=1.0),
    "noise_multiplier": NOT_A_NUMBER | NOT_FINITE | NEGATIVE,
    "layer_balance": NOT_A_NUMBER | NOT_FINITE | NEGATIVE | st.floats(min_value=1.01) | st.none(),
    "pink_alpha": NOT_A_NUMBER | NOT_FINITE,
    "zipf_exponent": NOT_A_NUMBER | NOT_FINITE,
    "num_train_epochs": NOT_A_NUMBER | NOT_FINITE,
    "public_dataset_size": BELOW_ONE,
    "probe_batch_size": BELOW_ONE | st.none(),
    "num_probe_batches": BELOW_ONE | st.none(),
    "probe_refresh_steps": BELOW_ONE | st.none(),
    "max_factor_dim": BELOW_ONE | st.none(),
    "rank": BELOW_ONE,
    "probe_min_length": BELOW_ONE,
    "probe_max_length": BELOW_ONE,
    "per_device_train_batch_size": BELOW_ONE | st.none(),
    "gradient_accumulation_steps": BELOW_ONE | st.none(),
    "max_steps": NOT_A_NUMBER | BROKEN | st.none(),
    "seed": NOT_A_NUMBER | BROKEN | st.none(),
    "accountant": NO_CHOICE,
    "preconditioner": NO_CHOICE,
    "probe": NO_CHOICE,
    "probe_labels": NO_CHOICE,
    "probe_language": WRONG_TYPES | st.integers() | st.none(),
    "kfac_approx": NO_CHOICE,
    "kfac_sides": NO_CHOICE,
    "secure_rng": WRONG_TYPES | TEXT | st.integers() | st.none(),
    "log_unsafe_metrics": WRONG_TYPES | TEXT | st.integers() | st.none(),
    "privacy_unit": WRONG_TYPES | st.integers() | st.none(),
    "privacy_key_path": WRONG_TYPES | st.integers(),
}


def assert_refused(folder, name, value):
    with pytest.raises(ConfigurationError) as caught:
        settings.config(folder, **{name: value})
    assert name in caught.value.what
    assert caught.value.way_out


def pairs(draw):
    name = draw(st.sampled_from(sorted(MALFORMED)))
    return name, draw(MALFORMED[name])


@hypothesis_settings(max_examples=100, deadline=None, derandomize=True)
@given(pair=st.composite(pairs)())
def test_a_malformed_option_is_one_typed_error_that_names_it(tmp_path_factory, pair):
    assert_refused(tmp_path_factory.getbasetemp(), *pair)


@pytest.mark.slow
def test_a_thousand_malformed_options_are_each_one_typed_error(tmp_path, figure):
    names = []

    @hypothesis_settings(max_examples=1000, deadline=None, database=None)
    @given(pair=st.composite(pairs)())
    def check(pair):
        assert_refused(tmp_path, *pair)
        names.append(pair[0])

    check()
    figure(f"{len(names):,} malformed configurations, {len(set(names))} fields")
    assert len(names) >= 1000


CHOICES = {
    name: DPKFCConfig.__dataclass_fields__[name].metadata["choices"]
    for name in DPKFCConfig.__annotations__
    if "choices" in DPKFCConfig.__dataclass_fields__[name].metadata
}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("wrong", ["pld", 3])
def test_a_refused_choice_is_told_every_legal_one(tmp_path, name, wrong):
    with pytest.raises(ConfigurationError) as caught:
        settings.config(tmp_path, **{name: wrong})
    assert f"one of {', '.join(CHOICES[name])}" in caught.value.way_out


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [
        ("target_epsilon", 0, "finite target_epsilon > 0"),
        ("noise_multiplier", -1, "finite noise_multiplier ≥ 0"),
        ("target_delta", 1, "0 < target_delta < 1, or null (None)"),
        ("clip_norm", math.inf, "finite clip_norm > 0"),
        ("public_dataset_size", 0, "1 ≤ public_dataset_size, or null (None)"),
        ("damping", 0, "damping > 0"),
        ("damping", math.inf, "a finite number"),
        ("layer_balance", 2, "0 ≤ layer_balance ≤ 1"),
        ("rank", 0, "rank ≥ 1, or None"),
        ("rank", 2.5, "a whole number, or null (None)"),
        ("probe_batch_size", 0, "1 ≤ probe_batch_size"),
        ("zipf_exponent", math.nan, "a finite number"),
        ("adambc_floor", 0, "0 < adambc_floor"),
        ("disk_kappa", 2, "0 < disk_kappa ≤ 1"),
        ("disk_gamma", 0, "0 < disk_gamma"),
        ("disk_gamma", 1e-3, "disk_gamma above 0.0067"),
        ("per_device_train_batch_size", 0, "1 ≤ per_device_train_batch_size"),
        ("seed", "x", "a whole number"),
        ("secure_rng", "perhaps", "true or false"),
        ("privacy_unit", None, "a text"),
    ],
)
def test_a_refused_value_is_told_what_is_legal(tmp_path, name, value, legal):
    with pytest.raises(ConfigurationError) as caught:
        settings.config(tmp_path, **{name: value})
    assert legal in caught.value.way_out


def changed(**change):
    rows = settings.text_data(40)
    return [row | change for row in rows]


def without(name):
    return [{k: v for k, v in row.items() if k != name} for row in settings.text_data(40)]


RECORDS = {
    "empty": ([], "train_dataset"),
    "numbers": ([1, 2, 3] * 10, "train_dataset"),
    "no labels": (without("labels"), "labels"),
    "no tokens": (without("input_ids"), "input_ids"),
    "label of no class": (changed(labels=7), "labels"),
    "negative label": (changed(labels=-7), "labels"),
    "label in words": (changed(labels="good"), "labels"),
    "no label value": (changed(labels=None), "labels"),
    "token beyond the vocabulary": (changed(input_ids=[5, 10**6, 6]), "input_ids"),
    "tokens in words": (changed(input_ids=["a", "b"]), "input_ids"),
    "too long for the model": (changed(input_ids=[9] * 99), "max_position_embeddings"),
}


@pytest.mark.parametrize("case", RECORDS)
def test_malformed_records_are_one_typed_error_that_names_the_column(tmp_path, case):
    records, match = RECORDS[case]
    with pytest.raises(DPKFCError, match=match):
        settings.trainer(tmp_path, data=records).train()


def test_training_without_records_is_refused(tmp_path):
    trainer = DPKFCTrainer(model=settings.bert(), args=settings.config(tmp_path))
    with pytest.raises(ConfigurationError, match="train_dataset is missing"):
        trainer.train()


@pytest.mark.parametrize("text", ["", "- a\n", "model", "model: [", "target_epsilon: {}\n"])
def test_a_malformed_yaml_file_is_one_clear_error(tmp_path, text, capsys):
    (tmp_path / "c.yaml").write_text(text)
    assert main(["train", str(tmp_path / "c.yaml")]) == 2
    assert "Way out:" in capsys.readouterr().err
