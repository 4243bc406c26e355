"""Stop texts that end a turn, in tokens and on real vLLM."""

from pathlib import Path

import pytest
from byte_tokenizer import hf_byte_tokenizer
from small_engine import small_engine

import april_rl.task.tiny
from april_rl.task.data.tokenizer import load_tokenizer
from april_rl.training.engine.attempt import StopTexts
from april_rl.training.rollout.requests import Request
from april_rl.types import SampleId

POLICY = Path(april_rl.task.tiny.__file__).parent / "policy"


@pytest.mark.parametrize(
    ("said", "texts", "num_new", "end"),
    [
        ("abcd", ["x", "abcde"], 4, None),
        ("abcd", ["cd"], 1, 4),
        ("abcd", ["x", "b"], 3, 2),
        ("abcd", ["cd", "b"], 4, 2),  # the first of several texts, with tokens after it
        ("abcd", ["bc", "abcde"], 4, 3),
        ("aé", ["é"], 1, 3),  # two tokens
        ("aéb", ["é"], 3, 3),
    ],
)
def test_the_token_that_completes_a_stop_text_is_the_last(tmp_path, said, texts, num_new, end):
    tokenizer = hf_byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    token_ids = tokenizer.encode(said)
    assert StopTexts(str(tmp_path)).end(texts, token_ids, num_new=num_new) == end


@pytest.mark.slow
@pytest.mark.cpu_engine
def test_a_turn_ends_at_a_stop_text_even_when_it_was_parked_in_between():
    """The step after the stop text is already in progress. Fails when tokens after the text are
    returned, or the engine waits for more.
    """
    tokenizer = load_tokenizer(str(POLICY))
    engine = small_engine(
        POLICY,
        max_model_len=256,
        max_num_seqs=4,
        keeps_parked=True,
        args={"async_scheduling": True},
        stop_tokens=(),
    )
    (prompt,) = tokenizer.encode(["a5+b3+c6+d2+e2+f9+g8+h5="], add_special_tokens=False)
    requests = [Request(SampleId(0, i), prompt, 0, 60, seed=i) for i in range(4)]
    tick = engine.advance(requests, slots=4, max_steps=1000)
    whole = {each.sample_id: list(each.token_ids) for each in tick.finished}
    texts = {
        sample_id: tokenizer.decode(token_ids[3:5])
        for sample_id, token_ids in whole.items()
        if len(token_ids) > 6
    }
    assert len(texts) > 1
    engine.abort()
    for has_pause in (False, True):
        sent = [r._replace(stop=(texts[r.sample_id],)) for r in requests if r.sample_id in texts]
        begun = {each.sample_id: [] for each in sent}
        if has_pause:
            assert not engine.advance(sent, slots=4, max_steps=2).finished
            parts = {each.sample_id: each.token_ids for each in engine.abort()}
            begun = {sample_id: list(part) for sample_id, part in parts.items()}
            sent = [
                r._replace(start=len(parts[r.sample_id]), parts=(parts[r.sample_id],)) for r in sent
            ]
        tick = engine.advance(sent, slots=4, max_steps=1000)
        assert len(tick.finished) == len(texts)
        for each in tick.finished:
            said = begun[each.sample_id] + list(each.token_ids)
            assert said == whole[each.sample_id][: len(said)]
            assert each.finish_reason == "stop"
            text = texts[each.sample_id]
            assert text in tokenizer.decode(said)
            assert text not in tokenizer.decode(said[:-1])
        engine.abort()
