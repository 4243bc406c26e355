"""Requests of an agent that continue its context, and requests that start a new one."""

from __future__ import annotations

from itertools import accumulate, pairwise

from agent_episodes import agents, encode, play, question, say, tokenizer
from byte_tokenizer import END
from episodes import answer, with_turn

from april_rl.types import Observation, Sample


def contexts_of(sample: Sample) -> list[str]:
    """Return each context of a sample as text."""
    ends = list(accumulate(sample.context_lengths, initial=0))
    parts = [sample.sequence[start:end] for start, end in pairwise(ends)]
    return [tokenizer().show_text(part) for part in parts]


def as_prompt(text: str) -> str:
    return tokenizer().chat_text([{"role": "user", "content": text}])


def test_a_limit_of_a_request_ends_its_turn_and_the_conversation_continues(tmp_path):
    with agents(tmp_path) as pool:
        asked = question("short")
        first = answer(pool, asked)
        assert first.max_turn_tokens == 3
        cut = with_turn(asked.with_span(first), encode("one"), finish_reason="length")
        second = answer(pool, cut)
        whole = say(cut.with_span(second), "three")
        last = answer(pool, whole)
    assert second.max_turn_tokens == 0
    assert contexts_of(whole) == [
        f"{as_prompt('a')}one{END}\n<|im_start|>user\nb{END}\n<|im_start|>assistant\nthree{END}"
    ]
    assert (last.is_final, last.reward) == (True, 5.0)
    with agents(tmp_path) as pool:  # built a second time
        assert answer(pool, cut) == second


def test_a_text_continues_after_its_sampled_tokens_but_not_after_its_end(usual_agents):
    """A served policy does not read the token that ends a text, and reads the text of a `stop`
    once.
    """
    sample = question("text")
    sample = with_turn(sample.with_span(answer(usual_agents, sample)), encode("upon."))
    sample = say(sample.with_span(answer(usual_agents, sample)), "a")
    sample = say(sample.with_span(answer(usual_agents, sample)), "b")
    reply = answer(usual_agents, sample)
    assert contexts_of(sample) == [f"once upon. more: a{END}", f"once upon. more: a!b{END}"]
    heard = [span for span in sample.spans if isinstance(span, Observation)]
    assert [span.max_turn_tokens for span in heard] == [50, 50, 16]
    assert [span.stop for span in heard] == [(".",), (".",), ()]
    assert (reply.is_final, reply.reward, reply.failure) == (True, 41.0, "")


def test_a_chat_continues_after_the_text_that_ended_its_turn(usual_agents):
    sample = question('stopped {"stop": ["</code>"]}')
    sample = with_turn(sample.with_span(answer(usual_agents, sample)), encode("one</code>"))
    sample = say(sample.with_span(answer(usual_agents, sample)), "two")
    reply = answer(usual_agents, sample)
    assert contexts_of(sample) == [
        f"{as_prompt('a')}one</code>{END}\n"
        f"<|im_start|>user\nb{END}\n<|im_start|>assistant\ntwo{END}"
    ]
    assert (reply.is_final, reply.reward, reply.failure) == (True, 3.0, "")


def test_a_rewritten_history_starts_a_new_context_in_the_same_sample(usual_agents):
    sample, reply = play(usual_agents, question("rewrite"), "one", "two", "three")
    first, second = contexts_of(sample)
    assert first == f"{as_prompt('first')}one{END}"
    assert second.startswith(f"{as_prompt('second')}two{END}")
    assert second.endswith("three" + END)
    assert (reply.reward, len(sample.completions)) == (5.0, 3)


def test_other_tools_start_a_new_context_and_so_does_returning_to_the_first_ones(usual_agents):
    sample, reply = play(usual_agents, question("subagent"), "one", "two", "three")
    first, second, third = contexts_of(sample)
    assert first == f"{as_prompt('main')}one{END}"
    assert "weather" in second
    assert third.startswith(first)
    assert third.endswith("three" + END)
    assert reply.reward == 5.0


def test_a_context_is_rebuilt_unchanged(tmp_path):
    """In new processes, as after a kill. Fails when the form of a context is not compared."""
    with agents(tmp_path) as pool:
        sample, _ = play(pool, question("subagent"), "one", "two")
    with agents(tmp_path) as pool:
        reply = answer(pool, sample)
    assert reply.begins_context
    forgotten = [
        span._replace(begins_context=False) if isinstance(span, Observation) else span
        for span in sample.spans
    ]
    with agents(tmp_path) as pool:
        reply = answer(pool, Sample(sample.prompt, 0, tuple(forgotten)))
    assert "it returned something else when it was built again" in reply.failure
