"""The private parts of vLLM that docs/contributing.md lists exist with the signatures we rely on.

No engine starts. The test of a missing part fails with its name; the page says where the part is
used and which test shows its behaviour.
"""

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator

import pytest
import torch
from source_tree import PACKAGE, ROOT, tree_of

import april_rl.training.engine  # noqa: F401 (sets vLLM up before it is imported)

PAGE = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")

CLIENT = "vllm.v1.engine.core_client:InprocClient"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
OUTPUT = "vllm.v1.core.sched.output:SchedulerOutput"
KNOWN = "vllm.v1.core.sched.output:CachedRequestData"
RUNNER = "vllm.v1.worker.cpu_model_runner:CPUModelRunner"
EXPERTS = (
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod"
)

SIGNATURES = {
    f"{CLIENT}.add_request": "self request",
    f"{CLIENT}.get_output": "self",
    f"{CLIENT}.abort_requests": "self request_ids",
    f"{CLIENT}.add_lora": "self lora_request",
    f"{CLIENT}.collective_rpc": "self method timeout args kwargs",
    f"{CLIENT}.sleep": "self level mode",
    f"{CLIENT}.wake_up": "self tags",
    f"{SCHEDULER}.schedule": "self throttle_prefills",
    f"{SCHEDULER}.update_from_output": "self scheduler_output model_runner_output",
    f"{SCHEDULER}.get_request_counts": "self",
    f"{SCHEDULER}.get_kv_cache_usage": "self",
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks": "self",
    "vllm.v1.core.kv_cache_utils:get_max_concurrency_for_kv_cache_config": (
        "vllm_config kv_cache_config"
    ),
    "vllm.v1.executor:Executor.get_class": "vllm_config",
    "vllm.v1.executor.uniproc_executor:ExecutorWithExternalLauncher._distributed_args": "self",
    f"{RUNNER}.reload_weights": "self weights_iterator weights_path is_checkpoint_format",
    "vllm.v1.sample.sampler:Sampler.forward": (
        "self logits sampling_metadata predict_bonus_token logprobs_mode_override"
    ),
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens": (
        "x cu_num_tokens num_tokens replace_from replace_to"
    ),
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm": "layer remove_weight",
    f"{EXPERTS}._setup_kernel": "self layer w13 w2",
    "vllm.ir.op:IrOp.register_impl": "self provider supported supports_args inplace",
}

ATTRIBUTES = {
    CLIENT: "engine_core",
    "vllm.v1.engine.core:EngineCore": "batch_queue scheduler vllm_config",
    "vllm.v1.engine:EngineCoreRequest": (
        "request_id prompt_token_ids mm_features sampling_params pooling_params arrival_time "
        "lora_request cache_salt data_parallel_rank"
    ),
    "vllm.v1.engine:EngineCoreOutput": (
        "request_id new_token_ids new_logprobs finish_reason prefill_stats routed_experts"
    ),
    "vllm.v1.engine:EngineCoreOutputs": "outputs",
    "vllm.v1.engine:FinishReason": "STOP LENGTH",
    SCHEDULER: "running requests kv_cache_manager kv_cache_config aux_output_connector",
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": "running",
    OUTPUT: (
        "total_num_scheduled_tokens scheduled_new_reqs scheduled_cached_reqs preempted_req_ids"
    ),
    "vllm.v1.core.sched.output:NewRequestData": "req_id num_computed_tokens",
    KNOWN: "req_ids num_computed_tokens resumed_req_ids",
    "vllm.v1.request:Request": "request_id status num_tokens num_computed_tokens num_preemptions",
    "vllm.v1.request:RequestStatus": "RUNNING",
    "vllm.v1.core.kv_cache_manager:KVCacheManager": "block_pool watermark_blocks",
    "vllm.v1.kv_cache_interface:KVCacheConfig": "num_blocks kv_cache_groups",
    "vllm.config:VllmConfig": "use_v2_model_runner lora_config model_config",
    "vllm.config:ModelConfig": "is_moe",
    "vllm.config:CacheConfig": "kv_cache_size_tokens",
    "vllm.config:SchedulerConfig": "async_scheduling",
    "vllm.v1.worker.gpu_worker:Worker": "reload_weights model_runner",
    RUNNER: "sampler requests input_batch",
    "vllm.v1.worker.gpu_input_batch:InputBatch": "req_ids num_tokens_no_spec",
    "vllm.v1.outputs:SamplerOutput": "sampled_token_ids logprobs_tensors",
    "vllm.v1.outputs:LogprobsTensors": "logprob_token_ids logprobs selected_token_ranks",
    EXPERTS: "moe_kernel",
    "vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEKernel": "fused_experts",
    "vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEExperts": (
        "process_weights_after_loading"
    ),
    "vllm.ir.op:IrOp": "impls",
}

