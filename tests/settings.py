"""A tiny private training, as trainer tests and their child processes use it."""

from __future__ import annotations

import models
import tokenizers_zoo
import torch

from hf_dpkfc import DPKFCConfig, DPKFCTrainer

OPTIONS = {
    "per_device_train_batch_size": 8,
    "max_steps": 4,
    "target_epsilon": 3.0,
    "target_delta": 1e-4,
    "rank": 8,
    "probe_batch_size": 8,
    "num_probe_batches": 2,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "use_cpu": True,
    "learning_rate": 1e-3,
}


def config(output_dir, **changes):
    options = OPTIONS | changes
    if "noise_multiplier" in changes:
        options.pop("target_epsilon")
    return DPKFCConfig(output_dir=str(output_dir), **options)


def text_data(count=60, seed=0, num_labels=3):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 9, (count,), generator=generator).tolist()
    return [
        {
            "input_ids": torch.randint(8, 40, (n,), generator=generator).tolist(),
            "labels": i % num_labels,
        }
        for i, n in enumerate(lengths)
    ]


def bert(dropout=0.1):
    model = models.build("bert").float()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    return model


def trainer(output_dir, model=None, data=None, **changes):
    extra = {
        name: changes.pop(name)
        for name in (
            "eval_dataset",
            "callbacks",
            "data_collator",
            "per_example_loss",
            "compute_metrics",
            "public_dataset",
            "optimizers",
            "optimizer_cls_and_kwargs",
            "model_init",
        )
        if name in changes
    }
    if "model_init" not in extra:
        extra["model"] = bert() if model is None else model
    return DPKFCTrainer(
        args=config(output_dir, **changes),
        train_dataset=text_data() if data is None else data,
        processing_class=tokenizers_zoo.build("bert"),
        **extra,
    )


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
