"""Host memory: what the workers of a node share, and the error when there is too little."""

from dataclasses import replace

import pytest
from planned_models import GPU, INPUTS, change, sizes_of, worker

from april_rl.config.choices import Offload
from april_rl.errors import PreflightError
from april_rl.start.planning.memory_check import check_memory
from april_rl.start.planning.memory_plan import GIB, plan_memory

MORE = "runtime.num_workers=16 on twice as many machines needs less"


def test_host_memory_is_shared_within_a_node_and_the_smallest_node_decides():
    """Fails when each worker counts all host memory of its node."""
    model, offloads = sizes_of("8B"), change(INPUTS, offload=Offload.all)
    assert check_memory(model, INPUTS, [worker("a"), worker("b")])
    with pytest.raises(PreflightError, match=r"has 20\.0 GiB free"):
        check_memory(model, INPUTS, [worker("a"), worker("b", free=20 * GIB)])
    plan = plan_memory(model, offloads, device_bytes=GPU)
    need = plan.host.total + plan.file_bytes
    apart = [worker("a", host=1.1 * need), worker("b", host=1.1 * need)]
    assert check_memory(model, offloads, apart)
    with pytest.raises(PreflightError, match=r"host memory: .* learner\.offload=optimizer or none"):
        check_memory(model, offloads, [replace(each, node_id="a") for each in apart])


def test_the_copy_of_a_checkpoint_is_in_host_memory_while_it_is_written():
    """12 bytes per trained parameter, over the workers that share one copy; on a CPU in addition to
    everything else. Fails when a run is accepted although its first checkpoint would not fit.
    """
    model = sizes_of("8B")
    sizes = {
        (8, None): 12 * model.num_parameters / 8,
        (8, 2): 12 * model.num_parameters / 2,
        (1, None): 12 * model.num_parameters,
    }
    for (num_workers, shard_size), expected in sizes.items():
        settings = change(INPUTS, num_workers=num_workers, shard_size=shard_size)
        assert plan_memory(model, settings).host.items["checkpoint"] == expected
    adapters = plan_memory(sizes_of("8B", rank=8), INPUTS).host.items["checkpoint"]
    assert 0 < adapters < model.num_parameters / 100
    [whole] = plan_memory(model, change(INPUTS, device="cpu", num_workers=1)).phases
    assert whole.items["checkpoint"] == 12 * model.num_parameters


def test_the_file_of_an_export_is_in_host_memory_once_per_node():
    """Only rank 0 writes. Fails when each worker has a file, or none has."""
    model, offloads = sizes_of("8B"), change(INPUTS, offload=Offload.all)
    plan = plan_memory(model, offloads, device_bytes=GPU)
    assert plan.file_bytes == 2 * GIB
    assert plan.host.total == (12 + 12) * model.num_parameters / 8
    enough = 3 * plan.host.total + plan.file_bytes
    assert check_memory(model, offloads, [worker("a", host=enough + 9)] * 3)
    with pytest.raises(PreflightError, match=r"after 2\.0 GiB for an export's file"):
        check_memory(model, offloads, [worker("a", host=enough - 9)] * 3)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"offload": Offload.optimizer}, f"; learner.offload=none needs less, {MORE}"),
        ({"has_reference": True}, f"; algorithm.kl=none needs no reference model, {MORE}"),
        ({"shard_size": 4}, "; learner.shard_size=null needs less"),
        ({}, f"; {MORE}"),
    ],
)
def test_settings_that_lower_host_memory_are_proposed_only_if_they_help(changes, expected):
    """Fails when a setting is proposed that the run already has, or that changes nothing."""
    with pytest.raises(PreflightError) as caught:
        check_memory(sizes_of("8B"), change(INPUTS, **changes), [worker("a", host=GIB)])
    assert str(caught.value).endswith(expected)
