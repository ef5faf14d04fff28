"""Text classification with a BERT-class encoder: StackOverflow, or what stands in for it offline.

--data stackoverflow: questions of mikex86/stackoverflow-posts, streamed from the Hub, in two tasks:
`--task tags` (main tag among a fixed public list) and `--task next-word` (the word that follows a
context of fixed length, among a fixed public list). The StackOverflow task of the paper's public
code makes its label from the text's length, which the input shows; it isn't repeated here.
--data complaints (consumer finance narratives, 8 products), --data rotten_tomatoes and --data imdb
(sentiment; 9,000 of IMDB's training reviews) need no Hub and stand under their own names.

--train head (default, as in the paper) trains HF's classifier on the pooled CLS token of a frozen
backbone; lora adds rank-8 adapters to query and value of the upper third of the layers; full trains
everything. Batch 64 and AdamW as in the paper; batch 256 for heads on the stand-ins, which have
many epochs. --head-rate gives the classifier, which starts from nothing, a rate of its own: that
many times the rest's.

    python recipes/stackoverflow_bert.py --task tags --method synthetic --epsilon 1
    python recipes/stackoverflow_bert.py --data complaints --model minilm --data-dir DIR
    python recipes/compare.py stackoverflow_bert --data complaints --model minilm --data-dir DIR \
        --train head --methods none synthetic public oracle --epsilons 1 3
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import offline
import texts
import torch
from encoders import (
    Collator,
    builder,
    effective_rank,
    featurised_splits,
    tiny_checkpoint,
    tokenized_splits,
)
from methods import EIGHT_POINTS, THREE_POINTS
from task import Task, Trials, main
from transformers import AutoTokenizer

# By mode: epochs, and what the learning rates of the grid are multiplied with: on Rotten Tomatoes
# at ε 3, DP-Adam with LoRA came to 60.2 on validation at 3e-3 and to 70.9 at 1e-2; in full, with
# batch 256 and the head's rate ten times as high, to 69.5 and 49.5 at 1e-3 and to 70.8 at 3e-3.
EPOCHS = {"head": 20, "lora": 2, "full": 2}
RATE_SCALE = {"head": 300.0, "lora": 10.0, "full": 3.0}
MICRO_BATCH = {"head": 256, "lora": 64, "full": 32}  # small where padding costs time
GRID = {"head": EIGHT_POINTS, "lora": THREE_POINTS, "full": THREE_POINTS}

_EPOCHS_HELP = "default: 5 for stackoverflow, else by mode: " + ", ".join(
    f"{epochs} {mode}" for mode, epochs in EPOCHS.items()
)


def add_options(parser: argparse.ArgumentParser) -> None:
    sources = ("stackoverflow", "complaints", "rotten_tomatoes", "imdb")
    parser.add_argument("--data", choices=sources, default="stackoverflow")
    parser.add_argument("--task", choices=("tags", "next-word"), default="tags")
    parser.add_argument("--train", choices=EPOCHS, default="head")
    parser.add_argument("--model", default="google-bert/bert-base-uncased", help="id or 'minilm'")
    parser.add_argument("--length", type=int, help="tokens; default 128, or 64 for stand-ins")
    parser.add_argument("--epochs", type=int, help=_EPOCHS_HELP)
    parser.add_argument("--batch-size", type=int, help="default 64, or 256 for stand-ins' heads")
    parser.add_argument("--head-rate", type=float, default=1.0, help="times the rest's")


def load(options: argparse.Namespace) -> Task:
    is_paper = options.data == "stackoverflow"
    length = 16 if options.smoke else options.length or (128 if is_paper else 64)
    epochs = 1 if options.smoke else options.epochs or (5 if is_paper else EPOCHS[options.train])
    data = _texts(options)
    checkpoint = tiny_checkpoint() if options.smoke else _checkpoint(options)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    build_model = builder(checkpoint, data.num_labels, options.train)
    collate, measured = Collator(tokenizer), {}
    splits = tokenized_splits(data, tokenizer, length)
    if options.train != "full":
        cache = None if options.smoke else options.model
        splits = featurised_splits(splits, build_model(), collate, cache)
    if options.train == "head":
        features = splits["test"].columns["features"]
        measured = {"effective_rank_of_head_inputs": effective_rank(features)}
    many_epochs = options.train == "head" and not (is_paper or options.smoke)
    batch_size = options.batch_size or (256 if many_epochs else 64)
    subject = options.data + (f"-{options.task}" if is_paper else "")
    return Task(
        name=("smoke_" if options.smoke else "") + f"{subject}_{options.train}",
        title=f"{subject}, {options.model.split('/')[-1]}, {options.train}, T {length}, "
        f"{epochs} epochs of {len(splits['train']):,}"
        + (f", batch {batch_size}" if options.batch_size else ""),
        **splits,
        build_model=build_model,
        optimizer="adamw",
        epochs=epochs,
        batch_size=batch_size,
        micro_batch=min(batch_size, MICRO_BATCH[options.train]),
        probe="Zipf",
        collator=collate,
        processor=tokenizer,
        rate_scale=RATE_SCALE[options.train],
        head_rate=options.head_rate,
        trials=Trials(300, 1)
        if options.smoke
        else Trials(num_steps=None, grid=GRID[options.train]),
        options={"probe_max_length": length, **_options_of(options)},
        measure=lambda _: measured,
    )


def _options_of(options: argparse.Namespace) -> dict[str, Any]:
    """The same for all arms."""
    if options.train == "head":  # a frozen backbone's factors don't change while the head trains
        return {"probe_refresh_steps": 1000}
    # A few hundred small steps: with the defaults, the factors would take a third of the time.
    refresh = {"probe_refresh_steps": 100, "num_probe_batches": 4}
    if options.smoke:
        return refresh
    on_cpu = not torch.accelerator.is_available()
    # On CPUs in float32 whatever they can do: rows of one table come from several machines.
    return {"bf16": not on_cpu, "use_cpu": on_cpu, **refresh}


def _texts(options: argparse.Namespace) -> texts.Texts:
    if options.smoke:
        return texts.made_up(num_labels=2)
    if options.data == "stackoverflow":
        return texts.stackoverflow(options.task)
    data = getattr(texts, options.data)(options.data_dir)
    return data.fewer(9_000, 1_000, 3_000) if options.data == "imdb" else data


def _checkpoint(options: argparse.Namespace) -> str:
    if options.model != "minilm":
        return options.model
    local = Path(options.data_dir or ".") / "minilm"
    return str(local if local.exists() else offline.minilm())


if __name__ == "__main__":
    main(sys.modules[__name__])
