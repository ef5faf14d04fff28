"""The privacy card: rendered from the statement alone, so that it can't quote a record."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hf_dpkfc.curvature.catalogue import CHECKPOINT_PROBES
from hf_dpkfc.errors import PublishingError
from hf_dpkfc.publishing.statement import STATEMENT_NAME, PrivacyStatement

# Above this ε, the factor e^ε alone no longer rules out that a record is given away.
STRONG_EPSILON = 3.0

START, END = "<!-- hf_dpkfc:privacy -->", "<!-- /hf_dpkfc:privacy -->"
_SECTION = re.compile(f"{START}.*?{END}", re.DOTALL)
_RESULTS_START, _RESULTS_END = "<!-- hf_dpkfc:results -->", "<!-- /hf_dpkfc:results -->"
_RESULTS = re.compile(f"{_RESULTS_START}.*?{_RESULTS_END}", re.DOTALL)
_HEADER = re.compile(r"\A---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)(.*)\Z", re.DOTALL | re.MULTILINE)
# Header fields that a training fills in; those of another training say nothing of this one.
_GATHERED = (
    "library_name",
    "base_model",
    "pipeline_tag",
    "datasets",
    "metrics",
    "model-index",
)
TAGS = ("differential-privacy", "dp-sgd", "dp-kfc", "hf_dpkfc")


@dataclass(frozen=True)
class CardFacts:
    """What the card says besides privacy; nothing of it comes from training records.

    Attributes:
        model_name: Title of the card.
        base_model: The checkpoint that was fine-tuned.
        datasets: Hub ids of the data, if public.
        metrics: Evaluation results by name.
        task: The Hub's pipeline tag.
        library: The Hub's library_name.
        license: The Hub's license tag.
        language: The Hub's language code.
        tags: The user's own.
    """

    model_name: str
    base_model: str | None = None
    datasets: tuple[str, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    task: str | None = None
    library: str = "transformers"
    license: str | None = None
    language: str | None = None
    tags: tuple[str, ...] = ()


def render_card(statement: PrivacyStatement, facts: CardFacts, existing: str | None = None) -> str:
    """The card's whole text; a README written by hand keeps everything but our section."""
    section = privacy_section(statement.require_publishable())
    metadata, body = split_metadata(existing or "")
    if _is_of_another_training(metadata, statement):
        metadata, body = _without_its_facts(metadata, body)
    metadata |= _metadata(statement, facts, metadata)
    if not body.strip():
        body = f"# {facts.model_name}\n\n{_results(facts)}{section}\n"
    else:
        body = _updated(body, section, facts)
    front = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    return f"---\n{front}---\n{body if body.startswith(chr(10)) else chr(10) + body}"


def _updated(body: str, section: str, facts: CardFacts) -> str:
    """An existing text with our section, and our table of results, brought up to date."""
    if facts.metrics:
        body = _RESULTS.sub(lambda _: _results(facts).strip(), body)
    if _SECTION.search(body):
        return _SECTION.sub(lambda _: section, body)
    if START in body or END in body:
        raise PublishingError(
            "README.md holds half of a privacy section.",
            why=f"what stands between {START} and {END} is ours to update, and one of the two is "
            "gone: an old claim would stay beside the new one.",
            way_out="put the mark back, or delete the old section; nothing was changed.",
        )
    return f"{body.rstrip()}\n\n{section}\n"


def _is_of_another_training(metadata: dict[str, Any], statement: PrivacyStatement) -> bool:
    """Whether an existing card states another run's guarantee."""
    block = metadata.get("differential_privacy")
    return block is not None and block != typed_block(statement)


def _without_its_facts(metadata: dict[str, Any], body: str) -> tuple[dict[str, Any], str]:
    """A card without what was gathered from an earlier training; hand-written text stays."""
    metadata = {name: value for name, value in metadata.items() if name not in _GATHERED}
    return metadata, "" if is_body_ours_alone(body) else _RESULTS.sub("", body)


