"""A learner offloads tensors between two updates, and their values stay the same."""

import gc
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from learner_setup import (
    ALGORITHM,
    CPU,
    Example,
    learner_logprobs,
    make_examples,
    make_learner,
    pack_minibatch,
)
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from april_rl.config.choices import Kl, Offload
from april_rl.training.learner.learner import Learner
from april_rl.training.learner.model.offload import Offloadable

pytestmark = pytest.mark.usefixtures("_group")


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
    return [tensor for piece in learner._optimizer._pieces for tensor in piece.tensors()]


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


def test_constant_values_are_copied_to_the_host_once():
    """A teacher's 16 GB would go back in every step. Fails when each offload copies, or a change
    that was announced is lost.
    """
    tensor = torch.ones(3)
    weights = Offloadable(lambda: [tensor], device=CPU, is_constant=True)
    weights.offload()
    assert tensor.untyped_storage().nbytes() == 0
    assert weights.host_copy(tensor).tolist() == [1, 1, 1]
    weights.reload()
    tensor += 1  # nothing does this: it shows that the next offload copies nothing
    weights.offload()
    with weights.change():
        assert tensor.tolist() == [1, 1, 1]
        tensor += 4
    weights.reload()
    assert tensor.tolist() == [5, 5, 5]


def test_a_reference_on_the_host_gives_the_numbers_of_one_on_the_device(path, tmp_path):
    """It moves every second update, and is saved and loaded. Fails when it is used or copied while
    its memory is freed.
    """
    algorithm = replace(ALGORITHM, kl=Kl.k3, kl_coefficient=0.1, reference_every=2)
    batch = [pack_minibatch([make_examples(path, noise=0.0, age=1)])]

    def run(*, is_moved: bool) -> list[float]:
        found: list[float] = []
        for begins in (True, False):
            learner = make_learner(path, algorithm=algorithm, lr=2e-3)
            frozen = learner._reference
            if is_moved:
                parameters = frozen._policy.parameters
                frozen.weights = Offloadable(parameters, device=CPU, is_constant=True)
                frozen.weights.offload()
            if not begins:
                learner.load_state(tmp_path)
            found += [learner.update(batch).read()["loss/reference_kl"] for _ in range(3)]
            if begins:
                learner.snapshot().write(tmp_path)
        return found

    assert run(is_moved=True) == run(is_moved=False)
