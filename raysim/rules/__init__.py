"""The contract of a federated method.

A method's file imports from here, from `raysim.numerics` and from other methods' files only.
"""

from raysim.config.sections.base import (
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    PositiveScheduled,
    Scheduled,
    Share,
    UnitScheduled,
)
from raysim.rules.batch import Batch
from raysim.rules.client_sampling import ClientPool, ClientSampling, SelectionPool
from raysim.rules.contract import (
    Algorithm,
    ClientRule,
    NoiseSpec,
    Report,
    ServerRule,
    State,
    normalised,
)
from raysim.rules.losses import JointLoss, Loss, Net, cross_entropy, soft_cross_entropy, task_loss
from raysim.rules.public import PublicData
from raysim.rules.reports import Cohort, Reports
from raysim.rules.rule import Logged, Problem
from raysim.rules.task import LocalData, PassMode, Task
from raysim.rules.tasks.learning_task import LearningTask, TaskData, TaskMetric
from raysim.rules.tasks.shipped_tasks import Classification, Multilabel, NextToken, Regression
from raysim.rules.upload_stages import UploadStage, WireFormat
from raysim.rules.uploads import Upload, Uploads

__all__ = [
    "Algorithm",
    "Batch",
    "Classification",
    "ClientPool",
    "ClientRule",
    "ClientSampling",
    "Cohort",
    "JointLoss",
    "LearningTask",
    "LocalData",
    "Logged",
    "Loss",
    "Multilabel",
    "Net",
    "NextToken",
    "NoiseSpec",
    "NonNegative",
    "NonNegativeInt",
    "PassMode",
    "Positive",
    "PositiveInt",
    "PositiveScheduled",
    "Problem",
    "PublicData",
    "Regression",
    "Report",
    "Reports",
    "Scheduled",
    "SelectionPool",
    "ServerRule",
    "Share",
    "State",
    "Task",
    "TaskData",
    "TaskMetric",
    "UnitScheduled",
    "Upload",
    "UploadStage",
    "Uploads",
    "WireFormat",
    "cross_entropy",
    "normalised",
    "soft_cross_entropy",
    "task_loss",
]
