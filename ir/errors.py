"""The exceptions a user can meet. Every one derives from `AutoparError`."""

from __future__ import annotations


class AutoparError(Exception):
    """Base of every error the compiler raises on purpose."""


class MeshError(AutoparError, ValueError):
    """A mesh that is malformed or does not fit the world it is used in."""


class LayoutError(AutoparError, ValueError):
    """A layout that is malformed or does not fit its tensor."""


class GraphError(AutoparError, ValueError):
    """An IR graph (or its text) that breaks a rule of the IR."""


class RuleError(AutoparError, ValueError):
    """An operator rule that is malformed, or that does not reproduce its operator when split."""


class TraceError(AutoparError, RuntimeError):
    """A model that cannot be traced; names the user's line and what to change."""


class HintError(AutoparError, ValueError):
    """A `shard()` hint that does not fit its operator, names nothing, or conflicts."""


class PlanError(AutoparError, ValueError):
    """A plan that cannot be made, read, or used for this model and mesh."""


class MemoryLimitError(PlanError):
    """No plan was found that fits the memory limit; says what is needed and for what."""


class InputError(AutoparError, ValueError):
    """A call whose inputs differ from the ones the module was compiled for."""


class NotCompiledError(AutoparError, RuntimeError):
    """Parameters were asked for before the first call compiled the module."""


class NoValuesError(AutoparError, RuntimeError):
    """A model from the meta device was run before its parameters were given values."""


class OptimizerError(AutoparError, RuntimeError):
    """An optimizer that updates other parameters than those of the parallel module."""


class CheckpointError(AutoparError, RuntimeError):
    """A checkpoint that cannot be written, read, or used for this model."""


class DesyncError(AutoparError, RuntimeError):
    """Ranks that should agree (on the plan, the graph, the inputs) do not."""


class VerificationError(AutoparError, AssertionError):
    """`verify` found the distributed module to differ from the single-device one."""
