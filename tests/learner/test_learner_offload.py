"""A learner offloads tensors between two updates, and their values stay the same."""

import gc
from collections.abc import Iterable

import pytest
import torch
from learner_setup import Example, learner_logprobs, make_examples, make_learner, pack_minibatch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from april_rl.config.choices import Offload
from april_rl.learner.learner import Learner
from april_rl.learner.model.offload import Offloadable

pytestmark = pytest.mark.usefixtures("_group")

CPU = torch.device("cpu")


def update(learner: Learner, examples: list[Example]) -> dict[str, float]:
    """Make two optimizer steps."""
    return learner.update([pack_minibatch([examples[:3]]), pack_minibatch([examples[3:]])]).read()


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the memory behind these tensors on this rank."""
    locals_ = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in locals_)}.values())


def masters(learner: Learner) -> list[Tensor]:
    return list(learner._policy.parameters())


def moments(learner: Learner) -> list[Tensor]:
    return list(learner._optimizer.moments())


def floats_alive() -> dict[int, int]:
    """Return the bytes of every storage that a float tensor of this process uses, by address."""
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, torch.nn.Parameter) and thing.is_floating_point():
            storage = thing.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


@pytest.mark.parametrize("offload", list(Offload))
def test_updates_with_offloading_in_between_equal_updates_without_it(either_path, offload):
    """Bit-identical after three updates of two steps: weights that are sent, log-probabilities
    computed while everything is offloaded, and the optimizer state at the end. The plain learner
    steps all parameters at once, the other one unit by unit; gradients are clipped and weights
    decay. Fails when something comes back too late, twice, or to the wrong tensor, or when a unit
    is stepped twice or not at all.
    """
    plain, other = make_learner(either_path), make_learner(either_path, offload=offload)
    for seed in range(3):
        examples = make_examples(either_path, noise=0.3, age=1, seed=seed)
        other.offload()
        assert update(other, examples) == update(plain, examples)
        other.offload()
        sent = dict(other.weights())
        for name, tensor in plain.weights():
            assert torch.equal(sent[name], tensor), name
        other.offload()
        other.offload()
        assert torch.equal(learner_logprobs(other, examples), learner_logprobs(plain, examples))
    expected = plain.snapshot().shards
    shards = other.snapshot().shards
    assert shards.keys() == expected.keys()
    for name, shard in shards.items():
        assert torch.equal(shard.values, expected[name].values), name


@pytest.mark.parametrize(
    ("offload", "leaves"),
    [
        (Offload.none, (False, False)),
        (Offload.optimizer, (False, True)),
        (Offload.all, (True, True)),
    ],
)
def test_offload_moves_the_tensors_that_the_setting_names_and_brings_them_back(
    either_path, offload, leaves
):
    """Parameters leave at `offload`, the optimizer state by the end of an update; gradients are
    never kept.
    """
    learner = make_learner(either_path, offload=offload)
    size = bytes_of(masters(learner))
    update(learner, make_examples(either_path, noise=0.3, age=1))
    masters_leave, moments_leave = leaves
    assert all(parameter.grad is None for parameter in masters(learner))
    assert bytes_of(masters(learner)) == size
    assert (bytes_of(moments(learner)) == 0) == moments_leave
    learner.offload()
    assert bytes_of(masters(learner)) == (0 if masters_leave else size)
    assert (bytes_of(moments(learner)) == 0) == moments_leave
    learner.reload()
    assert bytes_of(masters(learner)) == size
    assert bytes_of(moments(learner)) == 2 * size + 4 * len(masters(learner))  # plus a step count


@pytest.mark.parametrize("offload", [Offload.none, Offload.optimizer])
def test_offloaded_optimizer_state_is_on_the_device_only_during_optimizer_steps(
    either_path, offload
):
    """Count its bytes in each forward pass: two passes before the first step, four after it. Fails
    when the second minibatch's forward pass shares the device with optimizer state that it does not
    need.
    """
    seen: list[int] = []
    learner = make_learner(
        either_path, offload=offload, on_forward=lambda: seen.append(bytes_of(moments(learner)))
    )
    size = bytes_of(masters(learner))
    for _ in range(2):
        update(learner, make_examples(either_path, noise=0.3, age=1))
    assert len(seen) > 4
    expected = 0 if offload is Offload.optimizer else 2 * size + 4 * len(masters(learner))
    assert seen[-1] == expected
    assert set(seen) == {0, expected}


def largest_unit(learner: Learner) -> int:
    """Return the bytes of the optimizer state of the largest FSDP unit."""
    return max(
        sum(8 * p.to_local().numel() + 4 for p in unit)  # type: ignore[attr-defined]
        for unit in learner._policy.trained_units()
    )


def test_offloaded_optimizer_state_is_on_the_device_for_one_unit_at_a_time(either_path):
    """In optimizer steps, and when a state is loaded. Fails when the whole optimizer state is on
    the device at once.
    """
    learner = make_learner(either_path, offload=Offload.optimizer)
    seen: list[int] = []
    hook = register_optimizer_step_post_hook(lambda *_: seen.append(bytes_of(moments(learner))))
    for _ in range(2):
        update(learner, make_examples(either_path, noise=0.3, age=1))
    hook.remove()
    assert len(seen) == 4 * len(learner._policy.trained_units())
    assert 0 < max(seen) <= largest_unit(learner)
    loaded = make_learner(either_path, offload=Offload.optimizer)
    seen.clear()
    loaded._optimizer.continue_after(3, lambda *_: seen.append(bytes_of(moments(loaded))))
    assert 0 < max(seen) <= largest_unit(loaded)
    assert bytes_of(moments(loaded)) == 0


def test_an_offloaded_learner_keeps_nothing_else_on_the_device(either_path):
    """Even when the last operation was a forward pass, after which a unit stays gathered. Fails
    when that unit is not freed, or when gradients or activations outlive their step.
    """
    before = floats_alive().keys()
    learner = make_learner(either_path, offload=Offload.all)
    size = bytes_of(masters(learner))
    examples = make_examples(either_path, noise=0.3, age=1)
    update(learner, examples)
    learner_logprobs(learner, examples)
    learner.offload()
    left = {key: size for key, size in floats_alive().items() if key not in before}
    assert sum(left.values()) < 0.01 * size, sorted(left.values())


def test_a_storage_that_several_tensors_share_is_moved_once_and_its_views_follow():
    whole = torch.arange(12.0)
    view = whole[4:].view(2, 4)
    held = Offloadable(lambda: [whole, view], device=CPU)
    held.offload()
    assert bytes_of([whole, view]) == 0
    held.reload()
    assert torch.equal(whole, torch.arange(12.0))
    assert torch.equal(view, torch.arange(4.0, 12.0).view(2, 4))


def test_values_that_changed_since_the_last_offload_come_back():
    """Fails when the CPU copy of an earlier offload overwrites the new values."""
    tensor = torch.zeros(3)
    held = Offloadable(lambda: [tensor], device=CPU)
    for value in (1.0, 2.0):
        tensor.fill_(value)
        held.offload()
        held.reload()
        assert tensor.tolist() == [value] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU")
def test_cached_memory_of_an_accelerator_is_released():
    device = torch.accelerator.current_accelerator()
    tensor = torch.arange(2.0**20, device=device)
    held = Offloadable(lambda: [tensor], device=device)
    before = torch.accelerator.memory_allocated()
    held.offload()
    assert before - torch.accelerator.memory_allocated() >= 4 * 2**20
    held.reload()
    assert torch.equal(tensor.cpu(), torch.arange(2.0**20))
