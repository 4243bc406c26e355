"""A user's own losses, advantages and group filters are used as given, or refused by name."""

from dataclasses import replace

import pytest
import torch
from light_samples import whole_sample

from april_rl.config import TrainConfig
from april_rl.config.algorithm import AlgorithmConfig
from april_rl.config.user_code import OwnFunctionError
from april_rl.start.assembly.own_algorithm import load_advantages, load_group_filter
from april_rl.start.assembly.own_functions import try_on_groups, try_own_functions
from april_rl.training.algorithm.losses import LossInputs, ppo_clip
from april_rl.training.algorithm.responses import Responses
from april_rl.training.learner.own_loss import load_loss
from april_rl.types import Group, Prompt, ScoredGroup

PROMPT = Prompt(id=1, token_ids=(1, 2), text="1 + 1", answer="2", source="sums:7")
GROUP = Group(
    prompt=PROMPT, samples=tuple(whole_sample(PROMPT, i, (7,) * (i + 1)) for i in range(3))
)
SCORED = [ScoredGroup(group=GROUP, rewards=(0.0, 1.0, 2.0))]
INPUTS = LossInputs(
    logprobs=torch.tensor([-1.0, -0.5, -3.0]),
    anchor_logprobs=torch.tensor([-1.0, -0.4, -4.5]),
    advantages=torch.tensor([1.0, -1.0, 1.0]),
    behaviour_logprobs=torch.tensor([-1.0, -0.4, -4.5]),
    responses=Responses.of([2, 1]),
)


def of(**settings: object) -> AlgorithmConfig:
    return AlgorithmConfig(**settings)  # type: ignore[arg-type]


def test_a_loss_gets_its_arguments_and_its_metrics_are_kept() -> None:
    loss = load_loss(of(loss="own_functions:by_ratio", args={"high": 3.0}))
    assert loss is not None
    found = loss(INPUTS)
    ratio = (INPUTS.logprobs - INPUTS.anchor_logprobs).exp()
    assert found.clipped.tolist() == [False, False, True]
    assert torch.equal(found.metrics["distance"], (ratio - 1).abs())
    same = ppo_clip(replace(INPUTS), clip_low=0.99, clip_high=2.0)
    assert torch.equal(found.loss[:2], same.loss[:2])


def test_a_loss_may_return_only_its_tensor() -> None:
    loss = load_loss(of(loss="own_functions:plain"))
    assert loss is not None
    assert torch.equal(loss(INPUTS).loss, -INPUTS.logprobs * INPUTS.advantages)
    assert not loss(INPUTS).clipped.any()


def test_advantages_are_one_per_sample_or_one_per_token() -> None:
    signs = load_advantages(of(advantage="own_functions:signs", args={"scale": 2.0}))
    by_token = load_advantages(of(advantage="own_functions:by_token"))
    assert signs is not None
    assert by_token is not None
    assert signs(SCORED, [[0.0, 1.0, 2.0]]) == [[-2.0, 0.0, 2.0]]
    assert [each.tolist() for each in by_token(SCORED, [[0.0] * 3])[0]] == [[0], [0, 1], [0, 1, 2]]  # type: ignore[union-attr]


def test_a_group_filter_gets_the_scored_group() -> None:
    keep = load_group_filter(of(group_filter="own_functions:is_mixed", args={"least": 2}))
    assert keep is not None
    few, mixed, all_right = (0.0, 0.0, 1.0), (0.0, 1.0, 1.0), (1.0, 1.0, 1.0)
    scored = [ScoredGroup(group=GROUP, rewards=rewards) for rewards in (few, mixed, all_right)]
    assert [keep(each) for each in scored] == [False, True, False]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"loss": "nowhere:loss"}, "algorithm.loss=nowhere:loss .* there is no module nowhere"),
        ({"loss": "own_functions:lost"}, "has no function 'lost'"),
        ({"loss": "own_functions:needs"}, "missing a required .*argument: 'tau'"),
        (
            {"loss": "own_functions:signs"},
            r"argument: 'rewards'; it is called as f\(inputs, NAME=…\)",
        ),
        ({"loss": "own_functions:without_gradient"}, "its loss has no gradient"),
        ({"loss": "own_functions:summed"}, r"loss of shape \[\] for 5 tokens"),
        ({"loss": "own_functions:of_numbers"}, "returned a list; return a tensor or a TokenLoss"),
        ({"loss": "own_functions:wrong_metric"}, r"the metric distance of shape \[\]"),
        (
            {"loss": "own_functions:metric_of_a_number"},
            "the metric distance as a float; it needs a",
        ),
        (
            {"loss": "own_functions:metric_with_nan"},
            "the metric root with 5 of 5 values that are not",
        ),
        (
            {"loss": "own_functions:distance_from_anchor"},
            "gradient of its loss is .*must be finite",
        ),
        ({"loss": "own_functions:raises"}, "five tokens as a test: ZeroDivisionError: no tokens"),
        (
            {"loss": "own_functions:only_wrong"},
            "one token as a test: IndexError",
        ),
        ({"loss": "own_functions:spaces"}, "metric named 'Log ratio'; a name has letters, digits"),
        ({"loss": "own_functions:wrong_clipped"}, r"returned clipped of shape \[2\] for 5 tokens"),
        ({"advantage": "own_functions:plain"}, r"called as f\(samples, rewards, NAME=…\)"),
        ({"group_filter": "own_functions:by_token"}, r"it is called as f\(scored, NAME=…\)"),
        (
            {"loss": "own_functions:plain", "args": {"high": 2}},
            r"high: none of your functions",
        ),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_training(
    settings: dict[str, object], sentence: str
) -> None:
    with pytest.raises(OwnFunctionError, match=sentence) as caught:
        try_own_functions(of(**settings))
    assert "OwnFunctionError" not in str(caught.value)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("raises", "ZeroDivisionError: no tokens"),
        ("one_for_all", r"returned \[1\] advantages for groups of \[3\] samples"),
        ("too_short", r"shape \[1\] for a sample .* which has 2 response tokens"),
        ("infinite_in_float32", "advantage that is not finite in float32"),
        ("not_finite", r"not finite in float32 for a sample of the prompt '1 \+ 1' \(sums:7\)"),
        ("flat", r"returned np.float64\(0.0\) where the advantages of a group belong; return for"),
        ("texts", "it returned '1' for a sample .*; return numbers"),
    ],
)
def test_wrong_advantages_end_the_step_with_one_sentence(function: str, sentence: str) -> None:
    estimate = load_advantages(of(advantage=f"own_functions:{function}"))
    assert estimate is not None
    with pytest.raises(OwnFunctionError, match=sentence):
        estimate(SCORED, [[0.0, 1.0, 2.0]])


