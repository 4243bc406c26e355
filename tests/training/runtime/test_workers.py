"""Number, nodes and order of the workers, and the comparison of ranks within one engine."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from composed_config import load, refusal
from light_samples import PROMPT, following

from april_rl.config import TrainConfig
from april_rl.config.choices import ComputeDtype
from april_rl.errors import LayoutError, RunError
from april_rl.start.planning.layout import settle
from april_rl.start.planning.machine import num_visible
from april_rl.training.runtime.cluster import Node, WorkerLocation, rank_order, spread
from april_rl.training.runtime.lockstep import check_lockstep, fingerprint
from april_rl.types import Completion, Sample


def node(number: int, room: int) -> Node:
    return Node(ip=f"10.0.0.{number}", id=f"node {number}", room=room)


def completion(index: int = 0, *, token_ids: tuple[int, ...] = (5, 6)) -> Completion:
    return following(Sample(PROMPT, index), token_ids, version=1)


def layout_of(*overrides: str, gpus: int) -> tuple[str, int, int]:
    """Return device, workers and engines of the tiny recipe with `overrides` on a machine with
    `gpus`.
    """
    config = load("+recipe=tiny_cpu", *overrides)
    found, layout = settle(config, gpus=gpus, where="this machine")
    assert found.runtime.num_workers == layout.num_workers
    assert found.runtime.device.name == {"cpu": "cpu", "cuda": "gpu"}[layout.device]
    return layout.device, layout.num_workers, layout.num_engines


def test_auto_is_every_gpu_or_one_engine_on_cpu() -> None:
    """Fails when the workers of an engine count as engines."""
    assert load("+recipe=tiny_cpu").runtime.num_workers == "auto"
    assert layout_of("runtime.device=auto", gpus=8) == ("cuda", 8, 8)
    two = "engine.tensor_parallel_size=2"
    assert layout_of("runtime.device=auto", two, gpus=8) == ("cuda", 8, 4)
    assert layout_of("runtime.device=auto", gpus=0) == ("cpu", 1, 1)
    assert layout_of(two, gpus=8) == ("cpu", 2, 1), "the recipe says cpu"
    assert layout_of(two, "runtime.num_workers=4", gpus=0) == ("cpu", 4, 2)


@pytest.mark.parametrize(
    ("overrides", "gpus", "expected"),
    [
        (("runtime.device=auto",), 1, True),
        (("runtime.device=auto",), 0, False),
        (
            (
                "runtime.device=auto",
                "engine.args.speculative_config={method:ngram,num_speculative_tokens:4}",
            ),
            1,
            False,
        ),
        (("runtime.device=auto", "engine.args.async_scheduling=false"), 1, False),
        (("engine.args.async_scheduling=true",), 0, True),
    ],
)
def test_steps_are_scheduled_ahead_on_gpus_or_when_requested(overrides, gpus, expected) -> None:
    assert settle_on(*overrides, gpus=gpus).engine.args["async_scheduling"] is expected


def settle_on(*overrides: str, gpus: int) -> TrainConfig:
    return settle(load("+recipe=tiny_cpu", *overrides), gpus=gpus, where="this machine")[0]


def test_auto_is_float32_on_a_cpu_and_bfloat16_on_a_gpu() -> None:
    """Fails when learner or engine is left out, or an explicit precision is not used."""
    for gpus, expected in ((0, ComputeDtype.float32), (1, ComputeDtype.bfloat16)):
        found = settle_on("runtime.device=auto", gpus=gpus)
        assert (found.learner.compute_dtype, found.engine.dtype) == (expected, expected)
    asked = settle_on("learner.compute_dtype=bfloat16", gpus=0)
    assert asked.learner.compute_dtype is ComputeDtype.bfloat16
    assert asked.engine.dtype is ComputeDtype.float32


def test_workers_that_do_not_form_whole_engines_are_refused_with_both_keys() -> None:
    """A number is refused at once, auto when its value is known."""
    two = "engine.tensor_parallel_size=2"
    message = refusal("+recipe=tiny_cpu", "runtime.num_workers=3", two)
    assert "runtime.num_workers must be a multiple of engine.tensor_parallel_size=2" in message
    message = refusal("+recipe=tiny_cpu", "runtime.num_workers=some")
    assert "runtime.num_workers must be >= 1 or auto, got some" in message
    with pytest.raises(LayoutError, match=r"num_workers=auto.* has 3 GPUs.*parallel_size=2"):
        layout_of("runtime.device=gpu", two, gpus=3)
    with pytest.raises(LayoutError, match=r"^runtime\.device=gpu needs a GPU, and this machine"):
        layout_of("runtime.device=gpu", gpus=0)


@pytest.mark.parametrize(
    ("environment", "seen"),
    [
        ({}, 8),
        ({"CUDA_VISIBLE_DEVICES": "1,5"}, 2),
        ({"HIP_VISIBLE_DEVICES": "GPU-0a1b"}, 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
    ],
)
def test_gpus_that_the_environment_hides_are_not_counted(environment, seen) -> None:
    assert num_visible(8, environment) == seen


def test_workers_go_to_few_nodes_and_no_engine_spans_two() -> None:
    """Fails when a node's odd GPU gets half an engine, or nodes are ordered by their names."""
    nodes = [node(10, 4), node(9, 8), node(2, 3)]
    assert spread(nodes, num_workers=8, tensor_parallel_size=1) == [(node(9, 8), 8)]
    assert spread(nodes, num_workers=12, tensor_parallel_size=2) == [
        (node(9, 8), 8),
        (node(10, 4), 4),
    ]
    assert spread(nodes, num_workers=14, tensor_parallel_size=2)[0] == (node(2, 3), 2)
    with pytest.raises(RunError, match=r"num_workers=16: 2 of them do not fit.*3 on 10\.0\.0\.2"):
        spread(nodes, num_workers=16, tensor_parallel_size=2)


