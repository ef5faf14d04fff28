from __future__ import annotations

import copy
import inspect
import logging
import math

import models
import peft
import pytest
import settings
import tokenizers_zoo
import torch
from safetensors.torch import load_file
from torch.utils.data import IterableDataset
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    DefaultDataCollator,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from hf_dpkfc import DPKFCConfig, DPKFCTrainer, engine
from hf_dpkfc.callbacks import OwnBestCheckpointCallback
from hf_dpkfc.errors import (
    ConfigurationError,
    LedgerError,
    NeighbourError,
    ProbeError,
    UnsupportedLayerError,
    UnsupportedTaskError,
)
from hf_dpkfc.losses import Task
from hf_dpkfc.mechanism.randomness import SecretKey
from hf_dpkfc.publishing.statement import PrivacyStatement
from hf_dpkfc.refusals import refuse_launch


@pytest.fixture
def warnings_of(caplog):
    """What our loggers say; transformers' own logger doesn't propagate by itself."""
    from transformers.utils import logging as hf_logging

    hf_logging.enable_propagation()
    logging.getLogger("hf_dpkfc").propagate = True
    with caplog.at_level(logging.INFO):
        yield caplog
    hf_logging.disable_propagation()


def test_without_noise_clipping_or_geometry_it_is_the_plain_trainer(tmp_path):
    data = settings.text_data(24)
    plain = settings.bert(dropout=0.0)
    private = copy.deepcopy(plain)
    shared = {"max_steps": 5, "learning_rate": 0.1, "optim": "sgd", "lr_scheduler_type": "linear"}
    Trainer(
        model=plain,
        args=TrainingArguments(
            str(tmp_path / "a"),
            per_device_train_batch_size=24,
            max_grad_norm=0.0,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            **shared,
        ),
        train_dataset=data,
        processing_class=tokenizers_zoo.build("bert"),
    ).train()
    settings.trainer(
        tmp_path / "b",
        private,
        data,
        noise_multiplier=0.0,
        clip_norm=1e9,
        preconditioner="none",
        per_device_train_batch_size=6,
        gradient_accumulation_steps=4,
        **shared,
    ).train()
    difference = (settings.weights(plain) - settings.weights(private)).abs().max()
    assert difference < 1e-5


def test_the_plan_is_spent_exactly_and_logged(tmp_path):
    trainer = settings.trainer(tmp_path, gradient_accumulation_steps=2)
    plan = trainer.plan
    assert plan.expected_batch_size == 16
    assert plan.steps == 4
    assert trainer.epsilon_spent() == 0.0
    trainer.train()
    assert trainer.epsilon_spent() == plan.epsilon <= 3.0
    epsilons = [log["privacy/epsilon"] for log in trainer.state.log_history]
    assert epsilons == sorted(epsilons)
    assert trainer.state.global_step == 4


def test_epochs_become_steps_as_in_hf(tmp_path):
    trainer = settings.trainer(tmp_path, max_steps=-1, num_train_epochs=1.5)
    assert trainer.plan.steps == math.ceil(1.5 * math.ceil(60 / 8)) == 12
    trainer.train()
    assert trainer.state.global_step == 12
    assert trainer._run.num_releases == 12


def test_the_learning_rate_follows_logical_steps(tmp_path):
    trainer = settings.trainer(tmp_path, gradient_accumulation_steps=3, lr_scheduler_type="linear")
    trainer.train()
    rates = [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


SAFE_LOGS = {"grad_norm", "learning_rate", "epoch", "step", "privacy/epsilon", "privacy/delta"}
SAFE_LOGS |= {"train_runtime", "train_samples_per_second", "train_steps_per_second"}


def test_nothing_unnoised_is_logged_or_returned(tmp_path):
    trainer = settings.trainer(tmp_path)
    output = trainer.train()
    assert {key for log in trainer.state.log_history for key in log} <= SAFE_LOGS
    assert output.training_loss == 0.0
    assert "train_loss" not in output.metrics
    assert trainer.state.num_input_tokens_seen == 0
    assert trainer.state.total_flos == 0


def test_unsafe_metrics_carry_their_name(tmp_path):
    trainer = settings.trainer(tmp_path, log_unsafe_metrics=True)
    trainer.train()
    keys = {key for log in trainer.state.log_history for key in log} - SAFE_LOGS
    assert keys == {"unsafe/train_loss", "unsafe/clip_fraction", "unsafe/batch_size"}


def test_the_callers_args_are_not_modified(tmp_path):
    args = settings.config(tmp_path, gradient_accumulation_steps=4)
    before = args.to_dict()
    DPKFCTrainer(
        model=settings.bert(),
        args=args,
        train_dataset=settings.text_data(),
        processing_class=tokenizers_zoo.build("bert"),
    ).train()
    assert args.to_dict() == before


def fresh_bert():
    """With initial weights from the global generator, as HF seeds it."""
    return type(settings.bert())(settings.bert().config).float()


def test_the_same_seed_gives_the_same_start_and_other_noise(tmp_path):
    starts, maps, finals = [], [], []
    for name in "ab":
        torch.manual_seed(len(finals))  # what the process drew before must not matter
        trainer = settings.trainer(tmp_path / name, seed=42, model_init=fresh_bert, max_steps=1)
        starts.append(settings.weights(trainer.model))
        trainer.train()
        maps.append(trainer.preconditioner.fingerprint)
        finals.append(settings.weights(trainer.model))
    assert torch.equal(*starts)
    assert maps[0] == maps[1]
    assert not torch.equal(*finals)


def test_a_logical_step_draws_noise_exactly_once(tmp_path, monkeypatch):
    """G5: many micro-batches, one draw."""
    draws = []
    real = engine.privatize
    monkeypatch.setattr(engine, "privatize", lambda *args: draws.append(1) or real(*args))
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}
    settings.trainer(tmp_path, **options).train()
    assert len(draws) == 4


