"""A session's loaders, accumulation, evaluation: one process, and several."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from azureml_elastic import train
from azureml_elastic.config import ElasticResources, FixedGlobalBatch, FixedPerWorkerBatch, Plan
from azureml_elastic.distributed.data_parallel import ElasticDataParallel
from azureml_elastic.errors import UsageError
from tests.support.train import training, workers
from tests.support.worlds import World

pytestmark = pytest.mark.usefixtures("alone")

EXACT = FixedGlobalBatch(logical_workers=4, reduce="exact")


class Run:
    def __init__(self, folder, policy=None, **options):
        self.run = train.start(workers.policy(folder), batch=policy)
        training.MADE.append(self.run)
        self.model = self.run.wrap(nn.Linear(1, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, **options)
        self.run.track(model=self.model, optimizer=self.optimizer)

    def loader(self, length=20, global_batch_size=6, **options):
        return self.run.loader(
            TensorDataset(torch.arange(float(length)).unsqueeze(1)), global_batch_size=global_batch_size, **options
        )

    def loss(self, x):
        return self.model(x).square().mean()


def test_the_optimizer_must_not_step_before_the_last_micro_batch(tmp_path):
    this = Run(tmp_path)
    before = this.model.module.weight.detach().clone()
    for (x,) in this.loader(micro_batch_size=4):
        this.run.backward(this.loss(x))
        assert this.run.accumulating
        with pytest.raises(
            UsageError, match=r"after micro-batch 1 of the loader 'train'.*if run.accumulating: continue"
        ):
            this.optimizer.step()
        with pytest.raises(UsageError, match=r"if run\.accumulating: continue"):
            this.run.commit()
        break
    assert torch.equal(this.model.module.weight, before)
    this.run.finish()


def test_several_loaders_have_a_position_each(tmp_path):
    seen = []
    for _ in range(3):  # as after two restarts
        this = Run(tmp_path)
        labelled, unlabelled = this.loader(), this.loader(30, name="unlabelled", seed=5)
        with pytest.raises(UsageError, match="before with name='unlabelled'"):
            this.loader(name="unlabelled")
        stop = this.run.steps + 3
        for epoch in this.run.epochs(2):
            for (x,), (z,) in zip(labelled, unlabelled, strict=False):
                if len(x) == len(z):
                    this.run.backward(this.loss(x) + this.loss(z))
                else:
                    with pytest.raises(UsageError, match="different numbers of samples"):
                        this.run.backward(this.loss(x) + this.loss(z))
                this.optimizer.step()
                this.optimizer.zero_grad()
                this.run.commit()
                seen += [(epoch, "labelled", i) for i in x.flatten().tolist()]
                seen += [(epoch, "unlabelled", i) for i in z.flatten().tolist()]
                if this.run.steps == stop:
                    break
            if this.run.steps == stop:
                break
        this.run.finish()
    found = Counter((epoch, kind) for epoch, kind, _ in set(seen))
    assert len(set(seen)) == len(seen)
    assert found == {
        (0, "labelled"): 20,
        (1, "labelled"): 20,
        (0, "unlabelled"): 24,
        (1, "unlabelled"): 24,
    }


def test_a_checkpoint_remembers_loaders_that_a_script_makes_later(tmp_path):
    this = Run(tmp_path)
    for (x,) in this.loader():
        this.run.backward(this.loss(x))
        this.optimizer.step()
        this.run.commit()
        break
    this.run.finish()
    this = Run(tmp_path)
    with pytest.raises(UsageError, match="global_batch_size was 6 and is 5"):
        this.loader(global_batch_size=5)
    assert [len(x) for (x,) in map(lambda batch: (this.run.commit(), batch)[1], this.loader())] == [6, 6, 2]  # noqa: C417
    this.run.finish()


def test_what_cannot_be_dealt_out_is_refused(tmp_path):
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    this = Run(tmp_path, EXACT)
    with pytest.raises(UsageError, match=r"Endless has neither a length.*train.Shards\(paths, read_one\)"):
        this.run.loader(Endless(), global_batch_size=4)
    with pytest.raises(UsageError, match="logical_workers=4 is above global_batch_size=3"):
        this.loader(global_batch_size=3)
    with pytest.raises(UsageError, match="micro_batch_size=0 is below the limit of 1"):
        this.loader(micro_batch_size=0)
    shards = train.Shards(range(8), lambda shard: [shard])
    with pytest.raises(UsageError, match="micro_batch_size and micro_batches do not go with shards"):
        this.run.loader(shards, global_batch_size=4, micro_batch_size=2)
    with pytest.raises(UsageError, match="persistent_workers"):
        this.run.loader(shards, global_batch_size=4, num_workers=1, persistent_workers=True)
    this = Run(tmp_path / "other", EXACT)
    this.loader()
    with pytest.raises(UsageError, match="one training loader"):
        this.loader(name="second")
    this = Run(tmp_path / "third", FixedPerWorkerBatch(scaling="linear", reference_world_size=4))
    with pytest.raises(UsageError, match="global_batch_size=6 cannot be divided by reference_world_size=4"):
        this.loader()


def test_exact_sums_take_one_backward_pass_a_micro_batch(tmp_path):
    this = Run(tmp_path, EXACT)
    for (x,) in this.loader():
        this.run.backward(this.loss(x))
        with pytest.raises(UsageError, match=r"one run\.backward"):
            this.run.backward(this.loss(x))
        break


def test_tokens_are_counted_for_all_micro_batches_or_none(tmp_path):
    this = Run(tmp_path)
    for index, (x,) in enumerate(this.loader(micro_batch_size=3)):
        if index == 0:
            this.run.backward(this.loss(x), count=5)
            continue
        with pytest.raises(UsageError, match="got count= for some micro-batches"):
            this.run.backward(this.loss(x))
        break


def test_gradients_that_were_there_before_are_kept(tmp_path):
    for policy in (None, EXACT):
        this = Run(tmp_path / str(policy is None), policy)
        this.model.module.weight.grad = torch.full((1, 1), 7.0)
        for (x,) in this.loader():
            this.run.backward(0.0 * this.loss(x))
            if not this.run.accumulating:
                break
        assert this.model.module.weight.grad.item() == 7.0


def test_shards_survive_a_restart_and_their_audit_is_complete(tmp_path, monkeypatch):
    plan = Plan(resources=ElasticResources(max_instance_count=1), audit=True).to_json()
    environment = {"AZUREML_ELASTIC_RUN_DIR": tmp_path / "run", "AZUREML_ELASTIC_PLAN": plan}
    lengths = [3, 9, 0, 4, 4, 12, 1, 7, 5, 5, 2, 6]
    for number, (size, stop) in enumerate([(2, 4), (3, 8), (1, 11), (2, None)]):
        world = World(
            size, training.train_on_shards, tmp_path / "c", lengths, stop, **environment, AZUREML_ELASTIC_ROUND=number
        )
        assert {outcome.code for outcome in world.outcomes()} == ({0} if stop is None else {9})
    audit = training.audit(tmp_path / "run")
    assert audit.complete, audit
    assert (audit.dataset_size, audit.epochs) == (58, 3)


def test_a_data_set_of_hugging_face_is_one_in_shards(tmp_path):
    this = Run(tmp_path)
    data = training.Streaming({0: [1.0, 2.0], 1: [3.0], 2: [4.0, 5.0, 6.0]})
    seen = []
    for _ in this.run.epochs(2):
        for x in this.run.loader(data, global_batch_size=3) if not seen else this.again:
            this.run.backward(this.loss(x.float().unsqueeze(1)))
            this.optimizer.step()
            this.run.commit()
            seen += x.tolist()
        this.again = []
    assert sorted(seen) == [1, 2, 3, 4, 5, 6]
    assert data.epochs == [0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_an_evaluation_gives_the_same_bits_at_any_world_size(world_size, tmp_path):
    expected = World(1, training.evaluate, tmp_path / "one").values()[0]
    found = World(world_size, training.evaluate, tmp_path / "many").values()
    assert {json.dumps(each) for each in found} == {json.dumps(expected)}


@pytest.mark.parametrize("world_size", [3, 5])
def test_all_ranks_of_an_evaluation_run_the_same_number_of_passes(world_size, tmp_path):
    """A forward pass may be a collective: 10 batches among 3 ranks, or 2 among 5."""
    length = 37 if world_size == 3 else 8
    found = World(world_size, training.evaluate_collectively, tmp_path, length).values()
    assert found == [{"count": 1.0, "sum": (length - 1) / 2}] * world_size


def test_an_evaluation_leaves_the_mode_of_each_module_alone(tmp_path):
    this = Run(tmp_path)
    this.model.module.eval()
    modes = []
    this.run.evaluate(
        lambda _: {"x": modes.append((this.model.training, this.model.module.training, torch.is_grad_enabled())) or 1},
        TensorDataset(torch.zeros(3, 1)),
        batch_size=2,
    )
    assert modes == [(False, False, False)] * 2
    assert (this.model.training, this.model.module.training) == (True, False)
    with pytest.raises(UsageError, match="0 samples"):
        this.run.evaluate(lambda _: {}, TensorDataset(torch.zeros(0, 1)), batch_size=2)


def test_a_pass_without_gradients_involves_no_other_rank(tmp_path):
    assert World(2, training.forward_on_rank_0, tmp_path).values() == ["passed", "waited"]
    assert issubclass(ElasticDataParallel, nn.parallel.DistributedDataParallel)


def test_a_model_goes_on_after_a_rank_is_lost_while_its_process_group_is_replaced():
    survivor, lost = World(2, training.reform_again_after_a_loss).outcomes()
    assert (survivor.code, lost.code) == (0, 0), survivor.error
    failure, calls, gradient = survivor.value
    assert "gloo/transport" in failure
    assert (calls, gradient) == (["called"], [[0.5] * 4])  # by the script's communication hook


def test_a_group_that_ends_while_its_threads_need_the_gil_is_replaced():
    """The reducer joined them with the GIL held: 1 step in 40 ended in a deadlock."""
    assert World(1, training.reform_many_times, 300).values() == [300]


def test_ranks_find_each_other_after_one_has_failed_to_before():
    """torch numbers the groups of a process, also those that it could not open."""
    outcomes = World(2, training.open_after_a_failure).outcomes()
    assert [(each.code, each.error) for each in outcomes] == [(0, None)] * 2
    assert [each.value for each in outcomes] == [2.0, 2.0]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torch; torchdata calls it
def test_a_stateful_data_loader_serves(tmp_path):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    this = Run(tmp_path)
    loader = this.loader(loader_class=stateful, num_workers=2)
    seen = []
    for (x,) in loader:
        this.run.commit()
        seen += x.flatten().tolist()
        if this.run.steps == 2:
            break
    this.run.finish()
    this = Run(tmp_path)
    for (x,) in this.loader(loader_class=stateful):
        this.run.commit()
        seen += x.flatten().tolist()
    assert sorted(seen) == list(range(20))
    shards = train.Shards(range(8), lambda shard: [float(shard)])
    other = Run(tmp_path / "shards")
    for x in other.run.loader(shards, global_batch_size=4, loader_class=stateful):
        other.run.commit()
        seen += x.tolist()
    assert sorted(seen[20:]) == list(range(8))
