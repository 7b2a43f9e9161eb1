"""autopar: an automatic-parallel compiler for PyTorch."""

from autopar.api import autoparallelize, plan
from autopar.baseline_report import compare
from autopar.calibration import calibrate
from autopar.comparison import Comparison
from autopar.ir.errors import (
    AutoparError,
    DesyncError,
    GraphError,
    HintError,
    InputError,
    LayoutError,
    MemoryLimitError,
    MeshError,
    NotCompiledError,
    PlanError,
    TraceError,
    VerificationError,
)
from autopar.ir.mesh import Mesh
from autopar.memory_report import MemoryReport
from autopar.mesh_search import MeshSearch, search_meshes
from autopar.module import ParallelModule
from autopar.passes.device import Device
from autopar.passes.topology import Topology
from autopar.plans import Plan
from autopar.sharding import shard
from autopar.verification import verify
from autopar.verify_report import Report

__all__ = [
    "AutoparError",
    "Comparison",
    "DesyncError",
    "Device",
    "GraphError",
    "HintError",
    "InputError",
    "LayoutError",
    "MemoryLimitError",
    "MemoryReport",
    "Mesh",
    "MeshError",
    "MeshSearch",
    "NotCompiledError",
    "ParallelModule",
    "Plan",
    "PlanError",
    "Report",
    "Topology",
    "TraceError",
    "VerificationError",
    "autoparallelize",
    "calibrate",
    "compare",
    "plan",
    "search_meshes",
    "shard",
    "verify",
]
