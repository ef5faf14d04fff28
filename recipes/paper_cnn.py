"""The paper's CNN (Appendix, "Simple Vision"): two convolutions, two linear layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput


class PaperCNNConfig(PretrainedConfig):
    """Image size and channels; the pink-noise probe reads them."""

    model_type = "paper-cnn"

    def __init__(self, image_size: int = 28, num_channels: int = 1, **kwargs) -> None:
        super().__init__(**kwargs)
        self.image_size = image_size
        self.num_channels = num_channels


class PaperCNNForImageClassification(PreTrainedModel):
    """Conv 16 and 32 (3×3, padding 1, ReLU, 2×2 max pooling), then 1568 → 128 → labels at 28×28."""

    config_class = PaperCNNConfig
    main_input_name = "pixel_values"

    def __init__(self, config: PaperCNNConfig) -> None:
        super().__init__(config)
        self.conv1 = nn.Conv2d(config.num_channels, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.hidden = nn.Linear(32 * (config.image_size // 4) ** 2, 128)
        self.classifier = nn.Linear(128, config.num_labels)
        self.post_init()

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        """Logits, and the mean loss for HF's evaluation; training takes each example's own."""
        features = _pooled(self.conv2(_pooled(self.conv1(pixel_values))))
        hidden = self.hidden(features.flatten(1)).relu()
        logits = self.classifier(hidden)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)

    def _init_weights(self, module: nn.Module) -> None:
        """Torch's own initialisation stands."""


def _pooled(x: Tensor) -> Tensor:
    """2×2 max pooling of ReLU.

    Pooling first gives the same numbers on a quarter of the pixels, and with channels last torch
    pools several times faster.
    """
    return F.max_pool2d(x.contiguous(memory_format=torch.channels_last), 2).relu()
