"""What a strategy as the user writes it fixes about one operator."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.ir.errors import HintError
from autopar.ir.graph import Node
from autopar.ir.mesh import Mesh
from autopar.ir.parse import parse_graph
from autopar.ir.rules import rule_for
from autopar.passes.choices import WHOLE, Fix
from autopar.passes.hints import Hint, first_assignment, layout_fix, operator_fix

ABC = Mesh.of({"a": 2, "b": 2, "c": 2})


def last_call(text: str) -> Node:
    return parse_graph(text + "\nreturn\n").nodes[-1]


MATMUL = last_call(
    """
%x : f32[128, 32] = input "x"
%w : f32[32, 64] = input "w"
%y : f32[128, 64] = aten.matmul.default(%x, %w)"""
)

#: Its rule reads ``b2 b1 b0 i``: batch, rows, columns of the activation; then ``o i`` and ``o``.
LINEAR = last_call(
    """
%x : f32[4, 6, 32] = input "x"
%w : f32[64, 32] = input "w"
%b : f32[64] = input "b"
%y : f32[4, 6, 64] = aten.linear.default(%x, %w, %b)"""
)

ROW = last_call(
    """
%x : f32[1, 32] = input "x"
%w : f32[64, 32] = input "w"
%y : f32[1, 64] = aten.linear.default(%x, %w)"""
)

#: 25 heads of 64.
ODD_HEADS = last_call(
    """
%x : f32[8, 1600] = input "x"
%y : f32[8, 25, 64] = aten.reshape.default(%x, [8, 25, 64])"""
)

#: ``(d0 d1) -> d0 d1``
HEADS = last_call(
    """
%x : f32[8, 24] = input "x"
%y : f32[8, 4, 6] = aten.reshape.default(%x, [8, 4, 6])"""
)

MERGE = last_call(
    """
%x : f32[8, 4, 6] = input "x"
%y : f32[8, 24] = aten.reshape.default(%x, [8, 24])"""
)

SORT = last_call(
    """
