"""A tokenizer of a few whole words, with a chat template."""

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<bos>", "<eos>"]
WORDS = [*SPECIAL, "system", "user", "assistant", "one", "two", "three", "Q:", "A:"]
CHAT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role }} {{ m.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


def hf_tokenizer(chat_template=CHAT):
    backend = Backend(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", WORDS.index("<bos>"))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def words(token_ids):
    return " ".join(WORDS[i] for i in token_ids)
