"""The assignment solver: exact where it can be, and saying its gap where it can't.

It knows nothing of tensors and imports neither torch nor the rest of the compiler.
"""

from .errors import InfeasibleError, ProblemError
from .least_peak import LeastPeak, least_peak
from .matrix_model import MatrixModel
from .problem import Edge, Held, Node, Problem, Solution, Stage, evaluate
from .solve import Progress, solve

__all__ = [
    "Edge",
    "Held",
    "InfeasibleError",
    "LeastPeak",
    "MatrixModel",
    "Node",
    "Problem",
    "ProblemError",
    "Progress",
    "Solution",
    "Stage",
    "evaluate",
    "least_peak",
    "solve",
]