def test_records_of_like_length_share_a_micro_batch(tmp_path):
    """At rate 1 everybody is drawn, and each micro-batch is as wide as its longest record."""
    seen = []
    lengths = sorted(len(row["input_ids"]) for row in settings.text_data())

    def collate(rows):
        batch = tokenizers_zoo.build("bert").pad(
            [{"input_ids": row["input_ids"]} for row in rows], return_tensors="pt"
        )
        seen.append(batch["input_ids"].shape)
        return {**batch, "labels": torch.tensor([row["labels"] for row in rows])}

    options = {"per_device_train_batch_size": 10, "gradient_accumulation_steps": 6, "max_steps": 1}
    trainer = settings.trainer(tmp_path, data_collator=collate, preconditioner="none", **options)
    trainer.train()
    assert seen[-6:] == [(10, longest) for longest in lengths[9::10]]


def test_the_first_preconditioner_does_not_depend_on_private_data(tmp_path):
    prints = []
    for seed in (1, 2):
        data = settings.text_data(seed=seed)
        trainer = settings.trainer(tmp_path / str(seed), data=data, max_steps=1)
        trainer.train()
        prints.append(trainer.preconditioner.fingerprint)
    assert prints[0] == prints[1]


def test_one_record_more_changes_no_public_number(tmp_path):
    """G4: rates, steps, divisors and learning rates come from public constants."""
    plans, rates = [], []
    for count in (60, 61):
        trainer = settings.trainer(
            tmp_path / str(count), data=settings.text_data(count), public_dataset_size=60
        )
        trainer.train()
        plans.append(trainer.plan)
        rates.append([log.get("learning_rate") for log in trainer.state.log_history])
    assert plans[0] == plans[1]
    assert rates[0] == rates[1]
    assert "add/remove" in plans[0].adjacency


def test_an_empty_draw_is_a_step_of_pure_noise(tmp_path):
    trainer = settings.trainer(
        tmp_path, public_dataset_size=10**7, target_delta=1e-8, noise_multiplier=1.0, max_steps=2
    )
    before = settings.weights(trainer.model)
    trainer.train()
    assert trainer._run.num_releases == 2
    assert trainer._run.unsafe.num_examples == 0
    assert not torch.equal(before, settings.weights(trainer.model))