def test_a_loss_that_gives_nan_during_the_run_ends_it_with_its_name() -> None:
    """Fails when the step is skipped instead, with a message about rewards."""
    config = of(loss="own_functions:logarithm")
    try_own_functions(config)
    loss = load_loss(config)
    assert loss is not None
    steep = replace(INPUTS, advantages=torch.tensor([1.0, -3.0, 1.0]))
    sentence = (
        r"algorithm\.loss=own_functions:logarithm: it returned loss with 1 of 3 .*first is nan"
    )
    with pytest.raises(OwnFunctionError, match=sentence):
        loss(steep)


def test_a_loss_may_change_its_inputs_and_be_constant() -> None:
    """Fails when weights and the next pass see changed inputs, or a constant ends the run."""
    loss = load_loss(of(loss="own_functions:in_place"))
    assert loss is not None
    given = replace(INPUTS, logprobs=INPUTS.logprobs.clone().requires_grad_())
    before = [each.clone() for each in (given.advantages, given.behaviour_logprobs)]
    found = loss(given)
    assert found.loss.tolist() == [1.0, 1.0, 1.0]
    assert torch.autograd.grad(found.loss.sum(), given.logprobs)[0].tolist() == [0.0, 0.0, 0.0]
    assert [each.tolist() for each in before] == [
        each.tolist() for each in (given.advantages, given.behaviour_logprobs)
    ]


def test_a_loss_is_not_called_for_a_row_without_response_tokens() -> None:
    """Ranks get such rows when there are fewer rows than ranks."""
    loss = load_loss(of(loss="own_functions:largest"))
    assert loss is not None
    none = torch.zeros(0, requires_grad=True)
    empty = LossInputs(
        logprobs=none,
        anchor_logprobs=none.detach(),
        advantages=none.detach(),
        behaviour_logprobs=none.detach(),
        responses=Responses.of([0]),
    )
    assert loss(empty).loss.requires_grad
    assert loss(INPUTS).metrics["max"].shape == (3,)


def test_a_model_that_gives_nan_is_not_blamed_on_the_loss() -> None:
    loss = load_loss(of(loss="own_functions:plain"))
    assert loss is not None
    broken = replace(INPUTS, logprobs=torch.tensor([-1.0, float("nan"), -3.0]))
    assert loss(broken).loss.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("forgets_return", r"group_filter=own_functions:forgets_return: it returned None; return"),
        ("counts", r"group_filter=own_functions:counts: it returned 2\.0; return True"),
    ],
)
def test_a_group_filter_that_does_not_return_a_bool_is_refused(
    function: str, sentence: str
) -> None:
    keep = load_group_filter(of(group_filter=f"own_functions:{function}"))
    assert keep is not None
    with pytest.raises(OwnFunctionError, match=sentence):
        keep(ScoredGroup(group=GROUP, rewards=(0.0, 1.0, 1.0)))


@pytest.mark.parametrize(
    "settings",
    [
        {"advantage": "own_functions:signs", "group_filter": "own_functions:is_mixed"},
        {"advantage": "own_functions:by_token", "group_filter": "own_functions:rejects_all"},
        {"advantage": "own_functions:by_column"},
    ],
)
def test_valid_functions_pass_the_trial(settings: dict[str, str]) -> None:
    """Fails when a group in the trial lacks the columns of the data, or is incomplete."""
    prompt = replace(PROMPT, columns={"level": 3}, has_environment=True)
    try_on_groups(TrainConfig(algorithm=of(**settings)), prompt)


def test_the_trial_fails_for_a_column_that_the_data_lack() -> None:
    with pytest.raises(OwnFunctionError, match="level"):
        try_on_groups(TrainConfig(algorithm=of(advantage="own_functions:by_column")), PROMPT)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"loss": "pppo"}, "algorithm.loss must be module:function or one of ppo_clip, gspo"),
        ({"advantage": "gaa"}, "algorithm.advantage must be module:function or one of grpo"),
        ({"group_filter": "mixed"}, "algorithm.group_filter must be null or module:function"),
        ({"args": {"tau": 1}}, "algorithm.args has no effect"),
        ({"loss": "a:b", "clip_low": 0.1}, "algorithm.clip_low=0.1 has no effect with .*loss=a:b"),
        ({"group_filter": "a:b", "dynamic_sampling": True}, "remove one of them"),
    ],
)
def test_settings_that_do_not_work_with_own_functions_are_refused(
    settings: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        of(**settings)
