"""PyTorch's own samples of every operator of its API, as calls of ours.

Operators with a rule: every strategy (or some of them, drawn at random) reproduces the operator.
Operators without: what discovery finds must pass the same check. A wrong discovery is the worst
there can be, as nobody has looked at it.
"""

from __future__ import annotations

import itertools
import random
import zlib
from dataclasses import replace

import pytest
import torch

import op_db
from autopar.ir.discovered import discovered_rule
from autopar.ir.errors import TraceError
from autopar.ir.graph import Value
from autopar.ir.rule import Rule, strategies
from autopar.ir.rules import registry, rule_for
from autopar.passes.signature import signature
from harness import MESHES, TALLY, check_strategies, make_case
from op_db import Recorded
from samples.sample import Sample

#: How many samples of an operator are traced, and how many strategies of a call are checked on
#: one mesh; of an operator without a rule, how many calls are tried.
SAMPLES, STRATEGIES, DISCOVERIES = 2, 6, 2

#: How many strategies of a call are checked on one mesh where it is a variation of another, or
#: the run is not thorough.
FEW = 3

#: The quick run checks one in so many of the database's operators.
QUICK = 16

INFOS = op_db.infos()
QUICK_INFOS = random.Random(op_db.SEED).sample(INFOS, len(INFOS) // QUICK)

#: What asks for tensors without gaps itself.
DENSE = ("aten.view_as_complex.default",)

_checked: set[object] = set()


pytestmark = pytest.mark.usefixtures("one_thread")


def _records(info: op_db.OpInfo, count: int, dtype: torch.dtype | None = None) -> list[Recorded]:
    """The small calls of some samples of an operator, those of samples that can be traced."""
    found: list[Recorded] = []
    for sample in op_db.samples(info, count, dtype):
        try:
            found += [r for r in op_db.record(info, sample) if op_db.is_small(r)]
        except TraceError:
            continue
    return found


def _has_rule(recorded: Recorded) -> bool:
    node = recorded.node
    return node.op in registry.registered() or any(fn(node) for fn in registry._FALLBACKS)


def _is_new(recorded: Recorded, kind: str) -> bool:
    """Whether no call like this one was checked in this way; calls of one type count once."""
    key = (kind, signature(recorded.node))
    if key in _checked:
        return False
    _checked.add(key)
    return True


def _check(recorded: Recorded, sample: Sample, rule: Rule, most: int) -> int:
    """Check some strategies of a rule of a call; their number.

    A variation of a call that is checked anyway is left out on one of the meshes.
    """
    if rule.opaque:
        return 0
    try:
        case = make_case(sample)
    except RuntimeError:  # the operator itself cannot be called, or differentiated, like this
        return 0
    count = 0
    for mesh in MESHES if most > FEW else MESHES[::2]:
        found = strategies(
            rule,
            mesh,
            grad=case.node.differentiable,
            axis_orders=True,
            asked={f.name for f in rule.factors},
        )
        drawn = random.Random(zlib.crc32(sample.name.encode()))
        chosen = drawn.sample(found, min(most, len(found)))
        check_strategies(case, rule, chosen, mesh)
        count += len(chosen)
    TALLY.add(recorded.node.op, count)
    return count


def _check_rules(info: op_db.OpInfo, records: list[Recorded], most: int) -> None:
    name = op_db.info_name(info)
    for recorded in records:
        if _has_rule(recorded) and _is_new(recorded, "plain"):
            _check(recorded, recorded.sample(name), rule_for(recorded.node), most)


def _check_gaps(info: op_db.OpInfo, records: list[Recorded]) -> None:
    """Tensors that lie in memory with gaps."""
    for recorded in records:
        if recorded.node.op in DENSE:
            continue
        if _has_rule(recorded) and _is_new(recorded, "gaps"):
            sample = replace(recorded.sample(f"{op_db.info_name(info)}, gaps"), strided=True)
            _check(recorded, sample, rule_for(recorded.node), FEW)


def _check_degenerate(info: op_db.OpInfo, records: list[Recorded]) -> None:
    """Dimensions of size 0 and 1."""
    for recorded in records:
        if not _has_rule(recorded):
            continue
        sizes = dict.fromkeys(s for v in recorded.node.operands for s in v.shape if s > 1)
        for size, to in itertools.product(sizes, (0, 1)):
            smaller = op_db.resized_call(recorded, size, to)
            if smaller is not None and _is_new(smaller, "degenerate"):
                sample = smaller.sample(f"{op_db.info_name(info)}, {size} cut to {to}")
                _check(smaller, sample, rule_for(smaller.node), FEW)


def _check_discoveries(info: op_db.OpInfo, records: list[Recorded], most: int) -> None:
    name = op_db.info_name(info)
    new = (r for r in records if not _has_rule(r) and _is_new(r, "discovered"))
    for recorded in itertools.islice(new, DISCOVERIES):
        _check(recorded, recorded.sample(name), discovered_rule(recorded.node), most)


@pytest.mark.parametrize("info", QUICK_INFOS, ids=op_db.info_name)
def test_some_of_pytorchs_own_samples(info: op_db.OpInfo) -> None:
    records = _records(info, 1)
    _check_rules(info, records, FEW)
    if info in QUICK_INFOS[::6]:
        _check_discoveries(info, records, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("info", INFOS, ids=op_db.info_name)
def test_pytorchs_own_samples(info: op_db.OpInfo, thorough: bool) -> None:
    records, most = _records(info, SAMPLES), STRATEGIES if thorough else FEW
    _check_rules(info, records, most)
    _check_gaps(info, records[:1])
    _check_degenerate(info, records[:1])
    _check_discoveries(info, records, most)


@pytest.mark.slow
@pytest.mark.parametrize(
    "info", [i for i in INFOS if torch.bfloat16 in i.dtypes], ids=op_db.info_name
)
def test_pytorchs_own_samples_in_half_precision(info: op_db.OpInfo) -> None:
    for recorded in _records(info, 1, torch.bfloat16):
        if _has_rule(recorded) and _is_new(recorded, "half"):
            sample = recorded.sample(f"{op_db.info_name(info)}, half")
            _check(recorded, sample, rule_for(recorded.node), FEW)


def test_a_traced_sample_has_the_calls_that_export_would_trace() -> None:
    info = next(i for i in INFOS if i.name == "nn.functional.linear")
    (recorded,) = _records(info, 1)
    assert recorded.node.op == "aten.linear.default"
    assert all(isinstance(v, Value) for v in recorded.node.operands)
    assert [tuple(x.shape) for x in recorded.tensors] == [v.shape for v in recorded.node.operands]
