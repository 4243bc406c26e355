"""Which ready groups a step trains: the ones that are due, and a random choice of the others."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from light_samples import whole_sample

from april_rl.training.rollout.batch_draw import draw_batch
from april_rl.types import Group, Prompt, ScoredGroup

CAP, NOW, N = 3, 10, 4


def group(prompt_id: int, *, version: int) -> ScoredGroup:
    """Return a ready group of one sample whose tokens have this `version`."""
    prompt = Prompt(id=prompt_id, token_ids=(1,), text="", answer="", source="")
    sample = whole_sample(prompt, 0, (2,), version=version)
    return ScoredGroup(group=Group(prompt=prompt, samples=(sample,)), rewards=(0.0,))


def draw(ready: list[ScoredGroup], open_versions: Counter[int], *, seed: int = 0) -> list[int]:
    """Return the prompt ids of the batch at version NOW."""
    batch = draw_batch(
        ready, open_versions, num_groups=N, max_staleness=CAP, policy_version=NOW, seed=seed
    )
    return [scored.group.prompt.id for scored in batch]


@given(
    st.lists(st.integers(NOW - CAP, NOW), max_size=20),
    st.lists(st.integers(NOW - CAP, NOW), max_size=10),
)
def test_groups_that_later_steps_cannot_train_in_time_are_trained_now(
    ready_versions, open_versions
):
    """They fill at most one batch. Fails when a due group waits while another one is trained."""
    ready = [group(i, version=v) for i, v in enumerate(sorted(ready_versions))]
    opened = Counter(open_versions)
    chosen = draw(ready, opened)
    assert len(chosen) == min(N, len(ready))
    assert chosen == sorted(chosen)
    for left in range(CAP + 1):
        latest = NOW - CAP + left
        early = {scored.group.prompt.id for scored in ready if _version(scored) <= latest}
        waiting = len(early - set(chosen)) + sum(opened[v] for v in opened if v <= latest)
        if waiting > left * N:
            assert set(chosen) <= early or not early - set(chosen)


def _version(scored: ScoredGroup) -> int:
    assert scored.group.oldest_version is not None
    return scored.group.oldest_version


def test_groups_that_are_not_due_are_drawn_at_random():
    """Each is drawn equally often. Fails when the oldest groups are preferred, or the draw ignores
    the seed.
    """
    ready = [group(i, version=NOW) for i in range(8)]
    counts = Counter(i for seed in range(800) for i in draw(ready, Counter(), seed=seed))
    assert draw(ready, Counter(), seed=5) == draw(ready, Counter(), seed=5)
    assert sum(counts.values()) == 800 * N
    assert all(340 < counts[i] < 460 for i in range(8))  # 400 expected; one sigma is 14
