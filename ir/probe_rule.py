"""Refuting a rule: every factor, linear group and pair of them, on many kinds of inputs.

`refute` looks for one input and one cut on which the operator, split as the rule says, differs
from the operator run whole. A rule that it cannot refute is believed. It needs an operator that
is a function: the same results for the same operands, a backward that is linear in the gradients
of the results.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from autopar.ir.graph import Node, Value, map_values
from autopar.ir.layout import PARTIAL, REPLICATE
from autopar.ir.probe import Cut, NoBackward, Whole, difference, one_line, run, run_whole
from autopar.ir.probe_inputs import Inputs, InputSource
from autopar.ir.rule import Rule

#: Largest error relative to the largest entry, for an operator that computes in double precision
#: and for one that computes in single precision whatever it is given.
_DOUBLE, _SINGLE = 1e-10, 1e-5

#: The same for an operator run in the dtypes of its call, to see that it does the same in them.
_ROUGH = 3e-2

#: Relative changes of the inputs that double, single and half precision still tell from nothing.
_DOUBLE_STEP, _SINGLE_STEP, _HALF_STEP = 1e-11, 1e-5, 1e-2

#: The part of a result that changes with an operand where the operand is not rounded first; where
#: it is, or in a step function, only entries at the edge of a step do.
_MANY = 0.1

#: How many kinds of inputs an operator must accept, and give finite results for, to be judged.
_ENOUGH = 2

#: How many kinds of inputs terms are tried on where it is to be brief.
_BRIEF = 5

#: The part of the kinds of inputs on which a result must be another than on the rest.
_CHANGING = 0.25

#: Seed of everything that is drawn: all ranks must come to the same rule.
_SEED = 0


class Unsure(Exception):  # noqa: N818  (an outcome, not an error)
    """Why nothing can be said of an operator."""


class CannotRun(Unsure):
    """Why an operator cannot be tried on some shapes; it may run on others."""


@dataclass
class Subject:
    """An operator call that can be run: on smaller shapes and in double precision if it may be.

    node:
        its values have the shapes and dtypes that it is run on
    source:
        draws its operands
    brief:
        try it on the most telling kinds of inputs only
    """

    node: Node
    source: InputSource
    generator: torch.Generator
    precision: float = _DOUBLE
    brief: bool = False
    _wholes: dict[tuple[tuple[int, int], ...], list[tuple[str, Whole]]] = field(
        default_factory=dict
    )

    def tolerance(self, dtype: torch.dtype) -> float:
        """The largest error, relative to the largest number, in a tensor of a dtype."""
        return self.precision if dtype.itemsize >= 8 else max(self.precision, _SINGLE)

    def wholes(self, along: dict[int, int] | None = None) -> list[tuple[str, Whole]]:
        """The call run whole on every kind of input that it accepts, by the inputs' names."""
        found = self._kept((), self.source.all(brief=self.brief))
        if along:
            key = tuple(sorted(along.items()))
            found = found + self._kept(key, self.source.blocks(along, brief=self.brief))
        return found

    def _kept(
        self, key: tuple[tuple[int, int], ...], drawn: Iterator[Inputs]
    ) -> list[tuple[str, Whole]]:
        if key not in self._wholes:
            self._wholes[key] = list(self._run(drawn))
        return self._wholes[key]

    def _run(self, drawn: Iterator[Inputs]) -> Iterator[tuple[str, Whole]]:
        for inputs in drawn:
            try:
                whole = run_whole(self.node, inputs.tensors, self.generator)
            except Exception:  # the operator does not take such inputs
                continue
            shapes = [tuple(y.shape) for y in whole.results]
            if shapes != [v.shape for v in self.node.results]:
                raise Unsure("the shapes of its results depend on what its operands hold")
            yield inputs.name, whole


