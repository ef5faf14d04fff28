"""From a trained model to what is published of it: card facts, staging, push."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from hf_dpkfc.diagnostics.rundata import evaluation_metrics
from hf_dpkfc.errors import PublishingError, UnsupportedTaskError
from hf_dpkfc.losses import Task, task_of, unwrapped
from hf_dpkfc.privacy.ledger import LEDGER_NAME
from hf_dpkfc.publishing.card import CardFacts, is_ours_alone, read_card, render_card
from hf_dpkfc.publishing.statement import PrivacyStatement
from hf_dpkfc.publishing.upload import create_repository, push_folder, remote_readme
from hf_dpkfc.runs import RunFolder

logger = logging.getLogger(__name__)

_PIPELINE_TAGS = {
    Task.TOKEN_LABEL: "token-classification",
    Task.SPAN: "question-answering",
    Task.MASKED_LM: "fill-mask",
    Task.CAUSAL_LM: "text-generation",
}


def finished_statement(files: RunFolder, own: PrivacyStatement | None) -> PrivacyStatement:
    """What a finished run states, if its ledger is still the one that the statement quotes.

    Args:
        files: Of the run.
        own: This process's statement, where it trained; else the folder's is read.

    Raises:
        PublishingError: If there is no ledger, or another one.
    """
    if not files.ledger_path.exists():
        raise PublishingError(
            f"There is no {LEDGER_NAME} in {files.folder}.",
            why="without a ledger nobody knows what was spent.",
            way_out="train with DPKFCTrainer first.",
        )
    statement = _with_audit(files, own)
    is_quoted = statement.ledger_sha256 == files.ledger_digest()
    is_held = files.holds(statement.plan, statement.num_releases, statement.claims_privacy)
    if not (is_quoted and is_held):
        raise PublishingError(
            f"{files.ledger_path} isn't the ledger that the statement quotes.",
            why="one of them was changed after training ended.",
            way_out="restore them as they were when training ended.",
        )
    return statement


def _with_audit(files: RunFolder, own: PrivacyStatement | None) -> PrivacyStatement:
    """This process's statement, with an audit that was attached since; else the folder's."""
    if own is None:
        return PrivacyStatement.load(files.folder)
    if not math.isfinite(own.plan.epsilon):  # such a one isn't written
        return own
    return replace(own, audit=PrivacyStatement.load(files.folder).audit)


@dataclass(frozen=True)
class CardOptions:
    """What the caller of ``create_model_card`` or ``push_to_hub`` says; HF's names.

    Attributes:
        model_name: Title of the card.
        finetuned_from: The base model's Hub id; by default read off the model.
        dataset: Hub ids of the data.
        dataset_tags: The same, and preferred: HF's scripts put a title into ``dataset``.
        tasks: The Hub's pipeline tag; by default read off the head.
        license: The Hub's license tag.
        language: The Hub's language code.
        tags: More tags.
        dataset_args: Taken for compatibility; a card quotes nothing of the data.
    """

    model_name: str | None = None
    finetuned_from: str | None = None
    dataset: str | Sequence[str] | None = None
    dataset_tags: str | Sequence[str] | None = None
    tasks: str | Sequence[str] | None = None
    license: str | None = None
    language: str | None = None
    tags: str | Sequence[str] | None = None
    dataset_args: str | Sequence[str] | None = None

    def facts(
        self, model: nn.Module, default_name: str, evaluation: Mapping[str, Any]
    ) -> CardFacts:
        """What the card says besides privacy: these options, the model and its evaluation."""
        config = getattr(unwrapped(model), "config", None)
        origin = self.finetuned_from or str(getattr(config, "_name_or_path", ""))
        tasks = _several(self.tasks)
        return CardFacts(
            model_name=self.model_name or default_name,
            base_model=origin if _is_hub_id(origin) else None,
            datasets=_several(self.dataset_tags) or _several(self.dataset),
            metrics=_quotable(evaluation),
            task=tasks[0] if tasks else _pipeline_tag(model),
            library="transformers" if model is unwrapped(model) else "peft",
            license=self.license,
            language=self.language,
            tags=_several(self.tags),
        )


def _several(value: str | Sequence[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _is_hub_id(origin: str) -> bool:
    """A path of the author's machine is nobody's business."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", origin) is not None and not Path(origin).exists()


def _quotable(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of held-out records; the Hub refuses a card with NaN or infinity in it."""
    metrics = evaluation_metrics(evaluation)
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _pipeline_tag(model: nn.Module) -> str | None:
    try:
        task = task_of(model)
    except UnsupportedTaskError:
        return None
    is_vision = hasattr(getattr(unwrapped(model), "config", None), "num_channels")
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

    def write_card(self, published: str | None = None) -> None:
        """Write the card; a README written by hand keeps everything but our section.

        Args:
            published: The text to start from, instead of the README that lies here.
        """
        existing = read_card(self.card_path) if published is None else published
        text = render_card(self.statement, self.facts, existing)
        self.card_path.write_text(text)

    def push(
        self,
        repo_id: str,
        *,
        token: str | None,
        private: bool | None,
        revision: str | None,
        message: str,
    ) -> Any:
        """One commit with everything in it; what was written by hand, here or there, is kept."""
        is_bare = is_ours_alone(read_card(self.card_path) or "")
        full_id = create_repository(repo_id, token=token, private=private)
        published = remote_readme(full_id, token=token, revision=revision)
        if published is not None and not is_bare and not is_ours_alone(published):
            logger.warning(
                "%s is pushed as it is here; what the README of %s said before is in its history.",
                self.card_path,
                full_id,
            )
        self.write_card(published if is_bare else None)
        with tempfile.TemporaryDirectory() as scratch:
            self._stage(Path(scratch))
            return push_folder(
                Path(scratch), full_id, token=token, revision=revision, message=message
            )

    def _stage(self, folder: Path) -> None:
        """Written afresh: whatever else lies in ``output_dir`` can't come along.

        Raises:
            PublishingError: If the model isn't one that others could load from a folder.
        """
        if not hasattr(self.model, "save_pretrained"):
            raise PublishingError(
                f"{type(self.model).__name__} can't be published: it has no save_pretrained.",
                why="the Hub gets a folder that from_pretrained can read again.",
                way_out="make it a transformers.PreTrainedModel, or give it "
                "huggingface_hub.PyTorchModelHubMixin.",
            )
        self.model.save_pretrained(folder)
        if self.model is not unwrapped(self.model):
            self._settle_adapter(folder)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        shutil.copyfile(self.card_path, folder / "README.md")
        self.statement.save(folder)

    def _settle_adapter(self, folder: Path) -> None:
        """Where readers look for it, and without the path that its base was loaded from."""
        # peft gives an adapter with a name of its own a folder of that name.
        own = folder / str(self.model.active_adapter)
        for path in own.iterdir() if own.is_dir() else ():
            path.replace(folder / path.name)
        config = folder / "adapter_config.json"
        fields = json.loads(config.read_text())
        fields["base_model_name_or_path"] = self.facts.base_model
        config.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
