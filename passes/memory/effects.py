"""What each call of a graph does to memory, on the shapes and strides its operands really have."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.graph import Graph, Node, Value
from autopar.ir.local import rank_call
from autopar.passes.memory.saved import (
    Backward,
    Call,
    Forward,
    Resolve,
    Spec,
    observe,
    observe_backward,
)


def local_shape(graph: Graph, value: Value) -> tuple[int, ...]:
    """What one rank holds of a value; all of it in a graph that is not partitioned."""
    if value.layout is None or graph.mesh is None:
        return value.shape
    return value.layout.local_shape(value.shape, graph.mesh)


class Effects:
    """Forward and backward effects of the calls of one graph; forwards first, in graph order.

    A call that cannot be observed (a foreign operator without a version for fake tensors) is
    taken to save all it reads and makes.

    assumed:
        the operators for which that was so, here or in their backward
    """

    def __init__(self, graph: Graph, resolve: Resolve) -> None:
        self.graph, self.resolve = graph, resolve
        self.assumed: set[str] = set()
        # What calls depend on besides their arguments: the groups of their mesh.
        self._where = "" if graph.mesh is None else str(graph.mesh)
        self._specs: dict[str, Spec] = {}
        self._calls: dict[str, Call | None] = {}

    def spec(self, value: Value) -> Spec:
        """The local tensor of a value; contiguous unless a call was seen to make it otherwise."""
        if value.name not in self._specs:
            self._specs[value.name] = self._contiguous(value)
        return self._specs[value.name]

    def forward(self, node: Node) -> Forward:
        """What the forward of a call makes and keeps."""
        operands = [self.spec(v) for v in node.operands]
        results = [self._contiguous(v) for v in node.results]
        call, effect = self._observed(node, operands, results)
        self._calls[node.name] = call
        if call is None:
            self.assumed.add(node.op)
        for value, spec in zip(node.results, effect.results, strict=True):
            self._specs[value.name] = Spec(spec.shape, spec.stride, spec.dtype, value.grad)
        return effect

    def backward(self, node: Node, incoming: tuple[Spec | None, ...]) -> Backward:
        """What the backward of a call makes, given the gradients of its results."""
        call = self._calls[node.name]
        if call is not None:
            try:
                return observe_backward(call, incoming)
            except Exception:  # a foreign operator may lack a backward for fake tensors
                self.assumed.add(node.op)
        return _new_gradients([self.spec(v) for v in node.operands], len(node.results))

    def _contiguous(self, value: Value) -> Spec:
        return Spec.contiguous(local_shape(self.graph, value), value.dtype, value.grad)

    def _observed(
        self, node: Node, operands: Sequence[Spec], results: Sequence[Spec]
    ) -> tuple[Call | None, Forward]:
        if self.graph.mesh is not None:
            node = rank_call(node, self.graph.mesh, self.graph.mesh.coordinates(0))
        try:
            call = Call.make(node, operands, self.resolve, self._where)
            effect = observe(call)
        except Exception:  # any failure of a foreign operator means only that it cannot be seen
            return None, _all_saved(operands, results)
        made = [(spec.shape, spec.dtype) for spec in effect.results]
        if made != [(spec.shape, spec.dtype) for spec in results]:
            return None, _all_saved(operands, results)
        return call, effect


def _all_saved(operands: Sequence[Spec], results: Sequence[Spec]) -> Forward:
    """The most an operator can be expected to keep."""
    homes = tuple(range(len(operands), len(operands) + len(results)))
    grad = any(spec.grad for spec in results)
    saved = frozenset(range(len(operands) + len(results))) if grad else frozenset()
    fresh = tuple(spec.nbytes for spec in results)
    return Forward(tuple(results), homes, fresh, saved, 0)


def _new_gradients(operands: Sequence[Spec], results: int) -> Backward:
    """A new gradient for every operand that carries one."""
    grads = tuple(Spec.contiguous(s.shape, s.dtype) if s.grad else None for s in operands)
    fresh: list[int] = []
    homes: list[int] = []
    for grad in grads:
        homes.append(results + len(operands) + len(fresh) if grad else -1)
        if grad:
            fresh.append(grad.nbytes)
    return Backward(grads, tuple(homes), tuple(fresh), 0)
