"""A tokenizer of transformers for the model of tiny.py: a token for each printable character."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

PAD, BEGIN, END = 0, 1, 2


def library(adds_begin: bool = True) -> Tokenizer:
    words = {"<pad>": PAD, "<s>": BEGIN, "</s>": END}
    words |= {chr(32 + i): 3 + i for i in range(93)} | {"\n": 96}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.add_special_tokens(["<pad>", "<s>", "</s>"])
    made.decoder = decoders.Fuse()
    if adds_begin:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BEGIN)]
        )
    return made


def tokenizer(adds_begin: bool = True, **options: Any) -> PreTrainedTokenizerFast:
    special = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    made = library(adds_begin)
    return PreTrainedTokenizerFast(tokenizer_object=made, **special | options)