SMALL = {
    "vocab_size": 90,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


def small(cls, **config):
    torch.manual_seed(0)
    return cls(BertConfig(**SMALL, **config))


def rows(**columns):
    return [
        {"input_ids": [5, 20 + i % 9, 21, 6], **{k: v(i) for k, v in columns.items()}}
        for i in range(40)
    ]


def task_settings(task):
    tokenizer = tokenizers_zoo.build("bert")
    # The tokenizer has more tokens than the model: a random replacement could be one of them.
    masking = {"mask_replace_prob": 1.0, "random_replace_prob": 0.0}
    lm = DataCollatorForLanguageModeling
    return {
        Task.SINGLE_LABEL: (
            small(BertForSequenceClassification),
            rows(labels=lambda i: i % 2),
            None,
        ),
        "pairs": (
            small(BertForSequenceClassification),
            rows(labels=lambda i: i % 2, token_type_ids=lambda i: [0, 0, 1, 1]),
            None,
        ),
        Task.MULTI_LABEL: (
            small(BertForSequenceClassification, problem_type="multi_label_classification"),
            rows(labels=lambda i: [1.0, float(i % 2)]),
            None,
        ),
        Task.REGRESSION: (
            small(BertForSequenceClassification, num_labels=1),
            rows(labels=lambda i: i / 10),
            None,
        ),
        Task.TOKEN_LABEL: (
            small(BertForTokenClassification),
            rows(labels=lambda i: [-100, i % 2, 1, -100]),
            DataCollatorForTokenClassification(tokenizer),
        ),
        Task.SPAN: (
            small(BertForQuestionAnswering),
            rows(start_positions=lambda i: 1, end_positions=lambda i: 2),
            DefaultDataCollator(),
        ),
        Task.MASKED_LM: (models.build("bert-mlm").float(), rows(), lm(tokenizer, **masking)),
        Task.CAUSAL_LM: (models.build("gpt2").float(), rows(), lm(tokenizer, mlm=False)),
        "image": (
            models.build("vit").float(),
            [{"pixel_values": torch.randn(2, 8, 8), "labels": i % 3} for i in range(40)],
            DefaultDataCollator(),
        ),
    }[task]


@pytest.mark.parametrize("task", [*(t for t in Task), "pairs", "image"], ids=str)
@pytest.mark.parametrize("preconditioner", ["kfac", "none"])
def test_every_head_trains(tmp_path, task, preconditioner):
    model, data, collator = task_settings(task)
    trainer = settings.trainer(
        tmp_path,
        model,
        data,
        max_steps=2,
        preconditioner=preconditioner,
        **({"data_collator": collator} if collator else {}),
    )
    before = settings.weights(model).clone()
    trainer.train()
    after = settings.weights(trainer.model)
    assert torch.isfinite(after).all()
    assert not torch.equal(before, after)


def test_an_unknown_head_is_refused_and_a_loss_of_ones_own_works(tmp_path):
    class Wrapper(torch.nn.Module):
        main_input_name = "pixel_values"

        def __init__(self):
            super().__init__()
            self.inner = models.build("cnn").float()
            self.config = self.inner.config

        def forward(self, pixel_values, labels=None):
            return self.inner(pixel_values)

    data = [{"pixel_values": torch.randn(2, 10, 10), "labels": i % 3} for i in range(40)]
    options = {
        "probe": "public",
        "public_dataset": data[:20],
        "data_collator": DefaultDataCollator(),
    }
    with pytest.raises(UnsupportedTaskError, match="per_example_loss"):
        settings.trainer(tmp_path / "a", Wrapper(), data, **options).train()

    def loss(outputs, inputs):
        return torch.nn.functional.cross_entropy(outputs.logits, inputs["labels"], reduction="none")

    trainer = settings.trainer(tmp_path / "b", Wrapper(), data, per_example_loss=loss, **options)
    trainer.train()
    assert trainer.epsilon_spent() > 0

    own = {"per_example_loss": loss, "data_collator": DefaultDataCollator()}
    with pytest.raises(ProbeError, match="probe='public'"):
        settings.trainer(tmp_path / "c", Wrapper(), data, **own).train()
    plain = settings.trainer(tmp_path / "d", Wrapper(), data, preconditioner="none", **own)
    plain.train()
    assert plain.epsilon_spent() > 0


@pytest.mark.parametrize("method", ["__init__", "train", "hyperparameter_search", "evaluate"])
def test_arguments_are_hfs_in_hfs_order(method):
    """A script that passes them by position, or a new one of HF's, must not end up elsewhere."""
    theirs = inspect.signature(getattr(Trainer, method)).parameters.values()
    ours = inspect.signature(getattr(DPKFCTrainer, method)).parameters
    variable = inspect.Parameter.VAR_KEYWORD
    wanted = [p.name for p in theirs if p.kind is not variable]
    assert list(ours)[: len(wanted)] == wanted
    assert all(ours[p.name].default == p.default for p in theirs if p.kind is not variable)


def test_batch_losses_are_refused(tmp_path):
    class Mine(DPKFCTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            return model(**inputs).loss

    with pytest.raises(ConfigurationError, match="per_example_loss"):
        Mine(model=settings.bert(), args=settings.config(tmp_path))
    with pytest.raises(ConfigurationError, match="per_example_loss"):
        DPKFCTrainer(
            model=settings.bert(), args=settings.config(tmp_path), compute_loss_func=lambda *_: 0
        )


def test_a_batch_loss_given_by_position_is_refused(tmp_path):
    arguments = [None, settings.text_data(), None, None, None, lambda *_: 0]
    with pytest.raises(ConfigurationError, match="per_example_loss"):
        DPKFCTrainer(settings.bert(), settings.config(tmp_path), *arguments)


def test_a_step_behind_the_ledgers_back_is_refused(tmp_path):
    class Mine(DPKFCTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            return torch.zeros(())

    trainer = Mine(
        model=settings.bert(),
        args=settings.config(tmp_path),
        train_dataset=settings.text_data(),
        processing_class=tokenizers_zoo.build("bert"),
    )
    with pytest.raises(LedgerError, match="taken without a release"):
        trainer.train()


def test_plain_training_arguments_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="DPKFCConfig"):
        DPKFCTrainer(model=settings.bert(), args=TrainingArguments(str(tmp_path)))


def test_a_stream_of_records_is_refused(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(settings.text_data())

    with pytest.raises(ConfigurationError, match="random access"):
        settings.trainer(tmp_path, data=Stream())


@pytest.mark.parametrize("data", [None, []])
def test_training_on_nothing_is_refused(tmp_path, data):
    trainer = settings.trainer(tmp_path, target_delta=None)
    trainer.train_dataset = data
    with pytest.raises(ConfigurationError, match="train_dataset is"):
        trainer.train()


def test_with_a_public_size_an_empty_set_trains_on_noise(tmp_path):
    """Under add/remove it is the neighbour of a set of one: a refusal would tell them apart."""
    trainer = settings.trainer(tmp_path, data=[], public_dataset_size=60)
    trainer.train()
    assert trainer.state.global_step == 4


def test_the_training_set_is_no_public_set(tmp_path):
    data = settings.text_data()
    with pytest.raises(ConfigurationError, match="public_dataset is the train_dataset"):
        settings.trainer(tmp_path, data=data, probe="public", public_dataset=data)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_model_with_gradient_checkpointing_is_refused(tmp_path, use_reentrant):
    model = settings.bert()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with pytest.raises(ConfigurationError, match="gradient checkpointing"):
        settings.trainer(tmp_path, model)


def test_a_model_whose_outputs_have_no_names_is_refused(tmp_path):
    model = settings.bert()
    model.config.return_dict = False
    with pytest.raises(ConfigurationError, match="return_dict=False"):
        settings.trainer(tmp_path, model)


@pytest.mark.parametrize("name", ["is_fsdp_enabled", "is_deepspeed_enabled"])
def test_sharding_that_a_launcher_switches_on_is_refused(tmp_path, monkeypatch, name):
    """``accelerate launch`` speaks through the environment, not through the options."""
    trainer = settings.trainer(tmp_path)
    monkeypatch.setattr(trainer, name, True)
    with pytest.raises(ConfigurationError, match="DDP"):
        refuse_launch(trainer)


def test_float16_that_a_launcher_switches_on_is_refused(tmp_path, monkeypatch):
    trainer = settings.trainer(tmp_path)
    monkeypatch.setattr(trainer.accelerator.state, "_mixed_precision", "fp16")
    with pytest.raises(ConfigurationError, match="fp16"):
        refuse_launch(trainer)


def test_a_model_in_bfloat16_trains(tmp_path):
    trainer = settings.trainer(tmp_path, settings.bert().bfloat16())
    trainer.train()
    assert torch.isfinite(settings.weights(trainer.model)).all()


def test_a_key_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    trainer = settings.trainer(tmp_path / "out", privacy_key_path=str(tmp_path / "file" / "keys"))
    with pytest.raises(ConfigurationError, match="privacy_key_path"):
        trainer.train()


def test_a_model_with_batch_norm_is_refused(tmp_path):
    model = models.build("cnn").float()
    model.body[1] = torch.nn.BatchNorm2d(8)
    data = [{"pixel_values": torch.randn(2, 10, 10), "labels": 0} for _ in range(20)]
    with pytest.raises(UnsupportedLayerError, match="BatchNorm2d"):
        settings.trainer(tmp_path, model, data).train()


def test_a_collator_that_mixes_examples_is_caught(tmp_path):
    class Mixup:
        def __call__(self, features):
            width = max(len(f["input_ids"]) for f in features)
            ids = torch.zeros(len(features), width, dtype=torch.long)
            for i, feature in enumerate(features):
                ids[i, : len(feature["input_ids"])] = torch.tensor(feature["input_ids"])
            ids[:, 1] = ids[-1, 1]
            return {
                "input_ids": ids,
                "attention_mask": (ids != 0).long(),
                "labels": torch.tensor([f["labels"] for f in features]),
            }

    with pytest.raises(NeighbourError, match="among others"):
        settings.trainer(tmp_path, data_collator=Mixup()).train()


def test_lora_trains_and_its_silent_factor_wakes_up(tmp_path):
    config = peft.LoraConfig(r=2, target_modules=["query", "value"])
    model = peft.get_peft_model(settings.bert(), config)
    trainer = settings.trainer(tmp_path, model, max_steps=3, rank=None)
    trainer.train()
    assert not trainer.preconditioner.awaits_signal
    frozen = dict(trainer.model.base_model.model.named_parameters())
    start = dict(settings.bert().named_parameters())
    name = "bert.encoder.layer.0.output.dense.weight"
    assert torch.equal(frozen[name], start[name])


def test_bfloat16_trains(tmp_path):
    trainer = settings.trainer(tmp_path, bf16=True)
    trainer.train()
    assert torch.isfinite(settings.weights(trainer.model)).all()


def test_the_key_is_private_during_training_and_gone_afterwards(tmp_path):
    folder = tmp_path / "keys"
    seen = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(next(folder.rglob("key")).stat().st_mode & 0o777)

    settings.trainer(tmp_path / "out", privacy_key_path=str(folder), callbacks=[Look()]).train()
    assert set(seen) == {0o600}
    assert not [p for p in folder.rglob("*") if p.is_file()]


def test_a_key_inside_output_dir_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="inside output_dir"):
        settings.trainer(tmp_path, privacy_key_path=str(tmp_path / "keys")).train()


def test_no_secret_is_in_the_output_folder(tmp_path, monkeypatch):
    secret = bytes(range(32))
    monkeypatch.setattr(SecretKey, "generate", lambda: SecretKey(secret))
    settings.trainer(tmp_path / "out", save_strategy="steps", save_steps=2).train()
    files = [p for p in (tmp_path / "out").rglob("*") if p.is_file()]
    assert len(files) > 8
    for path in files:
        content = path.read_bytes()
        assert secret not in content
        assert secret.hex().encode() not in content


def test_an_oracle_claims_nothing(tmp_path, warnings_of):
    trainer = settings.trainer(tmp_path, probe="oracle", max_steps=1)
    trainer.train()
    assert trainer.epsilon_spent() == math.inf
    assert "No ε is claimed" in warnings_of.text


def test_no_noise_warns_that_epsilon_is_infinite(tmp_path, warnings_of):
    trainer = settings.trainer(tmp_path, noise_multiplier=0.0, max_steps=1)
    trainer.train()
    assert trainer.epsilon_spent() == math.inf
    assert "ε is infinite" in warnings_of.text


def test_evaluating_on_the_training_set_warns(tmp_path, warnings_of):
    trainer = settings.trainer(tmp_path)
    metrics = trainer.evaluate(trainer.train_dataset)
    assert all(name.startswith(("unsafe_train", "epoch")) for name in metrics)
    assert "kept off the card" in warnings_of.text


def test_training_records_are_unsafe_by_any_door(tmp_path, warnings_of):
    """As one of several evaluation sets, and in predict()."""
    data = settings.text_data()
    held_out = settings.text_data(10, seed=5)
    trainer = settings.trainer(tmp_path, data=data, eval_dataset={"own": data, "other": held_out})
    names = set(trainer.evaluate())
    assert {"unsafe_train_loss", "eval_other_loss"} <= names
    assert not [name for name in names if "own" in name]
    assert "unsafe_train_loss" in trainer.predict(data).metrics
    trainer.train()
    assert trainer._statement().logged_unsafe_metrics


def test_training_records_evaluated_after_training_are_on_the_card(tmp_path):
    trainer = settings.trainer(tmp_path)
    trainer.train()
    assert not trainer._statement().logged_unsafe_metrics
    trainer.evaluate(trainer.train_dataset)
    assert trainer._statement().logged_unsafe_metrics
    assert PrivacyStatement.load(tmp_path).logged_unsafe_metrics


def test_training_records_evaluated_before_training_ends_are_on_the_statement(tmp_path):
    data = settings.text_data()
    trainer = settings.trainer(tmp_path, data=data, eval_dataset={"own": data})
    trainer.evaluate()
    trainer.train()
    assert PrivacyStatement.load(tmp_path).logged_unsafe_metrics


def test_evaluate_predict_and_metrics_behave_as_in_hf(tmp_path):
    def accuracy(prediction):
        return {
            "accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())
        }

    trainer = settings.trainer(
        tmp_path,
        eval_dataset=settings.text_data(20, seed=9),
        compute_metrics=accuracy,
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer.train()
    logged = [log for log in trainer.state.log_history if "eval_accuracy" in log]
    assert [log["step"] for log in logged] == [2, 4]
    assert trainer.predict(settings.text_data(5)).predictions.shape == (5, 3)


def test_a_second_training_keeps_the_first_ledger(tmp_path, warnings_of):
    settings.trainer(tmp_path).train()
    settings.trainer(tmp_path).train()
    assert len(list(tmp_path.glob("privacy_ledger*.jsonl"))) == 2
    assert "add up" in warnings_of.text


def test_training_on_from_private_weights_is_refused(tmp_path):
    trainer = settings.trainer(tmp_path)
    trainer.train()
    with pytest.raises(ConfigurationError, match="trained privately already"):
        trainer.train()


def test_a_step_leaves_no_trace_in_global_random_state(tmp_path):
    """Else a checkpoint's rng_state.pth would tell how many dropout masks were drawn."""
    states = []

    class Look(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            states.append(torch.get_rng_state())

    settings.trainer(tmp_path, callbacks=[Look()]).train()
    assert all(torch.equal(state, states[0]) for state in states)


def test_dropout_masks_do_not_come_from_the_public_seed(tmp_path):
    """σ = 0 and the whole set as the batch: only the masks can differ between two equal runs."""
    options = {
        "noise_multiplier": 0.0,
        "per_device_train_batch_size": 60,
        "max_steps": 1,
        "optim": "sgd",
        "seed": 42,
    }
    finals = []
    for name in "ab":
        trainer = settings.trainer(tmp_path / name, settings.bert(dropout=0.5), **options)
        trainer.train()
        finals.append(settings.weights(trainer.model))
    assert not torch.equal(*finals)


def test_looking_at_the_loader_opens_no_run(tmp_path):
    trainer = settings.trainer(tmp_path)
    assert len(trainer.get_train_dataloader()) == 8
    assert not (tmp_path / "privacy_ledger.jsonl").exists()


def test_diagonal_and_public_run_through_the_same_trainer(tmp_path):
    public = settings.text_data(30, seed=77)
    trainer = settings.trainer(
        tmp_path, preconditioner="diagonal", probe="public", public_dataset=public
    )
    trainer.train()
    assert trainer.preconditioner.kind == "diagonal"
    assert not trainer.preconditioner.is_data_free


def test_a_public_probe_without_public_data_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="public_dataset"):
        settings.trainer(tmp_path, probe="public").train()


def test_secure_rng_trains(tmp_path):
    trainer = settings.trainer(tmp_path, secure_rng=True)
    trainer.train()
    assert trainer._run.num_releases == 4


def test_the_progress_bar_shows_epsilon(tmp_path, capsys):
    settings.trainer(tmp_path, disable_tqdm=False).train()
    assert "ε=" in capsys.readouterr().err


def test_search_says_what_tuning_costs(tmp_path, warnings_of):
    trainer = settings.trainer(
        tmp_path,
        model_init=lambda: settings.bert(),
        eval_dataset=settings.text_data(10, seed=3),
        max_steps=2,
    )
    plan = trainer.plan
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {
            "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-3),
            "clip_norm": trial.suggest_float("clip_norm", 0.5, 2.0),
        },
        backend="optuna",
        n_trials=2,
        compute_objective=lambda metrics: metrics["eval_loss"],
    )
    assert set(best.hyperparameters) == {"learning_rate", "clip_norm"}
    assert "2 trials on the same records spend" in warnings_of.text
    assert all((tmp_path / f"run-{i}" / "privacy_ledger.jsonl").exists() for i in range(2))
    run = (plan.noise_multiplier, plan.sampling_rate, plan.steps)
    assert trainer._spent.runs == (run, run)


def searched(tmp_path, **options):
    """A search over two trials, one for each of the given values."""
    name, values = options.popitem()
    trainer = settings.trainer(
        tmp_path,
        model_init=lambda: settings.bert(),
        eval_dataset=settings.text_data(10, seed=3),
        max_steps=1,
        **options,
    )
    import optuna

    trainer.hyperparameter_search(
        hp_space=lambda trial: {name: trial.suggest_categorical(name, values)},
        backend="optuna",
        n_trials=len(values),
        sampler=optuna.samplers.GridSampler({name: values}, seed=0),
        compute_objective=lambda metrics: metrics["eval_loss"],
    )
    return trainer


def test_each_trial_has_its_own_accumulation(tmp_path):
    trainer = searched(tmp_path, gradient_accumulation_steps=[1, 3, 2])
    batches = [60 * rate for _, rate, _ in trainer._spent.runs]
    assert sorted(batches) == pytest.approx([8, 16, 24])


def test_a_trial_outside_an_options_range_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="exactly one"):
        searched(tmp_path, noise_multiplier=[1.0])


def test_config_is_required_to_know_its_noise():
    with pytest.raises(ConfigurationError):
        DPKFCConfig(output_dir="out")


class NoLabels(torch.nn.Module):
    """A user's own network: no configuration, and a forward without labels."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 3)

    def forward(self, x):
        return self.linear(x)


def test_a_model_that_takes_no_labels_trains_with_a_loss_of_its_own(tmp_path):
    data = [{"x": torch.randn(6), "labels": i % 3} for i in range(40)]
    trainer = DPKFCTrainer(
        model=NoLabels(),
        args=settings.config(tmp_path, preconditioner="none", max_steps=2),
        train_dataset=data,
        data_collator=DefaultDataCollator(),
        per_example_loss=lambda outputs, inputs: torch.nn.functional.cross_entropy(
            outputs, inputs["labels"], reduction="none"
        ),
    )
    trainer.train()
    assert trainer.state.global_step == 2


def test_prompt_learning_is_refused_by_name(tmp_path):
    config = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)
    with pytest.raises(ConfigurationError, match="prompt learning"):
        settings.trainer(tmp_path, peft.get_peft_model(settings.bert(), config))


def in_batch_negatives(outputs, inputs):
    scores = outputs @ outputs.mT
    return torch.nn.functional.cross_entropy(
        scores, torch.arange(len(scores)) % len(scores), reduction="none"
    )


def unknown_head(folder, loss, **options):
    data = [{"x": torch.randn(6), "labels": i % 3} for i in range(40)]
    return DPKFCTrainer(
        model=NoLabels(),
        args=settings.config(folder, preconditioner="none", max_steps=2),
        train_dataset=data,
        data_collator=DefaultDataCollator(),
        per_example_loss=loss,
        **options,
    )


def test_public_records_check_a_loss_for_which_there_are_no_probes(tmp_path):
    public = [{"x": torch.randn(6), "labels": i % 3} for i in range(9)]
    with pytest.raises(NeighbourError, match="among others"):
        unknown_head(tmp_path, in_batch_negatives, public_dataset=public).train()


def test_a_card_says_where_neighbours_could_not_be_checked(tmp_path):
    trainer = unknown_head(
        tmp_path,
        lambda outputs, inputs: torch.nn.functional.cross_entropy(
            outputs, inputs["labels"], reduction="none"
        ),
    )
    trainer.train()
    trainer.create_model_card()
    assert "It wasn't checked" in (tmp_path / "README.md").read_text()


class MixingCollator(DataCollatorWithPadding):
    """Every row's first token is a neighbour's last."""

    def __call__(self, features):
        batch = super().__call__(features)
        batch["input_ids"][:, 0] = batch["input_ids"][:, -1].roll(1)
        return batch


def test_an_oracle_without_preconditioner_is_checked_like_any_other(tmp_path):
    trainer = settings.trainer(
        tmp_path,
        probe="oracle",
        preconditioner="none",
        data_collator=MixingCollator(tokenizers_zoo.build("bert")),
    )
    with pytest.raises(NeighbourError):
        trainer.train()


class LeakingLMCollator(DataCollatorForLanguageModeling):
    def __call__(self, features, return_tensors=None):
        batch = super().__call__(features, return_tensors)
        batch["input_ids"][:, 0] = batch["input_ids"][:, -1].roll(1)
        return batch


def test_a_language_model_collator_is_part_of_the_check(tmp_path):
    """It makes its labels itself, and can't pad those of a probe."""
    tokenizer = tokenizers_zoo.build("gpt2")
    tokenizer.pad_token = tokenizer.eos_token
    data = [{"input_ids": [5, 6, 7, 8][: 2 + i % 3]} for i in range(40)]
    trainer = DPKFCTrainer(
        model=models.build("gpt2").float(),
        args=settings.config(tmp_path, probe_max_length=16),
        train_dataset=data,
        processing_class=tokenizer,
        data_collator=LeakingLMCollator(tokenizer, mlm=False),
    )
    with pytest.raises(NeighbourError):
        trainer.train()


class SeededCollator(DataCollatorWithPadding):
    """Drops one token of every row, drawn from a generator of its own."""

    generator = torch.Generator().manual_seed(42)

    def __call__(self, features):
        batch = super().__call__(features)
        at = torch.randint(batch["input_ids"].shape[1], (1,), generator=self.generator)
        batch["input_ids"][:, at] = self.tokenizer.unk_token_id
        return batch


def test_a_collator_with_a_generator_of_its_own_is_refused(tmp_path):
    collator = SeededCollator(tokenizers_zoo.build("bert"))
    with pytest.raises(ConfigurationError, match="generator of its own"):
        settings.trainer(tmp_path, data_collator=collator).train()


@pytest.mark.parametrize("seed", [42, None])
def test_masks_of_a_public_seed_are_refused(tmp_path, seed):
    """One record more would shift everybody's masks."""
    model, data, _ = task_settings(Task.MASKED_LM)
    tokenizer = tokenizers_zoo.build("bert")
    masking = {"mask_replace_prob": 1.0, "random_replace_prob": 0.0}
    collator = DataCollatorForLanguageModeling(tokenizer, seed=seed, **masking)
    trainer = settings.trainer(tmp_path, model, data, data_collator=collator, max_steps=1)
    if seed is None:
        trainer.train()
        return
    with pytest.raises(ConfigurationError, match="generator of its own"):
        trainer.train()


def test_another_runs_checkpoint_is_not_loaded_as_the_best(tmp_path, warnings_of):
    """HF names the best checkpoint by its step, whoever wrote it."""
    saving = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 1, "eval_steps": 1}
    held_out = settings.text_data(10, seed=5)
    settings.trainer(tmp_path, target_epsilon=50.0, eval_dataset=held_out, **saving).train()
    best = saving | {"save_steps": 2, "load_best_model_at_end": True, "save_total_limit": None}
    worst_first = {"metric_for_best_model": "step", "greater_is_better": False}
    trainer = settings.trainer(
        tmp_path,
        eval_dataset=held_out,
        compute_metrics=lambda _: {"step": trainer.state.global_step},
        **best,
        **worst_first,
    )
    trainer.train()
    assert "isn't this run's" in warnings_of.text
    own = PrivacyStatement.load(tmp_path).weights_sha256
    last = settings.bert()
    last.load_state_dict(load_file(tmp_path / "checkpoint-4/model.safetensors"))
    assert own == engine.weights_digest(last)


