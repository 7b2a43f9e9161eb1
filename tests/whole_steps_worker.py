"""One rank of `test_optimizers.py`: steps that see whole tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import autopar
from policy_worker import Net, batch
from ranks import main


class Mirrored(Optimizer):
    """A step that mixes elements far from each other."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                assert not isinstance(p, DTensor)
                grad = p.grad.view(-1)
                p.view(-1).sub_(group["lr"] * (grad - grad.flip(0)))


MADE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), 1e-2),
    "one at a time": lambda m: torch.optim.Adafactor(m.parameters(), 1e-2, foreach=False),
    "asked for": lambda m: autopar.step_whole(Mirrored(list(m.parameters()))),
}


def check_steps(rank: int, world: int) -> None:
    """Equal to one device, with the optimizer's parameters and state in place between steps."""
    torch.manual_seed(0)
    model = Net().double()
    for name, make in MADE.items():
        for zero in (0, 3):
            single = copy.deepcopy(model)
            parallel = autopar.autoparallelize(
                copy.deepcopy(model), kwargs=batch(), mesh=world, mode="data_parallel", zero=zero
            )
            mine, theirs = make(parallel), make(single)
            for seed in range(3):
                for module, optimizer in ((parallel, mine), (single, theirs)):
                    optimizer.zero_grad()
                    module(**batch(seed)).backward()
                    optimizer.step()
            for path, parameter in parallel.named_parameters():
                expected = single.get_parameter(path)
                assert torch.allclose(parameter.full_tensor(), expected, atol=1e-12), (name, path)
            kept = [p for group in mine.param_groups for p in group["params"]]
            assert all(a is b for a, b in zip(kept, parallel.parameters(), strict=True))
            saved = mine.state_dict()["state"]
            assert len(saved) == len(theirs.state_dict()["state"])


def check_closure(rank: int, world: int) -> None:
    parallel = autopar.autoparallelize(Net(), kwargs=batch(), mesh=world, mode="data_parallel")
    optimizer = torch.optim.Adafactor(parallel.parameters())
    loss = parallel(**batch())
    loss.backward()
    before = [p.full_tensor().clone() for p in parallel.parameters()]
    try:
        optimizer.step(lambda: loss)
    except autopar.OptimizerError as error:
        assert "closure" in str(error)
    else:
        raise AssertionError("a closure was taken")
    after = [p.full_tensor() for p in parallel.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    optimizer.step()
    kept = optimizer.param_groups[0]["params"]
    assert all(p is q for p, q in zip(kept, parallel.parameters(), strict=True))


if __name__ == "__main__":
    main({"steps": check_steps, "closure": check_closure})
