"""Batches of all shapes in parts: the gradients of the whole batch, or the batch is computed whole and that is said."""

from __future__ import annotations

import copy
import random
import re
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import default_collate

from azureml_elastic.train.data.parted_batches import PartedBatch, PartedCollate
from azureml_elastic.train.data.position import MicroBatch, Window
from azureml_elastic.train.data.sampling import Cursor
from azureml_elastic.train.integrations.script_loop.batch_layout import PROBED, BatchLayout, Kind
from azureml_elastic.train.integrations.script_loop.batch_parts import CurrentBatch
from azureml_elastic.train.integrations.script_loop.divided_forward import divide_forward

LIMIT = 2
CPU = torch.device("cpu")
WINDOW = Window((), 0, Cursor(), Cursor(), None)


class Script:
    """A script with fewer ranks than at full size: a loader of larger batches, and models that are divided.

    Args:
        samples: the dataset
        collate: its function to collate samples
        models: models that are called
    """

    def __init__(self, samples, collate, *models):
        self.samples = samples
        self.collate = collate
        self.models = [copy.deepcopy(model) for model in models]
        self.whole = [copy.deepcopy(model) for model in models]
        self.batch = CurrentBatch(LIMIT, CPU)
        layout = self.batch.layout = BatchLayout.learn(collate, lambda: samples[:PROBED])
        self.loader = PartedCollate(collate, LIMIT, layout)
        for model in self.models:
            divide_forward(model, self.batch)

    def train(self, step, start=0, count=6):
        """Train samples with a step that returns a loss, and return the gradients, and those of the whole batch."""
        found = self._gradients(self.models, step, self._next(start, count))
        self.batch.take(None, None)
        expected = self._gradients(self.whole, step, self.collate(copy.deepcopy(self.samples[start : start + count])))
        return found, expected

    def _next(self, start, count):
        batch, parts = self.loader(copy.deepcopy(self.samples[start : start + count])), None
        if isinstance(batch, PartedBatch):
            batch, parts = batch
        self.batch.take(batch, MicroBatch(WINDOW, count, 1.0, parts=parts))
        return batch

    @staticmethod
    def _gradients(models, step, batch):
        torch.manual_seed(3)
        for model in models:
            model.zero_grad()
        step(*models, batch).backward()
        return [parameter.grad for model in models for parameter in model.parameters() if parameter.grad is not None]

    def check(self, step, **options):
        """Train a batch, and check that the gradients are those of the whole."""
        for found, expected in zip(*self.train(step, **options), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class Counted(nn.Module):
    """A model that notes with how many samples it is called."""

    def note(self, size):
        SIZES.append(size)


class Small(Counted):
    """A model with a linear layer."""

    def __init__(self, outputs=3):
        super().__init__()
        self.inner = nn.Linear(4, outputs)


SIZES: list[int] = []


@pytest.fixture(autouse=True)
def sizes():
    SIZES.clear()
    torch.manual_seed(5)
    return SIZES


def is_divided(script, step):
    """Train twice, of which the first time includes a check, and return whether the second was in parts."""
    script.check(step)
    SIZES.clear()
    script.check(step, start=2)
    return max(SIZES[:3]) <= LIMIT


def label_loss(model, batch):
    """A step of a script with a batch of inputs and labels."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def mean_loss(model, batch):
    """A step of a script with a model whose outputs have a time first."""
    return functional.cross_entropy(model(batch[0]).mean(0), batch[1])


# --- shapes that are divided -----------------------------------------------------------------------------------------


def sequences(count=12, ragged=True):
    return [(torch.randn(3 + (3 * n % 5 if ragged else 3), 4), torch.tensor(n % 3)) for n in range(count)]


def time_first(rows):
    return pad_sequence([x for x, _ in rows]), torch.stack([y for _, y in rows])


class Recurrent(Counted):
    def __init__(self, **options):
        super().__init__()
        self.lstm = nn.LSTM(4, 5, **options)
        self.head = nn.Linear(5, 3)
        self.first = options.get("batch_first", False)

    def forward(self, x):
        self.note(x.size(0 if self.first else 1))
        return self.head(self.lstm(x)[0])


class Last(Recurrent):
    def forward(self, x):
        return super().forward(x)[-1]


@pytest.mark.parametrize("samples", [sequences(ragged=False), sequences()], ids=["equal", "padded"])
@pytest.mark.parametrize("move", [lambda x: x, lambda x: x.float() * 1.0, lambda x: x.clone()])
def test_time_first(samples, move):
    def step(model, batch):
        return functional.cross_entropy(model(move(batch[0])).mean(0), batch[1])

    assert is_divided(Script(samples, time_first, Recurrent()), step)


@pytest.mark.parametrize("equal_at_first", [False, True])
def test_a_part_is_padded_as_it_would_be_with_all_ranks_where_its_outputs_have_no_time(equal_at_first):
    samples = sequences()
    if equal_at_first:  # those of which the layout is learned
        samples = [(torch.randn(5, 4), torch.tensor(0)) for _ in range(PROBED)] + samples
    script = Script(samples, time_first, Last())

    begin = PROBED if equal_at_first else 0
    found, _ = script.train(label_loss, start=begin)
    (whole,) = script.whole
    whole.zero_grad()
    for start in (begin, begin + 2, begin + 4):  # what three ranks train
        (label_loss(whole, time_first(samples[start : start + 2])) / 3).backward()
    for one, other in zip(found, [each.grad for each in whole.parameters()], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_what_is_computed_of_a_padded_batch_is_cut_with_its_padding():
    def step(model, batch):
        return functional.cross_entropy(model(batch[0].transpose(0, 1)), batch[1])

    class BatchFirst(Last):
        def forward(self, x):
            return super().forward(x.transpose(0, 1))

    assert is_divided(Script(sequences(), time_first, BatchFirst()), step)


def test_as_many_times_as_samples():
    samples = [(torch.randn(6, 4), torch.tensor(n % 3)) for n in range(12)]

    assert is_divided(Script(samples, time_first, Recurrent()), mean_loss)


class Detector(Counted):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, images, targets):
        self.note(len(images))
        features = torch.stack([self.body(image[None]).mean((2, 3))[0] for image in images])
        boxes = torch.stack([target["boxes"].mean(0) for target in targets])
        return {"loss_box": functional.l1_loss(self.head(features), boxes)}


def images():
    return [
        (torch.randn(3, 9 + n % 3, 9), {"boxes": torch.rand(1 + n % 4, 4), "labels": torch.ones(1 + n % 4)})
        for n in range(12)
    ]


@pytest.mark.parametrize(
    "given",
    [
        lambda batch: batch,
        lambda batch: map(list, batch),
        lambda batch: ([each * 2 for each in batch[0]], [{**each} for each in batch[1]]),
    ],
    ids=["as they are", "copied", "computed"],
)
@pytest.mark.parametrize("count", [3, 4, 6])  # also as many as a channel, or as a batch has tensors
def test_lists_of_images(given, count):
    script = Script(images(), lambda rows: tuple(zip(*rows, strict=True)), Detector())

    def step(model, batch):
        return sum(model(*given(batch)).values())

    script.check(step, count=count)
    SIZES.clear()
    script.check(step, count=count)
    assert max(SIZES[:2]) <= LIMIT


class Graph:
    """Graphs with nodes and edges, as PyG has them: attributes, and an index of nodes that begins anew in each."""

    def __init__(self, x, edge_index, y, batch=None):
        self.x, self.edge_index, self.y, self.batch = x, edge_index, y, batch

    def to(self, device):
        for name, value in vars(self).items():
            setattr(self, name, value.to(device))
        return self


def graphs():
    found = []
    for n in range(12):
        nodes = 3 + n % 4
        found.append(Graph(torch.randn(nodes, 4), torch.randint(nodes, (2, nodes + n % 3)), torch.tensor([n % 3])))
    return found


def graph_batch(rows):
    begins = [0, *torch.tensor([len(each.x) for each in rows]).cumsum(0).tolist()]
    return Graph(
        torch.cat([each.x for each in rows]),
        torch.cat([each.edge_index + begin for each, begin in zip(rows, begins, strict=False)], 1),
        torch.cat([each.y for each in rows]),
        torch.cat([torch.full((len(each.x),), n) for n, each in enumerate(rows)]),
    )


class GraphModel(Counted):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x, edges=None, batch=None):
        if isinstance(x, Graph):
            x, edges, batch = x.x, x.edge_index, x.batch
        graphs = int(batch.max()) + 1
        self.note(graphs)
        hidden = self.inner(x)
        hidden = hidden.index_add(0, edges[1], hidden[edges[0]]).relu()
        pooled = torch.zeros(graphs, 5).index_add(0, batch, hidden)
        return self.head(pooled)


@pytest.mark.parametrize(
    "call",
    [lambda model, batch: model(batch), lambda model, batch: model(batch.x, batch.edge_index, batch=batch.batch)],
    ids=["object", "attributes"],
)
def test_graphs(call):
    def step(model, batch):
        batch = batch.to("cpu")
        return functional.cross_entropy(call(model, batch), batch.y)

    assert is_divided(Script(graphs(), graph_batch, GraphModel()), step)


@pytest.mark.parametrize("change", ["in place", "other"])
def test_graphs_that_the_script_has_changed_are_computed_whole(change, caplog):
    def step(model, batch):
        if change == "other":
            batch.x = batch.x * 2
        else:
            batch.x.mul_(2)
        return functional.cross_entropy(model(batch), batch.y)

    assert not is_divided(Script(graphs(), graph_batch, GraphModel()), step)
    assert "that the script has changed cannot be cut" in caplog.text


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Item:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "item"


class Encoded(dict):
    """A tokenizer's batch, read by attributes."""

    __getattr__ = dict.__getitem__


class Classifier(Counted):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3))

    def forward(self, batch=None, x=None, y=None, **_):
        if x is None:
            x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else (batch.x, batch.y)
        self.note(len(x))
        logits = self.layers(x)
        return {"loss": functional.cross_entropy(logits, y), "logits": logits, "name": "classifier", "none": None}


