"""A critic in an update: its values, the advantages computed from them, and its own steps."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from learner_setup import (
    MAX_GRAD_NORM,
    OPTIMIZER,
    Example,
    all_plain_logprobs,
    learner_logprobs,
    make_actor_critic,
    make_examples,
    num_tokens,
    pack_minibatch,
    plain_adamw,
    plain_model,
    plain_update,
)
from torch import Tensor, nn

from april_rl.config.choices import Schedule
from april_rl.config.models_beside import CriticConfig
from april_rl.training.learner.row import PackedRow
from april_rl.training.learner.update_errors import NonFiniteError

pytestmark = pytest.mark.usefixtures("_group")

CRITIC = CriticConfig(lr=3e-3, policy_lambda=0.9, value_lambda=1.0, value_clip=0.2)


def rewarded(path: str, *, noise: float = 0.3) -> list[Example]:
    """Return examples with a reward at the last token of each response; half of the tokens have age
    0.
    """
    examples = make_examples(path, noise=noise, age=1)
    found = []
    for number, example in enumerate(examples):
        rewards = np.zeros(example.num_response, np.float32)
        rewards[-1] = number % 3 - 0.5
        found.append(replace(example, advantage=rewards))
    return found


class PlainCritic(nn.Module):
    """A transformers backbone with a linear head that starts at 0."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.model = plain_model(path).model
        self.head = nn.Linear(self.model.config.hidden_size, 1, bias=False)
        nn.init.zeros_(self.head.weight)

    def values(self, example: Example) -> Tensor:
        """Return the values [R], computed for one sequence on its own."""
        hidden = self.model(torch.tensor([example.token_ids]), use_cache=False).last_hidden_state
        return self.head(hidden[0, example.num_prompt - 1 : -1])[:, 0]


def advantages(example: Example, values: Tensor, decay: float) -> Tensor:
    """Compute advantages as in Schulman et al. 2016, eq. 16, as a sum over deltas [R]."""
    rewards = torch.from_numpy(np.asarray(example.advantage))
    deltas = rewards + torch.cat([values[1:], torch.zeros(1)]) - values
    steps = range(len(deltas))
    return torch.stack([sum(decay ** (k - t) * deltas[k] for k in steps[t:]) for t in steps])


def plain_run(
    path: str, minibatches: Sequence[Sequence[Example]], *, num_updates: int
) -> tuple[nn.Module, PlainCritic]:
    """Return policy and critic after updates in plain torch."""
    policy, critic = plain_model(path), PlainCritic(path)
    of_policy = plain_adamw(policy)
    of_critic = plain_adamw(critic)
    for group in of_critic.param_groups:
        group["lr"] = CRITIC.lr
    for _ in range(num_updates):
        with torch.no_grad():
            old = {id(e): critic.values(e) for part in minibatches for e in part}
            raw = {
                id(e): advantages(e, old[id(e)], CRITIC.policy_lambda)
                for part in minibatches
                for e in part
            }
            every = torch.cat([*raw.values()])
            returns = {
                id(e): advantages(e, old[id(e)], CRITIC.value_lambda) + old[id(e)]
                for part in minibatches
                for e in part
            }
        judged = [
            [
                replace(e, advantage=(raw[id(e)] - every.mean()) / every.std(correction=0))
                for e in part
            ]
            for part in minibatches
        ]
        plain_update(policy, of_policy, judged)
        for part in minibatches:
            of_critic.zero_grad()
            for e in part:
                values, target = critic.values(e), returns[id(e)]
                near = old[id(e)] + (values - old[id(e)]).clamp(-0.2, 0.2)
                loss = torch.maximum((values - target) ** 2, (near - target) ** 2) / 2
                (loss.sum() / num_tokens([part])).backward()
            torch.nn.utils.clip_grad_norm_(critic.parameters(), MAX_GRAD_NORM)
            of_critic.step()
    return policy, critic


def test_updates_with_a_critic_equal_plain_torch(path):
    """Two updates of two minibatches, so that the second one has values other than 0. Fails when
    advantages are not standardised over both minibatches, a value is used for another token, the
    targets follow the moving critic, or the two optimizers share state.
    """
    examples = rewarded(path)
    minibatches = [examples[:3], examples[3:]]
    learner = make_actor_critic(path, critic=CRITIC)
    batch = [pack_minibatch([part]) for part in minibatches]
    metrics = [learner.update(batch).read() for _ in range(2)]
    policy, critic = plain_run(path, minibatches, num_updates=2)
    expected = all_plain_logprobs(policy, examples)
    found = learner_logprobs(learner.policy, examples)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    trained = dict(critic.named_parameters())
    for name, parameter in learner.critic.trained.model.named_parameters():
        plain = trained["head.weight" if name == "lm_head.weight" else name]
        torch.testing.assert_close(parameter.full_tensor(), plain, rtol=0, atol=2e-5)
    assert metrics[0]["critic/explained_variance"] == pytest.approx(0.0, abs=1e-9)
    assert OPTIMIZER["lr"] != CRITIC.lr


