"""Synthetic inputs: what the network is shown instead of data.

A probe is a frozen description from which batches are drawn with public randomness. None of these
classes can see a training set: they are built from a tokenizer or an image size, and from the
model's configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from hf_dpkfc.curvature.labels import LabelSpace
from hf_dpkfc.curvature.vocabulary import ranked_payload_ids
from hf_dpkfc.errors import ConfigurationError, ProbeError
from hf_dpkfc.losses import Task, unwrapped

Batch = dict[str, Tensor]
# (sizes, generator) -> tokens for sequences of these sizes, special tokens not counted.
PayloadDrawer = Callable[[list[int], torch.Generator], list[list[int]]]

# The paper's sequence length (appendix "Experimental Details"): what a probe is at most by default.
DEFAULT_MAX_LENGTH = 128


class Probe(Protocol):
    """A source of synthetic batches."""

    is_data_free: ClassVar[bool]

    @property
    def labels(self) -> LabelSpace | None:
        """The head's label space; None where the records bring their own labels."""
        ...

    def batches(
        self, num_batches: int, batch_size: int, generator: torch.Generator
    ) -> Iterator[Batch]:
        """Batches of model inputs with labels, drawn with public randomness."""
        ...


@dataclass(frozen=True)
class SequenceTemplate:
    """Where a tokenizer puts its special tokens, padding and segments.

    Attributes:
        fixed: The special tokens around the payloads: before, (between,) after.
        segments: token_type_id of each part in order of appearance: fixed, payload, fixed, ...
        pad_id: None where the tokenizer can't pad; a batch then has one length.
        pads_left: Which side is padded.
        mask_id: The mask token, if any.
        names: The inputs that the model wants.
    """

    fixed: tuple[tuple[int, ...], ...]
    segments: tuple[int, ...]
    pad_id: int | None
    pads_left: bool
    mask_id: int | None
    names: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: Any, *, pair: bool = False) -> SequenceTemplate:
        """Ask the tokenizer by letting it encode one letter, alone or as a pair."""
        texts = ("a", "b") if pair else ("a",)
        payloads = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        encoded = tokenizer(*texts, return_token_type_ids=True)
        ids, types = list(encoded["input_ids"]), list(encoded["token_type_ids"])
        fixed, segments, start = [], [], 0
        for payload in payloads:
            at = _find(ids, payload, start)
            fixed.append(tuple(ids[start:at]))
            segments += [types[start] if at > start else 0, types[at]]
            start = at + len(payload)
        fixed.append(tuple(ids[start:]))
        segments.append(types[start] if start < len(ids) else 0)
        return cls(
            fixed=tuple(fixed),
            segments=tuple(segments),
            pad_id=tokenizer.pad_token_id,
            pads_left=tokenizer.padding_side == "left",
            mask_id=tokenizer.mask_token_id,
            names=tuple(tokenizer.model_input_names),
        )

    @property
    def num_fixed(self) -> int:
        """Special tokens per sequence."""
        return sum(map(len, self.fixed))

    @property
    def num_payloads(self) -> int:
        """1 for single sequences, 2 for pairs."""
        return len(self.fixed) - 1

    def fill(self, payload: Sequence[int]) -> tuple[list[int], list[int], list[bool]]:
        """Ids, segment ids and payload marks of one sequence holding the given tokens."""
        size = -(-len(payload) // self.num_payloads)
        parts = [payload[i * size : (i + 1) * size] for i in range(self.num_payloads)]
        ids, types, marks = list(self.fixed[0]), [self.segments[0]] * len(self.fixed[0]), []
        marks = [False] * len(ids)
        for i, part in enumerate(parts):
            after = self.fixed[i + 1]
            ids += [*part, *after]
            types += [self.segments[2 * i + 1]] * len(part) + [self.segments[2 * i + 2]] * len(
                after
            )
            marks += [True] * len(part) + [False] * len(after)
        return ids, types, marks


def _find(ids: list[int], part: list[int], start: int) -> int:
    for at in range(start, len(ids) - len(part) + 1):
        if ids[at : at + len(part)] == part:
            return at
    raise ProbeError(
        f"The tokenizer's encoding {ids} doesn't contain its own payload {part}.",
        why="the places of its special tokens can't be read off.",
        way_out="pass probe='public' with a public_dataset.",
    )


def draw_categories(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Indices drawn with these relative weights, float64.

    Inverse transform: multinomial has a limit of 2^24 categories and is slower.
    """
    cumulative = weights.cumsum(0)
    uniform = torch.rand(count, generator=generator, dtype=torch.float64) * cumulative[-1]
    return torch.searchsorted(cumulative, uniform, right=True).clamp(max=len(weights) - 1)


def payload_ids_of(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that this model can embed and that may stand in a probe, commonest first."""
    vocab_size = getattr(unwrapped(model).config, "vocab_size", None)
    return tuple(ranked_payload_ids(tokenizer, vocab_size))


def length_limits(
    model: nn.Module,
    tokenizer: Any,
    template: SequenceTemplate,
    min_length: int | None,
    max_length: int | None,
) -> tuple[int, int]:
    """The given lengths, or the limits of tokenizer, model and :data:`DEFAULT_MAX_LENGTH`."""
    shortest = template.num_fixed + template.num_payloads
    limits = [DEFAULT_MAX_LENGTH, tokenizer.model_max_length]
    limits += [n for n in [getattr(unwrapped(model).config, "max_position_embeddings", None)] if n]
    longest = int(min(limits)) if max_length is None else max_length
    return min(shortest + 1, longest) if min_length is None else min_length, longest


@dataclass(frozen=True)
class ZipfTokenProbe:
    """Sequences of tokens drawn by Zipf's law (Alg. 4, with the frequency weights of section 4.2).

    Attributes:
        template: Special tokens, padding and segments.
        payload_ids: Admissible tokens, commonest first.
        labels: The head's label space.
        min_length: Shortest sequence, special tokens included.
        max_length: Longest sequence, special tokens included.
        exponent: p(rank) ∝ rank^-exponent; 0 is the uniform law.
    """

    template: SequenceTemplate
    payload_ids: tuple[int, ...]
    labels: LabelSpace
    min_length: int
    max_length: int
    exponent: float = 1.0
    is_data_free: ClassVar[bool] = True

    def __post_init__(self) -> None:
        shortest = self.template.num_fixed + self.template.num_payloads
        if not shortest <= self.min_length <= self.max_length:
            raise ConfigurationError(
                f"probe_min_length={self.min_length}, probe_max_length={self.max_length}.",
                why=f"a sequence needs its special tokens and a payload, {shortest} tokens, and "
                "lengths are drawn between the two.",
                way_out=f"choose {shortest} ≤ probe_min_length ≤ probe_max_length.",
            )

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        tokenizer: Any,
        *,
        min_length: int | None = None,
        max_length: int | None = None,
        pair: bool = False,
        exponent: float = 1.0,
    ) -> Self:
        """A probe for this model and tokenizer; lengths come from their limits, never from data."""
        template = SequenceTemplate.of(tokenizer, pair=pair)
        lengths = length_limits(model, tokenizer, template, min_length, max_length)
        payload_ids = payload_ids_of(model, tokenizer)
        own = cls._own_fields(model, tokenizer, payload_ids)
        return cls(template, payload_ids, LabelSpace.of(model), *lengths, exponent, **own)

    @classmethod
    def _own_fields(
        cls, model: nn.Module, tokenizer: Any, payload_ids: tuple[int, ...]
    ) -> dict[str, Any]:
        """What a subclass has besides these fields."""
        return {}

    def batches(
        self, num_batches: int, batch_size: int, generator: torch.Generator
    ) -> Iterator[Batch]:
        """Batches of similar lengths: all lengths are drawn first and sorted, to pad little."""
        total = num_batches * batch_size
        lengths = torch.randint(self.min_length, self.max_length + 1, (total,), generator=generator)
        if self.template.pad_id is None:
            lengths = lengths[::batch_size].repeat_interleave(batch_size)
        draw = self._drawer()
        for chunk in lengths.sort().values.split(batch_size):
            sizes = (chunk - self.template.num_fixed).tolist()
            yield self._batch(draw(sizes, generator), generator)

    def _batch(self, payloads: list[list[int]], generator: torch.Generator) -> Batch:
        inputs, payload = self._filled(payloads)
        return inputs | self.labels.draw_for_tokens(
            inputs["input_ids"], payload, self.template.mask_id, generator
        )

    def _filled(self, payloads: list[list[int]]) -> tuple[Batch, Tensor]:
        """Model inputs around the payloads, and where the payloads stand."""
        rows = [self.template.fill(part) for part in payloads]
        lengths = [len(row[0]) for row in rows]
        width, pad = max(lengths), self.template.pad_id or 0
        inputs: Batch = {"input_ids": self._pad([row[0] for row in rows], width, pad)}
        if "attention_mask" in self.template.names:
            inputs["attention_mask"] = self._pad([[1] * n for n in lengths], width, 0)
        if "token_type_ids" in self.template.names:
            inputs["token_type_ids"] = self._pad([row[1] for row in rows], width, 0)
        return inputs, self._pad([row[2] for row in rows], width, False)

    def _drawer(self) -> PayloadDrawer:
        """What draws payloads, prepared once for all batches of a call."""
        return lambda sizes, generator: [
            part.tolist() for part in self._draw_tokens(sum(sizes), generator).split(sizes)
        ]

    def _draw_tokens(self, count: int, generator: torch.Generator) -> Tensor:
        ranks = torch.arange(1, len(self.payload_ids) + 1, dtype=torch.float64)
        at = draw_categories(ranks.pow(-self.exponent), count, generator)
        return torch.tensor(self.payload_ids)[at]

    def _pad(self, rows: list[list[Any]], width: int, value: Any) -> Tensor:
        left = self.template.pads_left
        padded = [
            [value] * (width - len(row)) + row if left else row + [value] * (width - len(row))
            for row in rows
        ]
        return torch.tensor(padded)


@dataclass(frozen=True)
class UniformTokenProbe(ZipfTokenProbe):
    """Sequences of tokens drawn uniformly (Alg. 4 to the letter)."""

    exponent: float = 0.0

    @classmethod
    def for_model(cls, model: nn.Module, tokenizer: Any, **options: Any) -> UniformTokenProbe:
        """As for Zipf, with exponent 0."""
        return super().for_model(model, tokenizer, **{**options, "exponent": 0.0})


@dataclass(frozen=True)
class PinkNoiseProbe:
    """Images whose amplitude falls with spatial frequency f as f^-alpha (Alg. 3).

    The power spectrum falls with slope -2·alpha. Each image has the given mean and standard
    deviation; 0 and 1 are those of normalised ``pixel_values``.
    """

    height: int
    width: int
    channels: int
    labels: LabelSpace
    alpha: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    is_data_free: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if min(self.height, self.width, self.channels) < 1 or self.height * self.width < 2:
            raise ProbeError(
                f"Images of {self.channels} channels, {self.height}×{self.width} pixels.",
                why="noise needs at least one channel and two pixels to have a spectrum.",
                way_out="give num_channels and image_size in the model's configuration, or a "
                "positive height, width and channels.",
            )

    @classmethod
    def for_model(
        cls, model: nn.Module, image_processor: Any = None, *, alpha: float = 1.0
    ) -> PinkNoiseProbe:
        """A probe of the model's image size, in the processor's scale.

        A processor that normalises gives zero mean and unit deviation; one that doesn't leaves
        pixels around its ``image_mean`` and ``image_std``.
        """
        config = unwrapped(model).config
        height, width = _image_size(config, image_processor)
        channels = getattr(config, "num_channels", 0)
        scale: dict[str, Any] = {}
        if image_processor is not None and not getattr(image_processor, "do_normalize", True):
            scale["mean"] = tuple(image_processor.image_mean or (0.5,))
            scale["std"] = tuple(image_processor.image_std or (0.25,))
        return cls(height, width, channels, LabelSpace.of(model), alpha=alpha, **scale)

    def batches(
        self, num_batches: int, batch_size: int, generator: torch.Generator
    ) -> Iterator[Batch]:
        """Batches of pixel_values with labels."""
        for _ in range(num_batches):
            pixel_values = self._images(batch_size, generator)
            yield {"pixel_values": pixel_values, "labels": self.labels.draw(batch_size, generator)}

    def _images(self, batch_size: int, generator: torch.Generator) -> Tensor:
        white = torch.randn(batch_size, self.channels, self.height, self.width, generator=generator)
        colored = torch.fft.ifft2(torch.fft.fft2(white) * self._amplitude()).real
        centred = colored - colored.mean((1, 2, 3), keepdim=True)
        unit = centred / centred.std((1, 2, 3), keepdim=True).clamp(min=1e-12)
        return unit * torch.tensor(self.std).view(1, -1, 1, 1) + torch.tensor(self.mean).view(
            1, -1, 1, 1
        )

    def _amplitude(self) -> Tensor:
        """f^-alpha on the grid of frequencies in cycles per pixel; nothing at f = 0."""
        f_y, f_x = torch.fft.fftfreq(self.height), torch.fft.fftfreq(self.width)
        radius = (f_y[:, None].square() + f_x.square()).sqrt()
        amplitude = radius.clamp(min=1e-12).pow(-self.alpha)
        amplitude[0, 0] = 0.0
        return amplitude


@dataclass(frozen=True)
class WhiteNoiseProbe(PinkNoiseProbe):
    """Images of independent pixels: pink noise with a flat spectrum."""

    alpha: float = 0.0


def _image_size(config: Any, image_processor: Any) -> tuple[int, int]:
    """The processor's, which is what the model will see; a model may take several sizes."""
    size = _processed_size(image_processor) or getattr(config, "image_size", None)
    if size is None:
        raise ProbeError(
            f"{type(config).__name__} has no image_size and no image processor was given.",
            why="the size of a noise image must come from the model, never from the data.",
            way_out="pass the checkpoint's image processor as processing_class, or set "
            "config.image_size.",
        )
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _processed_size(image_processor: Any) -> tuple[int, int] | None:
    """Height and width after cropping or resizing; None where the processor does neither."""
    crops = getattr(image_processor, "do_center_crop", True)
    crop = getattr(image_processor, "crop_size", None) if crops else None
    given = crop or getattr(image_processor, "size", None)
    if not given:
        return None
    edge = given.get("shortest_edge")
    height, width = given.get("height") or edge, given.get("width") or edge
    return (int(height), int(width)) if height and width else None


@dataclass(frozen=True)
class PublicDataProbe:
    """Batches of a public data set through the user's collator.

    Not data-free: the factors see these records, so they must be public. Labels are synthetic
    where ``labels`` is given, since a public set's labels rarely mean what the head predicts.

    Attributes:
        dataset: Public records.
        collate: From records to model inputs.
        labels: The head's label space; None for the records' own labels.
        keeps_labels: Labels that records do have are kept: a user's own loss knows what they mean.
    """

    dataset: Sequence[Any]
    collate: Callable[[list[Any]], Mapping[str, Tensor]]
    labels: LabelSpace | None = None
    keeps_labels: bool = False
    is_data_free: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if len(self.dataset) == 0:
            raise ProbeError(
                "public_dataset is empty.",
                why="there is nothing to estimate the factors from.",
                way_out="pass a public data set with at least one record, or probe='auto'.",
            )

    def batches(
        self, num_batches: int, batch_size: int, generator: torch.Generator
    ) -> Iterator[Batch]:
        """Batches of records drawn with replacement."""
        for _ in range(num_batches):
            at = torch.randint(len(self.dataset), (batch_size,), generator=generator)
            inputs = dict(self.collate([self.dataset[i] for i in at.tolist()]))
            if self.labels is not None and not self._keeps_labels(inputs):
                inputs |= self._relabelled(inputs, generator)
            yield inputs

    def _keeps_labels(self, inputs: Mapping[str, Tensor]) -> bool:
        """A language model's labels are the text itself, which the collator may have masked."""
        assert self.labels is not None
        is_language = self.labels.task in (Task.MASKED_LM, Task.CAUSAL_LM)
        keeps = self.keeps_labels or is_language
        return "labels" in inputs and (keeps or inputs["labels"].dim() > 2)

    def _relabelled(self, inputs: Mapping[str, Tensor], generator: torch.Generator) -> Batch:
        assert self.labels is not None
        if "input_ids" not in inputs:
            return {"labels": self.labels.draw(len(next(iter(inputs.values()))), generator)}
        ids = inputs["input_ids"].cpu()  # where the generator is
        payload = inputs.get("attention_mask", torch.ones_like(ids)).cpu().bool()
        return self.labels.draw_for_tokens(ids, payload, None, generator)
