from __future__ import annotations

import dataclasses

import pytest
import settings
from transformers import HfArgumentParser, TrainingArguments

from hf_dpkfc import DPKFCConfig
from hf_dpkfc.errors import ConfigurationError


def test_ours_are_only_what_we_add():
    theirs = {f.name for f in dataclasses.fields(TrainingArguments)}
    added = {f.name for f in dataclasses.fields(DPKFCConfig)} - theirs
    assert {"target_epsilon", "clip_norm", "preconditioner", "probe"} <= added
    assert all(DPKFCConfig.__dataclass_fields__[name].metadata["help"] for name in added)


def test_the_command_line_parses_every_option(tmp_path):
    parser = HfArgumentParser(DPKFCConfig)
    (args,) = parser.parse_args_into_dataclasses(
        [
            "--output_dir",
            str(tmp_path),
            "--target_epsilon",
            "2",
            "--kfac_approx",
            "expand",
            "--probe_refresh_steps",
            "7",
            "--secure_rng",
            "true",
            "--dp_optimizer",
            "disk",
        ]
    )
    assert args.dp_optimizer == "disk"
    assert (args.target_epsilon, args.kfac_approx, args.probe_refresh_steps) == (2.0, "expand", 7)
    assert args.secure_rng is True


def test_yaml_parses(tmp_path):
    (tmp_path / "c.yaml").write_text(f"output_dir: {tmp_path}\ntarget_epsilon: 1.5\nrank: null\n")
    (args,) = HfArgumentParser(DPKFCConfig).parse_yaml_file(str(tmp_path / "c.yaml"))
    assert (args.target_epsilon, args.rank) == (1.5, None)


def test_a_config_survives_to_dict(tmp_path):
    args = settings.config(tmp_path, damping=0.3)
    again = DPKFCConfig(
        **{
            f.name: args.to_dict()[f.name]
            for f in dataclasses.fields(DPKFCConfig)
            if f.init and f.name in args.to_dict()
        }
    )
    assert again.to_dict() == args.to_dict()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"fp16": True}, "fp16"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"include_num_input_tokens_seen": True}, "include_num_input_tokens_seen"),
        ({"ignore_data_skip": True}, "ignore_data_skip"),
        ({"skip_memory_metrics": False}, "skip_memory_metrics"),
        ({"debug": "underflow_overflow"}, "debug"),
        ({"optim": "galore_adamw_layerwise"}, "optim"),
        ({"optim": "adalomo"}, "optim"),
        ({"use_liger_kernel": True}, "use_liger_kernel"),
        ({"torch_compile": True}, "torch_compile"),
        ({"target_epsilon": None}, "target_epsilon=None, noise_multiplier=None"),
        ({"target_epsilon": 0.0}, "target_epsilon=0.0"),
        ({"target_epsilon": float("nan")}, "target_epsilon=nan"),
        ({"target_delta": 0.0}, "target_delta=0.0"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0"),
        ({"damping": 0.0}, "damping=0.0"),
        ({"rank": 0}, "rank=0"),
        ({"probe": "gaussian"}, "probe='gaussian'"),
        ({"preconditioner": "newton"}, "preconditioner='newton'"),
        ({"kfac_approx": "flatten"}, "kfac_approx='flatten'"),
        ({"kfac_sides": "outputs"}, "kfac_sides='outputs'"),
        ({"probe_refresh_steps": 0}, "probe_refresh_steps=0"),
        ({"public_dataset_size": 0}, "public_dataset_size=0"),
        ({"accountant": "gdp"}, "accountant='gdp'"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0"),
        ({"clip_norm": "abc"}, "clip_norm='abc'"),
        ({"clip_norm": None}, "clip_norm=None"),
        ({"clip_norm": True}, "clip_norm=True"),
        ({"rank": 2.5}, "rank=2.5"),
        ({"damping": float("nan")}, "damping=nan"),
        ({"probe": 3}, "probe=3"),
        ({"probe_batch_size": []}, r"probe_batch_size=\[\]"),
        ({"secure_rng": "perhaps"}, "secure_rng='perhaps'"),
        ({"privacy_unit": None}, "privacy_unit=None"),
        ({"public_dataset_size": 10.5}, "public_dataset_size=10.5"),
        ({"dp_optimizer": "adam"}, "dp_optimizer='adam'"),
        ({"adambc_floor": 0.0}, "adambc_floor=0.0"),
        ({"disk_kappa": 0.0}, "disk_kappa=0.0"),
        ({"disk_kappa": 1.1}, "disk_kappa=1.1"),
        ({"disk_gamma": 0.0}, "disk_gamma=0.0"),
        ({"disk_gamma": 1e-3}, "disk_gamma=0.001"),
        ({"dp_optimizer": "disk", "max_grad_norm": 1.0}, "max_grad_norm=1.0"),
        ({"dp_optimizer": "adambc", "max_grad_norm": 1.0}, "max_grad_norm=1.0"),
        ({"dp_optimizer": "adambc", "optim": "sgd"}, "optim="),
        ({"dp_optimizer": "adambc", "optim_args": "momentum=0.9"}, "optim_args="),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_would_break_a_promise_is_refused_by_name(tmp_path, change, match):
    with pytest.raises(ConfigurationError, match=match) as caught:
        settings.config(tmp_path, **change)
    assert "Why:" in str(caught.value)
    assert "Way out:" in str(caught.value)


def test_numbers_that_yaml_reads_as_strings_are_numbers(tmp_path):
    """PyYAML takes 1e-5 for a string, and so does whoever reads a configuration with it."""
    (tmp_path / "c.yaml").write_text(
        f"output_dir: {tmp_path}\ntarget_epsilon: '2'\ntarget_delta: 1e-5\nrank: '8'\n"
        "secure_rng: 'False'\n"
    )
    (args,) = HfArgumentParser(DPKFCConfig).parse_yaml_file(str(tmp_path / "c.yaml"))
    assert (args.target_epsilon, args.target_delta, args.rank) == (2.0, 1e-5, 8)
    assert args.secure_rng is False


def test_both_epsilon_and_noise_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="exactly one"):
        DPKFCConfig(output_dir=str(tmp_path), target_epsilon=1.0, noise_multiplier=1.0)


def test_our_default_leaves_the_private_gradient_unclipped(tmp_path):
    assert settings.config(tmp_path).max_grad_norm == 0.0


@pytest.mark.parametrize("is_logged", [True, False])
def test_a_run_keeps_to_its_end_whether_it_logs_unsafe_metrics(tmp_path, is_logged):
    args = settings.config(tmp_path, log_unsafe_metrics=is_logged)
    assert args.stated_options()["log_unsafe_metrics"] == str(is_logged)
