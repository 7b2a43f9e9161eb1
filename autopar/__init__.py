"""autopar: an automatic-parallel compiler for PyTorch."""

from autopar.api import autoparallelize, plan
from autopar.ir.errors import (
    AutoparError,
    DesyncError,
    GraphError,
    HintError,
    InputError,
    LayoutError,
    MeshError,
    NotCompiledError,
    PlanError,
    TraceError,
    VerificationError,
)
from autopar.ir.mesh import Mesh
from autopar.module import ParallelModule
from autopar.plan import Plan
from autopar.sharding import shard
from autopar.verification import Report, verify

__all__ = [
    "AutoparError",
    "DesyncError",
    "GraphError",
    "HintError",
    "InputError",
    "LayoutError",
    "Mesh",
    "MeshError",
    "NotCompiledError",
    "ParallelModule",
    "Plan",
    "PlanError",
    "Report",
    "TraceError",
    "VerificationError",
    "autoparallelize",
    "plan",
    "shard",
    "verify",
]