def item_batch(rows):
    return Item(torch.stack([each.x for each in rows]), torch.stack([each.y for each in rows]))


def points(kind):
    return [kind(x=torch.randn(4), y=torch.tensor(n % 3)) for n in range(12)]


@pytest.mark.parametrize(
    ("kind", "collate"),
    [
        (Pair, default_collate),
        (dict, default_collate),
        (Item, item_batch),
        (dict, lambda rows: Encoded(default_collate(rows))),
    ],
    ids=["namedtuple", "dict", "dataclass", "encoding"],
)
@pytest.mark.parametrize("changes", [False, True])
def test_nested_batches(kind, collate, changes):
    def step(model, batch):
        if changes and isinstance(batch, dict):
            batch["x"] = batch["x"] * 2
        elif changes:
            batch = batch._replace(x=batch.x * 2) if isinstance(batch, Pair) else replace(batch, x=batch.x * 2)
        outputs = model(**batch) if isinstance(batch, Encoded) else model(batch)
        return outputs["loss"] + outputs["logits"].square().mean()

    assert is_divided(Script(points(kind), collate, Classifier()), step)


def test_noise_and_time_as_in_training_by_diffusion():
    class Denoiser(Counted):
        def __init__(self):
            super().__init__()
            self.inner, self.times, self.text = nn.Linear(4, 4), nn.Embedding(10, 4), nn.Linear(5, 4)

        def forward(self, noisy, timesteps, encoder_hidden_states, return_dict=True):
            self.note(len(noisy))
            return (self.inner(noisy) + self.times(timesteps) + self.text(encoder_hidden_states).mean(1),)

    frozen = nn.Embedding(7, 5).requires_grad_(requires_grad=False)
    samples = [{"pixels": torch.randn(4), "ids": torch.randint(7, (3,))} for _ in range(12)]

    def step(model, batch):
        latents = batch["pixels"] * 0.18
        noise = torch.randn_like(latents)
        timesteps = torch.randint(0, 10, (len(latents),))
        hidden = frozen(batch["ids"])
        predicted = model(latents + noise, timesteps, hidden, return_dict=False)[0]
        return functional.mse_loss(predicted.float(), noise)

    assert is_divided(Script(samples, default_collate, Denoiser()), step)


