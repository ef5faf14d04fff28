"""Tiny models built from configurations, with inputs and single-example views: all offline."""

from __future__ import annotations

import torch
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.modeling_outputs import ImageClassifierOutput

VOCABULARY = 60
BATCH = 4
LENGTH = 9

_BERT_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "num_labels": 3,
}


class CNNConfig(PretrainedConfig):
    model_type = "tiny-cnn"

    def __init__(self, image_size=10, num_channels=2, **kwargs):
        super().__init__(**kwargs)
        self.image_size = image_size
        self.num_channels = num_channels


class CNNForImageClassification(PreTrainedModel):
    """Strides, dilation, groups, 'same' padding, in-place activations, GroupNorm."""

    config_class = CNNConfig

    def __init__(self, config):
        super().__init__(config)
        self.body = nn.Sequential(
            nn.Conv2d(config.num_channels, 8, 3, stride=2, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 12, 3, padding="same", dilation=2, groups=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(12, 6, 2, bias=False, padding_mode="circular", padding=1),
            nn.AdaptiveAvgPool2d(2),
        )
        self.head = nn.Linear(24, config.num_labels)
        self.post_init()

    def forward(self, pixel_values, labels=None):
        return ImageClassifierOutput(logits=self.head(self.body(pixel_values).flatten(1)))

    def _init_weights(self, module):
        pass


def build(name: str) -> nn.Module:
    """A tiny model by name, seeded, in eval mode, in float64."""
    torch.manual_seed(0)
    return _BUILDERS[name]().double().eval()


_BUILDERS = {
    "bert": lambda: BertForSequenceClassification(BertConfig(**_BERT_LIKE)),
    "bert-mlm": lambda: BertForMaskedLM(BertConfig(**_BERT_LIKE)),
    "albert": lambda: AlbertForSequenceClassification(AlbertConfig(**_BERT_LIKE, embedding_size=8)),
    "distilbert": lambda: DistilBertForSequenceClassification(
        DistilBertConfig(
            vocab_size=VOCABULARY,
            dim=16,
            n_layers=2,
            n_heads=2,
            hidden_dim=24,
            max_position_embeddings=32,
            num_labels=3,
        )
    ),
    "roberta": lambda: RobertaForSequenceClassification(RobertaConfig(**_BERT_LIKE)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=32,
            bos_token_id=1,
            eos_token_id=2,
        )
    ),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=24,
            max_position_embeddings=32,
        )
    ),
    "vit": lambda: ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=4,
            num_channels=2,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            num_labels=3,
        )
    ),
    "cnn": lambda: CNNForImageClassification(CNNConfig(num_labels=3)),
}
NAMES = tuple(_BUILDERS)
_IMAGE_SHAPES = {"vit": (2, 8, 8), "cnn": (2, 10, 10)}
_TOKEN_LABELS = {"bert-mlm", "gpt2", "llama"}


def inputs_for(name: str, batch: int = BATCH, seed: int = 1) -> dict[str, torch.Tensor]:
    """A batch with ragged right padding for text, images for vision."""
    generator = torch.Generator().manual_seed(seed)
    if name in _IMAGE_SHAPES:
        pixels = torch.randn(batch, *_IMAGE_SHAPES[name], generator=generator).double()
        return {"pixel_values": pixels, "labels": torch.arange(batch) % 3}
    ids = torch.randint(5, VOCABULARY, (batch, LENGTH), generator=generator)
    lengths = LENGTH - torch.arange(batch) % 4
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    ids = ids.masked_fill(mask == 0, 1)
    labels = ids.masked_fill(mask == 0, -100) if name in _TOKEN_LABELS else torch.arange(batch) % 3
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def singles(inputs: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The same examples, each as a batch of one."""
    size = len(next(iter(inputs.values())))
    return [{k: v[i : i + 1] for k, v in inputs.items()} for i in range(size)]


def only_head(model: nn.Module) -> nn.Module:
    """Freeze all but the last module with parameters (for tied models: the last norm)."""
    model.requires_grad_(False)
    leaves = [m for m in model.modules() if not list(m.children()) and list(m.parameters())]
    heads = [m for m in leaves if isinstance(m, nn.Linear | nn.LayerNorm)]
    tied = {id(p) for m in leaves if isinstance(m, nn.Embedding) for p in m.parameters()}
    free = [m for m in heads if not any(id(p) in tied for p in m.parameters())]
    free[-1].requires_grad_(True)
    return model