def test_ranks_follow_nodes_and_gpus_and_do_not_change_on_cpu() -> None:
    """10.0.0.9 comes before 10.0.0.10 and GPU 2 before GPU 10; two nodes on one machine stay
    separate.
    """
    found = [("10.0.0.10", "a", "10"), ("10.0.0.10", "a", "2")]
    found += [("10.0.0.9", node, "") for node in ("c", "b", "c", "b")]
    locations = [WorkerLocation(node_ip=ip, node_id=node, gpu=gpu) for ip, node, gpu in found]
    assert rank_order(locations) == [3, 5, 2, 4, 1, 0]


def test_ranks_that_sampled_the_same_tokens_pass_the_check() -> None:
    """Log-probabilities may differ in their last bits."""
    ours = [completion(0), completion(1)]
    theirs = [replace(each, logprobs=(-0.5, -0.5000001)) for each in ours]
    assert fingerprint(theirs) == fingerprint(ours) != fingerprint(ours[:1])
    check_lockstep(ours, [fingerprint(theirs)] * 3, first_rank=4)
    check_lockstep(ours, [], first_rank=0)


@pytest.mark.parametrize(
    "theirs",
    [
        [completion(0), completion(1, token_ids=(5, 7))],
        [completion(0), replace(completion(1), finish_reason="length")],
        [completion(0), replace(completion(1), policy_version=2)],
        [completion(0)],
    ],
    ids=["token", "end", "version", "number"],
)
def test_a_rank_that_sampled_other_tokens_is_named(theirs) -> None:
    """The second of three followers: worker 6 of an engine that begins with worker 4."""
    ours = [completion(0), completion(1)]
    same = fingerprint(ours)
    with pytest.raises(
        RunError, match=r"worker 6 did not sample the same tokens as worker 4"
    ) as raised:
        check_lockstep(ours, [same, fingerprint(theirs), same], first_rank=4)
    assert ("index=1" in str(raised.value)) == (len(theirs) == 2)


def test_unnamed_shared_memory_disappears_with_a_killed_process() -> None:
    """A lock and a block of multiprocessing, made like vLLM's, in a process that is killed. Fails
    when their names remain, because no process is left to unlink them.
    """
    code = (
        "import multiprocessing as mp, os\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "from april_rl.training.runtime.process_setup import unlink_shared_memory\n"
        "lock, block = mp.get_context('spawn').Lock(), SharedMemory(create=True, size=4096)\n"
        "block.buf[0] = 1\n"
        "held = [p for p in os.listdir('/dev/shm') if p.endswith(block.name.lstrip('/'))]\n"
        "name = lock._semlock.name.lstrip('/')\n"
        "assert len(held) == 1 and os.path.exists(f'/dev/shm/sem.{name}')\n"
        "assert unlink_shared_memory() == 2\n"
        "lock.acquire(); lock.release(); block.buf[1] = block.buf[0]\n"
        "print(block.name.lstrip('/'), f'sem.{name}', flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert len(done.stdout.split()) == 2, done.stderr
    assert [name for name in done.stdout.split() if Path("/dev/shm", name).exists()] == []
