"""The privacy card: rendered from the statement alone, so that it can't quote a record."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from hf_dpkfc.publishing.statement import STATEMENT_NAME, PrivacyStatement

START, END = "<!-- hf_dpkfc:privacy -->", "<!-- /hf_dpkfc:privacy -->"
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
    """

    model_name: str
    base_model: str | None = None
    datasets: tuple[str, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    task: str | None = None
    library: str = "transformers"


def render_card(statement: PrivacyStatement, facts: CardFacts, existing: str | None = None) -> str:
    """The card's whole text; a README written by hand keeps everything but our section."""
    statement.require_publishable()
    section = f"{START}\n{_privacy_section(statement)}\n{END}"
    metadata, body = split_metadata(existing or "")
    metadata |= _metadata(statement, facts, metadata)
    if START in body and END in body:
        body = re.sub(f"{START}.*?{END}", lambda _: section, body, flags=re.DOTALL)
    elif body.strip():
        body = f"{body.rstrip()}\n\n{section}\n"
    else:
        body = f"# {facts.model_name}\n\n{_results(facts)}{section}\n"
    front = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    return f"---\n{front}---\n{body if body.startswith(chr(10)) else chr(10) + body}"


def split_metadata(text: str) -> tuple[dict[str, Any], str]:
    """A README's YAML header and the rest."""
    match = re.match(r"\A---\s*\n(.*?)\n---\s*\n(.*)\Z", text, flags=re.DOTALL)
    if match is None:
        return {}, text
    return yaml.safe_load(match[1]) or {}, match[2]


def _metadata(
    statement: PrivacyStatement, facts: CardFacts, existing: dict[str, Any]
) -> dict[str, Any]:
    tags = [*existing.get("tags", []), *TAGS]
    metadata: dict[str, Any] = {
        "library_name": existing.get("library_name", facts.library),
        "tags": list(dict.fromkeys(tags)),
        "differential_privacy": _typed_block(statement),
    }
    if facts.base_model:
        metadata["base_model"] = facts.base_model
    if facts.datasets:
        metadata["datasets"] = list(facts.datasets)
    if facts.task:
        metadata["pipeline_tag"] = facts.task
    if facts.metrics:
        metadata["metrics"] = list(facts.metrics)
    # The Hub takes results only with task, data set and metric all three.
    if facts.metrics and facts.task and facts.datasets:
        metadata["model-index"] = [_model_index(facts)]
    return metadata


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


def _typed_block(statement: PrivacyStatement) -> dict[str, Any]:
    plan = statement.plan
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
    }


def _results(facts: CardFacts) -> str:
    if not facts.metrics:
        return ""
    rows = "\n".join(f"| {name} | {value:.4f} |" for name, value in facts.metrics.items())
    return f"| evaluation | value |\n|---|---|\n{rows}\n\n"


def _privacy_section(statement: PrivacyStatement) -> str:
    plan = statement.plan
    numbered = "\n".join(f"{i}. {text}" for i, text in enumerate(_statements(statement), 1))
    return (
        "## Privacy\n\n"
        "If you were in the training data: this model would have come out almost the same without "
        "you. Whatever anyone concludes from it, they would have concluded with nearly the same "
        f"probability (up to a factor of e^{plan.epsilon:.3g} ≈ {_factor(plan.epsilon)}, and apart "
        f"from an event of probability {plan.delta:.2g}) had your record held nothing. What is "
        "true of people like you in general may still be learnt.\n\n"
        f"Formally, the training is ({plan.epsilon:.4g}, {plan.delta:.3g})-differentially private:"
        f"\n\n{numbered}\n"
    )


def _factor(epsilon: float) -> str:
    return f"{2.718281828459045**epsilon:.3g}" if epsilon < 50 else "astronomical"


def _statements(statement: PrivacyStatement) -> list[str]:
    """The sixteen things that a rigorous card states."""
    plan, geometry = statement.plan, statement.preconditioner
    second = statement.second_opinion
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
        f"**Mechanism.** Per-example gradients are preconditioned, clipped to norm "
        f"{plan.clip_norm:g} in the preconditioned space, summed, and Gaussian noise of standard "
        f"deviation {plan.noise_multiplier:.4g}·{plan.clip_norm:g} is added to every coordinate. "
        f"Preconditioner: {_geometry(geometry)}.",
        f"**Sampling.** Assumed and done: Poisson, each record with probability "
        f"{plan.expected_batch_size}/{plan.dataset_size} per step.",
        f"**Steps.** {plan.steps} planned, {statement.num_releases} taken; expected batch "
        f"{plan.expected_batch_size}, by which sums are divided; {statement.world_size} "
        f"process{'es' if statement.world_size > 1 else ''}.",
        f"**Accounting.** {plan.accountant.upper()} by Opacus. Second opinion "
        f"({statement.other_accountant.upper()}): ε = {second:.4g}. Recompute it with "
        "`hf-dpkfc verify` on this repository.",
        "**Not protected.** What can be learnt about groups, and what side channels (timing, "
        "memory, crashes) reveal."
        + (
            " **Un-noised training metrics were logged** during training and are not covered."
            if statement.logged_unsafe_metrics
            else ""
        ),
        f"**Randomness.** {statement.randomness}. The key was never stored with the model and is "
        "destroyed.",
        "**Rules.** A record with a non-finite gradient contributes zero; an empty batch releases "
        "pure noise and counts as a step.",
        "**Pre-training.** The data of the base model is not covered.",
        f"**Audit.** {_audit(statement.audit)}",
        f"**Evidence.** Ledger SHA-256 `{statement.ledger_sha256}`; {versions}.",
        "**Caveats.** The guarantee is about the algorithm; it rests on this implementation and on "
        "floating-point noise being close to Gaussian.",
    ]


def _geometry(geometry: dict[str, Any]) -> str:
    if geometry["kind"] == "none":
        return "none (plain DP-SGD geometry)"
    source = (
        "estimated from synthetic probes only, so it costs no privacy budget (after step 0 it "
        "depends on weights that are private already)"
        if geometry["is_data_free"]
        else "estimated from public records, which this guarantee doesn't cover"
    )
    return f"{geometry['kind']} with probe '{geometry['probe']}', {source}"


def _audit(audit: dict[str, Any] | None) -> str:
    if audit is None:
        return "None was made for this model."
    return (
        f"{audit['method']} at confidence {audit['confidence']}: lower bound "
        f"{audit['bound']:.4g} against the claim of {audit['claim']:.4g}."
    )
