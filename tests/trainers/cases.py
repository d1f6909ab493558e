"""The real trainers of public libraries that are tested, and what is expected of each.

Each is a script in ``scripts``, with models and data made by itself. ``tests/trainers/page.py`` makes the table of the
documentation of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """A trainer of a library.

    Args:
        library: name on the package index.
        script: name of the script, without ``_script.py``, and its arguments.
        shape: what the table calls it.
        steps: optimizer steps of the whole training.
        epochs: how often each sample is trained; None where the trainer draws them, or makes them itself.
        session: whether the training continues from the state in memory; otherwise from what the script saves.
        close: how close the script's own numbers are to those of a run without faults, where it is not 1e-6.
        weights: the same for the norms of the weights of each step; None where they depend on the ranks.
        ignored: what the script records that depends on the ranks.
        says: part of a message of this library that the run must show; it shows no other one on what does not hold.
        after: the first step at which a node may be lost.
        sharded: whether a loss costs steps, as its state is sharded without replicas.
        searches: whether it takes steps that are none of the training, so that single steps are not compared.
        preloaded: whether its imports can be made before it runs.
        quick: whether the case is part of the default run.
        notes: what a reader of the table needs to know.
        fails: why the case fails today under faults; the table names it.
    """

    library: str
    script: str
    shape: str
    steps: int = 40
    epochs: int | None = 2
    session: bool = True
    close: Mapping[str, float] = field(default_factory=dict)
    weights: float | None = 1e-6
    ignored: tuple[str, ...] = ()
    says: str = ""
    after: int = 2
    sharded: bool = False
    searches: bool = False
    preloaded: bool = True
    quick: bool = False
    notes: str = ""
    fails: str = ""

    def holds(self, *, faults: bool) -> bool:
        """Return whether the case is expected to pass."""
        return not (self.fails and faults)

    @property
    def id(self) -> str:
        """Return the test's name."""
        return self.script.replace(" --", "-").replace(" ", "-")


def _lightning(callback: str, shape: str, **more: object) -> Case:
    return Case("lightning", f"lightning --callback {callback}", shape, epochs=4, **more)


_ONLINE = "what a rank generates depends on the number of ranks, and so do rewards and weights"
_SENTENCES = "`SentenceTransformerTrainer`"
_OWN = "no session: the script goes on from the epoch that it has saved"

CASES = [
    Case("trl", "trl --trainer sft", "`SFTTrainer`"),
    Case("trl", "trl --trainer lora", "`SFTTrainer` with `LoraConfig`"),
    Case("trl", "trl --trainer dpo", "`DPOTrainer`"),
    Case("trl", "trl --trainer kto", "`KTOTrainer`"),
    Case("trl", "trl --trainer reward", "`RewardTrainer`"),
    Case(
        "trl",
        "trl --trainer grpo",
        "`GRPOTrainer`",
        steps=80,
        epochs=None,
        weights=None,
        ignored=("losses",),
        notes=_ONLINE,
    ),
    Case(
        "trl",
        "trl --trainer rloo",
        "`RLOOTrainer`",
        steps=80,
        epochs=None,
        weights=None,
        ignored=("losses",),
        notes=_ONLINE,
    ),
    Case(
        "sentence-transformers",
        "sentence_transformers",
        f"{_SENTENCES}, `MultipleNegativesRankingLoss`",
        weights=5e-3,
        ignored=("losses", "eval_loss"),
        notes="the other pairs of a rank's batch are the negatives, and so more where there are fewer ranks",
    ),
    Case("sentence-transformers", "sentence_transformers --loss score", f"{_SENTENCES}, `CosineSimilarityLoss`"),
    Case("setfit", "setfit", "`Trainer`"),
    Case("peft", "peft", "`LoraConfig` with `Trainer`, `merge_and_unload()`"),
    Case("diffusers", "diffusers", "the shape of `train_text_to_image.py`, with `EMAModel`"),
    Case(
        "pytorch-ignite",
        "ignite",
        "`Engine` with handlers and metrics, over `accelerate`",
        ignored=("losses",),
        notes="a metric of the interrupted epoch is not that of all its samples",
    ),
    Case("pytorch-ignite", "ignite_distributed", "`idist.Parallel`, `Checkpoint`", session=False, notes=_OWN),
    Case("monai", "monai", "`SupervisedTrainer`, `SupervisedEvaluator`, over `accelerate`"),
    # A sum of losses that rank 0 has computed alone, whose samples are others at another world size.
    Case("torch-geometric", "pyg", "graphs of a `DataLoader`, over `accelerate`", close={"losses": 0.1}),
    Case(
        "pytorch-metric-learning",
        "metric_learning",
        "a miner and a loss by index, over `accelerate`",
        epochs=4,
        weights=5e-3,
        notes="triplets are chosen among the samples of a rank, and so of more where there are fewer ranks",
    ),
    Case(
        "torchmetrics",
        "torchmetrics",
        "metrics of an epoch, over `accelerate`",
        ignored=("trained", "counted", "evaluated"),
        notes="a metric of the interrupted epoch may count the samples of the step of the fault twice; an evaluation "
        "before the loss is computed again, with the weights of now",
    ),
    _lightning(
        "torchmetrics",
        "metrics in `self.log()` of Lightning",
        ignored=("validated",),
        notes="a metric of the interrupted epoch leaves out what the lost rank had counted",
    ),
    Case(
        "evaluate",
        "evaluate",
        "a metric's module on disk, over `accelerate`",
        ignored=("hits",),
        notes="an evaluation before the loss is computed again, with the weights of now",
    ),
    _lightning("averaging", "`WeightAveraging`", quick=True),
    _lightning("ema", "`EMAWeightAveraging`"),
    _lightning("swa", "`StochasticWeightAveraging`", after=12),
    _lightning("accumulation", "`GradientAccumulationScheduler`", steps=25),
    _lightning("finetuning", "`BackboneFinetuning`"),
    _lightning(
        "pruning",
        "`ModelPruning`",
        says="ModelPruning renames the weights while it trains",
        fails="left to Lightning alone, as the log says: the training begins anew after a loss",
    ),
    _lightning("early_stopping", "`EarlyStopping`"),
    _lightning("checkpoint", "`ModelCheckpoint`"),
    _lightning(
        "lr_finder",
        "`LearningRateFinder`",
        searches=True,
        notes="a new process searches again, and trains with the rate that was found first",
    ),
    _lightning("lr_monitor", "`LearningRateMonitor`"),
    _lightning("on_exception", "`OnExceptionCheckpoint`"),
    _lightning("throughput", "`ThroughputMonitor`"),
    _lightning("timer", "`Timer`"),
    _lightning("lambda", "`LambdaCallback`"),
    Case("torch", "detection", "the shape of torchvision's detection: lists of images, over `accelerate`"),
    Case("torch", "imagenet", "the shape of `imagenet/main.py`", session=False, notes=_OWN, quick=True),
    Case("torch", "timm", "the shape of timm's `train.py`, with a `ModelEma`", session=False, notes=_OWN),
    Case("torch", "fsdp2", "the shape of the FSDP2 example, with DCP", session=False, notes=_OWN),
    Case(
        "speechbrain",
        "speechbrain",
        "`Brain.fit()` with its `Checkpointer`",
        session=False,
        preloaded=False,
        notes=_OWN,
    ),
    Case(
        "deepspeed",
        "deepspeed",
        "the shape of its examples: `initialize(training_data=…)`",
        weights=None,  # those of a rank's partition
        sharded=True,
        notes="ZeRO shards the state: the steps since the last snapshot are trained again",
    ),
]
