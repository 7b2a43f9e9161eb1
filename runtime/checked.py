"""The check of decisions that were frozen when the model was traced."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autopar.ir.errors import InputError
from autopar.runtime.operators import operator


@operator("checked")
def checked(
    x: Tensor, conditions: Sequence[Tensor], outcomes: Sequence[bool], where: Sequence[str]
) -> Tensor:
    """`x` itself, if every condition comes out as it did when the model was traced.

    Raises InputError naming the first that does not; every rank has the same conditions.
    """
    for condition, outcome, place in zip(conditions, outcomes, where, strict=True):
        if bool(condition) is not outcome:
            raise InputError(
                f"{place}: this decision came out {outcome} when the model was compiled and is "
                f"{not outcome} for these inputs. The compiled module can only go the first way; "
                f"compile it again for inputs like these, or write the line with torch.where"
            )
    return x.view_as(x)
