"""What a training will cost and do, the training itself, and what was published of it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dpkfc.errors import ConfigurationError, DPKFCError

# Everything else is imported by the command that needs it: torch and transformers take seconds.
if TYPE_CHECKING:
    from hf_dpkfc.privacy.plan import Adjacency, PrivacyPlan
    from hf_dpkfc.publishing.statement import PrivacyStatement

# The ε that people usually compare.
TABLE_EPSILONS = (0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 10.0)
CURVE_POINTS = 10
CURVE_WIDTH = 50
HELP_WIDTH = 88


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it succeeded, 1 if a verification failed, 2 if it was refused."""
    words = sys.argv[1:] if arguments is None else arguments
    args = _parser(words).parse_args(words)
    try:
        return int(args.run(args) or 0)
    except (DPKFCError, OSError) as error:  # a file that can't be read or written names itself
        print(f"hf-dpkfc: {error}", file=sys.stderr)
        return 2


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """All commands, of which only those among the words have declared their options."""
    parser = argparse.ArgumentParser(prog="hf-dpkfc", description=__doc__)
    parser.add_argument("--version", action="version", version=f"hf-dpkfc {version('hf-dpkfc')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (declare, text) in _COMMANDS.items():
        command = commands.add_parser(
            name, help=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name in words:  # choices and texts come from modules that are slow to import
            declare(command)
    return parser


# ---- plan ----


def _declare_plan(parser: argparse.ArgumentParser) -> None:
    from hf_dpkfc.privacy.accounting import ACCOUNTANTS

    parser.add_argument("--n", type=int, required=True, help="size of the data set (public)")
    parser.add_argument("--batch", type=int, required=True, help="expected batch size")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--epochs", type=float, help="passes of ⌈n / batch⌉ steps each")
    length.add_argument("--steps", type=int, help="number of steps, each one release")
    noise = parser.add_mutually_exclusive_group(required=True)
    noise.add_argument("--epsilon", type=float, help="target ε: the noise is calibrated")
    noise.add_argument("--sigma", type=float, help="noise multiplier: ε is computed")
    parser.add_argument("--delta", type=float, help="default: 1/(10 n)")
    parser.add_argument(
        "--clip-norm",
        type=float,
        default=1.0,
        help="C, of each example's gradient; ε doesn't depend on it (default: 1.0)",
    )
    parser.add_argument(
        "--accountant", choices=ACCOUNTANTS, default="rdp", help="how ε is computed (default: rdp)"
    )
    parser.add_argument(
        "--adjacency",
        choices=_adjacencies(),
        default="zero-out",
        help="add-remove is for trainings with public_dataset_size, whose n doesn't come from the "
        "records; ε is the same (default: zero-out)",
    )
    parser.set_defaults(run=_plan)


def _adjacencies() -> dict[str, Adjacency]:
    """Kinds of neighbours, by their names on a card."""
    from hf_dpkfc.privacy.plan import Adjacency

    return {kind.name.lower().replace("_", "-"): kind for kind in Adjacency}


def _plan(args: argparse.Namespace) -> None:
    from hf_dpkfc.privacy.accounting import MAX_PRV_EPSILON
    from hf_dpkfc.privacy.plan import PrivacyPlan, default_delta, steps_in

    steps = steps_in(args.epochs, args.n, args.batch) if args.steps is None else args.steps
    fields = {
        "clip_norm": args.clip_norm,
        "expected_batch_size": args.batch,
        "dataset_size": args.n,
        "steps": steps,
        "delta": args.delta if args.delta is not None else default_delta(args.n),
        "accountant": args.accountant,
        "adjacency": _adjacencies()[args.adjacency],
    }
    if args.epsilon is not None:
        plan = PrivacyPlan.calibrated(args.epsilon, **fields)
    else:
        plan = PrivacyPlan(noise_multiplier=args.sigma, **fields)
    print(plan)
    if plan.epsilon <= MAX_PRV_EPSILON:
        other = _other(args.accountant)
        second = plan.epsilon_at(plan.steps, other)
        print(f"\nsecond opinion: ε = {second:.4g} ({other.upper()})")
    print("\n" + _table(fields, plan))
    print("\n" + _curve(plan))


def _other(accountant: str) -> str:
    from hf_dpkfc.privacy.accounting import ACCOUNTANTS

    return next(name for name in ACCOUNTANTS if name != accountant)


def _table(fields: dict[str, Any], plan: PrivacyPlan) -> str:
    """σ, and the noise on the mean gradient, for the ε that people compare."""
    from hf_dpkfc.privacy.plan import PrivacyPlan

    rows = ["the same training at other ε", "     ε        σ   noise per coordinate σ·C/B"]
    for target in TABLE_EPSILONS:
        sigma = PrivacyPlan.calibrated(target, **fields).noise_multiplier
        noise = sigma * plan.clip_norm / plan.expected_batch_size
        rows.append(f"{target:6g}  {sigma:7.3f}   {noise:.3g}")
    return "\n".join(rows)


def _curve(plan: PrivacyPlan) -> str:
    """ε over the steps, as bars."""
    if not math.isfinite(plan.epsilon):
        return "without noise, ε is infinite from the first step on"
    rows = ["ε over the steps"]
    for i in range(1, CURVE_POINTS + 1):
        step = max(1, plan.steps * i // CURVE_POINTS)
        spent = plan.epsilon_at(step)
        bar = "█" * max(1, round(CURVE_WIDTH * spent / plan.epsilon))
        rows.append(f"{step:7d}  {bar} {spent:.3g}")
    return "\n".join(rows)


# ---- inspect ----

_HEADS = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "masked-lm": "AutoModelForMaskedLM",
    "causal-lm": "AutoModelForCausalLM",
    "image-classification": "AutoModelForImageClassification",
}


def _declare_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="Hub id or folder of a checkpoint")
    parser.add_argument(
        "--task",
        choices=_HEADS,
        default="sequence-classification",
        help="the model's head (default: sequence-classification)",
    )
    parser.set_defaults(run=_inspect)


def _inspect(args: argparse.Namespace) -> None:
    from hf_dpkfc.layers.routes import inspect_model

    table = inspect_model(_load_model(args.model, args.task))
    print(table)
    print(f"\n{len(table.blocks)} blocks, {len(table.refusals)} refused")
    table.require_covered()


def _load_model(name: str, task: str, **options: Any) -> Any:
    import transformers

    try:
        return getattr(transformers, _HEADS[task]).from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"The model {name!r} can't be loaded for {task}.",
            why=str(error).splitlines()[0],
            way_out="give a folder with a checkpoint, or a Hub id that this machine can reach.",
        ) from error


