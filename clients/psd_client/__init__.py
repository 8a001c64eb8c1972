"""psd_client: the package that a training program imports. Each framework has a submodule, such as psd_client.torch.

    ps = psd_client.connect()                                   # under psd-run; else servers=, rank=, world_size=
    params = ps.declare({"w": w0}, optimizer=psd_client.SGD(lr=0.1))
    params = ps.push_pull({"w": gradient})
    ps.close()

Importing psd_client imports no framework and opens no connection.
"""

import logging

from psd import __version__ as __version__
from psd.contract import environment as _environment  # noqa: F401 - before gRPC is loaded: it says what that is to print
from psd.contract.config import ConfigError
from psd.contract.errors import (
    BarrierTimeout,
    BlockOutOfRange,
    CheckpointCorrupt,
    CheckpointFailed,
    CheckpointUnsupported,
    CutMissed,
    Draining,
    ForeignRun,
    InternalError,
    InvalidRequest,
    InvalidTensor,
    JobOver,
    LayoutMismatch,
    NonFiniteGradient,
    NotDeclared,
    OutOfSpace,
    Overloaded,
    PartsDisagree,
    PermissionDenied,
    PsdError,
    RolledBack,
    RuleFailed,
    ScalarsDisagree,
    SessionFenced,
    ShardRestarted,
    ShardUnavailable,
    SpecMismatch,
    StateLost,
    TlsFailed,
    Unauthenticated,
    UnknownVector,
    WaitTimeout,
    WorkerFailed,
    WrongShard,
)
from psd.contract.printable import PrintableRecords
from psd_client import lbfgs as lbfgs
from psd_client.client import ParameterServer
from psd_client.connecting import connect
from psd_client.custom_rule import CustomRule
from psd_client.local import LocalCluster, RunFailed, local
from psd_client.publishing import Store, publish
from psd_client.reader import Reader, ReadTable
from psd_client.tables import (
    Constant,
    DeclaredTable,
    Normal,
    RowwiseAdagrad,
    Table,
    TruncatedNormal,
    Uniform,
    Zeros,
    hash_ids,
)
from psd_client.vector_batch import Batch, BatchAnswer
from psd_client.vectors import Matrix, Vector
from psd_client.weights import Weights
from psd_client.worker.reduction import Reduced
from psd_client.worker.session.orders import Drained
from psd_core import rules as _rules
from psd_core.rules import *  # noqa: F403 - a rule stands in one place

logging.getLogger("psd_client").addFilter(PrintableRecords())

__all__ = [
    "connect",
    "publish",
    "Store",
    "Weights",
    "ParameterServer",
    "Reduced",
    "Reader",
    "ReadTable",
    "CustomRule",
    "Table",
    "DeclaredTable",
    "Zeros",
    "Constant",
    "Uniform",
    "Normal",
    "TruncatedNormal",
    "RowwiseAdagrad",
    "hash_ids",
    "Vector",
    "Matrix",
    "Batch",
    "BatchAnswer",
    "local",
    "LocalCluster",
    "RunFailed",
    "ConfigError",
    "PsdError",
    "BarrierTimeout",
    "BlockOutOfRange",
    "CheckpointCorrupt",
    "CheckpointFailed",
    "CheckpointUnsupported",
    "CutMissed",
    "Drained",
    "Draining",
    "ForeignRun",
    "InternalError",
    "InvalidRequest",
    "InvalidTensor",
    "JobOver",
    "LayoutMismatch",
    "NonFiniteGradient",
    "NotDeclared",
    "OutOfSpace",
    "PartsDisagree",
    "Overloaded",
    "PermissionDenied",
    "RolledBack",
    "RuleFailed",
    "ScalarsDisagree",
    "SessionFenced",
    "ShardRestarted",
    "ShardUnavailable",
    "SpecMismatch",
    "StateLost",
    "TlsFailed",
    "Unauthenticated",
    "UnknownVector",
    "WaitTimeout",
    "WorkerFailed",
    "WrongShard",
]
__all__ += _rules.__all__


def __dir__() -> list[str]:
    faces = [name for name in ("jax", "keras", "torch", "torchrec") if name in globals()]  # those that have been imported
    return [*__all__, *faces, "__version__"]