%x : f32[8, 24] = input "x"
%y : f32[8, 24] = aten.roll.default(%x, [1], [0])"""
)


def fix_of(node: Node, *strategy: Any, mesh: Mesh = ABC, **options: Any) -> Fix:
    """What the strategy fixes; it must not want anything stored."""
    fix, stored = operator_fix(node, rule_for(node), Hint("'layer'", strategy), mesh, **options)
    assert stored == {}
    return fix


def splits(node: Node, *strategy: Any, mesh: Mesh = ABC) -> dict[str, tuple[str, ...]]:
    """The factors that are split."""
    return {
        factor: axes for factor, axes in fix_of(node, *strategy, mesh=mesh).exact.items() if axes
    }


def message(node: Node, *strategy: Any, mesh: Mesh = ABC, **options: Any) -> str:
    with pytest.raises(HintError) as caught:
        fix_of(node, *strategy, mesh=mesh, **options)
    return str(caught.value)


# --- counts --------------------------------------------------------------------------------------


def test_counts_take_the_first_axes_in_mesh_order() -> None:
    assert splits(MATMUL, (4, 2), (2, 1)) == {"m": ("a", "b"), "k": ("c",)}
    assert splits(MATMUL, (2, 4), (4, 1)) == {"m": ("a",), "k": ("b", "c")}
    assert splits(MATMUL, (1, 1), (1, 8)) == {"n": ("a", "b", "c")}


def test_a_count_of_one_says_that_the_loop_is_not_split() -> None:
    assert fix_of(MATMUL, (2, 1), (1, 1)).exact == {"m": ("a",), "k": (), "n": ()}


def test_an_operand_that_is_left_out_or_none_says_nothing_of_its_own_loops() -> None:
    assert "n" not in fix_of(MATMUL, (2, 1)).exact
    assert fix_of(MATMUL, None, (1, 2)).exact == {"k": (), "n": ("a",)}


def test_several_axes_of_a_count_may_stand_in_any_order() -> None:
    assert fix_of(MATMUL, (2, 4), (4, 1)).any_order == {"k"}


def test_a_later_axis_is_taken_where_the_first_does_not_fit() -> None:
    mesh = Mesh.of({"dp": 3, "tp": 2})
    assert splits(MATMUL, (2, 1), (1, 1), mesh=mesh) == {"m": ("tp",)}


def test_one_axis_is_preferred_to_two_where_it_comes_first() -> None:
    mesh = Mesh.of({"a": 4, "b": 2, "c": 2})
    assert splits(MATMUL, (4, 4), (4, 1), mesh=mesh) == {"m": ("a",), "k": ("b", "c")}


def test_assignment_backtracks_over_the_earlier_counts() -> None:
    mesh = Mesh.of({"a": 2, "b": 4, "c": 2})
    assert first_assignment([4, 4], ["a", "b", "c"], mesh) == [("a", "c"), ("b",)]
    assert first_assignment([8, 4], ["a", "b", "c"], mesh) is None


def test_axes_of_size_one_take_no_part() -> None:
    mesh = Mesh.of({"pp": 1, "a": 2})
    assert splits(MATMUL, (2, 1), mesh=mesh) == {"m": ("a",)}


# --- axis names ----------------------------------------------------------------------------------


def test_names_are_taken_as_they_stand() -> None:
    fix = fix_of(MATMUL, (("c", "a"), None), (None, "b"))
    assert fix.exact == {"m": ("c", "a"), "k": (), "n": ("b",)}
    assert fix.any_order == frozenset()


def test_mindspores_none_is_a_string() -> None:
    assert splits(MATMUL, ("a", "None"), ("None", "b")) == {"m": ("a",), "n": ("b",)}


def test_a_named_axis_of_size_one_splits_nothing() -> None:
    mesh = Mesh.of({"pp": 1, "a": 2})
    assert splits(MATMUL, (("pp", "a"), "pp"), mesh=mesh) == {"m": ("a",)}


def test_names_and_counts_mix_and_agree() -> None:
    assert splits(MATMUL, (2, ("b", "c")), (4, 1)) == {"m": ("a",), "k": ("b", "c")}
    assert splits(MATMUL, (2, 4), (("b", "c"), 1)) == {"m": ("a",), "k": ("b", "c")}


# --- composite dimensions and short forms --------------------------------------------------------


def test_the_two_entry_form_of_a_dense_layer_takes_leading_dimensions_as_one() -> None:
    assert splits(LINEAR, (2, 4), (1, 4)) == {"b1": ("a",), "i": ("b", "c")}
    assert splits(LINEAR, (4, 1)) == {"b1": ("a", "b")}
    # Past the first dimension's size the count goes on to the next.
    assert splits(LINEAR, (8, 1)) == {"b1": ("a", "b"), "b0": ("c",)}


def test_the_two_entry_form_is_for_the_activation_of_dense_layers_only() -> None:
    assert "expected 3 entries, one per dimension, got 2: (2, 4)" in message(MERGE, (2, 4))


def test_a_merged_dimension_is_split_major_part_first() -> None:
    assert splits(HEADS, (2, 4)) == {"d0": ("a",), "d1": ("b", "c")}
    assert splits(HEADS, (1, 8)) == {"d1": ("a", "b"), "d2": ("c",)}
    assert splits(HEADS, (None, ("c", "a", "b"))) == {"d1": ("c", "a"), "d2": ("b",)}


def test_a_merged_dimension_that_is_cut_across_its_parts_is_refused() -> None:
    told = message(HEADS, (1, 3), mesh=Mesh.of({"a": 3}))
    assert told == (
        "hint 'layer': input 0 of aten.reshape.default, shape (8, 24), dimension 1: into 3 does "
        "not fall on the boundaries of its parts [4, 6]"
    )


def test_sizes_that_do_not_divide_are_cut_unevenly() -> None:
    assert splits(LINEAR, (1, 4, 1)) == {"b0": ("a", "b")}
    assert splits(ODD_HEADS, (1, 2)) == {"d1": ("a",)}
    assert splits(ODD_HEADS, (1, ("a", "b"))) == {"d1": ("a", "b")}


def test_a_split_that_is_no_block_of_the_merged_dimension_is_refused() -> None:
    assert splits(MERGE, (1, 4, 2)) == {"d1": ("a", "b"), "d2": ("c",)}
    assert message(MERGE, (1, 2, 2)) == (
        "hint 'layer': aten.reshape.default, strategy ((1, 2, 2),): input 0, dimension 2 is merged "
        "behind another dimension and can be split only where that one is split into single "
        "elements"
    )


def test_the_whole_part_of_a_merged_dimension_cannot_be_split() -> None:
    node = last_call(
        """
