"""Probes that a language model says itself: no text but what its weights remember.

The weights at step 0 are a public checkpoint's; later ones are private already, so what is
sampled from them is post-processing, like every other use of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_dpkfc.curvature.fit import probing
from hf_dpkfc.curvature.probes import PayloadDrawer, ZipfTokenProbe
from hf_dpkfc.errors import ProbeError
from hf_dpkfc.losses import Task

# Each half of the positions is drawn once, given the other half. Two passes over 640 probes of half
# the length on average are 640 forward passes at full length; a training step of 256 examples is
# worth 768, its backward pass counted twice.
GIBBS_PARTS = 2


@dataclass(frozen=True)
class SampledTokenProbe(ZipfTokenProbe):
    """Sequences drawn from the model's own language-model head.

    A causal model is sampled token by token from its beginning-of-sequence tokens (from a first
    token by Zipf's law where it has none), a masked one by a Gibbs sweep over a Zipf sequence.
    Special tokens are never drawn.

    Attributes:
        model: The language model, at whatever weights it has when batches are drawn.
    """

    model: nn.Module = field(kw_only=True, repr=False, compare=False)
    is_data_free: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels.task not in (Task.CAUSAL_LM, Task.MASKED_LM):
            raise ProbeError(
                f"probe='sampled' with a head for {self.labels.task}.",
                why="sequences are drawn from a language-model head, and this model has none.",
                way_out="choose probe='auto'.",
            )
        if self.labels.task is Task.MASKED_LM and self.template.mask_id is None:
            raise ProbeError(
                "probe='sampled' with a masked language model whose tokenizer has no mask token.",
                why="a position is drawn by masking it.",
                way_out="pass the checkpoint's own tokenizer, or choose probe='auto'.",
            )

    @classmethod
    def _own_fields(
        cls, model: nn.Module, tokenizer: Any, payload_ids: tuple[int, ...]
    ) -> dict[str, Any]:
        return {"model": model}

    def _drawer(self) -> PayloadDrawer:
        zipf = super()._drawer()

        def draw(sizes: list[int], generator: torch.Generator) -> list[list[int]]:
            with probing(self.model), torch.no_grad():
                if self.labels.task is Task.MASKED_LM:
                    return self._gibbs(zipf(sizes, generator), generator)
                drawn = self._ancestral(len(sizes), max(sizes), generator)
            return [row[:size] for row, size in zip(drawn, sizes, strict=True)]

        return draw

    def _ancestral(self, count: int, size: int, generator: torch.Generator) -> list[list[int]]:
        """Each token given all before it."""
        start = torch.tensor(self.template.fixed[0], dtype=torch.long).expand(count, -1)
        drawn = [] if start.shape[1] else [self._draw_tokens(count, generator)]
        step, past = (start if start.shape[1] else drawn[0][:, None]), None
        while len(drawn) < size:
            outputs = self.model(
                input_ids=step.to(self._device), past_key_values=past, use_cache=True
            )
            past = outputs.past_key_values
            drawn.append(self._categorical(outputs.logits[:, -1], generator))
            step = drawn[-1][:, None]
        return torch.stack(drawn, 1).tolist()

    def _gibbs(self, payloads: list[list[int]], generator: torch.Generator) -> list[list[int]]:
        """Each part of the positions given the others, in parallel."""
        inputs, payload = self._filled(payloads)
        ids = inputs.pop("input_ids")
        part = torch.randint(GIBBS_PARTS, ids.shape, generator=generator)
        for number in range(GIBBS_PARTS):
            chosen = payload & (part == number)
            masked = ids.masked_fill(chosen, self.template.mask_id or 0)
            moved = {name: value.to(self._device) for name, value in inputs.items()}
            logits = self.model(input_ids=masked.to(self._device), **moved).logits
            ids[chosen] = self._categorical(logits[chosen.to(self._device)], generator)
        return [row[keep].tolist() for row, keep in zip(ids, payload, strict=True)]

    def _categorical(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """One admissible token per row of logits [n, vocabulary]."""
        payload_ids = torch.tensor(self.payload_ids)
        admissible = logits.float().cpu()[:, payload_ids].softmax(-1)
        return payload_ids[torch.multinomial(admissible, 1, generator=generator).squeeze(1)]

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device
