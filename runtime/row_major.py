"""Random numbers drawn in the order of a tensor's indices, whatever its strides.

PyTorch fills a tensor in the order of its memory: after a transpose, the same generator gives the
same numbers to other entries. A graph knows no strides, and a rank's piece has others than the
whole, so where a single device is compared with ranks number by number, it draws in this order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.random import default_generator


class RowMajorDraws(TorchDispatchMode):
    """While active, random operators give entry after entry its numbers, the last index fastest.

    Strides stay what they would have been, of tensors written in place and of results.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if torch.Tag.nondeterministic_seeded not in func.tags or all(
            x.is_contiguous() for x in given
        ):
            return func(*args, **kwargs)
        dense = {id(x): x.contiguous() for x in given}
        dense_args, dense_kwargs = pytree.tree_map_only(
            Tensor, lambda x: dense[id(x)], (args, kwargs)
        )
        if func._schema.is_mutable:
            made = func(*dense_args, **dense_kwargs)
            for x in _written(func, args, kwargs):
                if dense[id(x)] is not x:
                    x.copy_(dense[id(x)])
            own = {id(dense[id(x)]): x for x in given}
            return pytree.tree_map_only(Tensor, lambda x: own.get(id(x), x), made)
        # Twice with the same numbers: for the strides, and for the values.
        used = kwargs.get("generator") or default_generator(given[0].device)
        before = used.get_state()
        result = func(*args, **kwargs)
        used.set_state(before)
        made = func(*dense_args, **dense_kwargs)
        for x, values in zip(pytree.tree_leaves(result), pytree.tree_leaves(made), strict=True):
            x.copy_(values)
        return result


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call writes in place."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            x = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [x] if isinstance(x, Tensor) else []
    return found
