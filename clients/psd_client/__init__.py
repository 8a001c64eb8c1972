"""psd_client: what a training program imports. Frameworks' faces are submodules of their own, such as psd_client.torch.

    ps = psd_client.connect()                                   # under psd-run; else servers=, rank=, world_size=
    params = ps.declare({"w": w0}, optimizer=psd_client.SGD(lr=0.1))
    params = ps.push_pull({"w": gradient})
    ps.close()

Importing it imports no framework and opens nothing.
"""

import logging

from psd.contract.config import ConfigError
from psd.contract.errors import (
    BarrierTimeout,
    BlockOutOfRange,
    CheckpointCorrupt,
    CheckpointFailed,
    CutMissed,
    Draining,
    ForeignRun,
    InternalError,
    InvalidRequest,
    InvalidTensor,
    LayoutMismatch,
    NonFiniteGradient,
    NotDeclared,
    OutOfSpace,
    Overloaded,
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
    WaitTimeout,
    WrongShard,
)
from psd.contract.printable import PrintableRecords
from psd_client.client import ParameterServer, connect
from psd_client.custom_rule import CustomRule
from psd_client.optimizers import FTRL, LAMB, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Lion, NAdam, RMSprop
from psd_client.reader import Reader

logging.getLogger("psd_client").addFilter(PrintableRecords())

__all__ = [
    "connect",
    "ParameterServer",
    "Reader",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "Adamax",
    "AdamW",
    "FTRL",
    "LAMB",
    "Lion",
    "NAdam",
    "RMSprop",
    "CustomRule",
    "ConfigError",
    "PsdError",
    "BarrierTimeout",
    "BlockOutOfRange",
    "CheckpointCorrupt",
    "CheckpointFailed",
    "CutMissed",
    "Draining",
    "ForeignRun",
    "InternalError",
    "InvalidRequest",
    "InvalidTensor",
    "LayoutMismatch",
    "NonFiniteGradient",
    "NotDeclared",
    "OutOfSpace",
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
    "WaitTimeout",
    "WrongShard",
]
