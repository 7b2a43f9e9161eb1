"""Loss scaling in fp16: an overflow that one rank sees skips the step on all of them.

`torch.amp.GradScaler` looks for infinities in what each rank holds of the gradients. For
`DTensor`s PyTorch then reduces what was found, over the axes that divide the *first* gradient
only. A gradient that another axis divides may overflow in one rank's piece alone; that rank would
skip its step, the others not, and their parameters would be of different models from then on.

So what was found is reduced over the whole mesh, wherever gradients of a parallel module are among
those that are looked at. PyTorch's scaler then works as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_LOOKS = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default

#: The meshes that parallel modules live on.
_meshes: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()
_installed = False


def agree_on_infinities(mesh: DeviceMesh | None) -> None:
    """From here on ranks agree on infinities in gradients on this mesh."""
    global _installed
    if mesh is None:
        return
    _meshes.add(mesh)
    if not _installed:
        handlers = DTensor._op_dispatcher._custom_op_handlers
        handlers[_LOOKS] = _then_agree(handlers[_LOOKS])
        _installed = True


def _then_agree(look: Callable[..., Any]) -> Callable[..., Any]:
    def look_and_agree(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grads, found, scale = args
        # An optimizer may train plain parameters as well. They come after the others, which
        # write what they find over what was found before.
        result = look(op, ([g for g in grads if isinstance(g, DTensor)], found, scale), kwargs)
        plain = [g for g in grads if not isinstance(g, DTensor)]
        if plain:
            op(plain, found, scale)
        # In the order of the gradients, which all ranks share.
        for mesh in dict.fromkeys(g.device_mesh for g in grads if isinstance(g, DTensor)):
            if mesh in _meshes:
                for group in mesh.get_all_groups():
                    dist.all_reduce(found, dist.ReduceOp.MAX, group)
        return result

    return look_and_agree
