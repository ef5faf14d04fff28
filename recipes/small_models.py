"""The small networks of the paper's studies besides its CNN: an MLP and a two-block ViT."""

from __future__ import annotations

from paper_cnn import PaperCNNConfig, PaperCNNForImageClassification
from torch import Tensor, nn
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)
from transformers.modeling_outputs import ImageClassifierOutput


class MLPConfig(PretrainedConfig):
    """Image size and channels; the pink-noise probe reads them."""

    model_type = "figures-mlp"

    def __init__(self, image_size: int = 28, num_channels: int = 1, **kwargs) -> None:
        super().__init__(**kwargs)
        self.image_size = image_size
        self.num_channels = num_channels


class MLPForImageClassification(PreTrainedModel):
    """Pixels → 128 → 64 → labels, ReLU."""

    config_class = MLPConfig
    main_input_name = "pixel_values"

    def __init__(self, config: MLPConfig) -> None:
        super().__init__(config)
        self.layers = nn.Sequential(
            nn.Linear(config.num_channels * config.image_size**2, 128),
            nn.ReLU(),
            nn.Linear(128, 64),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(64, config.num_labels)
        self.post_init()

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        """Logits; the loss of each example is the library's business."""
        return ImageClassifierOutput(logits=self.classifier(self.layers(pixel_values.flatten(1))))

    def _init_weights(self, module: nn.Module) -> None:
        """Torch's own initialisation stands."""


def build(name: str, *, image_size: int = 28, num_channels: int = 1, seed: int = 0) -> nn.Module:
    """mlp, cnn or vit with ten labels; the same seed gives the same weights."""
    set_seed(seed)
    shape = {"image_size": image_size, "num_channels": num_channels, "num_labels": 10}
    if name == "mlp":
        return MLPForImageClassification(MLPConfig(**shape))
    if name == "cnn":
        return PaperCNNForImageClassification(PaperCNNConfig(**shape))
    # The paper's ViT: 2 blocks, 4 heads, width 64 (appendix "Extension to Attention").
    config = ViTConfig(
        **shape,
        patch_size=image_size // 4,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
    )
    return ViTForImageClassification(config)
