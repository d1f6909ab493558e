"""Which methods of ``Trainer`` that the integration takes the place of are overridden by public libraries, and how.

A new override fails the test until someone has looked at it: what it does may not go through what the integration sees.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = ("trl", "sentence_transformers", "setfit", "peft", "transformers.trainer_seq2seq")

OWN_LOOP = "before and after the loop of transformers, which it calls"
PASSES = "calls that of Trainer"
BLOCKS = "keeps what it generates for several batches, which it counts: given as many at any number of nodes"
BLOCK_LOADER = "a loader of larger batches in the order of a RepeatSampler, which is drawn as with all nodes"
STREAM = "a stream of rollouts, in batches for the ranks that there are: left to the stack, and said"
CARD = "writes a model card, then calls that of Trainer: within what is marked as incomplete"
METRICS = "adds its means since the last line, then calls that of Trainer"

LOOKED_AT = {
    "A2POTrainer.train": "estimates values first, then calls that of Trainer",
    "A2POTrainer._prepare_inputs": BLOCKS,
    "AsyncDistillationTrainer._inner_training_loop": OWN_LOOP,
    "AsyncDistillationTrainer._save_checkpoint": CARD,
    "AsyncDistillationTrainer.get_train_dataloader": STREAM,
    "AsyncDistillationTrainer.training_step": PASSES,
    "AsyncGRPOTrainer._inner_training_loop": OWN_LOOP,
    "AsyncGRPOTrainer._save_checkpoint": CARD,
    "AsyncGRPOTrainer.get_train_dataloader": STREAM,
    "AsyncGRPOTrainer.training_step": PASSES,
    "BaseTrainer._load_from_checkpoint": "loads modules from a folder: not called for the state of the run",
    "BaseTrainer.evaluation_loop": "calls that of Trainer, then its evaluator on one rank",
    "BaseTrainer.get_train_dataloader": "batch samplers, whose batches stay whole",
    "CPOTrainer._save_checkpoint": CARD,
    "CPOTrainer.evaluation_loop": "generates from some samples, then calls that of Trainer",
    "DPOTrainer._save_checkpoint": CARD,
    "DPOTrainer.training_step": PASSES,
    "DistillationTrainer._get_train_sampler": "by the number of ranks of its accelerator: that of a run with all nodes",
    "DistillationTrainer._prepare_inputs": BLOCKS,
    "DistillationTrainer._save_checkpoint": CARD,
    "DistillationTrainer.get_train_dataloader": BLOCK_LOADER,
    "DistillationTrainer.training_step": PASSES,
    "GKDTrainer.training_step": PASSES,
    "GOLDTrainer._get_train_sampler": "by the number of ranks of its accelerator: that of a run with all nodes",
    "GOLDTrainer._prepare_inputs": BLOCKS,
    "GOLDTrainer.get_train_dataloader": BLOCK_LOADER,
    "GOLDTrainer.training_step": PASSES,
    "GRPOTrainer._get_train_sampler": "by a size that its arguments have for a run with all nodes",
    "GRPOTrainer._load_optimizer_and_scheduler": "reads a file of its own: not called for the state of the run",
    "GRPOTrainer._prepare_inputs": BLOCKS,
    "GRPOTrainer._save_checkpoint": CARD,
    "GRPOTrainer.get_train_dataloader": BLOCK_LOADER,
    "GRPOTrainer.training_step": PASSES,
    "IWOPDTrainer._get_train_sampler": "by the number of ranks of its accelerator: that of a run with all nodes",
    "IWOPDTrainer._prepare_inputs": BLOCKS,
    "IWOPDTrainer.get_train_dataloader": BLOCK_LOADER,
    "IWOPDTrainer.training_step": PASSES,
    "KTOTrainer._get_train_sampler": "the data's own order, or that of Trainer",
    "KTOTrainer._save_checkpoint": CARD,
    "KTOTrainer.training_step": PASSES,
    "ORPOTrainer._save_checkpoint": CARD,
    "ORPOTrainer.evaluation_loop": "generates from some samples, then calls that of Trainer",
    "OnlineDPOTrainer._maybe_log_save_evaluate": "a copy of that of Trainer with more values in the line",
    "OnlineDPOTrainer._save_checkpoint": CARD,
    "OnlineDPOTrainer.training_step": "its own, divided by nothing: given as many batches at any number of nodes",
    "RLOOTrainer._get_train_sampler": "by a size that its arguments have for a run with all nodes",
    "RLOOTrainer._prepare_inputs": BLOCKS,
    "RLOOTrainer._save_checkpoint": CARD,
    "RLOOTrainer.get_train_dataloader": BLOCK_LOADER,
    "RLOOTrainer.training_step": PASSES,
    "RewardTrainer._save_checkpoint": CARD,
    "RewardTrainer.training_step": PASSES,
    "SDFTTrainer._get_train_sampler": "by a size that its arguments have for a run with all nodes",
    "SDFTTrainer._prepare_inputs": BLOCKS,
    "SDFTTrainer.get_train_dataloader": BLOCK_LOADER,
    "SDFTTrainer.training_step": PASSES,
    "SDPOTrainer._get_train_sampler": "by a size that its arguments have for a run with all nodes",
    "SDPOTrainer._prepare_inputs": BLOCKS,
    "SDPOTrainer.get_train_dataloader": BLOCK_LOADER,
    "SDPOTrainer.training_step": PASSES,
    "SFTTrainer._save_checkpoint": CARD,
    "SFTTrainer.training_step": PASSES,
    "TPOTrainer._save_checkpoint": CARD,
}  # fmt: skip
"""What was found, by class and method."""


def overrides(packages):
    """Return the overrides of what the integration replaces or relies on in the trainers of installed packages."""
    from transformers import Trainer

    from azureml_elastic.train.integrations.transformers import attachment

    wrapped = {name.partition(".")[2] for name in attachment.WRAPPERS["transformers.trainer"] if "." in name}
    names = {*wrapped, *attachment.METHODS, *attachment.DATA_METHODS}
    names |= {"_save_checkpoint", "_prepare_inputs", "_inner_training_loop", "create_accelerator_and_postprocess"}
    for name in packages:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{name}."):
            try:
                importlib.import_module(module.name)
            except (Exception, SystemExit):
                continue
    kinds, found = [Trainer], set()
    while kinds:
        kinds += (kind := kinds.pop()).__subclasses__()
        if kind is not Trainer:
            found |= {f"{kind.__name__}.{name}" for name in names & vars(kind).keys()}
    return sorted(found)


@pytest.fixture(scope="module")
def found():
    for name in PACKAGES:
        pytest.importorskip(name)
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nimport json, test_overrides\n"
    code += f"print(json.dumps(test_overrides.overrides({PACKAGES!r})))"
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True)
    return set(json.loads(result.stdout.splitlines()[-1]))


def test_someone_has_looked_at_each_override(found):
    assert found - LOOKED_AT.keys() == set()


def test_what_was_looked_at_is_still_there(found):
    assert LOOKED_AT.keys() - found == set()
