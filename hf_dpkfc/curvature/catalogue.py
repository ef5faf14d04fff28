"""The probes by name, and the choice of one for a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_dpkfc.curvature.labels import LabelSpace
from hf_dpkfc.curvature.probes import (
    PinkNoiseProbe,
    Probe,
    PublicDataProbe,
    UniformTokenProbe,
    WhiteNoiseProbe,
    ZipfTokenProbe,
)
from hf_dpkfc.curvature.sampled import sampled_probe_for
from hf_dpkfc.curvature.structured import StructuredTokenProbe
from hf_dpkfc.curvature.words import WordTokenProbe
from hf_dpkfc.errors import ConfigurationError, ProbeError, UnsupportedTaskError
from hf_dpkfc.losses import unwrapped

# These read the weights of the model or of its checkpoint to choose their tokens: the card says so.
CHECKPOINT_PROBES = ("structured", "sampled")
TOKEN_PROBES = ("zipf", "uniform", "words", *CHECKPOINT_PROBES)
IMAGE_PROBES = ("pink", "white")
DATA_PROBES = ("public", "oracle")
PROBES = ("auto", *TOKEN_PROBES, *IMAGE_PROBES, *DATA_PROBES)


@dataclass(frozen=True)
class ProbeOptions:
    """What a probe looks like. Utility only, except "oracle", which voids the guarantee.

    Attributes:
        name: One of :data:`PROBES`; "auto" is Zipf for text and pink noise for images. "structured"
            and "sampled" read weights, see :data:`CHECKPOINT_PROBES`; "words" reads a public list
            of word frequencies.
        min_length: Shortest token sequence; None for the shortest possible.
        max_length: Longest token sequence; None for the model's and tokenizer's limit.
        pink_alpha: Amplitude falls as frequency^-pink_alpha.
        zipf_exponent: Probability falls as rank^-zipf_exponent; for "words", it grows as
            frequency^zipf_exponent.
        language: Of "words".
    """

    name: str = "auto"
    min_length: int | None = None
    max_length: int | None = None
    pink_alpha: float = 1.0
    zipf_exponent: float = 1.0
    language: str = "en"

    def __post_init__(self) -> None:
        if self.name not in PROBES:
            raise ConfigurationError(
                f"probe={self.name!r}.",
                why="there is no such probe.",
                way_out=f"choose one of {', '.join(PROBES)}.",
            )


def build_probe(
    options: ProbeOptions,
    model: nn.Module,
    processor: Any,
    *,
    records: Sequence[Any] | None = None,
    collate: Callable[[list[Any]], Mapping[str, Tensor]] | None = None,
    keeps_labels: bool = False,
) -> Probe:
    """The probe that the options name.

    Args:
        options: Its name and shape.
        model: Whose inputs and labels are imitated.
        processor: Tokenizer, image processor, or a processor that holds one.
        records: For "public" and "oracle": the records to draw from.
        collate: For "public" and "oracle": from records to model inputs.
        keeps_labels: For "public": labels that the records have are kept.

    Raises:
        ProbeError: If no synthetic input can be made for this model.
    """
    name = resolved(options.name, model, processor)
    if name in DATA_PROBES:
        return _data_probe(name, model, records, collate, keeps_labels)
    if name in TOKEN_PROBES:
        tokenizer = getattr(processor, "tokenizer", processor)
        if not hasattr(tokenizer, "get_vocab"):
            raise _no_processor(name, "tokenizer")
        shape: dict[str, Any] = {
            "min_length": options.min_length,
            "max_length": options.max_length,
        }
        if name == "uniform":
            return UniformTokenProbe.for_model(model, tokenizer, **shape)
        shape["exponent"] = options.zipf_exponent
        if name == "words":
            return WordTokenProbe.for_model(model, tokenizer, language=options.language, **shape)
        kind = sampled_probe_for(model) if name == "sampled" else _ZIPF_PROBES[name]
        return kind.for_model(model, tokenizer, **shape)
    image_processor = getattr(processor, "image_processor", processor)
    if name == "white":
        return WhiteNoiseProbe.for_model(model, image_processor, alpha=0.0)
    return PinkNoiseProbe.for_model(model, image_processor, alpha=options.pink_alpha)


_ZIPF_PROBES: dict[str, type[ZipfTokenProbe]] = {
    "zipf": ZipfTokenProbe,
    "structured": StructuredTokenProbe,
}


def resolved(name: str, model: nn.Module, processor: Any) -> str:
    """The probe's name, with what "auto" stands for.

    Raises:
        ProbeError: If nothing can be chosen for this model.
    """
    return _automatic(model, processor) if name == "auto" else name


def _automatic(model: nn.Module, processor: Any) -> str:
    main_input = getattr(unwrapped(model), "main_input_name", None)
    config = getattr(unwrapped(model), "config", None)
    if main_input == "pixel_values" or hasattr(config, "num_channels"):
        return "pink"
    if hasattr(getattr(processor, "tokenizer", processor), "get_vocab"):
        return "zipf"
    raise _no_processor("auto", "tokenizer or image processor")


def _data_probe(
    name: str,
    model: nn.Module,
    records: Sequence[Any] | None,
    collate: Callable[[list[Any]], Mapping[str, Tensor]] | None,
    keeps_labels: bool,
) -> PublicDataProbe:
    if records is None or collate is None:
        raise ConfigurationError(
            f"probe={name!r} without public_dataset.",
            why="there are no records to estimate the factors from.",
            way_out="pass public_dataset= to the trainer, or choose probe='auto'.",
        )
    try:
        labels = LabelSpace.of(model) if name == "public" else None
    except UnsupportedTaskError:  # a loss of the user's own: the records bring their labels
        labels = None
    return PublicDataProbe(records, collate, labels, keeps_labels)


def _no_processor(name: str, wanted: str) -> ProbeError:
    return ProbeError(
        f"probe={name!r} needs a {wanted}, and processing_class has none.",
        why="synthetic inputs are made from the checkpoint's own vocabulary or image size, never "
        "from the data.",
        way_out="pass the checkpoint's tokenizer or image processor as processing_class, or "
        "probe='public' with public_dataset=, or preconditioner='none'.",
    )
