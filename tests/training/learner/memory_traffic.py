"""Count the bytes that operations read and write, on the meta device, where nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations that move no data: views, and memory without values.
_FREE = {
    *("view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "alias"),
    *("unsqueeze", "squeeze", "detach", "split", "split_with_sizes", "unbind", "as_strided"),
    *("empty", "empty_like", "new_empty", "reshape"),
}
_MATMULS = {"mm", "bmm", "addmm"}


class MemoryTraffic(TorchDispatchMode):
    """A dispatch mode that counts the bytes that operations read and write.

    A compiled graph counts as if the compiler fused everything between two matrix products.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self._is_inside = False  # a compiled graph is counted as a whole

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Allow functions to be compiled while this mode is on."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._is_inside and func.overloadpacket.__name__ not in _FREE:
            self.num_bytes += _bytes((args, kwargs, result))
        return result

    def compile_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Replace `learner.model.fused.compile_function`."""
        backend = aot_autograd(
            fw_compiler=self._compile,
            bw_compiler=self._compile,
            partition_fn=min_cut_rematerialization_partition,
        )
        return torch.compile(function, dynamic=False, backend=backend)

    def _compile(self, graph: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        num_bytes = _joined_bytes(graph)

        def call(*args: object) -> object:
            self._is_inside = True
            result = graph(*args)
            self._is_inside = False
            self.num_bytes += num_bytes
            return result

        return make_boxed_func(call)


def _joined_bytes(graph: GraphModule) -> int:
    """Return the bytes of each matrix product, plus those that enter or leave the rest, counted
    once.
    """
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    products = [node for node in nodes if _name(node) in _MATMULS]
    rest = [node for node in nodes if _name(node) not in _MATMULS | _FREE]
    total = sum(_bytes([each.meta["val"] for each in (n, *n.all_input_nodes)]) for n in products)
    joined = set(rest)
    crossing = {_base(each) for node in rest for each in node.all_input_nodes} - joined
    for node in nodes:
        outside = [user for user in node.users if user not in joined]
        if _base(node) in joined and any(_name(user) not in _FREE for user in outside):
            crossing.add(_base(node))
    return total + _bytes([node.meta["val"] for node in crossing if "val" in node.meta])


def _name(node: Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return getattr(packet, "__name__", str(packet))


def _base(node: Node) -> Node:
    while node.op == "call_function" and _name(node) in _FREE and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _bytes(values: object) -> int:
    return sum(t.numel() * t.itemsize for t in tree_leaves(values) if isinstance(t, Tensor))
