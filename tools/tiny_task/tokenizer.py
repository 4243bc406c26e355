"""A character tokenizer with one extra token for the opening of the box, and a chat template."""

from __future__ import annotations

import string

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN, BOX = "<pad>", "<eos>", "<unk>", "\\boxed{"
# The policy knows no roles: a chat is its messages, with a space between two of them.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '' if loop.first else ' ' }}{{ message['content'] }}"
    "{% endfor %}"
)
ALPHABET = (*string.digits, *string.ascii_lowercase, *"+= }")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer; text of the task survives encoding and decoding unchanged, other
    characters become <unk>.
    """
    tokens = (PAD, EOS, UNKNOWN, BOX, *ALPHABET)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