class Chances(Counted):
    """A model with dropout of several kinds, and with random numbers of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.AlphaDropout(0.3))
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True)
        self.gru = nn.GRU(8, 8, num_layers=2, dropout=0.5, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        self.note(len(x))
        hidden = self.layers(x)[:, None].expand(-1, 3, -1)
        hidden = self.gru(self.attention(hidden, hidden, hidden, need_weights=False)[0])[0]
        hidden = functional.scaled_dot_product_attention(hidden, hidden, hidden, dropout_p=0.3)
        keep = torch.empty(len(x), 1, 1).bernoulli_(0.8) + torch.rand(len(x), 1, 1).floor() + random.random() * 0
        noise = torch.randn_like(hidden) * 0.1 + torch.randint(3, hidden.shape) * 0.01 + float(np.random.rand()) * 0  # noqa: NPY002
        return self.out((hidden * keep + noise).mean(1))


def test_dropout_and_random_numbers_do_not_keep_a_batch_whole(caplog):
    script = Script(points(Pair), default_collate, Chances())
    script.train(label_loss)
    SIZES.clear()
    script.train(label_loss)
    assert not caplog.records
    assert max(SIZES[:3]) <= LIMIT


def test_the_check_leaves_the_random_numbers_as_they_were():
    class Noisy(Small):
        def forward(self, x):
            return self.inner(x) * torch.rand(())

    script = Script(points(Pair), default_collate, Noisy())
    script.train(lambda model, batch: model(batch.x).sum())
    drawn = []
    for _ in range(2):  # the second time without a check
        batch = script._next(0, 6)
        torch.manual_seed(7)
        script.models[0](batch.x)
        drawn.append(torch.rand(()))
    other = Script(points(Pair), default_collate, Noisy())
    batch = other._next(0, 6)
    torch.manual_seed(7)
    other.models[0](batch.x)
    assert torch.rand(()) == drawn[0] == drawn[1]


def test_a_layer_of_zeros_hides_nothing(caplog):
    """Its outputs are those of parts, whatever is before it; its gradients are not."""

    class Mixed(Counted):
        def __init__(self):
            super().__init__()
            self.inner, self.out = nn.Linear(4, 8), nn.Linear(8, 3)
            nn.init.zeros_(self.out.weight)

        def forward(self, x):
            self.note(len(x))
            hidden = self.inner(x)
            return self.out(hidden - hidden.mean(0))

    assert not is_divided(Script(points(Pair), default_collate, Mixed()), label_loss)
    assert caplog.text.count("gradients for a sample depend on the others") == 1


# --- what is computed whole ------------------------------------------------------------------------------------------


class Contrastive(Small):
    def forward(self, one, other):
        self.note(len(one))
        scores = functional.normalize(self.inner(one)) @ functional.normalize(self.inner(other)).T
        return {"loss": functional.cross_entropy(scores * 5, torch.arange(len(one))), "scores": scores}


class OnlyLoss(Contrastive):
    def forward(self, one, other):
        return super().forward(one, other)["loss"]


class Standardized(Counted):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3))

    def forward(self, one, other):
        self.note(len(one))
        return self.layers(one) + self.layers(other)


class Summing(Counted):
    """Keeps a number of its own, and a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.inner, self.seen, self.mean = nn.Linear(4, 3), 0, torch.zeros(4)

    def forward(self, one, other):
        self.note(len(one))
        self.seen += 1
        self.mean.mul_(0.9).add_(one.mean(0))
        return self.inner(one * other)