@contextmanager
def quietly() -> Iterator[None]:
    """Run operators aside from whatever goes on around: modes, random state, warnings."""
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.random.fork_rng())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        torch.manual_seed(_SEED)
        yield


def subject_of(node: Node, *, cast: bool = True, brief: bool = False) -> Subject:
    """A call made ready to run, its results' shapes and dtypes as they come out.

    cast:
        run it in double precision where the operator takes that, else in single
    brief:
        try it on the most telling kinds of inputs only

    Raises CannotRun where it does not take operands that are drawn, Unsure where it is not a
    function of them.
    """
    failure: Exception | None = None
    for device in _devices():
        for dtype in (torch.float64, torch.float32) if cast else (None,):
            try:
                return _subject(node, device, dtype, brief)
            except CannotRun as error:
                failure = failure or error
            except NoBackward:
                return _subject(_without_gradients(node), device, dtype, brief)
    assert failure is not None
    raise failure


def _subject(node: Node, device: torch.device, dtype: torch.dtype | None, brief: bool) -> Subject:
    call = node if dtype is None else _cast(node, dtype)
    generator = torch.Generator().manual_seed(_SEED)
    failures: list[Exception] = []

    def accepts(tensors: Sequence[Tensor]) -> bool:
        try:
            run_whole(_sized(call, tensors), tensors, torch.Generator().manual_seed(_SEED))
        except Exception as error:
            failures.append(error)
            return False
        return True

    source = InputSource(call, device, generator, accepts)
    if not source.settle():
        if all(isinstance(error, NoBackward) for error in failures):
            raise failures[0]
        raise CannotRun(f"it does not run on operands that are drawn ({one_line(failures[0])})")
    try:
        source.node = _sized(call, source.base())
        subject = Subject(source.node, source, generator, brief=brief)
        _check_function(subject)
        subject.precision = _precision(subject) if dtype is not None else _ROUGH
    except Unsure:
        raise
    except Exception as error:  # it took what was drawn before by chance
        raise CannotRun(f"it does not run on operands that are drawn ({one_line(error)})") from None
    return subject


def _devices() -> list[torch.device]:
    found = [torch.device("cpu")]
    if torch.cuda.is_available():
        found.append(torch.device("cuda", torch.cuda.current_device()))
    return found


def _cast(node: Node, real: torch.dtype) -> Node:
    """The call with its floating point operands of one dtype."""

    def cast(value: Value) -> Value:
        if value.dtype.is_floating_point:
            return replace(value, dtype=real)
        return replace(value, dtype=real.to_complex()) if value.dtype.is_complex else value

    args, kwargs = map_values((node.args, node.kwargs), cast)
    return Node(node.op, args, kwargs, tuple(cast(v) for v in node.results))


def _without_gradients(node: Node) -> Node:
    """The call with no gradient through it."""

    def still(value: Value) -> Value:
        return replace(value, grad=False)

    args, kwargs = map_values((node.args, node.kwargs), still)
    return Node(node.op, args, kwargs, tuple(still(v) for v in node.results))


def _sized(node: Node, tensors: Sequence[Tensor]) -> Node:
    """The call with the shapes and dtypes that its results really have on some operands."""
    made = run(node, [x.clone() for x in tensors])
    if len(made) != len(node.results) or not all(isinstance(y, Tensor) for y in made):
        raise Unsure("it does not return the results that were traced")
    for y, value in zip(made, node.results, strict=True):
        if y.dim() != len(value.shape):
            raise Unsure("the shapes of its results depend on what its operands hold")
    results = tuple(
        replace(v, shape=tuple(y.shape), dtype=y.dtype)
        for v, y in zip(node.results, made, strict=True)
    )
    return Node(node.op, node.args, node.kwargs, results)