# ---- train ----

_TRAIN_KEYS = (
    "model",
    "train_file",
    "eval_file",
    "text_column",
    "pair_column",
    "label_column",
    "labels",
)


EXAMPLE = """\
model: distilroberta-base
train_file: train.csv            # CSV, JSON or Parquet, or a Hub id
eval_file: test.csv
text_column: text
label_column: label
labels: [negative, positive]     # otherwise read off the training file
output_dir: out
per_device_train_batch_size: 32
gradient_accumulation_steps: 8   # the expected batch is their product, 256
num_train_epochs: 5
learning_rate: 3.0e-3            # higher than without privacy
target_epsilon: 3.0
target_delta: 1.0e-5
"""


def _declare_train(parser: argparse.ArgumentParser) -> None:
    parser.description = textwrap.fill(
        f"The file holds {', '.join(_TRAIN_KEYS)} (data: CSV, JSON or Parquet files, or Hub ids) "
        "and any option of DPKFCConfig: those below, and those of transformers.TrainingArguments.",
        HELP_WIDTH,
    )
    parser.epilog = f"example:\n\n{textwrap.indent(EXAMPLE, '  ')}\n{_options_help()}"
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml", help="the options of the run")
    parser.set_defaults(run=_train)


def _options_help() -> str:
    """Every option of ours with its default, its choices and its text, by group."""
    from hf_dpkfc.config import options_by_group

    parts = []
    for group, options in options_by_group().items():
        parts.append(f"options that can change {group} (default):\n")
        parts += [_option_help(option) for option in options]
    return "\n".join(parts)


def _option_help(option: dataclasses.Field[Any]) -> str:
    choices = option.metadata.get("choices")
    kind = f"one of {', '.join(choices)}" if choices else option.type
    head = f"{option.name}: {kind} ({json.dumps(option.default)})"
    margin = " " * 6
    return (
        textwrap.fill(head, HELP_WIDTH, initial_indent="  ", subsequent_indent=margin)
        + "\n"
        + textwrap.indent(textwrap.fill(option.metadata["help"], HELP_WIDTH - 6), margin)
        + "\n"
    )


