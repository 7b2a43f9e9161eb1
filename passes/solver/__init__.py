"""The assignment solver: exact where it can be, and saying its gap where it can't.

It knows nothing of tensors and imports neither torch nor the rest of the compiler.
"""

from .errors import InfeasibleError, ProblemError
from .problem import Edge, Node, Problem, Solution, Stage, evaluate
from .solve import Progress, solve

__all__ = [
    "Edge",
    "InfeasibleError",
    "Node",
    "Problem",
    "ProblemError",
    "Progress",
    "Solution",
    "Stage",
    "evaluate",
    "solve",
]
