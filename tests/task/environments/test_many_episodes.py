"""Which process gets an episode, and what that costs with many of them."""

from __future__ import annotations

import time

from episodes import answer, answers, fresh, hear, pool, say, text_of


def test_the_start_of_an_episode_costs_the_same_for_any_number_of_episodes():
    with pool(num_processes=2) as environments:
        began_s = time.process_time()
        for number in range(8000):
            environments.act(fresh(number))
        assert time.process_time() - began_s < 3.0


def test_a_new_episode_goes_to_the_process_with_the_fewest():
    with pool(num_processes=2) as environments:

        def process_of(sample):
            return text_of(answer(environments, say(sample, "pid")))

        samples = [hear(environments, fresh(number)) for number in range(3)]
        first, second, third = map(process_of, samples)
        assert first == third != second
        environments.forget(samples[0].id)
        environments.forget(samples[2].id)
        assert process_of(hear(environments, fresh(3))) == first


def test_replies_are_taken_in_the_order_of_the_requests():
    """The order of arrival does not matter, nor does a second request for one of them."""
    with pool(num_processes=2) as environments:
        samples = [hear(environments, fresh(number)) for number in range(4)]
        turns = ("raiseonce", "sleep 200", "a", "dieonce")
        replies = answers(environments, *map(say, samples, turns))
    assert [reply.sample_id for reply in replies] == [sample.id for sample in samples]
    assert not any(reply.observation.failure for reply in replies)
