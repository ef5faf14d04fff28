"""Tokenizers of every family, made here from a few words: no download."""

from __future__ import annotations

import string
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.models.bert import BertTokenizer

WORDS = ["the", "and", "of", "people", "time", "work", "day", "house"]
NUM_MERGES = 5


def _bert():
    pieces = ["##ing", "##ed", *(f"##{c}" for c in string.ascii_lowercase)]
    vocabulary = ["[PAD]", *(f"[unused{i}]" for i in range(3)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary += [*string.ascii_lowercase, *WORDS, *pieces]
    path = Path(tempfile.mkdtemp()) / "vocab.txt"
    path.write_text("\n".join(vocabulary))
    tokenizer = BertTokenizer(vocab=str(path), vocab_file=str(path))
    tokenizer.add_tokens(["[ADDED]"])
    return tokenizer


def _byte_level(post=None, **special):
    base = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("an", "d"), ("o", "f")]
    tokens = base + ["".join(m) for m in merges]
    vocabulary = {token: i for i, token in enumerate([*special.values(), *tokens])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if post:
        backend.post_processor = post(vocabulary)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=64,
        **special,
    )


def _roberta():
    return _byte_level(
        lambda v: processors.RobertaProcessing(("</s>", v["</s>"]), ("<s>", v["<s>"])),
        bos_token="<s>",
        cls_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        sep_token="</s>",
        mask_token="<mask>",
    )


def _llama():
    return _byte_level(
        lambda v: processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", v["<s>"])]
        ),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    )


def _t5():
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁a", -6.0), ("▁of", -3.0)]
    pieces += [("▁the", -2.5), ("s", -3.5), ("ing", -5.0), ("a", -7.0), ("▁", -4.0), ("b", -7.5)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
        extra_special_tokens=["<extra_id_0>"],
    )


_BUILDERS = {
    "bert": _bert,
    "roberta": _roberta,
    "gpt2": lambda: _byte_level(eos_token="<|endoftext|>"),
    "llama": _llama,
    "t5": _t5,
    "byt5 (python)": ByT5Tokenizer,
}
NAMES = tuple(_BUILDERS)


def build(name):
    """A tokenizer by family name."""
    return _BUILDERS[name]()