def is_ours_alone(text: str) -> bool:
    """Whether a card holds nothing but what :func:`render_card` writes into an empty one."""
    return is_body_ours_alone(split_metadata(text)[1])


def is_body_ours_alone(body: str) -> bool:
    """The same of a card's text without its header."""
    rest = _RESULTS.sub("", _SECTION.sub("", body))
    return re.fullmatch(r"\s*(# [^\n]*)?\s*", rest) is not None


def read_card(path: Path) -> str | None:
    """The text of a card; None if there is no such file.

    Raises:
        PublishingError: If it isn't text.
    """
    try:
        return path.read_text(encoding="utf-8") if path.exists() else None
    except UnicodeDecodeError as error:
        raise PublishingError(
            f"{path} isn't UTF-8 text.",
            why=str(error),
            way_out="save it as UTF-8, or move it away; nothing was changed.",
        ) from error


def stated_section(text: str) -> str:
    """The privacy section of a card; empty if it has none."""
    match = _SECTION.search(text)
    return match[0] if match else ""


def formal_claim(statement: PrivacyStatement) -> str:
    """The guarantee as the card's text states it."""
    return f"({statement.plan.epsilon:.4g}, {statement.plan.delta:.3g})-differentially private"


def split_metadata(text: str) -> tuple[dict[str, Any], str]:
    """A README's YAML header and the rest.

    Raises:
        PublishingError: If the header can't be read.
    """
    match = _HEADER.match(text)
    if match is None:
        return {}, text
    try:
        metadata = yaml.safe_load(match[1]) or {}
    except yaml.YAMLError as error:
        raise _unreadable(" ".join(str(error).split())) from error
    if not isinstance(metadata, dict):
        raise _unreadable(f"it holds a {type(metadata).__name__}, not names with values.")
    return metadata, match[2]


def _unreadable(why: str) -> PublishingError:
    return PublishingError(
        "The header of README.md isn't the YAML that the Hub reads.",
        why=why,
        way_out="correct the lines between the two '---'; nothing was changed.",
    )


def _metadata(
    statement: PrivacyStatement, facts: CardFacts, existing: dict[str, Any]
) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "library_name": existing.get("library_name", facts.library),
        "tags": _united(existing.get("tags"), [*facts.tags, *TAGS]),
        "differential_privacy": typed_block(statement),
    }
    if facts.datasets:
        metadata["datasets"] = _united(existing.get("datasets"), facts.datasets)
    # What the author wrote by hand is better than what we gather.
    gathered = {
        "base_model": facts.base_model,
        "license": facts.license,
        "language": facts.language,
        "pipeline_tag": facts.task,
    }
    metadata |= {n: existing.get(n, value) for n, value in gathered.items() if value}
    if facts.metrics:
        metadata["metrics"] = _united(existing.get("metrics"), facts.metrics)
    # The Hub takes results only with task, data set and metric all three.
    if facts.metrics and facts.task and facts.datasets:
        written_index = existing.get("model-index")
        others = [
            entry
            for entry in (written_index if isinstance(written_index, list) else [])
            if not isinstance(entry, dict) or entry.get("name") != facts.model_name
        ]
        metadata["model-index"] = [*others, _model_index(facts)]
    return metadata


def _united(written: Any, ours: Iterable[str]) -> list[str]:
    """What stands there already, then ours; each once."""
    first = [written] if isinstance(written, str) else written or []
    return list(dict.fromkeys([*first, *ours]))


def _model_index(facts: CardFacts) -> dict[str, Any]:
    return {
        "name": facts.model_name,
        "results": [
            {
                "task": {"type": facts.task},
                "dataset": {"name": facts.datasets[0], "type": facts.datasets[0]},
                "metrics": [{"type": n, "value": v} for n, v in facts.metrics.items()],
            }
        ],
    }


