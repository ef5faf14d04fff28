"""Synthetic labels for every head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_dpkfc.losses import IGNORED_LABEL, Task, task_of, unwrapped

# BERT's share of predicted tokens (Devlin et al. 2019, section 3.1).
MASKED_LM_RATE = 0.15


@dataclass(frozen=True)
class LabelSpace:
    """The label space of a head: what it predicts and among how many classes."""

    task: Task
    num_labels: int

    @classmethod
    def of(cls, model: nn.Module) -> LabelSpace:
        """The label space of a Hugging Face model's head."""
        return cls(task_of(model), int(getattr(unwrapped(model).config, "num_labels", 1)))

    def draw(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """Labels of whole examples: uniform classes, fair coins, standard normals."""
        if self.task is Task.MULTI_LABEL:
            coins = torch.randint(2, (batch_size, self.num_labels), generator=generator)
            return coins.float()
        if self.task is Task.REGRESSION:
            values = torch.randn(batch_size, self.num_labels, generator=generator)
            return values.squeeze(1) if self.num_labels == 1 else values
        return torch.randint(self.num_labels, (batch_size,), generator=generator)

    def draw_for_tokens(
        self, input_ids: Tensor, payload: Tensor, mask_id: int | None, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Labels for token sequences, and the inputs where labelling changes them.

        Args:
            input_ids: [batch, position].
            payload: True where a position holds neither padding nor a special token.
            mask_id: The tokenizer's mask token, if it has one.
            generator: Public randomness.
        """
        if self.task is Task.TOKEN_LABEL:
            labels = torch.randint(self.num_labels, input_ids.shape, generator=generator)
            return {"labels": labels.masked_fill(~payload, IGNORED_LABEL)}
        if self.task is Task.CAUSAL_LM:  # tokens are drawn independently: the next one is a label
            return {"labels": input_ids.masked_fill(~payload, IGNORED_LABEL)}
        if self.task is Task.MASKED_LM:
            return _masked_lm(input_ids, payload, mask_id, generator)
        if self.task is Task.SPAN:
            ends = _ordered_pairs(payload, generator)
            return {"start_positions": ends[:, 0], "end_positions": ends[:, 1]}
        return {"labels": self.draw(len(input_ids), generator)}

    def draw_from_model(
        self, outputs: Any, inputs: Mapping[str, Tensor], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Labels from the model's own predictive distribution: the true Fisher's expectation."""
        if self.task is Task.SPAN:
            return {
                "start_positions": _categorical(outputs.start_logits, generator),
                "end_positions": _categorical(outputs.end_logits, generator),
            }
        logits = outputs.logits.detach().float().cpu()
        if self.task is Task.MULTI_LABEL:
            return {"labels": torch.bernoulli(logits.sigmoid(), generator=generator)}
        if self.task is Task.REGRESSION:
            noise = torch.randn(logits.shape, generator=generator)
            return {"labels": (logits + noise).view_as(inputs["labels"])}
        labels = _categorical(logits, generator)
        if self.task is Task.CAUSAL_LM:  # logits at t predict the token at t + 1
            labels = torch.nn.functional.pad(labels[:, :-1], (1, 0))
        return {
            "labels": labels.masked_fill(inputs["labels"].cpu() == IGNORED_LABEL, IGNORED_LABEL)
        }


def _categorical(logits: Tensor, generator: torch.Generator) -> Tensor:
    probabilities = logits.detach().float().cpu().softmax(-1)
    flat = torch.multinomial(probabilities.flatten(0, -2), 1, generator=generator)
    return flat.view(probabilities.shape[:-1])


def _masked_lm(
    input_ids: Tensor, payload: Tensor, mask_id: int | None, generator: torch.Generator
) -> dict[str, Tensor]:
    scores = torch.rand(input_ids.shape, generator=generator).masked_fill(~payload, 2.0)
    first = torch.zeros_like(payload).scatter_(1, scores.argmin(1, keepdim=True), True)
    chosen = ((scores < MASKED_LM_RATE) | first) & payload
    labels = input_ids.masked_fill(~chosen, IGNORED_LABEL)
    masked = input_ids if mask_id is None else input_ids.masked_fill(chosen, mask_id)
    return {"input_ids": masked, "labels": labels}


def _ordered_pairs(payload: Tensor, generator: torch.Generator) -> Tensor:
    """Two payload positions of each example in order, [batch, 2]."""
    weights = payload.float() + 1e-30  # an example without payload still needs an answer
    return torch.multinomial(weights, 2, replacement=True, generator=generator).sort(1).values