def _check_function(subject: Subject) -> None:
    """The same operands twice must give the same results, and come out as they went in."""
    node = subject.node
    for inputs in itertools.islice(subject.source.all(), 3):
        random = torch.get_rng_state()
        try:
            first = run_whole(node, inputs.tensors, torch.Generator().manual_seed(_SEED))
        except Exception:  # the operator does not take such inputs
            continue
        given = [x.clone() for x in inputs.tensors]
        again = run_whole(node, given, torch.Generator().manual_seed(_SEED))
        pairs = [*zip(first.results, again.results, strict=True)]
        pairs += zip(first.gradients, again.gradients, strict=True)  # type: ignore[arg-type]
        if not all(_equal(a, b) for a, b in pairs):
            raise Unsure("called again with the same operands it gives other results")
        if not torch.equal(random, torch.get_rng_state()):
            raise Unsure("it draws random numbers")
        run(node, given)
        if not all(_equal(a, b) for a, b in zip(given, inputs.tensors, strict=True)):
            raise Unsure("it writes to its operands")


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _precision(subject: Subject) -> float:
    """How far off results may be; Unsure for an operator that computes in half precision.

    An operator may convert what it is given. It is then blind to small changes of that operand.
    """
    floating = [v.dtype for v in subject.node.results if v.dtype.is_floating_point]
    if any(dtype.itemsize < 4 for dtype in floating):
        raise Unsure("it gives results in half precision, in which a small error shows nothing")
    found = _DOUBLE
    for k, value in enumerate(subject.node.operands):
        if not (floating and value.dtype.is_floating_point) or _sees(subject, k, _DOUBLE_STEP):
            continue
        if _sees(subject, k, _SINGLE_STEP):
            found = _SINGLE
        elif _sees(subject, k, _HALF_STEP):
            raise Unsure("it computes in half precision, in which a small error shows nothing")
        # Else the results do not depend on the operand, or in steps: they are exact.
    return found


def _sees(subject: Subject, k: int, step: float) -> bool:
    """Whether much of some result changes when operand `k` changes by a small part of itself."""
    base = subject.source.base()
    moved = list(base)
    drawn = torch.rand(base[k].shape, generator=subject.generator, dtype=torch.float64)
    moved[k] = base[k] * (1 + step * drawn).to(base[k])
    pairs = list(zip(run(subject.node, base), run(subject.node, moved), strict=True))
    changed = [(a != b).double().mean() for a, b in pairs if a.is_floating_point() and a.numel()]
    return any(float(part) > _MANY for part in changed)


# --- refuting ----------------------------------------------------------------------------------


def refute(subject: Subject, rule: Rule) -> str:
    """An input and a cut on which a rule of the subject's node is wrong; "" if none was found.

    Raises Unsure where the operator accepts too few kinds of inputs to be judged.
    """
    for factor in rule.factors:
        if found := refute_factor(subject, rule, factor.name):
            return found
    for role in whole_roles(subject.node, rule):
        if found := refute_role(subject, rule, role):
            return found
    return refute_pairs(subject, rule)


def refute_factor(subject: Subject, rule: Rule, name: str, *, each: int = 2) -> str:
    """`refute` for the ways to cut one factor.

    each:
        in how many ways the call is cut on each kind of inputs, in turn; on the first it is cut
        in every way
    """
    factor = rule.by_name[name]
    if not factor.splittable or factor.size == 1:
        return ""
    ways = list(factor_cuts(rule, name))
    wholes = subject.wholes(block_dims(rule, name))
    for k, (inputs, whole) in enumerate(wholes):
        chosen = ways if k == 0 else [ways[(k + i) % len(ways)] for i in range(each)]
        for cuts in dict.fromkeys(chosen):
            if found := _difference(subject, rule, cuts, whole):
                return f"{cuts[-1]}, {inputs}: {found}"
    _check_telling(wholes)
    return ""