class Hooked(Counted):
    """Has a hook of the script's own within."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 3)
        self.inner.register_forward_hook(lambda module, inputs, output: output * 1.5)

    def forward(self, one, other):
        self.note(len(one))
        return self.out(self.inner(one + other))


class Hinge(Small):
    """A loss that is zero as long as all is well."""

    def forward(self, one, other):
        self.note(len(one))
        return (self.inner(one).sum() * other.sum() - 1e6).relu()


def test_what_the_first_batch_sets_up_keeps_the_first_batch_whole_alone(caplog):
    class Scaled(Classifier):
        scale = None

        def forward(self, x, y):
            if self.scale is None:
                self.scale = x.detach().std()
            return super().forward(x=x / self.scale, y=y)["loss"]

    script = Script(points(Pair), default_collate, Scaled())
    script.check(lambda model, batch: model(*batch))
    assert is_divided(script, lambda model, batch: model(*batch))
    assert not caplog.records


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Contrastive(), "no mean over samples"),
        (OnlyLoss(), "no mean over samples"),
        (Standardized(), "fails by|depend on the others"),
        (Summing(), r"its Summing\.(seen|mean) changes"),
        (Hooked(), "hook"),
        (Hinge(1), "zero, which shows nothing"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, nn.Module) else "",
)
def test_samples_that_depend_on_each_other_are_computed_together(model, reason, caplog):
    samples = [(torch.randn(4), torch.randn(4)) for _ in range(12)]

    def step(model, batch):
        outputs = model(*batch)
        return outputs["loss"] if isinstance(outputs, dict) else outputs.square().mean()

    script = Script(samples, default_collate, model)
    assert not is_divided(script, step)
    (record,) = caplog.records
    assert re.search(reason, record.getMessage())
    if isinstance(model, Summing):
        assert script.models[0].seen == script.whole[0].seen == 2
        torch.testing.assert_close(script.models[0].mean, script.whole[0].mean)


class ProxyLoss(Counted):
    def __init__(self):
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(3, 3))

    def forward(self, embeddings, labels, chosen):
        self.note(len(embeddings))
        return functional.cross_entropy(embeddings[chosen] @ self.proxies.T, labels[chosen])


@pytest.mark.parametrize("chosen", [[5, 1], [5, 4, 3, 2, 1, 0], [0, 1], [0] * 6])
def test_row_numbers_in_a_loss(chosen, caplog):
    samples = points(Pair)
    layers = nn.Sequential(nn.Linear(4, 3))

    def step(model, criterion, batch):
        return criterion(model(batch.x), batch.y, torch.tensor(chosen))

    assert not is_divided(Script(samples, default_collate, layers, ProxyLoss()), step)
    assert caplog.text.count("ProxyLoss takes it whole") == 1


def test_hard_samples_alone(caplog):
    """As many as a part, or more; and as many as there are."""
    for chosen in ([1, 4], [0, 2, 3, 5, 1], [0, 2, 3, 5], [5, 4, 3, 2, 1, 0]):
        script = Script(points(dict), default_collate, Classifier())
        rows = torch.tensor(chosen)

        def step(model, batch, rows=rows):
            return model(x=batch["x"][rows], y=batch["y"][rows])["loss"]

        assert is_divided(script, step)
    assert not caplog.records


def test_a_dimension_that_happens_to_have_as_many(caplog):
    """A causal mask of 6 times 6 for 6 samples: by its sizes it may be anything."""

    class Masked(Counted):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)

        def forward(self, x, mask):
            self.note(x.size(1))
            return self.layer(x, src_mask=mask).mean(0)

    samples = [(torch.randn(6, 4), torch.tensor(n % 3)) for n in range(12)]
    mask = nn.Transformer.generate_square_subsequent_mask(6)

    def step(model, batch):
        return functional.cross_entropy(model(batch[0], mask), batch[1])

    assert not is_divided(Script(samples, time_first, Masked()), step)
    assert "in one of several dimensions" in caplog.text


def test_packed_sequences(caplog):
    class Packed(Counted):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 5), nn.Linear(5, 3)

        def forward(self, packed):
            self.note(int(packed.batch_sizes[0]))
            return self.head(self.lstm(packed)[1][0][-1])

    def collate(rows):
        lengths = [len(x) for x, _ in rows]
        return pad_sequence([x for x, _ in rows]), lengths, torch.stack([y for _, y in rows])

    def step(model, batch):
        packed = pack_padded_sequence(batch[0], batch[1], enforce_sorted=False)
        return functional.cross_entropy(model(packed), batch[2])

    assert not is_divided(Script(sequences(), collate, Packed()), step)
    assert len(caplog.records) == 1


def test_lengths_as_an_argument_are_packed_within():
    class Packing(Counted):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 5), nn.Linear(5, 3)

        def forward(self, x, lengths):
            self.note(x.size(1))
            return self.head(self.lstm(pack_padded_sequence(x, lengths, enforce_sorted=False))[1][0][-1])

    def collate(rows):
        lengths = torch.tensor([len(x) for x, _ in rows])
        return pad_sequence([x for x, _ in rows]), lengths, torch.stack([y for _, y in rows])

    def step(model, batch):
        return functional.cross_entropy(model(batch[0], batch[1]), batch[2])

    assert is_divided(Script(sequences(), collate, Packing()), step)


# --- means over labels -----------------------------------------------------------------------------------------------


class Tagger(Small):
    """A model whose loss is a mean over labels, which it gets by a name or by position."""

    def forward(self, x, labels):
        self.note(len(x))
        return functional.cross_entropy(self.inner(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("named", [True, False])
def test_labels_that_are_first_all_there_and_later_not(named):
    samples = [(torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(12)]
    for n in range(6, 12):
        samples[n][1][: n - 6] = -100

    def step(model, batch):
        return model(batch[0], labels=batch[1]) if named else model(*batch)

    script = Script(samples, default_collate, Tagger())
    script.check(step)
    script.check(step, start=6)
    SIZES.clear()
    script.check(step, start=6)
    assert max(SIZES[:3]) <= LIMIT


def test_a_mean_over_a_mask_that_first_hides_nothing(caplog):
    class MaskedMean(Small):
        def forward(self, x, mask):
            self.note(len(x))
            return (self.inner(x)[..., 0].square() * mask).sum() / mask.sum()

    samples = [(torch.randn(5, 4), torch.ones(5)) for _ in range(12)]
    for n in range(6, 12):
        samples[n][1][: n - 6] = 0

    def step(model, batch):
        return model(batch[0], mask=batch[1])

    script = Script(samples, default_collate, MaskedMean())
    script.check(step)
    script.check(step, start=6)
    assert "no mean over samples or labels" in caplog.text


def test_a_sum_is_a_sum():
    class Sum(Classifier):
        def forward(self, x, y):
            return functional.cross_entropy(self.layers(x), y, reduction="sum") if not self.note(len(x)) else None

    assert is_divided(Script(points(Pair), default_collate, Sum()), lambda model, batch: model(*batch))


# --- collating -------------------------------------------------------------------------------------------------------


def test_random_masks_are_those_of_the_whole_batch_alone():
    """A collate function that hides other words each time: parts that are collated alone would hide others."""

    def collate(rows):
        x, y = time_first(rows)
        return x * (torch.rand(x.shape) < 0.5), y

    script = Script(sequences(), collate, Recurrent())
    assert script.batch.layout.random
    assert script.batch.layout.rules[(0,)].kind is Kind.CUT
    assert script.batch.layout.rules[(0,)].dim == 1
    assert not isinstance(script._next(0, 6), PartedBatch)


def test_a_collate_function_that_takes_keys_out_of_samples():
    def collate(rows):
        y = torch.stack([row.pop("y") for row in rows])
        return {"x": pad_sequence([row["x"] for row in rows]), "y": y}

    samples = [{"x": x, "y": y} for x, y in sequences()]
    script = Script(samples, collate, Recurrent())
    batch = script.loader(copy.deepcopy(samples[:6]))
    assert isinstance(batch, PartedBatch)
    assert len(batch.parts) == 3
    torch.testing.assert_close(batch.parts[1]["x"], pad_sequence([each["x"] for each in samples[2:4]]))


def test_samples_that_cannot_be_read_teach_nothing():
    def fail():
        raise OSError

    assert not BatchLayout.learn(default_collate, fail).rules


def test_batches_of_equal_shapes_are_collated_once():
    calls = []

    def collate(rows):
        calls.append(len(rows))
        return default_collate(rows)

    script = Script(points(dict), collate, Classifier())
    calls.clear()
    script._next(0, 6)
    assert calls == [6]


def test_a_checkpointed_model_within_another_is_not_divided_again():
    class Outer(Counted):
        def __init__(self):
            super().__init__()
            self.inner = Classifier()

        def forward(self, x, y):
            return self.inner(x=x, y=y)["loss"]

    samples = points(Pair)
    script = Script(samples, default_collate, Outer())
    divide_forward(script.models[0].inner, script.batch)
    assert is_divided(script, lambda model, batch: model(*batch))