KERNELS = {
    "rms_norm": "out input weight epsilon",
    "fused_add_rms_norm": "input residual weight epsilon",
    "fused_gumbel_argmax": "logits seeds",
}
# Modules whose names are vLLM's documented interface.
PUBLIC = {"vllm", "vllm.config", "vllm.outputs", "vllm.platforms", "vllm.sampling_params"}


def part(path: str) -> object:
    """Return what `path` names; fail with its name if vLLM has no such part."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"vLLM has no {path} any more ({error}): see docs/contributing.md")


def has(owner: type, name: str) -> bool:
    """Return whether `owner` declares `name`, or sets it in one of its methods."""
    if name in dir(owner):
        return True
    return any(
        name in vars(each).get("__annotations__", ())
        or re.search(rf"self\.{name}\b\s*[:=]", inspect.getsource(each))
        for each in owner.__mro__
        if each.__module__.startswith("vllm")
    )


def check_attribute(path: str, name: str) -> None:
    owner = part(path)
    assert isinstance(owner, type), f"{path} is not a class any more: see docs/contributing.md"
    if not has(owner, name):
        pytest.fail(f"vLLM has no {path}.{name} any more: see docs/contributing.md")


def check_signature(path: str, expected: str) -> None:
    function = part(path)
    assert callable(function), f"{path} is not a function any more: see docs/contributing.md"
    found = " ".join(inspect.signature(function).parameters)
    assert found == expected, f"{path} takes ({found}), not ({expected}): see docs/contributing.md"


@pytest.mark.parametrize("path", SIGNATURES)
def test_a_function_of_vllm_has_the_signature_we_rely_on(path: str) -> None:
    check_signature(path, SIGNATURES[path])


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path in ATTRIBUTES for name in ATTRIBUTES[path].split()]
)
def test_an_attribute_of_vllm_that_we_use_exists(path: str, name: str) -> None:
    check_attribute(path, name)


@pytest.mark.cpu_engine
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_for_cpus_has_the_arguments_we_pass(name: str) -> None:
    import vllm._custom_ops  # noqa: F401 (registers the kernels)

    try:
        schema = getattr(torch.ops._C, name).default._schema
    except AttributeError:
        pytest.fail(f"vLLM has no torch.ops._C.{name} any more: see docs/contributing.md")
    found = " ".join(argument.name for argument in schema.arguments)
    assert found == KERNELS[name], f"torch.ops._C.{name} takes ({found}): see docs/contributing.md"


@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm"])
def test_an_operation_that_we_implement_exists(name: str) -> None:
    from vllm import ir

    assert name in dir(ir.ops), f"vLLM has no vllm.ir.ops.{name} any more: see docs/contributing.md"


@pytest.mark.parametrize("name", ["VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER"])
def test_vllm_reads_a_variable_that_we_set(name: str) -> None:
    from vllm import envs

    assert name in envs.environment_variables, (
        f"vLLM does not read {name}: see docs/contributing.md"
    )


def test_a_missing_or_changed_part_fails_with_its_name() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"InprocClient\.gone"):
        part(f"{CLIENT}.gone")
    with pytest.raises(pytest.fail.Exception, match=r"Scheduler\.gone"):
        check_attribute(SCHEDULER, "gone")
    with pytest.raises(AssertionError, match=r"Scheduler\.schedule takes"):
        check_signature(f"{SCHEDULER}.schedule", "self")


def imported_names() -> Iterator[str]:
    """Return the names that the package imports from vLLM, besides its documented interface."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("vllm.") and module not in PUBLIC:
                yield from (alias.name for alias in node.names)


def test_the_page_names_every_part_and_its_tests_exist() -> None:
    """Fails when a part is used or checked but missing from the page, or a test named there was
    renamed.
    """
    used = {path.rpartition(":")[2].rpartition(".")[2] for path in SIGNATURES}
    used |= {name for names in ATTRIBUTES.values() for name in names.split()}
    used |= {*KERNELS, *imported_names()}
    said = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", PAGE))))
    assert sorted(used - said) == []
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(tests) > 12
    lost = [t for path, t in tests if f"def {t}(" not in (ROOT / path).read_text("utf-8")]
    assert lost == []
