"""autopar: an automatic-parallel compiler for PyTorch."""

from autopar.api import autoparallelize, plan
from autopar.baseline_report import compare
from autopar.calibration import calibrate
from autopar.checkpoints import full_state_dict, load_checkpoint, save_checkpoint
from autopar.comparison import Comparison
from autopar.data import DistributedBatches
from autopar.initialise import initialise
from autopar.ir.errors import (
    AutoparError,
    CheckpointError,
    DesyncError,
    GraphError,
    HintError,
    InputError,
    LayoutError,
    MemoryLimitError,
    MeshError,
    NotCompiledError,
    NoValuesError,
    OptimizerError,
    PlanError,
    RuleError,
    TraceError,
    VerificationError,
)
from autopar.ir.mesh import Mesh
from autopar.memory_report import MemoryReport
from autopar.mesh_search import MeshSearch, search_meshes
from autopar.module import ParallelModule
from autopar.optimizers import hand_over
from autopar.passes.device import Device
from autopar.passes.topology import Topology
from autopar.plans import Plan
from autopar.pretrained import load_pretrained
from autopar.rules_api import discovered_rules, load_rules, register_rule, save_rules
from autopar.sharding import shard
from autopar.verification import verify
from autopar.verify_report import Report
from autopar.whole_steps import step_whole

__all__ = [
    "AutoparError",
    "CheckpointError",
    "Comparison",
    "DesyncError",
    "Device",
    "DistributedBatches",
    "GraphError",
    "HintError",
    "InputError",
    "LayoutError",
    "MemoryLimitError",
    "MemoryReport",
    "Mesh",
    "MeshError",
    "MeshSearch",
    "NoValuesError",
    "NotCompiledError",
    "OptimizerError",
    "ParallelModule",
    "Plan",
    "PlanError",
    "Report",
    "RuleError",
    "Topology",
    "TraceError",
    "VerificationError",
    "autoparallelize",
    "calibrate",
    "compare",
    "discovered_rules",
    "full_state_dict",
    "hand_over",
    "initialise",
    "load_checkpoint",
    "load_pretrained",
    "load_rules",
    "plan",
    "register_rule",
    "save_checkpoint",
    "save_rules",
    "search_meshes",
    "shard",
    "step_whole",
    "verify",
]
