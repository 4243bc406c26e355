"""Token ids become text in the reward processes, and it is the text that the controller
would get.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from array import array
from dataclasses import replace
from operator import attrgetter

import pytest
from character_decoder import NeverLoads, printable, process_id
from light_samples import whole_sample
from reward_pools import reward_pool
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from april_rl.config.task import RewardConfig
from april_rl.task.data.decoder import BackendDecoder
from april_rl.task.data.tokenizer import Tokenizer, load_tokenizer
from april_rl.task.rewards.check import check_reward
from april_rl.task.rewards.jobs import RewardError
from april_rl.task.tiny import builtins
from april_rl.types import Prompt, Sample

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())  # one token each: é consists of two


def byte_tokenizer(**settings):
    """Return byte-level BPE without merges, which Qwen and Llama have with merges."""
    vocabulary = {token: i for i, token in enumerate(BYTES)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", **settings)


def word_tokenizer(**settings):
    """Return a tokenizer of words and punctuation: decoding joins them with spaces."""
    words = ("<unk>", "it", "is", "\\boxed{2}", ".", "n't", "!")
    vocabulary = {word: i for i, word in enumerate(words)}
    backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **settings)


TOKENIZERS = {
    "tiny": lambda: AutoTokenizer.from_pretrained(builtins.resolve("builtin:tiny")),
    "bytes": byte_tokenizer,
    "bytes, spaces asked to go": lambda: byte_tokenizer(clean_up_tokenization_spaces=True),
    "words": word_tokenizer,
    "words, spaces go": lambda: word_tokenizer(clean_up_tokenization_spaces=True),
}
TEXTS = ["", "\\boxed{2}", "a é \N{GRINNING FACE} .", "it is n't ! .", "<|im_end|>it <eos><unk>"]


def tokenizer(name, folder):
    TOKENIZERS[name]().save_pretrained(folder)
    return load_tokenizer(str(folder))


def responses(loaded):
    """Return the ids of the texts, each also cut in the middle, which is inside a character if that
    has many tokens.
    """
    whole = loaded.encode(TEXTS, add_special_tokens=False)
    return [*whole, *(ids[: len(ids) // 2] for ids in whole), *(ids[:-2] for ids in whole)]


def sample(number, token_ids, answer):
    prompt = Prompt(id=number, token_ids=(1,), text="1 + 1 = ", answer=answer, source="f:1")
    logprobs = array("d", [-0.1] * len(token_ids))
    return whole_sample(prompt, 0, array("i", token_ids), logprobs=logprobs)


def pool(decode, function="reward_functions:exact"):
    reward = RewardConfig(function=function, num_processes=1)
    return reward_pool(reward, decode=decode)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_copy_of_the_tokenizer_decodes_like_the_tokenizer(name, tmp_path):
    """Fails when special tokens remain, when spaces before punctuation differ, or when the copy is
    made from the file instead of what transformers made of it.
    """
    loaded = tokenizer(name, tmp_path)
    copy = pickle.loads(pickle.dumps(loaded.decoder()))
    expected = [loaded.decode(ids) for ids in responses(loaded)]
    assert [copy(ids) for ids in responses(loaded)] == expected
    assert len(set(expected)) > 3


def test_characters_of_several_tokens_are_restored_and_special_tokens_are_removed(tmp_path):
    loaded = tokenizer("bytes", tmp_path)
    (ids,) = loaded.encode(["é<|im_end|>"], add_special_tokens=False)
    assert len(ids) == 3
    assert loaded.decoder()(ids) == "é"
    assert loaded.decoder()(ids[:1]) == "\N{REPLACEMENT CHARACTER}"


def test_a_reward_process_imports_transformers_only_if_the_tokenizer_needs_it(tmp_path):
    light = {name: tokenizer(name, tmp_path / name).decoder() for name in TOKENIZERS}
    kept = {name for name, decode in light.items() if isinstance(decode, BackendDecoder)}
    assert kept == TOKENIZERS.keys() - {"words, spaces go"}
    (tmp_path / "decoder").write_bytes(pickle.dumps(light["bytes"]))
    code = (
        "import pickle, sys; from pathlib import Path;"
        f"decode = pickle.loads(Path({str(tmp_path / 'decoder')!r}).read_bytes());"
        "print(decode([0, 1]), *sorted({'transformers', 'torch'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == [light["bytes"]([0, 1])], done.stderr


def test_a_tokenizer_with_its_own_decoding_is_loaded_again(tmp_path):
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *args, **kwargs):
            return super()._decode(*args, **kwargs).upper()

    made = Shouting(tokenizer_object=byte_tokenizer().backend_tokenizer)
    shouting = Tokenizer(made, path=str(tmp_path))
    assert shouting.decoder()(made("é")["input_ids"]) == "É"


def test_a_reward_function_gets_the_text_the_controller_would_decode(tmp_path):
    """`exact` gives 1 for the answer itself, which here is the text that the controller's tokenizer
    decodes. This tokenizer needs transformers in the reward process; test_rewards_schemas.py has
    one that does not.
    """
    loaded = tokenizer("words, spaces go", tmp_path)
    with pool(loaded.decoder()) as scorer:
        for number, ids in enumerate(responses(loaded)):
            scorer.submit(sample(number, ids, loaded.decode(ids)), group_size=1)
        scorer.submit(sample(99, responses(loaded)[1], "something else"), group_size=1)
        values = [score.value for score in scorer.collect(None)]
    assert values == [1.0] * (len(values) - 1) + [0.0]


def test_nothing_is_decoded_in_the_controller():
    """A tokenizer takes a millisecond for a long response, and `submit` must not wait for it."""
    with pool(process_id) as scorer:
        scorer.submit(sample(0, (50,), str(os.getpid())), group_size=1)
        assert [score.value for score in scorer.collect(None)] == [0.0]


def test_responses_are_sent_as_arrays_regardless_of_their_number_of_parts():
    """Fails when the controller pickles them number by number."""
    whole = sample(0, (50, 60), "i")
    first = replace(whole.completions[0], finish_reason=None)
    rest = replace(first, start=2, token_ids=(70,), logprobs=(-0.1,), finish_reason="stop")
    prompt = Prompt(id=0, token_ids=(1,), text="1 + 1 = ", answer="i", source="f:1")
    parted = Sample(prompt=prompt, index=0, spans=(first, rest))
    with pool(attrgetter("typecode")) as scorer:
        scorer.submit(whole, group_size=1)
        scorer.submit(parted, group_size=1)
        assert [score.value for score in scorer.collect(None)] == [1.0, 1.0]


def test_a_response_that_cannot_be_decoded_does_not_blame_the_function():
    """Fails when the error counts as a crash of one sample, which drops its group while the run
    continues.
    """
    with pool(printable) as scorer:
        scorer.submit(sample(0, (50, 7), "2"), group_size=1)
        message = r"turn a response's token ids into text, before calling .*exact: .* token: 7"
        with pytest.raises(RewardError, match=message):
            scorer.collect(None)


def test_a_tokenizer_that_does_not_load_is_found_before_training():
    message = r"token ids into text, before .*user_code\.memory_gib = 4: OSError: the vocabulary"
    reward = RewardConfig(function="reward_functions:exact")
    with (
        reward_pool(reward, decode=NeverLoads()) as trial,
        pytest.raises(RewardError, match=message),
    ):
        check_reward(reward, trial, [sample(0, (), "2").prompt])