@pytest.mark.parametrize("moment", ["on_train_begin", "on_save"])
@pytest.mark.parametrize(("is_ours", "kept"), [(True, "checkpoint-1"), (False, None)])
def test_a_best_checkpoint_is_kept_if_it_is_ours(moment, is_ours, kept):
    """Also where a resumed state remembers it."""
    state = TrainerState(best_model_checkpoint="checkpoint-1")
    getattr(OwnBestCheckpointCallback(lambda path: is_ours), moment)(None, state, None)
    assert state.best_model_checkpoint == kept


def test_weights_of_a_private_run_are_not_trained_again_under_a_new_plan(tmp_path):
    """A notebook's cell that is run twice would halve the ε that it states."""
    model = settings.bert()
    settings.trainer(tmp_path / "a", model, max_steps=1).train()
    with pytest.raises(ConfigurationError, match="trained privately already"):
        settings.trainer(tmp_path / "b", model, max_steps=1).train()
    assert not (tmp_path / "b/privacy_ledger.jsonl").exists()


def test_new_adapters_on_frozen_layers_are_a_new_start(tmp_path):
    base = settings.bert().requires_grad_(False)
    for name in ("a", "b"):
        lora = peft.LoraConfig(r=2, target_modules=["query"])
        model = peft.get_peft_model(copy.deepcopy(base) if name == "a" else base, lora)
        settings.trainer(tmp_path / name, model, max_steps=1).train()


