"""From a trained model to what is published of it: card facts, staging, push."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hf_dpkfc.errors import UnsupportedTaskError
from hf_dpkfc.losses import Task, task_of, unwrapped
from hf_dpkfc.publishing.card import CardFacts, render_card
from hf_dpkfc.publishing.statement import PrivacyStatement
from hf_dpkfc.publishing.upload import push_folder, remote_readme

_SPEED_SUFFIXES = ("runtime", "samples_per_second", "steps_per_second")
_PIPELINE_TAGS = {
    Task.TOKEN_LABEL: "token-classification",
    Task.SPAN: "question-answering",
    Task.MASKED_LM: "fill-mask",
    Task.CAUSAL_LM: "text-generation",
}


def card_facts(
    model: nn.Module,
    name: str,
    dataset: str | Sequence[str] | None,
    base: str | None,
    log_history: Sequence[Mapping[str, Any]],
) -> CardFacts:
    """What the card says besides privacy, from the model and its evaluation."""
    origin = str(base or getattr(unwrapped(model).config, "_name_or_path", ""))
    is_hub_id = bool(origin) and not Path(origin).exists() and origin.count("/") <= 1
    return CardFacts(
        model_name=name,
        base_model=origin if is_hub_id else None,
        datasets=(dataset,) if isinstance(dataset, str) else tuple(dataset or ()),
        metrics=_last_evaluation(log_history),
        task=_pipeline_tag(model),
        library="transformers" if model is unwrapped(model) else "peft",
    )


def _last_evaluation(log_history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    evaluated = [log for log in log_history if "eval_loss" in log]
    return {
        name.removeprefix("eval_"): float(value)
        for name, value in (evaluated[-1] if evaluated else {}).items()
        if name.startswith("eval_") and not name.endswith(_SPEED_SUFFIXES)
    }


def _pipeline_tag(model: nn.Module) -> str | None:
    try:
        task = task_of(model)
    except UnsupportedTaskError:
        return None
    is_vision = hasattr(unwrapped(model).config, "num_channels")
    return _PIPELINE_TAGS.get(task, f"{'image' if is_vision else 'text'}-classification")


@dataclass(frozen=True)
class Publication:
    """A model about to be published.

    Attributes:
        statement: With a guarantee to state.
        facts: For the card.
        model: Its weights, or its adapter's.
        processing_class: Tokenizer or processor, saved with it.
        folder: ``output_dir``, of which only the card is read.
    """

    statement: PrivacyStatement
    facts: CardFacts
    model: Any
    processing_class: Any
    folder: Path

    @property
    def card_path(self) -> Path:
        """The card in ``output_dir``."""
        return self.folder / "README.md"

    def write_card(self) -> None:
        """Write the card; a README written by hand keeps everything but our section."""
        existing = self.card_path.read_text() if self.card_path.exists() else None
        self.card_path.write_text(render_card(self.statement, self.facts, existing))

    def push(self, repo_id: str, *, token: str | None, **options: Any) -> Any:
        """One commit with everything in it. A README on the Hub is kept if there is none here."""
        if not self.card_path.exists() and "/" in repo_id:
            existing = remote_readme(repo_id, token)
            if existing is not None:
                self.card_path.write_text(existing)
        self.write_card()
        with tempfile.TemporaryDirectory() as scratch:
            self._stage(Path(scratch))
            return push_folder(Path(scratch), repo_id, token=token, **options)

    def _stage(self, folder: Path) -> None:
        """Written afresh: whatever else lies in ``output_dir`` can't come along."""
        self.model.save_pretrained(folder)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        shutil.copyfile(self.card_path, folder / "README.md")
        self.statement.save(folder)