def test_weights_masks_and_the_clip_of_values_act_as_in_plain_torch(path):
    """While the critic trains alone, in two passes, so that values move by more than the clip; some
    tokens are masked, and the others have different weights. Fails when masked tokens count in the
    whitening, the loss or the metrics, or values are clipped around anything but the old ones.
    """
    examples = rewarded(path)
    config = replace(CRITIC, value_clip=0.02)
    learner = make_actor_critic(path, critic=config, num_critic_only_steps=99, num_passes=2)
    [row] = pack_minibatch([examples])
    weights = [torch.arange(e.num_response) % 3 * 0.5 for e in examples]
    scaled = row.loss_weights.copy()
    scaled[row.response_mask] *= torch.cat(weights).numpy()
    row = replace(row, loss_weights=scaled)
    critic = PlainCritic(path)
    optimizer = plain_adamw(critic)
    for group in optimizer.param_groups:
        group["lr"] = config.lr
    for update in range(2):
        with torch.no_grad():
            old = [critic.values(e) for e in examples]
        returns = [advantages(e, v, 1.0) + v for e, v in zip(examples, old, strict=True)]
        raw = torch.cat([advantages(e, v, 0.9) for e, v in zip(examples, old, strict=True)])
        is_trained = torch.cat(weights) > 0
        error = (torch.cat(returns) - torch.cat(old))[is_trained]
        explained = 1 - error.var() / torch.cat(returns)[is_trained].var()
        spread = raw[is_trained].std(correction=0)
        judged = learner.critic.judge([[PackedRow.of(row, device=torch.device("cpu"))]])
        torch.testing.assert_close(
            judged.advantages[0][0], (raw - raw[is_trained].mean()) / spread, atol=1e-3, rtol=0
        )
        metrics = learner.update([[row]]).read()
        assert metrics["critic/explained_variance"] == pytest.approx(explained.item(), abs=1e-4)
        assert metrics["critic/error_old"] == pytest.approx(error.abs().mean().item(), abs=1e-4)
        moved = 0.0
        for _ in range(2):
            optimizer.zero_grad()
            for e, before, target, weight in zip(examples, old, returns, weights, strict=True):
                values = critic.values(e)
                moved = max(moved, (values - before).abs().max().item())
                near = before + (values - before).clamp(-0.02, 0.02)
                loss = torch.maximum((values - target) ** 2, (near - target) ** 2) / 2
                ((weight * loss).sum() / num_tokens([examples])).backward()
            torch.nn.utils.clip_grad_norm_(critic.parameters(), MAX_GRAD_NORM)
            optimizer.step()
        assert moved > 0.02, update
    trained = dict(critic.named_parameters())
    for name, parameter in learner.critic.trained.model.named_parameters():
        plain = trained["head.weight" if name == "lm_head.weight" else name]
        torch.testing.assert_close(parameter.full_tensor(), plain, rtol=0, atol=2e-5)


def test_the_error_of_a_critic_is_measured_by_age(path):
    """Fails when its error on old tokens is the error on all tokens."""
    examples = rewarded(path, noise=0.0)
    examples = [replace(e, age=number % 2) for number, e in enumerate(examples)]
    metrics = make_actor_critic(path, critic=CRITIC).update([pack_minibatch([examples])]).read()
    by_age = {
        age: np.concatenate(
            [np.full(e.num_response, abs(e.advantage[-1])) for e in examples if e.age == age]
        ).mean()
        for age in (0, 1)
    }
    assert metrics["critic/error_new"] == pytest.approx(by_age[0], abs=1e-6)
    assert metrics["critic/error_old"] == pytest.approx(by_age[1], abs=1e-6)


def test_the_policy_does_not_change_while_the_critic_warms_up(path):
    """For four optimizer steps, which are two updates. Engine and learner are still compared, and
    the policy's learning rate falls over the other six steps. Fails when the schedule counts the
    warm-up.
    """
    learner = make_actor_critic(
        path, critic=CRITIC, num_critic_only_steps=4, num_steps=10, schedule=Schedule.linear
    )
    examples = rewarded(path)
    batch = [pack_minibatch([part]) for part in (examples[:3], examples[3:])]
    start = learner_logprobs(learner.policy, examples)
    for _ in range(2):
        metrics = learner.update(batch)
        assert "loss/total" not in metrics
        assert torch.equal(learner_logprobs(learner.policy, examples), start)
    metrics = learner.update(batch)
    assert metrics.read()["loss/lr"] == pytest.approx(OPTIMIZER["lr"] * (1 + 5 / 6) / 2)
    assert not torch.equal(learner_logprobs(learner.policy, examples), start)


def test_a_bad_step_of_the_critic_names_its_learning_rate_and_leaves_it_unchanged(
    path, monkeypatch
):
    """Fails when the message blames the policy, or the critic takes the step anyway."""
    learner = make_actor_critic(path, critic=CRITIC)
    examples = rewarded(path)
    batch = [pack_minibatch([part]) for part in (examples[:3], examples[3:])]
    parameters = [*learner.critic.trained.model.parameters()]
    start = [parameter.full_tensor().clone() for parameter in parameters]
    monkeypatch.setattr(
        "april_rl.training.learner.critic.value_loss", lambda values, *_, **__: values * torch.inf
    )
    message = r"step 1 of 2 of the critic was not finite.* not affected: .*Lower critic\.lr, or"
    with pytest.raises(NonFiniteError, match=message):
        learner.update(batch)
    for parameter, before in zip(parameters, start, strict=True):
        assert torch.equal(parameter.full_tensor(), before)
        assert parameter.grad is None
