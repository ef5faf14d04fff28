"""What a trainer can't keep its promise with, before it touches a record: each with its reason."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer

from hf_dpkfc.config import DPKFCConfig
from hf_dpkfc.errors import ConfigurationError


def require_config(args: Any) -> DPKFCConfig:
    """The options, if they are ours."""
    if not isinstance(args, DPKFCConfig):
        raise ConfigurationError(
            f"args is a {type(args).__name__}.",
            why="the guarantee's options have no defaults that could be guessed.",
            way_out="pass args=DPKFCConfig(output_dir=..., target_epsilon=..., ...).",
        )
    return args


def refuse_batch_losses(trainer: Trainer) -> None:
    """A loss for the whole batch can't be taken apart by example."""
    is_overridden = type(trainer).compute_loss is not Trainer.compute_loss
    if is_overridden or trainer.compute_loss_func is not None:
        raise ConfigurationError(
            "compute_loss is overridden, or compute_loss_func was given.",
            why="they return one loss for the whole batch, and clipping needs each example's.",
            way_out="pass per_example_loss=fn with fn(outputs, inputs) -> [batch].",
        )


def refuse_data(train: Any, evaluation: Any, public: Any, args: DPKFCConfig) -> None:
    """Data sets that can't be sampled, or that stand in two places."""
    if isinstance(train, Mapping):
        raise ConfigurationError(
            f"train_dataset is a {type(train).__name__} of {', '.join(map(str, train))}.",
            why="it holds several data sets, and training is on one.",
            way_out="pass one of them, for instance train_dataset=data['train'].",
        )
    if public is not None and public is train:
        raise ConfigurationError(
            "public_dataset is the train_dataset.",
            why="factors estimated from private records would leave without noise.",
            way_out="pass other, public records, or probe='auto', which needs none; "
            "probe='oracle' is for experiments and claims no ε.",
        )
    if isinstance(train, IterableDataset) or (train is not None and not hasattr(train, "__len__")):
        raise ConfigurationError(
            f"train_dataset is a {type(train).__name__}.",
            why="Poisson sampling draws every record on its own, which needs random access.",
            way_out="pass a data set with __len__ and __getitem__ (load without streaming).",
        )
    if args.load_best_model_at_end and train is not None and evaluation is train:
        raise ConfigurationError(
            "load_best_model_at_end with the train_dataset as eval_dataset.",
            why="the best weights would be chosen by private records, without noise.",
            way_out="pass held-out records as eval_dataset, or load_best_model_at_end=False.",
        )


def refuse_second_optimizer(trainer: Trainer) -> None:
    """DP-AdamBC is an optimizer of its own."""
    is_given = trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None
    if getattr(trainer.args, "dp_optimizer", None) == "adambc" and is_given:
        raise ConfigurationError(
            "optimizers= or optimizer_cls_and_kwargs= beside dp_optimizer='adambc'.",
            why="DP-AdamBC is an optimizer of its own: only one of them can step.",
            way_out="drop the argument (a scheduler, optimizers=(None, scheduler), is fine), "
            "or set dp_optimizer=None.",
        )


def refuse_launch(trainer: Trainer) -> None:
    """What ``accelerate launch`` or the model switches on behind the options' back."""
    accelerator, args = trainer.accelerator, trainer.args
    model = accelerator.unwrap_model(trainer.model) if trainer.model is not None else None
    adapters = getattr(trainer.model, "peft_config", {}).values()
    sharded = "gradients are taken apart by example, which sharded parameters don't allow yet."
    refused = {
        f"{args.n_gpu} GPUs in one process (nn.DataParallel)": (
            args.n_gpu > 1,
            "it splits batches behind the captured inputs.",
            "start one process per GPU: accelerate launch your_script.py.",
        ),
        "mixed_precision=fp16": (
            accelerator.mixed_precision == "fp16",
            "its loss scaling skips steps depending on private data.",
            "launch with --mixed_precision bf16, or without it.",
        ),
        "Apple's GPU (device mps)": (
            args.device.type == "mps",
            "it has no float64, in which factors are decomposed and gradients compared.",
            "pass use_cpu=True.",
        ),
        "PEFT prompt learning": (
            any(config.is_prompt_learning for config in adapters),
            "prompts are repeated for the batch behind the captured inputs.",
            "use LoRA, or another adapter of linear layers.",
        ),
        "A model with tuples for outputs (return_dict=False)": (
            not getattr(getattr(model, "config", None), "return_dict", True),
            "each example's loss is computed from the model's outputs by name.",
            "set model.config.return_dict = True.",
        ),
        "FSDP": (trainer.is_fsdp_enabled, sharded, "launch with DDP."),
        "DeepSpeed": (trainer.is_deepspeed_enabled, sharded, "launch with DDP."),
        "gradient checkpointing of the model": (
            bool(getattr(model, "is_gradient_checkpointing", False)),
            "layers that run twice hide their inputs from us, or keep them anyway.",
            "model.gradient_checkpointing_disable(); lower per_device_train_batch_size and "
            "raise gradient_accumulation_steps instead.",
        ),
    }
    for name, (is_on, why, way_out) in refused.items():
        if is_on:
            raise ConfigurationError(f"{name} is switched on.", why=why, way_out=way_out)


# Modules whose weights a private run of this process has moved.
_TRAINED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def note_training(model: nn.Module) -> None:
    """From now on, the model's weights have a cost."""
    _TRAINED.update(_training_modules(model))


def refuse_trained(model: nn.Module) -> None:
    """Weights that were trained already carry a cost that a new plan wouldn't count."""
    if any(module in _TRAINED for module in _training_modules(model)):
        raise ConfigurationError(
            "The model's weights were trained privately already.",
            why="this plan's ε wouldn't count what they have cost, and a run that is replayed from "
            "its start would not start there.",
            way_out="load the base checkpoint again into a new trainer; resume an interrupted run "
            "from a checkpoint of it.",
        )


def _training_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Modules with parameters of their own that train."""
    for module in model.modules():
        if any(p.requires_grad for p in module.parameters(recurse=False)):
            yield module
