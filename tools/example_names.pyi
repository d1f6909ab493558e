# Names that fragments of the pages leave out, for typed_examples.py.
import os as os
import time as time
from collections.abc import Iterator
from typing import Any as Any

import pytest as pytest
import torch as torch
import torch.distributed as _distributed
from azure.ai.ml import MLClient
from azure.ai.ml import dsl as dsl
from azure.ai.ml.entities import Command
from azure.ai.ml.entities import CronTrigger as CronTrigger
from azure.ai.ml.entities import JobSchedule as JobSchedule
from azure.ai.ml.entities import PipelineJobSettings as PipelineJobSettings
from azure.ai.ml.entities import UserIdentityConfiguration as UserIdentityConfiguration
from azure.ai.ml.sweep import Choice as Choice
from torch import Tensor as Tensor
from torch.distributed.fsdp import fully_shard as fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel as ColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel as RowwiseParallel
from torch.distributed.tensor.parallel import parallelize_module as parallelize_module
from torch.nn.functional import cross_entropy as cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR as CosineAnnealingLR

from azureml_elastic import ElasticCommandJob as ElasticCommandJob
from azureml_elastic import ElasticResources as ElasticResources
from azureml_elastic import MetricsPolicy as MetricsPolicy
from azureml_elastic import Presets as Presets
from azureml_elastic import Profile as Profile
from azureml_elastic.testing import Eviction as Eviction
from azureml_elastic.testing import LocalWorkspace as LocalWorkspace
from azureml_elastic.testing import Pool as Pool
from azureml_elastic.train import Session

dist = _distributed

class Scheduler:
    def get_last_lr(self) -> list[float]: ...

model: Any  # of any class, with layers
optimizer: torch.optim.Optimizer
scheduler: Scheduler
dataset: torch.utils.data.TensorDataset
test_set: torch.utils.data.TensorDataset
loss: torch.Tensor
paths: list[str]
config: dict[str, Any]
run: Session
train: ElasticCommandJob
job: ElasticCommandJob
ml_client: MLClient
old: Command

def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor: ...
def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor: ...
def read_one(path: str) -> Iterator[torch.Tensor]: ...
def collate(samples: list[torch.Tensor]) -> torch.Tensor: ...
def prepare() -> Command: ...
def evaluate(data: Any, model: Any) -> Command: ...
def main(rank: int, world_size: int) -> None: ...
def train_batch(state: Any) -> None: ...
def make_my_job() -> ElasticCommandJob: ...
