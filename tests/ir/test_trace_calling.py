"""Binding a later call to the inputs of a traced one."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.calling import CallSignature, TensorArgument
from autopar.ir.errors import InputError

torch.set_num_threads(1)


def forward(x, batch=None, *rest, scale=1.0, mask=None, **extra):
    raise AssertionError("only its signature is used")


def tensor(*shape, **kwargs):
    return torch.zeros(*shape, **kwargs)


def test_inputs_are_named_by_their_paths():
    batch = {"x": [tensor(2), (tensor(3), None)], "y": 3}
    signature = CallSignature.of(forward, (tensor(1), batch), {"extra": tensor(4), "scale": 2.0})
    assert signature.names == ("x", "batch['x'][0]", "batch['x'][1][0]", "extra")
    assert signature.order[1] == TensorArgument("batch['x'][0]", (2,), torch.float32)


def test_arguments_bind_by_position_and_by_keyword():
    signature = CallSignature.of(forward, (tensor(1),), {"mask": tensor(2), "batch": tensor(3)})
    assert signature.names == ("x", "mask", "batch")
    x, batch, mask = tensor(1), tensor(3), tensor(2)
    for args, kwargs in [
        ((x, batch), {"mask": mask}),
        ((x,), {"batch": batch, "mask": mask}),
        ((), {"mask": mask, "batch": batch, "x": x}),
    ]:
        bound = signature.bind(args, kwargs)
        assert [id(t) for t in bound] == [id(x), id(mask), id(batch)]


def test_explicit_default_is_as_good_as_none_given():
    signature = CallSignature.of(forward, (tensor(1),), {"scale": 1.0, "mask": None})
    assert len(signature.bind((tensor(1),), {})) == 1
    plain = CallSignature.of(forward, (tensor(1),), {})
    assert len(plain.bind((tensor(1),), {"scale": 1.0, "mask": None})) == 1


def test_extra_positional_arguments_bind():
    signature = CallSignature.of(forward, (tensor(1), None, tensor(2), tensor(3)), {})
    assert signature.names == ("x", "rest[0]", "rest[1]")
    assert len(signature.bind((tensor(1), None, tensor(2), tensor(3)), {})) == 3


EXAMPLE = (tensor(8, 4), {"ids": [tensor(2, dtype=torch.long)]})


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((tensor(5, 4), EXAMPLE[1]), {}, "x: expected shape (8, 4), got (5, 4)"),
        ((tensor(8, 4).double(), EXAMPLE[1]), {}, "x: expected dtype torch.float32, got torch.fl"),
        ((3, EXAMPLE[1]), {}, "x: expected a tensor of shape (8, 4) and dtype torch.float32, got"),
        (
            (EXAMPLE[0], {"ids": [tensor(3, dtype=torch.long)]}),
            {},
            "batch['ids'][0]: expected shape (2,), got (3,)",
        ),
        ((EXAMPLE[0], {"ids": []}), {}, "batch['ids']: expected the entries ['0'], got []"),
        ((EXAMPLE[0], {"idx": []}), {}, "batch: expected the entries ['ids'], got ['idx']"),
        ((EXAMPLE[0], [1]), {}, "batch: expected a dict, got a list"),
        ((EXAMPLE[0], tensor(1)), {}, "batch: expected a dict, got a tensor of shape (1,)"),
        (EXAMPLE, {"scale": 2.0}, "scale: expected 1.0, got 2.0. Its value was frozen"),
        (EXAMPLE, {"mask": tensor(1)}, "mask: expected None, got a tensor of shape (1,)"),
        (EXAMPLE, {"more": 1}, "more: unexpected argument, the module was compiled without it"),
        ((EXAMPLE[0],), {}, "batch: expected a dict, got None"),
        ((), {}, "the call does not fit forward"),
        ((tensor(8, 4, requires_grad=True), EXAMPLE[1]), {}, "x: requires grad, but the example"),
    ],
)
def test_call_that_differs_is_refused_by_name(args, kwargs, says):
    signature = CallSignature.of(forward, EXAMPLE, {})
    with pytest.raises(InputError) as raised:
        signature.bind(args, kwargs)
    assert str(raised.value).startswith(says)


def test_constants_compare_by_type_too():
    signature = CallSignature.of(forward, (tensor(1), 1), {})
    with pytest.raises(InputError, match="batch: expected 1, got True"):
        signature.bind((tensor(1), True), {})


def test_gradient_of_an_input_may_be_off_later():
    signature = CallSignature.of(forward, (tensor(2, requires_grad=True),), {})
    assert signature.order[0].requires_grad
    signature.bind((tensor(2),), {})


def test_object_that_cannot_be_frozen_is_refused():
    with pytest.raises(InputError, match=r"batch\['a'\]: cannot be traced, got a object"):
        CallSignature.of(forward, (tensor(1), {"a": object()}), {})


def test_example_keeps_the_structure_of_the_call():
    signature = CallSignature.of(forward, (tensor(1), {"a": (tensor(2), 3)}), {})
    held = signature.example["batch"]["a"]
    assert held == (TensorArgument("batch['a'][0]", (2,), torch.float32), 3)
