"""Local tensors of parameters: what their gradients become, beside `DTensor.to_local`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.runtime.local_parameter import local_parameters


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


@pytest.fixture
def make(mesh: DeviceMesh) -> Callable[[], nn.Parameter]:
    def parameter() -> nn.Parameter:
        return nn.Parameter(DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)]))

    return parameter


Make = Callable[[], nn.Parameter]


def local_parameter(parameter: Tensor) -> Tensor:
    (piece,) = local_parameters([parameter])
    return piece


def local_grad(parameter: nn.Parameter) -> Tensor:
    grad = parameter.grad
    assert isinstance(grad, DTensor) and isinstance(parameter, DTensor)
    assert (grad.placements, grad.shape) == (parameter.placements, parameter.shape)
    assert not grad.requires_grad
    return grad.to_local()


def test_gradients_add_up_until_they_are_dropped(make: Make) -> None:
    p = make()
    for total in (2.0, 4.0, 6.0):
        (local_parameter(p) * 2).sum().backward()
        assert torch.equal(local_grad(p), torch.full((3, 4), total))
    p.grad = None
    x = local_parameter(p)
    (x * 2 + local_parameter(p) * 3 + x).sum().backward()
    assert torch.equal(local_grad(p), torch.full((3, 4), 6.0))


def each(p: Tensor, q: Tensor) -> Tensor:
    return local_parameter(p) + local_parameter(q)


def together(p: Tensor, q: Tensor) -> Tensor:
    x, y = local_parameters([p, q])
    return x + y


@pytest.mark.parametrize("sum_of", [each, together])
def test_gradients_of_two_parameters_are_not_one_tensor(
    make: Make, sum_of: Callable[[Tensor, Tensor], Tensor]
) -> None:
    p, q = make(), make()
    seen = []
    total = sum_of(p, q)
    total.register_hook(lambda grad: seen.append(grad))
    (total * 2).sum().backward()
    local_grad(p).zero_()
    assert torch.equal(local_grad(q), torch.full((3, 4), 2.0))
    assert torch.equal(seen[0], torch.full((3, 4), 2.0))


def test_a_gradient_of_other_strides_is_made_contiguous(make: Make) -> None:
    p = make()
    (local_parameter(p).t() * torch.arange(12.0).view(4, 3)).sum().backward()
    assert local_grad(p).is_contiguous()
    assert torch.equal(local_grad(p), torch.arange(12.0).view(4, 3).t())


def test_a_gradient_that_nobody_else_holds_is_not_copied(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_copies(*args: object, **kwargs: object) -> Tensor:
        raise AssertionError("the gradient was copied")

    monkeypatch.setattr(Tensor, "clone", no_copies)
    p = make()
    (local_parameter(p) @ torch.ones(4, 2)).sum().backward()
    assert torch.equal(local_grad(p), torch.full((3, 4), 2.0))
    with pytest.raises(AssertionError, match="copied"):
        (local_parameter(p) + local_parameter(make())).sum().backward()


def test_many_parameters_share_a_node(make: Make) -> None:
    plain, frozen = torch.ones(2, requires_grad=True), make().requires_grad_(False)
    p, q, unread, added, hooked = (make() for _ in range(5))
    added.grad = torch.ones_like(added)
    hooked.register_hook(lambda grad: 2 * grad)
    pieces = local_parameters([p, plain, added, q, hooked, frozen, unread])
    assert pieces[1] is plain and pieces[5] is frozen._local_tensor
    assert all(torch.equal(x, torch.ones_like(x)) for x in pieces)
    assert len({pieces[k].grad_fn for k in (0, 2, 3, 4, 6)}) == 1
    sum((k + 1) * x.sum() for k, x in enumerate(pieces[:-1])).backward()
    for parameter, value in ((p, 1.0), (added, 4.0), (q, 4.0), (hooked, 10.0)):
        assert torch.equal(local_grad(parameter), torch.full((3, 4), value))
    assert unread.grad is None and frozen.grad is None
    assert torch.equal(plain.grad, torch.full((2,), 2.0))


def test_hooks_see_the_gradient(make: Make) -> None:
    for hooks in ("tensor", "accumulated", "node"):
        p, seen = make(), []
        if hooks == "tensor":
            p.register_hook(lambda grad, seen=seen: seen.append(grad) or 2 * grad)
        elif hooks == "accumulated":
            p.register_post_accumulate_grad_hook(lambda leaf, seen=seen: seen.append(leaf.grad))
        else:
            node = p.view_as(p).grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, p=p, seen=seen: seen.append(p.grad))
        local_parameter(p).sum().backward()
        assert len(seen) == 1 and isinstance(seen[0], DTensor), hooks
        assert torch.equal(local_grad(p), torch.full((3, 4), 2.0 if hooks == "tensor" else 1.0))


def test_gradients_that_are_returned_are_not_collected(make: Make) -> None:
    p, q = make(), make()
    loss = (local_parameter(p) * local_parameter(q).exp()).sum()
    (grad,) = torch.autograd.grad(loss, p, create_graph=True)
    assert isinstance(grad, DTensor) and p.grad is None and q.grad is None
    (second,) = torch.autograd.grad(grad.to_local().sum(), q)
    torch.testing.assert_close(second.to_local(), torch.ones(3, 4).exp())
    for sum_of in (each, together):
        q.grad = None
        sum_of(p, q).sum().backward(inputs=[q])
        assert p.grad is None and torch.equal(local_grad(q), torch.ones(3, 4))


def test_without_gradient_it_is_the_local_tensor_itself(make: Make, mesh: DeviceMesh) -> None:
    p = make()
    with torch.no_grad():
        assert local_parameter(p) is p._local_tensor
    frozen = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Replicate()]), False)
    assert not local_parameter(frozen).requires_grad