def typed_block(statement: PrivacyStatement) -> dict[str, Any]:
    """The claim as the card's metadata holds it, with its types."""
    plan = statement.plan
    run = {} if statement.run_sha256 is None else {"run": statement.run_sha256}
    return {
        "epsilon": float(plan.epsilon),
        "delta": float(plan.delta),
        "unit": plan.privacy_unit,
        "adjacency": plan.adjacency.name.lower().replace("_", "-"),
        "noise_multiplier": float(plan.noise_multiplier),
        "clip_norm": float(plan.clip_norm),
        "sampling": "poisson",
        "sampling_rate": float(plan.sampling_rate),
        "steps": plan.steps,
        "accountant": plan.accountant,
        "statement": STATEMENT_NAME,
        **run,
    }


def _results(facts: CardFacts) -> str:
    if not facts.metrics:
        return ""
    rows = "\n".join(f"| {name} | {value:.4f} |" for name, value in facts.metrics.items())
    table = f"| evaluation | value |\n|---|---|\n{rows}"
    return f"{_RESULTS_START}\n{table}\n{_RESULTS_END}\n\n"


def privacy_section(statement: PrivacyStatement) -> str:
    """The card's section between its marks: plain words first, then the formal statement."""
    plan = statement.plan
    numbered = "\n".join(f"{i}. {text}" for i, text in enumerate(_statements(statement), 1))
    return (
        f"{START}\n## Privacy\n\n"
        "If you were in the training data: whatever anyone concludes about you from this model, "
        "they could have concluded without your record, too. The probability of any outcome "
        f"differs by a factor of {_factor(plan.epsilon)} at most between a training with your "
        f"record and one without it (apart from an event of probability {plan.delta:.2g})."
        f"{_weakness(plan.epsilon)} What is true of people like you in general may still be "
        "learnt.\n\n"
        f"Formally, the training is {formal_claim(statement)}:\n\n{numbered}\n\n{END}"
    )


def _factor(epsilon: float) -> str:
    return f"e^{epsilon:.3g}" + (f" ≈ {math.exp(epsilon):.3g}" if epsilon < 50 else "")


def _weakness(epsilon: float) -> str:
    """What a reader of a large factor must know."""
    if epsilon <= STRONG_EPSILON:
        return ""
    return " That is a weak bound: an outcome may be much likelier because of your record."


def _statements(statement: PrivacyStatement) -> list[str]:
    """The sixteen things that a rigorous card states."""
    plan, geometry = statement.plan, statement.preconditioner
    second = statement.second_opinion
    opinion = "not computed, ε is too large" if second is None else f"ε = {second:.4g}"
    versions = ", ".join(f"{name} {number}" for name, number in sorted(statement.versions.items()))
    size = (
        "N was declared public"
        if plan.adjacency.name == "ADD_REMOVE"
        else "N is the size of the training set and is treated as public"
    )
    return [
        f"**Guarantee.** ε = {plan.epsilon:.4g}, δ = {plan.delta:.3g}: approximate differential "
        f"privacy. δ is {plan.delta * plan.dataset_size:.3g} of 1/N for N = {plan.dataset_size}; "
        f"{size}.",
        "**Model of trust.** Central: whoever ran the training saw the records and is trusted. "
        "Everybody else sees the weights; intermediate weights may be seen too, since every step "
        "is a release.",
        f"**Unit of privacy.** {plan.privacy_unit}.",
        f"**Adjacency.** {plan.adjacency.value}. Replace-one is not claimed.",
        "**Coverage.** This training run. Hyperparameter tuning, preprocessing and evaluation are "
        "not covered unless said otherwise elsewhere on this card.",
        f"**Mechanism.** Per-example gradients are {_clipped(geometry, plan.clip_norm)}, summed, "
        f"and Gaussian noise of standard deviation {plan.noise_multiplier:.4g}·{plan.clip_norm:g} "
        f"is added to every coordinate. Preconditioner: {_geometry(geometry)}."
        f"{_optimizer(statement.dp_optimizer)}",
        f"**Sampling.** Assumed and done: Poisson, each record with probability "
        f"{plan.expected_batch_size}/{plan.dataset_size} per step.",
        f"**Steps.** {plan.steps} planned, {statement.num_releases} taken; expected batch "
        f"{plan.expected_batch_size}, by which sums are divided; {statement.world_size} "
        f"process{'es' if statement.world_size > 1 else ''}.",
        f"**Accounting.** {plan.accountant.upper()} by Opacus. Second opinion "
        f"({statement.other_accountant.upper()}): {opinion}. Recompute it with "
        "`hf-dpkfc verify` on this repository.",
        "**Not protected.** What can be learnt about groups, and what side channels (timing, "
        "memory, crashes) reveal."
        + (
            " **Un-noised training metrics were logged** during training and are not covered."
            if statement.logged_unsafe_metrics
            else ""
        ),
        f"**Randomness.** {statement.randomness}. The key is never stored with the model and is "
        "destroyed when training ends.",
        "**Rules.** A record with a non-finite gradient contributes zero; an empty batch releases "
        "pure noise and counts as a step.",
        "**Pre-training.** The data of the base model is not covered.",
        f"**Audit.** {_audit(statement.audit)}",
        f"**Evidence.** Ledger SHA-256 `{statement.ledger_sha256}`; {versions}.",
        "**Caveats.** The guarantee is about the algorithm; it rests on this implementation and on "
        "floating-point noise being close to Gaussian."
        + (
            ""
            if statement.checked_neighbours
            else " **It wasn't checked that an example's loss doesn't depend on the others in its "
            "batch**, which the guarantee presumes: no synthetic inputs could be made for this "
            "model."
        ),
    ]


