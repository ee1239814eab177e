"""A word-level tokenizer and sentences with structure, made here: hubs need not be reached."""

from __future__ import annotations

import random
from typing import Any

import _torchvision  # noqa: F401  (transformers imports it)

WORDS = [f"w{index}" for index in range(120)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CHAT = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def tokenizer() -> Any:
    """A fast tokenizer of the transformers library."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        bos_token="[CLS]",
        eos_token="[SEP]",
        chat_template=CHAT,
    )


def sentence(source: random.Random, words: int = 10) -> str:
    """Words that follow each other with a fixed stride: something to learn."""
    place, stride = source.randrange(len(WORDS)), source.choice((1, 2, 3))
    return " ".join(WORDS[(place + index * stride) % len(WORDS)] for index in range(words))
