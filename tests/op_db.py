"""PyTorch's own sample inputs (`op_db`) as calls of our IR, with the tensors they run on.

PyTorch keeps, for every operator of its API, a database of calls that cover what the operator can
do: ranks, broadcasting, dimensions given from the end, optional arguments. Each is traced here as
`torch.export` would trace it, before autograd, and read by the tracer's own converter.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from autopar.ir.errors import TraceError
from autopar.ir.graph import Node, Value, map_values
from autopar.ir.trace_alias import Ref
from autopar.ir.trace_convert import Converter
from autopar.ir.trace_names import Namer
from samples.sample import Sample
from trace_check import call

#: The sizes that the database writes its samples in, and those we give it: more of them divide.
SIZES = {"S": 6, "M": 12, "L": 12}

#: The largest tensor of a call that is checked.
LARGEST = 20_000

#: Among how many of an operator's samples the tested ones are drawn.
CONSIDERED = 20

#: Seed of all drawing of samples.
SEED = 20


@dataclass(frozen=True)
class Recorded:
    """One call of a traced sample: its node, and the tensors it has been given."""

    node: Node
    tensors: tuple[Tensor, ...]

    def sample(self, label: str) -> Sample:
        """The call as the harness takes it."""
        queue = iter(self.tensors)
        args, kwargs = map_values((self.node.args, self.node.kwargs), lambda _: next(queue))
        empty = self.node.op.startswith("aten.empty")
        return Sample(self.node.op, tuple(args), dict(kwargs), label, unspecified=empty)


def infos() -> list[OpInfo]:
    """The operators of the database, their samples in our sizes."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing._internal"):
            for size, value in SIZES.items():
                if isinstance(getattr(module, size, None), int):
                    setattr(module, size, value)
    return list(op_db)


def info_name(info: OpInfo) -> str:
    """A name that no other entry of the database has."""
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


def samples(info: OpInfo, count: int, dtype: torch.dtype | None = None) -> list[SampleInput]:
    """Up to `count` samples: the first one, the rest drawn at random (always the same ones).

    dtype:
        default: float64, or the operator's first dtype if it does not take that
    """
    if not info.dtypes:
        return []  # it is for other devices
    if dtype is None:
        dtype = torch.float64 if torch.float64 in info.dtypes else _first_dtype(info)
    grad = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: list[SampleInput] = []
        generator = iter(info.sample_inputs("cpu", dtype, requires_grad=grad))
        # Some are for other devices, or cannot be made in our sizes.
        with contextlib.suppress(StopIteration, IndexError, RuntimeError):
            found.extend(itertools.islice(generator, CONSIDERED))
        if hasattr(generator, "close"):
            generator.close()  # not whenever it is collected: it switches gradients off and on
    draw = random.Random(zlib.crc32(f"{SEED} {info_name(info)} {dtype}".encode()))
    return found[:1] + draw.sample(found[1:], min(count - 1, len(found) - 1)) if found else []


def _first_dtype(info: OpInfo) -> torch.dtype:
    order = (torch.int64, torch.bool, torch.complex128, torch.float32)
    return next((d for d in order if d in info.dtypes), next(iter(info.dtypes)))


def record(info: OpInfo, sample: SampleInput) -> list[Recorded]:
    """The calls of a sample in execution order.

    Raises TraceError where the sample is one that the tracer refuses.
    """
    leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
    at = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[k] for k in at]
    if any(x.layout != torch.strided for x in tensors):
        raise TraceError("a sparse tensor")

    def run(*given: Tensor) -> Any:
        filled = list(leaves)
        for k, x in zip(at, given, strict=True):
            filled[k] = x
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return info.op(*args, **kwargs)

    namer = Namer()
    converter = Converter(namer)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            traced = make_fx(
                run, tracing_mode="fake", pre_dispatch=True, _error_on_data_dependent_ops=True
            )(*tensors)
        except Exception as error:
            raise TraceError(f"cannot be traced: {error}") from error
        values = [
            Value(namer.fresh("x"), tuple(x.shape), x.dtype, x.requires_grad) for x in tensors
        ]
        known = {v.name: x.detach() for v, x in zip(values, tensors, strict=True)}
        try:
            converter.run(traced, [Ref.root(v) for v in values])
            return list(_replayed(converter.nodes, known))
        except (TypeError, RuntimeError) as error:
            # Shapes that depend on values; numbers drawn anew that do not fit the next call.
            raise TraceError(f"cannot be read: {error}") from error


def resized_call(recorded: Recorded, size: int, to: int) -> Recorded | None:
    """The call with every dimension of one size cut down to another; None if it does not run."""
    tensors = tuple(_cut_down(x, size, to) for x in recorded.tensors)
    queue = iter(tensors)

    def describe(value: Value) -> Value:
        return replace(value, shape=tuple(next(queue).shape))

    args, kwargs = map_values((recorded.node.args, recorded.node.kwargs), describe)
    blank = replace(recorded.node, args=args, kwargs=kwargs)
    try:
        made = call(blank, dict(zip((v.name for v in blank.operands), tensors, strict=True)))
    except Exception:  # the operator does not take such shapes
        return None
    if len(made) != len(blank.results) or not all(isinstance(y, Tensor) for y in made):
        return None
    results = tuple(
        replace(v, shape=tuple(y.shape)) for v, y in zip(blank.results, made, strict=True)
    )
    return Recorded(replace(blank, results=results), tensors)


def _cut_down(x: Tensor, size: int, to: int) -> Tensor:
    grad, x = x.requires_grad, x.detach()
    for d, n in enumerate(x.shape):
        if n == size:
            x = x.narrow(d, 0, to)
    return x.clone().requires_grad_(grad)


def is_small(recorded: Recorded) -> bool:
    """Whether a call is small enough to be checked many times."""
    return all(v.numel <= LARGEST for v in recorded.node.operands + recorded.node.results)


def _replayed(nodes: Sequence[Node], known: dict[str, Tensor]) -> Iterator[Recorded]:
    """Run the nodes on real tensors, each with what the ones before it made."""
    for node in nodes:
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((node.args, node.kwargs))):
            # A constant tensor, which export would make a source of the graph.
            known[node.name] = node.args[0]
            continue
        given = tuple(known[v.name].detach().requires_grad_(v.grad) for v in node.operands)
        yield Recorded(node, given)
        made = call(node, {v.name: x for v, x in zip(node.operands, given, strict=True)})
        known.update({v.name: x.detach() for v, x in zip(node.results, made, strict=True)})