def _clipped(geometry: dict[str, Any], clip_norm: float) -> str:
    if geometry["kind"] == "none":
        return f"clipped to norm {clip_norm:g}"
    return f"preconditioned, clipped to norm {clip_norm:g} in the preconditioned space"


def _geometry(geometry: dict[str, Any]) -> str:
    if geometry["kind"] == "none":
        return "none (plain DP-SGD geometry)"
    source = (
        "estimated from synthetic probes only, so it costs no privacy budget (after step 0 it "
        "depends on weights that are private already)"
        if geometry["is_data_free"]
        else "estimated from public records, which this guarantee doesn't cover"
    )
    if geometry["probe"] in CHECKPOINT_PROBES:
        source += (
            "; the probes' tokens were chosen with weights, at step 0 those of the pre-trained "
            "checkpoint, which is public"
        )
    if geometry["probe"] == "words":
        source += (
            "; the probes' words were drawn by the public word frequencies of wordfreq "
            f"(language: {geometry.get('probe_language', 'not stated')})"
        )
    return f"{geometry['kind']} with probe '{geometry['probe']}', {source}"


def _optimizer(facts: dict[str, Any] | None) -> str:
    """A sentence about what came between noise and weights; none for plain torch."""
    if facts is None:
        return ""
    if facts["name"] == "adambc":
        return (
            f" Optimizer: DP-AdamBC (floor {facts['floor']:g}), which works on noisy gradients and "
            "public constants only and so costs no privacy budget."
        )
    return (
        f" Optimizer: DiSK (κ = {facts['kappa']:g}, γ = {facts['gamma']:g}): each example's "
        "gradients at two points, the present weights and a look-ahead along the last update, are "
        "combined before they are preconditioned and clipped, so one example still contributes at "
        "most the clip norm; the filter behind it works on noisy gradients only and costs no "
        "privacy budget."
    )


def _audit(audit: dict[str, Any] | None) -> str:
    if audit is None:
        return "None is attached (`hf-dpkfc audit --attach`)."
    trials = f", {audit['num_trials']} trials" if "num_trials" in audit else ""
    return (
        f"{audit['method']} at confidence {audit['confidence']}{trials}: lower bound "
        f"{audit['bound']:.4g} against the claim of {audit['claim']:.4g}."
    )