def _train(args: argparse.Namespace) -> None:
    import yaml

    from hf_dpkfc.config import DPKFCConfig
    from hf_dpkfc.trainer import DPKFCTrainer

    try:
        options = yaml.safe_load(args.config.read_text())
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ConfigurationError(
            f"{args.config} can't be read.", why=str(error), way_out="give a YAML file."
        ) from error
    if not isinstance(options, dict):
        raise ConfigurationError(
            f"{args.config} holds no options.",
            why="a training needs lines of the form 'name: value'.",
            way_out=f"give {', '.join(_TRAIN_KEYS[:2])}, output_dir, target_epsilon and so on.",
        )
    task = {key: options.pop(key, None) for key in _TRAIN_KEYS}
    _require_known_options(options, DPKFCConfig)
    config = _config(options)
    model, tokenizer, train, held_out = _classification_task(task)
    with _refusals_as_ours():
        trainer = DPKFCTrainer(
            model=model,
            args=config,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=tokenizer,
            compute_metrics=_accuracy,
        )
    print(trainer.plan)
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    trainer.save_model()
    if held_out is not None:
        print(f"accuracy on {task['eval_file']}: {trainer.evaluate()['eval_accuracy']:.4f}")
    print(f"ε spent: {trainer.epsilon_spent():.4g}; the model is in {config.output_dir}")


def _config(options: dict[str, Any]) -> Any:
    """The configuration."""
    from hf_dpkfc.config import DPKFCConfig

    fields = DPKFCConfig.__dataclass_fields__
    # YAML reads 5e-4 as a string, and Hugging Face's own options aren't converted.
    read = {name: _read(name, value, fields[name].default) for name, value in options.items()}
    with _refusals_as_ours():
        return DPKFCConfig(**read)


@contextmanager
def _refusals_as_ours() -> Iterator[None]:
    """Hugging Face's refusal of an option as one of our errors."""
    try:
        yield
    except DPKFCError:
        raise
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigurationError(
            "The options can't be used.",
            why=" ".join(str(error).split()),
            way_out="correct the option that the reason names.",
        ) from error


def _read(name: str, value: Any, default: Any) -> Any:
    """The value, as a number where the option's default is one."""
    if not isinstance(value, str) or type(default) not in (int, float):
        return value
    try:
        return type(default)(value)
    except ValueError as error:
        raise ConfigurationError(
            f"{name}={value!r}.", why="it isn't a number.", way_out="write it like 10 or 5.0e-4."
        ) from error


def _require_known_options(options: dict[str, Any], config: Any) -> None:
    unknown = set(options) - set(config.__dataclass_fields__)
    if unknown:
        raise ConfigurationError(
            f"Unknown options: {', '.join(sorted(unknown))}.",
            why="they are neither DPKFCConfig's nor this command's.",
            way_out=f"this command's own are {', '.join(_TRAIN_KEYS)}.",
        )