def refute_role(subject: Subject, rule: Rule, role: str) -> str:
    """`refute` for a role that splits no factor: two and three ranks hold terms."""
    # Terms of infinity do not add up to it.
    wholes = [(inputs, whole) for inputs, whole in subject.wholes() if whole.is_finite]
    wholes = wholes[: _BRIEF if subject.brief else None]
    for k, (inputs, whole) in enumerate(wholes):
        cut = Cut(role, (1,) * (2 + k % 2))
        if found := _difference(subject, rule, (cut,), whole):
            return f"{cut}, {inputs}: {found}"
    _check_telling(wholes)
    return ""


def _difference(subject: Subject, rule: Rule, cuts: tuple[Cut, ...], whole: Whole) -> str:
    return difference(subject.node, rule, cuts, whole, subject.generator, subject.tolerance)


def _check_telling(wholes: Sequence[tuple[str, Whole]]) -> None:
    """Raise Unsure unless the results are numbers that change with the inputs.

    An operand that is a switch, say, may turn off on almost all inputs what is looked for.
    """
    finite = [whole for _, whole in wholes if all(map(_mostly_finite, whole.results))]
    for k, y in enumerate(finite[0].results if finite else ()):
        seen = {_contents(whole.results[k]) for whole in finite}
        most = len(finite) * _CHANGING if y.is_floating_point() or y.is_complex() else 0
        if len(seen) >= max(_ENOUGH, most):
            return
    raise Unsure("it accepts too few kinds of inputs to be judged, or does not depend on them")


def _contents(y: Tensor) -> bytes:
    return y.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _mostly_finite(y: Tensor) -> bool:
    return not y.numel() or bool(torch.isfinite(y).double().mean() > 0.5)


def whole_roles(node: Node, rule: Rule) -> list[str]:
    """The roles that split nothing but give each rank a term of something."""
    return [f"{PARTIAL}{k}" for k in range(len(rule.linear))] + [REPLICATE] * node.differentiable


def refute_pairs(subject: Subject, rule: Rule) -> str:
    """`refute` for any two roles at once, on the first kinds of inputs."""
    roles: list[tuple[Cut, ...]] = []
    for factor in rule.factors:
        if factor.splittable and factor.size > 1:
            roles.extend(itertools.islice(factor_cuts(rule, factor.name), 1))
    roles += [(Cut(role, (1, 1)),) for role in whole_roles(subject.node, rule)]
    for first, second in itertools.combinations(roles, 2):
        if {c.role for c in first} & {c.role for c in second}:
            continue
        cuts = (*first, *second)
        for name, whole in subject.wholes()[:_ENOUGH]:
            if found := _difference(subject, rule, cuts, whole):
                return f"{first[-1]} and {second[-1]}, {name}: {found}"
    return ""


def factor_cuts(rule: Rule, name: str) -> Iterator[tuple[Cut, ...]]:
    """The ways to cut a factor: even and uneven, in two and three pieces, down to one element.

    A factor behind major ones in a composite dimension is cut where those are cut into single
    elements.
    """
    majors = dict.fromkeys(
        major
        for dims in rule.operands + rule.results
        for dim in dims
        for major in (dim[: dim.index(name)] if name in dim else ())
        if rule.by_name[major].size > 1
    )
    if any(not rule.by_name[major].splittable for major in majors):
        return
    before = tuple(Cut(major, (1,) * rule.by_name[major].size) for major in majors)
    size = rule.by_name[name].size
    half, third = size // 2, size // 3
    ways: list[tuple[int, ...]] = [
        (size - half, half),
        (half, size - half),
        (1, size - 1),
        (size - 1, 1),
    ]
    if third:
        ways += [(third, third, size - 2 * third), (size - 2, 1, 1)]
    for sizes in dict.fromkeys(ways):
        if all(sizes):
            yield *before, Cut(name, sizes)


def block_dims(rule: Rule, name: str) -> dict[int, int]:
    """Operand -> the dimension that a factor is in."""
    return {
        k: d for k, dims in enumerate(rule.operands) for d, dim in enumerate(dims) if name in dim
    }
