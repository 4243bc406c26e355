"""The optimizer step against plain torch, and its checks, in a world of one rank."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from learner_setup import (
    ALGORITHM,
    CPU,
    OPTIMIZER,
    Example,
    all_plain_logprobs,
    learner_logprobs,
    make_examples,
    make_learner,
    num_tokens,
    pack_minibatch,
    plain_adamw,
    plain_model,
    plain_update,
)

from april_rl.config.algorithm import AlgorithmConfig
from april_rl.config.choices import Correction, Loss, Ratio, Schedule
from april_rl.config.schema import OptimizerConfig
from april_rl.metrics import Mean, Metrics
from april_rl.training.learner.learner import Learner
from april_rl.training.learner.mismatch import Mismatch
from april_rl.training.learner.objective import EntropyBonus
from april_rl.training.learner.optimizer import Optimizer, lr_factor
from april_rl.training.learner.update_errors import (
    MEAN,
    MismatchError,
    MismatchWarning,
    NonFiniteError,
)

pytestmark = pytest.mark.usefixtures("_group")

CLOSE = {"atol": 2e-4, "rtol": 1e-4}
BYPASS = {"ratio": Ratio.behaviour, "correction": Correction.none, "weight_bounds": None}
BY_RATIO = {"proximal": ALGORITHM, "behaviour": replace(ALGORITHM, **BYPASS)}


def agreeing_examples(path: str) -> list[Example]:
    return make_examples(path, noise=0.0, age=0)


def weights_of(learner: Learner) -> list[torch.Tensor]:
    return [tensor.clone() for _, tensor in learner.weights()]


def are_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_three_updates_equal_plain_torch(either_path):
    model = plain_model(either_path)
    optimizer = plain_adamw(model)
    learner = make_learner(either_path)
    for seed in range(3):
        examples = make_examples(either_path, noise=0.3, age=1, seed=seed)
        [norm] = plain_update(model, optimizer, [examples])
        metrics = learner.update([pack_minibatch([examples])]).read()
        assert math.isclose(metrics["loss/grad_norm"], norm, rel_tol=1e-3)
        expected = all_plain_logprobs(model, examples)
        torch.testing.assert_close(learner_logprobs(learner, examples), expected, **CLOSE)


@pytest.mark.parametrize(("num_minibatches", "num_passes"), [(2, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize("ratio", BY_RATIO)
def test_all_steps_over_minibatches_and_passes_use_the_same_proximal_logprobs(
    path, ratio, num_minibatches, num_passes
):
    """Planted bugs: the first minibatch has a ratio of 1 in every pass; there is only one pass."""
    examples = make_examples(path, noise=0.3, age=1)
    minibatches = [examples[number::num_minibatches] for number in range(num_minibatches)]
    model = plain_model(path)
    plain_update(model, plain_adamw(model), minibatches, ratio=ratio, num_passes=num_passes)
    learner = make_learner(path, algorithm=BY_RATIO[ratio], num_passes=num_passes)
    metrics = learner.update([pack_minibatch([part]) for part in minibatches]).read()
    expected = all_plain_logprobs(model, examples)
    torch.testing.assert_close(learner_logprobs(learner, examples), expected, **CLOSE)
    assert (metrics["loss/is_weight_mean"] == 1.0) == (ratio == "behaviour")
    assert 0 < metrics["loss/clip_frac"] < 1


@pytest.mark.parametrize("loss", Loss)
def test_every_loss_is_the_same_however_responses_are_spread_over_rows(path, loss):
    """Also with a row that has no responses, and where layers are recomputed. Fails when a ratio or
    a mask is taken over a row, or when a rank without work has no loss for its backward pass.
    """
    examples = make_examples(path, noise=0.3, age=1)
    given = {"correction": Correction.sequence_truncate}
    if loss in (Loss.dppo_tv, Loss.dppo_kl):
        given = {"ratio": Ratio.behaviour, "correction": Correction.none, "clip_low": 1e-4}
    algorithm = AlgorithmConfig(loss=loss, geometric_mask=[0.9, 1.07], **given)
    whole, parts = (
        make_learner(path, algorithm=algorithm, activation_checkpointing=share)
        for share in (0.0, 1.0)
    )
    bins = [examples[:1], examples[1:4], [], examples[4:]]
    expected = whole.update([pack_minibatch([examples])] * 2).read()
    found = parts.update([pack_minibatch(bins)] * 2).read()
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-7)
    torch.testing.assert_close(
        learner_logprobs(parts, examples), learner_logprobs(whole, examples), **CLOSE
    )


def test_the_entropy_bonus_follows_its_target_from_update_to_update(path):
    """Compared with plain torch and given weights; every entropy is below the target. Planted bugs:
    the weight changes before its update; the first update has a bonus.
    """
    algorithm = replace(ALGORITHM, entropy_target=10.0, entropy_coefficient=2.0)
    learner, model = make_learner(path, algorithm=algorithm), plain_model(path)
    optimizer = plain_adamw(model)
    for seed, weight in enumerate([0.0, 2.005, 2.01]):
        examples = make_examples(path, noise=0.3, age=1, seed=seed)
        [norm] = plain_update(model, optimizer, [examples], entropy_weight=weight)
        metrics = learner.update([pack_minibatch([examples])]).read()
        assert metrics["loss/entropy_coefficient"] == pytest.approx(weight)
        assert metrics["loss/grad_norm"] == pytest.approx(norm, rel=1e-3)
    expected = all_plain_logprobs(model, examples)
    torch.testing.assert_close(learner_logprobs(learner, examples), expected, **CLOSE)


def test_the_coefficient_of_the_entropy_bonus_moves_by_a_step_and_acts_below_the_target():
    """Checks the rule for a list of entropies. Planted bugs: the bonus acts above the target; the
    coefficient falls below 0, or restarts at its setting.
    """
    bonus = EntropyBonus(AlgorithmConfig(entropy_target=1.0, entropy_coefficient=0.01))
    assert bonus.weight == 0.0
    weights = []
    for entropy in (0.5, 0.9, 1.5, 0.9, 1.0, *[2.0] * 9, 0.9, 0.9):
        bonus.adapt(entropy)
        weights.append(bonus.weight)
    expected = [0.015, 0.02, 0.0, 0.02, 0.015, *[0.0] * 9, 0.005, 0.01]
    assert weights == pytest.approx(expected)
    constant = EntropyBonus(AlgorithmConfig(entropy_coefficient=0.3))
    assert (constant.weight, constant.is_adapted, constant.save()) == (0.3, False, {})


def test_loss_metrics_equal_their_definitions(path):
    examples = make_examples(path, noise=0.3, age=0)
    logprobs = all_plain_logprobs(plain_model(path), examples).numpy()
    behaviour = np.concatenate([e.behaviour_logprobs for e in examples])
    ratio = np.exp(logprobs - behaviour)
    learner = make_learner(path, max_mismatch=1.0)
    metrics = learner.update([pack_minibatch([examples])]).read()
    advantages = np.concatenate([np.full(e.num_response, e.advantage) for e in examples])
    weights = np.minimum(ratio, 1.3)
    expected = {
        "loss/total": -(weights * advantages).sum() / num_tokens([examples]),
        "loss/behaviour_kl": (ratio - 1 - np.log(ratio)).mean(),
        "loss/ratio_mean": ratio.mean(),
        "loss/ratio_max": ratio.max(),
        "loss/is_weight_mean": weights.mean(),
        "loss/clip_frac": 0.0,
        "loss/masked_frac": 0.0,
        "loss/lr": OPTIMIZER["lr"],
        "mismatch/logprob_abs_mean": np.abs(logprobs - behaviour).mean(),
        "mismatch/logprob_abs_max": np.abs(logprobs - behaviour).max(),
        "mismatch/to_256_tokens": np.abs(logprobs - behaviour).mean(),  # no text is longer
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert metrics.keys() - expected.keys() == {"loss/entropy", "loss/grad_norm"}
    assert 0 < metrics["loss/entropy"] < math.log(98)


def test_the_mismatch_is_counted_by_depth_in_the_context():
    """A token counts at its own place, from 1; the last one is not comparable."""
    places = torch.tensor([0, 255, 256, 1023, 4096, 70_000, 70_001])
    row = SimpleNamespace(
        position_ids=places[None],
        positions=torch.arange(7),
        behaviour_logprobs=-torch.tensor([1.0, 3.0, 5.0, 6.0, 7.0, 8.0, 90.0]),
        is_comparable=torch.arange(7) < 6,
    )
    mismatch = Mismatch(device=CPU)
    mismatch.add(row, torch.zeros(7))
    found = {key: value for key, value in mismatch.metrics().read().items() if "/to_" in key}
    means = {256: 2.0, 1024: 5.5, 16_384: 7.0, 1 << 20: 8.0}
    assert found == {f"mismatch/to_{depth}_tokens": mean for depth, mean in means.items()}


def test_tokens_with_zero_weight_are_not_trained_and_not_counted(path):
    examples = make_examples(path, noise=0.3, age=1)
    alone, beside = make_learner(path), make_learner(path)
    expected = alone.update([pack_minibatch([examples[:2]])]).read()
    [kept], [masked] = pack_minibatch([examples[:2]]), pack_minibatch([examples[2:]])
    masked = replace(masked, loss_weights=np.zeros_like(masked.loss_weights))
    assert beside.update([[kept, masked]]).read() == pytest.approx(expected, rel=1e-4)


def test_norms_and_biases_do_not_decay():
    """Without gradients, only decay changes the weights. Fails when all parameters have the same
    decay.
    """
    layer, norm = torch.nn.Linear(3, 3), torch.nn.LayerNorm(3)
    parameters = [*layer.parameters(), *norm.parameters()]
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    config = OptimizerConfig(weight_decay=0.5, lr=0.1)
    Optimizer(config, [parameters], num_steps=1, device=torch.device("cpu")).step()
    torch.testing.assert_close(layer.weight, before[0] * (1 - 0.1 * 0.5))
    assert are_equal(list(parameters[1:]), before[1:])


@pytest.mark.parametrize("num_minibatches", [1, 2])
@pytest.mark.parametrize("offset", [0.3, -0.3, math.nan])
def test_a_mismatch_stops_the_update_before_any_step(path, num_minibatches, offset):
    learner = make_learner(path)
    before = weights_of(learner)
    examples = [
        replace(e, behaviour_logprobs=e.behaviour_logprobs + np.float32(offset))
        for e in make_examples(path, noise=0.0, age=0)
    ]
    size = len(examples) // num_minibatches
    parts = [examples[i * size : (i + 1) * size] for i in range(num_minibatches)]
    expected = r"5 times learner\.max_mismatch=0\.05.*sync is not the cause.*model_type qwen3"
    with pytest.raises(MismatchError, match=expected):
        learner.update([pack_minibatch([part]) for part in parts])
    assert are_equal(before, weights_of(learner))


def test_after_a_step_that_agreed_the_error_names_the_weight_sync_first(path):
    learner = make_learner(path)
    learner.update([pack_minibatch([agreeing_examples(path)])])
    wrong = [
        replace(e, behaviour_logprobs=e.behaviour_logprobs - 1) for e in agreeing_examples(path)
    ]
    with pytest.raises(MismatchError, match="Check first the weight sync"):
        learner.update([pack_minibatch([wrong])])


def test_a_mismatch_below_five_times_the_limit_is_only_a_warning(path):
    """Fails when the run already ends at the limit."""
    off = [
        replace(e, behaviour_logprobs=e.behaviour_logprobs - np.float32(0.2))
        for e in agreeing_examples(path)
    ]
    metrics = make_learner(path).update([pack_minibatch([off])])
    assert "0.2 nats" in MismatchWarning(0.05).of(metrics)


def test_a_warning_comes_once_until_engine_and_learner_agree_again():
    """A step that compared nothing does not change this."""
    warning = MismatchWarning(0.05)
    steps = [0.01, 0.1, 0.2, None, 0.1, 0.05, 0.06]
    said = [warning.of(Metrics({} if m is None else {MEAN: Mean(2 * m, 2)})) for m in steps]
    assert [text is not None for text in said] == [False, True, False, False, False, False, True]


def test_a_mismatch_in_the_second_minibatch_is_seen_before_the_first_step(path):
    learner = make_learner(path)
    before = weights_of(learner)
    stale, fresh = make_examples(path, noise=0.0, age=1), make_examples(path, noise=1.0, age=0)
    with pytest.raises(MismatchError):
        learner.update([pack_minibatch([stale]), pack_minibatch([fresh])])
    assert are_equal(before, weights_of(learner))


def test_tokens_of_an_older_policy_do_not_count_in_the_mismatch(path):
    metrics = make_learner(path).update([pack_minibatch([make_examples(path, noise=0.5, age=1)])])
    assert not [key for key in metrics if key.startswith("mismatch/")]


@pytest.mark.parametrize(("advantage", "named"), [(math.inf, "loss"), (2e38, "gradient norm")])
def test_a_step_that_is_not_finite_is_named_and_not_taken(path, advantage, named):
    learner = make_learner(path)
    before = weights_of(learner)
    examples = [replace(e, advantage=advantage) for e in make_examples(path, noise=0.0, age=0)[2:3]]
    said = f"minibatch 1 of 1 was not finite; the weights were not changed: the {named} is"
    with pytest.raises(NonFiniteError, match=said):
        learner.update([pack_minibatch([examples])])
    assert are_equal(before, weights_of(learner))
    other, good = make_learner(path), [pack_minibatch([make_examples(path, noise=0.0, age=0)])]
    metrics = [each.update(good).read() for each in (learner, other)]
    assert metrics[0] == metrics[1], "the next update is as if there had been none before"
    assert are_equal(weights_of(learner), weights_of(other))


def test_an_update_that_stops_at_its_second_minibatch_says_so_and_keeps_the_first_step(path):
    """Fails when the message says that the weights are unchanged, or the second minibatch changes
    them.
    """
    good = make_examples(path, noise=0.0, age=0)
    bad = [replace(good[2], advantage=math.inf)]
    learner, other = make_learner(path), make_learner(path)
    said = "minibatch 2 of 3 was not finite; 1 optimizer step was applied: the loss is"
    with pytest.raises(NonFiniteError, match=said):
        learner.update([pack_minibatch([part]) for part in (good, bad, good)])
    other.update([pack_minibatch([good])])
    assert are_equal(weights_of(learner), weights_of(other))


@pytest.mark.parametrize("ratio", BY_RATIO)
def test_several_passes_compare_each_token_with_the_engine_once_and_train_it_every_time(
    path, ratio
):
    """Planted bug: the first minibatch is compared before the update and again in its own pass."""
    examples = make_examples(path, noise=0.01, age=0)
    learner = make_learner(path, algorithm=BY_RATIO[ratio], num_passes=3)
    metrics = learner.update([pack_minibatch([examples])])
    once = num_tokens([examples])
    compared, trained = metrics[MEAN], metrics["loss/entropy"]
    assert (compared.weight, trained.weight) == (once, 3 * once)


def test_an_update_that_stops_in_its_second_pass_says_so(path):
    """The first step makes the weights so large that the next loss is not finite."""
    learner = make_learner(path, lr=1e30, num_passes=2)
    parts = [pack_minibatch([make_examples(path, noise=0.0, age=0)])]
    said = "minibatch 1 of 1 in pass 2 was not finite; 1 optimizer step was applied: the"
    with pytest.raises(NonFiniteError, match=said):
        learner.update(parts)


@pytest.mark.parametrize(
    ("change", "error"),
    [({"advantage": 2e38}, NonFiniteError), ({"behaviour_logprobs": -9.0}, MismatchError)],
)
def test_a_refused_update_frees_its_gradients(path, change, error):
    """The engine needs their memory. Fails when they stay until the next update."""
    learner = make_learner(path)
    first, *_ = make_examples(path, noise=0.0, age=0)
    if "behaviour_logprobs" in change:
        change = {"behaviour_logprobs": first.behaviour_logprobs + np.float32(-9.0)}
    with pytest.raises(error):
        learner.update([pack_minibatch([[replace(first, **change)]])])
    assert all(parameter.grad is None for parameter in learner._policy.parameters())


def test_the_learning_rate_rises_then_follows_its_schedule(path):
    learner = make_learner(path, lr=1e-3, warmup_steps=2, schedule=Schedule.linear, num_steps=4)
    batch = [pack_minibatch([make_examples(path, noise=0.0, age=1)])]
    lrs = [learner.update(batch).read()["loss/lr"] for _ in range(4)]
    assert lrs == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4])


@pytest.mark.parametrize(
    ("schedule", "last"),
    [(Schedule.constant, 1.0), (Schedule.linear, 0.1), (Schedule.cosine, 0.0245)],
)
def test_a_learning_rate_schedule_ends_at_its_final_value(schedule, last):
    settings = {"warmup_steps": 0, "num_steps": 10, "schedule": schedule}
    assert lr_factor(0, **settings) == 1.0
    assert lr_factor(9, **settings) == pytest.approx(last, abs=1e-4)