%x : f32[4, 8, 5] = input "x"
%y : f32[4, 8, 5] = aten.group_norm.default(%x, 2)"""
    )
    assert splits(node, (1, 2, 1)) == {"g": ("a",)}
    assert "dimension 1: the operator needs this dimension whole, got 4" in message(node, (1, 4, 1))


def test_operands_stand_in_the_order_of_the_rule_or_the_given_one() -> None:
    node = last_call(
        """
%b : f32[64] = input "b"
%x : f32[128, 32] = input "x"
%w : f32[32, 64] = input "w"
%y : f32[128, 64] = aten.addmm.default(%b, %x, %w)"""
    )
    assert splits(node, (2, 4), (4, 1)) == {"m": ("a",), "k": ("b", "c")}
    assert fix_of(node, (8,), order=(0, 1, 2)).exact == {"n": ("a", "b", "c")}


# --- stored parameters ---------------------------------------------------------------------------


def test_a_parameter_split_where_the_activation_is_whole_is_stored_so() -> None:
    fix, stored = operator_fix(
        MATMUL, rule_for(MATMUL), Hint("'layer'", ((8, 1), (8, 1))), ABC, parameters=[1]
    )
    assert fix.exact == {"m": ("a", "b", "c"), "k": (), "n": ()}
    assert stored == {1: (8, 1)}


def test_what_is_only_stored_is_split_beside_what_the_operator_splits() -> None:
    fix, stored = operator_fix(
        MATMUL, rule_for(MATMUL), Hint("'layer'", ((4, 1), (2, 2))), ABC, parameters=[1]
    )
    assert fix.exact == {"m": ("a", "b"), "k": (), "n": ("c",)}
    # The columns stay where the operator has them, whatever comes first in the mesh.
    assert stored == {1: (2, "c")}


def test_an_activation_split_so_is_a_contradiction() -> None:
    told = message(MATMUL, (8, 1), (8, 1))
    assert told == (
        "hint 'layer': input 1 of aten.matmul.default, shape (32, 64), dimension 0: split into 8, "
        "but the same loop of the operator is split into 1 in input 0, dimension 1"
    )


def test_a_parameter_that_contradicts_a_split_activation_is_refused() -> None:
    told = message(MATMUL, (2, 2), (4, 1), parameters=[1])
    assert "dimension 0: split into 4" in told
    assert "split into 2 in input 0, dimension 1" in told


# --- layouts -------------------------------------------------------------------------------------


def constraint(*shape: int) -> Node:
    sizes = ", ".join(map(str, shape))
    return last_call(f'%x : f32[{sizes}] = input "x"\n%y : f32[{sizes}] = autopar.constrain(%x)')


def test_a_layout_leaves_the_other_axes_whole() -> None:
    node = constraint(8, 4)
    fix = layout_fix((4, None), rule_for(node), (8, 4), "hint t: tensor", ABC, "tensor")
    assert fix.exact == {"d1": ("a", "b"), "d0": ()}
    assert fix.roles == {"c": WHOLE}


def test_a_fix_prints_the_same_in_every_process() -> None:
    fix = Fix({"k": ("a", "b")}, frozenset({"z", "k", "m"}))
    assert str(fix) == "{'k': ('a', 'b')} any order ['k', 'm', 'z'] {}"


# --- refusals: the thing, got against accepted, the way out --------------------------------------

FOUR = Mesh.of({"dp": 2, "tp": 2})


@pytest.mark.parametrize(
    ("node", "strategy", "expected"),
    [
        (
            MATMUL,
            ((2, 2, 2), (1, 1)),
            "input 0 of aten.matmul.default, shape (128, 32): expected 2 entries, one per "
            "dimension, got 3: (2, 2, 2)",
        ),
        (
            LINEAR,
            ((2,), (1, 1)),
            "input 0 of aten.linear.default, shape (4, 6, 32): expected 3 entries, one per "
            "dimension (or 2: all leading dimensions as one, and the last), got 1: (2,)",
        ),
        (
            MATMUL,
            (2, 1),
            "input 0 of aten.matmul.default, shape (128, 32): expected a tuple with 2 entries, "
            "one per dimension, got 2; a strategy is a tuple of such tuples, for one input ((…),)",
        ),
        (
            MATMUL,
            ((2, 1), (1, 1), (1,)),
            "aten.matmul.default has 2 tensor operands [(128, 32), (32, 64)], the strategy "
            "((2, 1), (1, 1), (1,)) has 3",
        ),
        (
            MATMUL,
            (("dp", "mp"), (None, None)),
            "input 0 of aten.matmul.default, shape (128, 32): unknown mesh axis 'mp', the mesh is "
            "{dp=2, tp=2}",
        ),
        (
            MATMUL,
            ((("dp", "dp"), None),),
            "input 0 of aten.matmul.default, shape (128, 32): a mesh axis is named twice in "
            "('dp', 'dp')",
        ),
        (
            MATMUL,
            (("dp", None), (None, "dp")),
            "aten.matmul.default, strategy (('dp', None), (None, 'dp')): mesh axis 'dp' splits two "
            "different loops of the operator, input 0, dimension 0 and input 1, dimension 1",
        ),
        (
            MATMUL,
            (("dp", "tp"), ("dp", None)),
            "input 1 of aten.matmul.default, shape (32, 64), dimension 0: split by dp, but the "
            "same loop of the operator is split by tp in input 0, dimension 1",
        ),
        (
            MATMUL,
            ((4, 2), (2, 1)),
            "aten.matmul.default, strategy ((4, 2), (2, 1)): no assignment of mesh axes gives the "
            "split counts (4, 2); each must be a product of different axes of {dp=2, tp=2}; with "
            "the others as they are, input 0, dimension 0 can be split into 1 or 2, got 4",
        ),
        (
            MATMUL,
            ((0, 1),),
            "input 0 of aten.matmul.default, shape (128, 32): a split count must be 1 or more, "
            "got 0",
        ),
        (
            MATMUL,
            ((1.5, 1),),
            "input 0 of aten.matmul.default, shape (128, 32): expected a count, an axis name or "
            "None, got 1.5",
        ),
        (
            ROW,
            ((2, 1),),
            "input 0 of aten.linear.default, shape (1, 32), dimension 0: size 1 does not divide "
            "into 2 pieces; it can be split into 1",
        ),
        (
            SORT,
            ((2, 1),),
            "input 0 of aten.roll.default, shape (8, 24), dimension 0: the operator needs this "
            "dimension whole, got 2 pieces; it can be split into 1",
        ),
    ],
)
def test_refusal(node: Node, strategy: Any, expected: str) -> None:
    assert message(node, *strategy, mesh=FOUR) == f"hint 'layer': {expected}"
