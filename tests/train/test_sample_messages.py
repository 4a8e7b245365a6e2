"""What rank 0 sends the other ranks of the samples: everything once a batch, and nothing stale."""

import pickle
from dataclasses import replace

import pytest
import torch
from PIL import Image

from vlmrl.train import controller
from vlmrl.train.controller import RankZeroTrainer, run_commands
from vlmrl.train.sample_messages import CALLS_KEPT, SampleCache
from vlmrl.types import ExpertRouting, MediaItem, Sample


def image(name, value=1.0):
    inputs = {"pixel_values": torch.full((64, 96), value), "image_grid_thw": torch.tensor([[1, 8, 8]])}
    return MediaItem(name, Image.new("RGB", (32, 32)), inputs, 16, {3: 9})


def sample(name, media, advantage=None):
    routing = [ExpertRouting(b"\x01\x00", 1)] * 5
    rest = {"media": media, "advantage": advantage, "expert_routing": routing, "rewards": {1: 0.5}}
    return Sample([1, 2], [3, 4, 5], [1, 1, 0], [-0.1, -0.2, 0.0], [7, 7, 7], "g", name, True, "stop", **rest)


def sent(cache, samples):
    """A message as the other ranks get it."""
    return pickle.loads(pickle.dumps(cache.pack(samples)))


def same(mine, theirs):
    rows = [replace(row, media=[]) for row in (mine, theirs)]
    assert rows[0] == rows[1]
    for one, other in zip(mine.media, theirs.media, strict=True):
        assert (one.id, one.num_tokens, one.separators) == (other.id, other.num_tokens, other.separators)
        assert one.mm_inputs.keys() == other.mm_inputs.keys()
        assert all(torch.equal(value, other.mm_inputs[key]) for key, value in one.mm_inputs.items())


class Ranks:
    """Two processes in one: what rank 0 broadcasts is what :func:`run_commands` gets after it."""

    def __init__(self, monkeypatch):
        self.commands = []
        monkeypatch.setattr(controller, "_broadcast", lambda *command: self.commands.append(pickle.dumps(command)))
        monkeypatch.setattr(controller, "_next_command", self._next)

    def _next(self):
        method, *arguments = pickle.loads(self.commands.pop(0))
        return method, tuple(arguments)


class RecordingTrainer:
    def __init__(self):
        self.calls = []

    def __getattr__(self, method):
        return lambda samples: self.calls.append((method, samples))


def test_the_calls_on_a_batch_send_its_rows_and_images_once(monkeypatch):
    ranks, trainers = Ranks(monkeypatch), []

    def make(spec):
        trainers.append(RecordingTrainer())
        return trainers[-1]

    trainer = RankZeroTrainer(make, None)
    shown = [image("a"), image("b", 2.0)]
    batch = [sample(f"t{number}", [shown[number % 2]]) for number in range(8)]
    trainer.call_on("token_kl", batch)
    trainer.call_on("score", batch)
    for number, row in enumerate(batch):
        row.advantage = float(number)
    trainer.call_on("step", batch)
    trainer.call_on("step", batch)
    _, *sizes = [len(command) for command in ranks.commands]
    assert sizes[0] > 2 * 64 * 96 * 4  # both images
    assert max(sizes[1:3]) < sizes[0] / 20
    assert sizes[3] > 0.9 * sizes[0]  # the batch was trained on before: nothing of it is kept
    controller.stop_commands()
    run_commands(make)
    here, there = (each.calls for each in trainers)
    assert [method for method, _ in there] == ["token_kl", "score", "step", "step"]
    for (_, mine), (_, theirs) in zip(here[2:], there[2:], strict=True):
        for one, other in zip(mine, theirs, strict=True):
            same(one, other)
    assert there[0][1][0].advantage is None


def test_a_row_that_was_changed_is_sent_again():
    rank_0, other = SampleCache(), SampleCache()
    row = sample("t", [image("a")])
    other.unpack(sent(rank_0, [row]))
    row.loss_mask = [0, 1, 0]
    row.rollout_logprobs[1] = -3.0
    same(other.unpack(sent(rank_0, [row]))[0], row)


def test_another_image_under_the_same_id_is_sent_again():
    """As a store of blank images makes it."""
    rank_0, other = SampleCache(), SampleCache()
    other.unpack(sent(rank_0, [sample("t", [image("a")])]))
    blanked = sample("t", [image("a", 0.0)])
    same(other.unpack(sent(rank_0, [blanked]))[0], blanked)


@pytest.mark.parametrize("between", range(CALLS_KEPT + 1))
def test_calls_on_other_samples_drop_old_ones_on_all_ranks(between):
    rank_0, other = SampleCache(), SampleCache()
    row = sample("t", [image("a")])
    other.unpack(sent(rank_0, [row]))
    for number in range(between):
        other.unpack(sent(rank_0, [sample(f"u{number}", [])]))
    message = sent(rank_0, [row])
    assert bool(message.new_images) == bool(message.new_rows) == (between >= CALLS_KEPT)
    same(other.unpack(message)[0], row)
    assert rank_0._rows.keys() == other._rows.keys() and rank_0._images.keys() == other._images.keys()


def test_two_rows_that_are_equal_stay_two():
    rank_0, other = SampleCache(), SampleCache()
    row = sample("t", [image("a")], 1.0)
    twin = replace(row, advantage=-1.0)
    assert [each.advantage for each in other.unpack(sent(rank_0, [row, twin]))] == [1.0, -1.0]
