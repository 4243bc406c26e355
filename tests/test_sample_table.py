"""The columns of all open groups' samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from light_samples import PROMPT, completion

from april_rl.rollout.sample_table import NO_VERSION, NOBODY, SampleTable, rank_within, view

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(1, 5)),
        st.tuples(st.just("close"), st.integers(0, 99)),
        st.tuples(st.just("forget"), st.just(0)),
    ),
    max_size=40,
)


def is_empty(table: SampleTable, place: int) -> bool:
    rows = slice(place * table.group_size, (place + 1) * table.group_size)
    return (
        not any(table.lengths[rows])
        and set(table.context_versions[rows]) == {NO_VERSION}
        and set(table.homes[rows]) == {NOBODY}
        and not any(table.work[rows])
        and not any(table.is_finished[rows])
        and not any(table.is_scored[rows])
        and set(table.completions[rows]) == set(table.parts[rows]) == {()}
        and table.finished[rows] == [None] * table.group_size
        and table.oldest_versions[place] == NO_VERSION
        and place not in table.failures
    )


@given(EVENTS, st.integers(1, 3), st.sampled_from([0, 10**9]))
def test_a_group_is_found_by_its_prompt_while_it_is_open(events, group_size, first_id):
    """Fails when a prompt leads to another's place, to one that was closed, or nowhere after older
    ones are forgotten; when two groups share a place, or one begins with what another left.
    """
    table, expected, next_id = SampleTable(group_size), dict[int, int](), first_id
    for kind, what in events:
        if kind == "open":
            next_id += what
            place = expected[next_id] = table.open(replace(PROMPT, id=next_id))
            assert len({*expected.values()}) == len(expected)
            assert is_empty(table, place)
            rows = table.rows([place])
            last = completion(0, start=0, num_tokens=2, version=1)
            table.completions[rows[0]] = table.parts[rows[0]] = (last,)  # type: ignore[assignment]
            for column in (table.lengths, table.homes, table.context_versions, table.work):
                view(column)[rows] = 7
            table.finish(rows, [last] * group_size)
            assert table.note(rows, np.ones(group_size)) == [place]
            table.oldest_versions[place] = 3
        elif kind == "close" and expected:
            table.close([expected.pop(sorted(expected)[what % len(expected)])])
        elif kind == "forget":
            table.forget_closed()
        ids = np.arange(first_id - 2, next_id + 3)
        assert table.places(ids).tolist() == [expected.get(int(id_), -1) for id_ in ids]
        assert table.open_places().tolist() == [expected[id_] for id_ in sorted(expected)]


def test_what_is_forgotten_takes_no_room():
    """Fails when a run keeps a number for every prompt it ever had, or a prompt that is gone."""
    table = SampleTable(1)
    for id_ in range(1000):
        place = table.open(replace(PROMPT, id=id_))
        table.close([place])
        table.forget_closed()
    assert table.prompts == [None]
    assert table.prompt_token_ids == [()]
    assert len(table._places) == 0
    assert len(table.lengths) == 1


@given(st.lists(st.integers(0, 3)))
def test_the_rank_is_the_number_of_equals_before(numbers):
    """Fails when equal numbers are not told apart in their order."""
    expected = [numbers[:place].count(number) for place, number in enumerate(numbers)]
    assert rank_within(np.array(numbers, np.int64)).tolist() == expected
