"""Probes that a language model says itself: no text but what its weights remember.

A model with a language-model head speaks for itself: at step 0 its weights are a public
checkpoint's; later ones are private already, so what is sampled from them is post-processing, like
every other use of them. For a model with another head its public checkpoint speaks, once, with the
head that it was pre-trained with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
)

from hf_dpkfc.curvature.fit import probing
from hf_dpkfc.curvature.labels import LabelSpace
from hf_dpkfc.curvature.probes import PayloadDrawer, ZipfTokenProbe
from hf_dpkfc.errors import ProbeError
from hf_dpkfc.losses import Task, task_of, unwrapped

# Each half of the positions is drawn once, given the other half. Two passes over 640 probes of half
# the length on average are 640 forward passes at full length; a training step of 256 examples is
# worth 768, its backward pass counted twice.
GIBBS_PARTS = 2
# What a checkpoint says before training; 320 sequences in two passes at full length cost less than
# one training step of 256 examples.
NUM_SAID, SAID_AT_ONCE = 320, 64
SPEAKING = (Task.CAUSAL_LM, Task.MASKED_LM)
HEADS = {
    AutoModelForMaskedLM: MODEL_FOR_MASKED_LM_MAPPING,
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
}
PRETRAINED = ("LM", "Model", "ForPreTraining")  # how classes of pre-trained checkpoints end


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
        if self.labels.task not in SPEAKING:
            raise _speechless(f"a head for {self.labels.task}")
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

    def said(self, count: int, generator: torch.Generator) -> tuple[tuple[int, ...], ...]:
        """Payloads of the greatest length."""
        draw, size = self._drawer(), self.max_length - self.template.num_fixed
        sizes = [size] * count
        starts = range(0, count, SAID_AT_ONCE)
        parts = (draw(sizes[at : at + SAID_AT_ONCE], generator) for at in starts)
        return tuple(tuple(row) for part in parts for row in part)

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


@dataclass(frozen=True)
class CheckpointTokenProbe(ZipfTokenProbe):
    """Beginnings of sequences that the public checkpoint said before training.

    The same ones at every refresh: the checkpoint doesn't change, so they are drawn once, with
    public randomness, and its language model is let go.

    Attributes:
        said: Payloads of the greatest length.
    """

    said: tuple[tuple[int, ...], ...] = field(kw_only=True, repr=False)
    is_data_free: ClassVar[bool] = True

    @classmethod
    def for_model(cls, model: nn.Module, tokenizer: Any, **options: Any) -> CheckpointTokenProbe:
        """What the checkpoint of this model says; lengths as for Zipf."""
        speaker = SampledTokenProbe.for_model(language_model_behind(model), tokenizer, **options)
        return cls(
            speaker.template,
            speaker.payload_ids,
            LabelSpace.of(model),
            speaker.min_length,
            speaker.max_length,
            speaker.exponent,
            said=speaker.said(NUM_SAID, torch.Generator().manual_seed(0)),
        )

    def _drawer(self) -> PayloadDrawer:
        def draw(sizes: list[int], generator: torch.Generator) -> list[list[int]]:
            at = torch.randint(len(self.said), (len(sizes),), generator=generator).tolist()
            return [list(self.said[i][:size]) for i, size in zip(at, sizes, strict=True)]

        return draw


def sampled_probe_for(model: nn.Module) -> type[ZipfTokenProbe]:
    """Who speaks: the model itself, or the checkpoint that it was made from."""
    return SampledTokenProbe if task_of(model) in SPEAKING else CheckpointTokenProbe


def language_model_behind(model: nn.Module) -> nn.Module:
    """The model's checkpoint, frozen, with the language-model head that it was pre-trained with.

    Raises:
        ProbeError: If there is no checkpoint, it can't be read, or it holds no such head.
    """
    config: Any = unwrapped(model).config
    name = config._name_or_path
    if not name:
        raise _speechless(f"a head for {task_of(model)} and no checkpoint behind it")
    try:
        revision = getattr(config, "_commit_hash", None) or "main"
        speaker = _with_language_model_head(name, revision)
    except OSError as error:
        raise _speechless(f"the checkpoint {name}, which can't be read ({error})") from error
    if speaker is None:
        raise _speechless(f"the checkpoint {name}")
    return speaker.to(next(model.parameters()).device).requires_grad_(False)


def _with_language_model_head(name: str, revision: str) -> Any:
    """A checkpoint under its own language-model head; None where its weights hold none.

    A checkpoint that was saved with another head has been trained on something since.
    """
    config = AutoConfig.from_pretrained(name, revision=revision)
    is_pretrained = all(a.endswith(PRETRAINED) for a in config.architectures or ())
    for head, configs in HEADS.items():
        if is_pretrained and not config.is_encoder_decoder and type(config) in configs:
            with torch.random.fork_rng(devices=[]):  # a missing head would be drawn at random
                speaker, info = head.from_pretrained(
                    name, revision=revision, output_loading_info=True
                )
            if not info["missing_keys"]:
                return speaker
    return None


def _speechless(what: str) -> ProbeError:
    return ProbeError(
        f"probe='sampled' with {what}.",
        why="sequences are drawn from a language-model head, and there is none.",
        way_out="load the model from a checkpoint that was pre-trained as a language model, or "
        "choose probe='auto'.",
    )
