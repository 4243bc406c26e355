"""A character tokenizer with one extra token for the opening of the box, and a chat template."""

from __future__ import annotations

import string

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN, BOX = "<pad>", "<eos>", "<unk>", "\\boxed{"
# The policy knows no roles: a chat is its messages, with a space between two of them. It is not
# shown tools, because it knows only one way to call: \\boxed{21} is the call boxed(value="21").
CHAT_TEMPLATE = (
    "{#- tools are not shown -#}"
    "{% for message in messages %}{{ '' if loop.first else ' ' }}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1]['role'] == 'tool' %} {% endif %}"
)
CALLS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "=",
    "fields": {
        "tool_calls": {
            "open": BOX,
            "close": "}",
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "boxed", "arguments": {"value": "{content}"}},
            },
        },
        "content": {"content": "text"},
    },
}
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
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    made.response_template = CALLS
    return made