def _classification_task(task: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Model, tokenizer, training and evaluation sets of a text classification."""
    from transformers import AutoTokenizer

    for key in ("model", "train_file", "text_column", "label_column"):
        if not task[key]:
            raise ConfigurationError(
                f"{key} is missing.",
                why="a text classification needs it.",
                way_out=f"add a line '{key}: ...' to the file.",
            )
    if not isinstance(task["labels"], list | None):
        raise ConfigurationError(
            f"labels={task['labels']!r}.",
            why="it is the list of all classes.",
            way_out="write 'labels: [first, second, ...]'.",
        )
    train = _load_rows(task["train_file"], task)
    held_out = _load_rows(task["eval_file"], task) if task["eval_file"] else None
    labels = task["labels"] or _labels_of(train, task["label_column"])
    for key, rows in (("train_file", train), ("eval_file", held_out)):
        if rows is not None and not set(rows[task["label_column"]]) <= set(labels):
            raise ConfigurationError(
                f"{key} holds classes that aren't among the {len(labels)} labels.",
                why="the head has one output for each label.",
                way_out="name all classes in 'labels: [...]'.",
            )
    names = [str(label) for label in labels]
    model = _load_model(
        task["model"],
        "sequence-classification",
        num_labels=len(labels),
        id2label=dict(enumerate(names)),
        label2id={name: at for at, name in enumerate(names)},
        problem_type="single_label_classification",
        ignore_mismatched_sizes=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    texts = [c for c in (task["text_column"], task["pair_column"]) if c]

    def encode(rows: Any) -> dict[str, Any]:
        ids = [labels.index(label) for label in rows[task["label_column"]]]
        return tokenizer(*(rows[c] for c in texts), truncation=True) | {"labels": ids}

    def encoded(rows: Any) -> Any:
        return rows.map(encode, batched=True, remove_columns=rows.column_names)

    return model, tokenizer, encoded(train), held_out and encoded(held_out)


def _labels_of(rows: Any, column: str) -> list[Any]:
    print(
        "The label set is read off the training file, which the guarantee doesn't cover; give "
        "'labels: [...]' if it isn't public.",
        file=sys.stderr,
    )
    return sorted(set(rows[column]))


def _load_rows(name: str, task: dict[str, Any]) -> Any:
    if importlib.util.find_spec("datasets") is None:
        raise ConfigurationError(
            "The package datasets isn't installed.",
            why="it reads the records.",
            way_out="pip install 'hf-dpkfc[recipes]'.",
        )
    kinds = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
    path = Path(name)
    if path.suffix in kinds and path.exists():
        rows = _load_file(kinds[path.suffix], name)
    elif path.suffix in kinds:
        raise ConfigurationError(
            f"{name} doesn't exist.", why="it was given as a data file.", way_out="check the path."
        )
    else:
        rows = _load_from_hub(name)
    for key in ("text_column", "pair_column", "label_column"):
        if task[key] and task[key] not in rows.column_names:
            raise ConfigurationError(
                f"{key}={task[key]!r} isn't a column of {name}.",
                why=f"its columns are {', '.join(rows.column_names)}.",
                way_out=f"name one of them in {key}.",
            )
        if task[key]:
            _require_filled(rows[task[key]], f"{key}={task[key]!r} of {name}", key)
    return rows


def _require_filled(values: Any, column: str, key: str) -> None:
    """Every record has a value there, and every text is one."""
    kinds = str | int | bool if key == "label_column" else str
    wrong = next((at for at, value in enumerate(values) if not isinstance(value, kinds)), None)
    if wrong is not None:
        needed = "a class" if key == "label_column" else "a text"
        raise ConfigurationError(
            f"Row {wrong + 1} of {column} isn't {needed}.",
            why=f"it is empty, or of another type ({type(values[wrong]).__name__}).",
            way_out="fill it in, or take the row out of the file.",
        )


def _load_file(kind: str, name: str) -> Any:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        return load_dataset(kind, data_files=name, split="train")
    except (DatasetsError, OSError, ValueError) as error:
        raise ConfigurationError(
            f"{name} can't be read as {kind}.",
            why=" ".join(str(error.__cause__ or error).split()),
            way_out="check that it isn't empty and that all of its lines have the same columns.",
        ) from error


def _load_from_hub(name: str) -> Any:
    from datasets import load_dataset

    try:
        return load_dataset(name, split="train")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"The data set {name!r} can't be loaded.",
            why=" ".join(str(error).split()) or type(error).__name__,
            way_out="give a CSV, JSON or Parquet file, or a Hub id that this machine can reach.",
        ) from error


def _accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


# ---- card and verify ----


def _declare_card(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="with a privacy statement")
    parser.set_defaults(run=_card)


def _card(args: argparse.Namespace) -> None:
    from hf_dpkfc.publishing.statement import PrivacyStatement

    print(_rendered(args.folder, PrivacyStatement.load(args.folder)))


def _rendered(folder: Path, statement: PrivacyStatement) -> Path:
    """The folder's card, written from a statement."""
    from hf_dpkfc.publishing.card import CardFacts, read_card, render_card

    path = folder / "README.md"
    facts = CardFacts(folder.absolute().name)
    path.write_text(render_card(statement, facts, read_card(path)))
    return path


def _declare_verify(parser: argparse.ArgumentParser) -> None:
    from hf_dpkfc.publishing.verify import LIMIT

    parser.description = textwrap.fill(
        "ε is recomputed with two accountants and compared with statement and card, and files "
        f"that may not be published are named. {LIMIT}",
        HELP_WIDTH,
    )
    parser.add_argument("repo", metavar="REPO_OR_FOLDER", help="of the published model")
    parser.add_argument("--token", help="to read a private repository")
    parser.set_defaults(run=_verify)


def _verify(args: argparse.Namespace) -> int:
    from hf_dpkfc.publishing.verify import LIMIT, verify

    checks = verify(args.repo, args.token)
    print("\n".join(map(str, checks)))
    print(LIMIT)
    return 0 if all(check.holds for check in checks) else 1


# ---- audit ----


def _declare_audit(parser: argparse.ArgumentParser) -> None:
    parser.description = textwrap.fill(
        "Canaries are put into releases of this code, on a tiny model, and left out. "
        "'step' repeats one release; 'training' attacks one whole run (looser).",
        HELP_WIDTH,
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--sigma", type=float, help="noise multiplier to audit")
    target.add_argument(
        "--attach",
        type=Path,
        metavar="FOLDER",
        help="audit at this trained model's plan, and put the result on its card",
    )
    parser.add_argument(
        "--kind", choices=("step", "training"), default="step", help="what is attacked"
    )
    parser.add_argument("--rate", type=float, default=0.5, help="training: sampling rate")
    parser.add_argument("--steps", type=int, default=10, help="training: number of steps")
    parser.add_argument("--delta", type=float, default=1e-5, help="training: δ")
    parser.add_argument("--trials", type=int, help="step: releases with and without the canary")
    parser.add_argument("--confidence", type=float, default=0.9999, help="of the bound")
    parser.add_argument("--secure-rng", action="store_true", help="audit the ChaCha20 generator")
    parser.add_argument("--out", type=Path, default=Path("audit"), help="folder of figure and JSON")
    parser.set_defaults(run=_audit)


def _audit(args: argparse.Namespace) -> int:
    from hf_dpkfc.diagnostics import audit
    from hf_dpkfc.publishing.statement import PrivacyStatement

    statement = PrivacyStatement.load(args.attach) if args.attach else None
    secure = args.secure_rng or (statement is not None and statement.uses_secure_rng)
    plan = statement.plan if statement else _audited_plan(args)
    if args.kind == "step":
        result = audit.audit_step(
            plan.noise_multiplier,
            clip_norm=plan.clip_norm,
            num_trials=args.trials or audit.STEP_TRIALS,
            confidence=args.confidence,
            secure=secure,
        )
    else:
        result = audit.audit_training(plan, confidence=args.confidence, secure=secure)
    print(result)
    args.out.mkdir(parents=True, exist_ok=True)
    result.draw(args.out / f"{args.kind}_scores.png")
    (args.out / f"{args.kind}_audit.json").write_text(json.dumps(result.to_dict(), indent=1) + "\n")
    print(f"scores and JSON are in {args.out}")
    if statement is not None:
        audited = dataclasses.replace(statement, audit=result.to_dict())
        audited.save(args.attach)  # a refuted claim stays refuted: no card can be written any more
        print(f"on the card: {_rendered(args.attach, audited)}")
    return 0 if result.holds else 1


def _audited_plan(args: argparse.Namespace) -> PrivacyPlan:
    from hf_dpkfc.privacy.plan import PrivacyPlan

    # The most records that δ allows, so that the rate is as exact as can be.
    size = int((1 + 1e-9) / args.delta) if 0 < args.delta < 1 else 10**6
    return PrivacyPlan(
        noise_multiplier=args.sigma,
        clip_norm=1.0,
        expected_batch_size=max(1, round(args.rate * size)),
        dataset_size=size,
        steps=args.steps,
        delta=args.delta,
    )


# ---- report ----


def _declare_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="output_dir of a run")
    parser.add_argument("--output", type=Path, help="default: report.html in RUN_DIR")
    parser.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> None:
    from hf_dpkfc.diagnostics.report import write_report

    print(write_report(args.run_dir, args.output))


_Declare = Callable[[argparse.ArgumentParser], None]
_COMMANDS: dict[str, tuple[_Declare, str]] = {
    "plan": (_declare_plan, "what will ε be? No data needed."),
    "inspect": (_declare_inspect, "each parameter's route, and what is refused"),
    "train": (_declare_train, "private text classification from a YAML file"),
    "card": (_declare_card, "render a folder's privacy card again"),
    "verify": (_declare_verify, "recompute a published model's ε"),
    "audit": (_declare_audit, "attack our own releases: lower bound on the leak, beside the claim"),
    "report": (_declare_report, "one HTML page about a run"),
}


if __name__ == "__main__":
    sys.exit(main())