def test_the_statement_names_the_probe_that_was_chosen(tmp_path):
    trainer = settings.trainer(tmp_path, max_steps=1)
    assert trainer.args.probe == "auto"
    trainer.train()
    assert PrivacyStatement.load(tmp_path).preconditioner["probe"] == "zipf"


def test_a_model_from_a_private_runs_folder_says_so(tmp_path, warnings_of):
    trainer = settings.trainer(tmp_path, max_steps=1)
    trainer.train()
    trainer.save_model()
    again = BertForSequenceClassification.from_pretrained(tmp_path)
    settings.trainer(tmp_path / "again", again)
    assert "where it was trained privately" in warnings_of.text


def test_several_data_sets_are_refused_by_their_names(tmp_path):
    with pytest.raises(ConfigurationError, match="train, test"):
        settings.trainer(tmp_path, data={"train": settings.text_data(), "test": []})


def test_the_best_weights_are_not_chosen_by_private_records(tmp_path):
    data = settings.text_data()
    best = {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}
    with pytest.raises(ConfigurationError, match="chosen by private records"):
        settings.trainer(tmp_path, data=data, eval_dataset=data, **best)


def soft_rows(count, seed=0):
    """Records with a distribution over the labels, and a weight that only the loss reads."""
    generator = torch.Generator().manual_seed(seed)
    return [
        row | {"labels": torch.rand(3, generator=generator).tolist(), "weight": 0.5}
        for row in settings.text_data(count, seed)
    ]


class OnlyTokens(BertForSequenceClassification):
    def forward(self, input_ids, attention_mask=None, token_type_ids=None):
        return super().forward(input_ids, attention_mask, token_type_ids)


def soft_loss(outputs, inputs):
    losses = -(inputs["labels"] * outputs.logits.log_softmax(-1)).sum(-1)
    return losses * inputs["weight"]


@pytest.mark.parametrize("preconditioner", ["kfac", "none"])
def test_a_loss_of_ones_own_gets_its_own_labels_from_public_records(tmp_path, preconditioner):
    """On a head that we know, whose labels would be integers."""
    trainer = settings.trainer(
        tmp_path,
        OnlyTokens(settings.bert().config),
        soft_rows(60),
        per_example_loss=soft_loss,
        public_dataset=soft_rows(20, seed=1),
        probe="public" if preconditioner == "kfac" else "auto",
        preconditioner=preconditioner,
        remove_unused_columns=False,
    )
    trainer.train()
    assert trainer._statement().checked_neighbours


def test_a_loss_that_cannot_take_the_probes_labels_is_told_where_to_get_others(tmp_path):
    def loss(outputs, inputs):
        return torch.nn.functional.binary_cross_entropy_with_logits(
            outputs.logits, inputs["labels"], reduction="none"
        ).sum(-1)

    trainer = settings.trainer(tmp_path, data=soft_rows(60), per_example_loss=loss)
    with pytest.raises(ProbeError, match="public_dataset="):
        trainer.train()
