"""What rank 0 sends the other ranks of the samples: everything once a batch, and nothing stale."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from testing.fakes import item_of

from vlmrl.multimodal.pixels import NoPixels
from vlmrl.train.controller import STOP, RunTrainer, run_commands
from vlmrl.train.sample_messages import CALLS_KEPT, SampleCache
from vlmrl.train.trainer import StepOutput
from vlmrl.types import ExpertRouting, Sample


def image(name, value=1):
    return item_of(name, Image.new("RGB", (128, 128), (value, value, value)), 16, {3: 9})


def sample(name, media, advantage=None):
    routing = [ExpertRouting(b"\x01\x00", 1)] * 5
    rest = {"media": media, "advantage": advantage, "expert_routing": routing, "rewards": {1: 0.5}}
    return Sample([1, 2], [3, 4, 5], [1, 1, 0], [-0.1, -0.2, 0.0], [7, 7, 7], "g", name, True, "stop", **rest)


def sent(cache, samples):
    """What rank 1 of two gets, which computes all samples."""
    message, images = cache.pack(samples, [set(), set(range(len(samples)))])
    return pickle.loads(pickle.dumps((message, images[1])))


def same(mine, theirs):
    rows = [replace(row, media=[]) for row in (mine, theirs)]
    assert rows[0] == rows[1]
    for one, other in zip(mine.media, theirs.media, strict=True):
        assert (one.id, one.num_tokens, one.separators) == (other.id, other.num_tokens, other.separators)
        assert one.sizes.keys() == other.sizes.keys()
        assert all(torch.equal(value, other.sizes[key]) for key, value in one.sizes.items())
        assert np.array_equal(one.pixels.read(), other.pixels.read())


class TwoRanks:
    """The commands of two processes in one: what rank 0 sends is what :func:`run_commands` gets after it, as rank 1."""

    def __init__(self):
        self.commands, self.images = [], []

    def send(self, method, *arguments):
        self.commands.append(pickle.dumps((method, arguments)))

    def receive(self):
        return pickle.loads(self.commands.pop(0))

    def send_images(self, parts):
        self.images.append(pickle.dumps(parts[1]))

    def receive_images(self):
        return pickle.loads(self.images.pop(0))


class RecordingRank:
    def __init__(self):
        self.trainer = None

    def start(self, spec):
        self.trainer = RecordingTrainer()

    def call(self, method, *arguments):
        return getattr(self.trainer, method)(*arguments)


class RecordingTrainer:
    """Rank 1 computes the second half of all samples, and in steps also the one before it."""

    def __init__(self):
        self.calls = []

    def rows_by_rank(self, samples, in_steps):
        half = len(samples) // 2
        return [set(range(half)), set(range(half - in_steps, len(samples)))]

    def __getattr__(self, method):
        return lambda samples: self.calls.append((method, samples)) or StepOutput({}, [], 0)


def test_the_calls_on_a_batch_send_its_rows_and_images_once_and_images_only_where_they_are_needed():
    ranks, here, there = TwoRanks(), RecordingRank(), RecordingRank()
    trainer = RunTrainer(here, ranks).start(None)
    batch = [sample(f"t{number}", [image(f"{number}", number)]) for number in range(8)]
    trainer.token_kl(batch)
    trainer.score(batch)
    for number, row in enumerate(batch):
        row.advantage = float(number)
    trainer.step(batch)
    trainer.step(batch)
    names = [sorted(pickle.loads(images)) for images in ranks.images]
    assert names == [["4", "5", "6", "7"], [], ["3"], ["3", "4", "5", "6", "7"]]  # the last batch is a new one
    _, *sizes = [len(command) for command in ranks.commands]
    assert max(sizes) < 128 * 128 * 3  # not even one image's pixels
    assert max(sizes[1:3]) < sizes[0] / 4  # rows by their hashes
    ranks.send(STOP)
    run_commands(there, ranks)
    here, there = here.trainer.calls, there.trainer.calls
    assert [method for method, _ in there] == ["token_kl", "score", "step", "step"]
    for (_, mine), (_, theirs) in zip(here[2:], there[2:], strict=True):
        for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            if number < 3:
                assert [type(item.pixels) for item in other.media] == [NoPixels]
                assert (other.advantage, other.image_ids) == (number, [f"{number}"])
            else:
                same(one, other)
    assert there[0][1][0].advantage is None


def test_a_row_that_was_changed_is_sent_again():
    rank_0, other = SampleCache(), SampleCache()
    row = sample("t", [image("a")])
    other.unpack(*sent(rank_0, [row]))
    row.loss_mask = [0, 1, 0]
    row.rollout_logprobs[1] = -3.0
    same(other.unpack(*sent(rank_0, [row]))[0], row)


def test_another_image_under_the_same_id_is_sent_again():
    """As a store of blank images makes it."""
    rank_0, other = SampleCache(), SampleCache()
    other.unpack(*sent(rank_0, [sample("t", [image("a")])]))
    blanked = sample("t", [image("a", 0)])
    same(other.unpack(*sent(rank_0, [blanked]))[0], blanked)


@pytest.mark.parametrize("between", range(CALLS_KEPT + 1))
def test_calls_on_other_samples_drop_old_ones_on_all_ranks(between):
    rank_0, other = SampleCache(), SampleCache()
    row = sample("t", [image("a")])
    other.unpack(*sent(rank_0, [row]))
    for number in range(between):
        other.unpack(*sent(rank_0, [sample(f"u{number}", [])]))
    message, images = sent(rank_0, [row])
    assert bool(message.new_images) == bool(images) == bool(message.rows.new_rows) == (between >= CALLS_KEPT)
    same(other.unpack(message, images)[0], row)
    assert rank_0.rows.keys() == other.rows.keys() and rank_0.images.keys() == other.images.keys()


def test_two_rows_that_are_equal_stay_two():
    rank_0, other = SampleCache(), SampleCache()
    row = sample("t", [image("a")], 1.0)
    twin = replace(row, advantage=-1.0)
    assert [each.advantage for each in other.unpack(*sent(rank_0, [row, twin]))] == [1.0, -1.0]


@pytest.mark.slow
def test_on_two_ranks_an_images_pixels_cross_once_to_the_rank_that_computes_it(preloaded, tmp_path):
    """Two processes over gloo; 8 rows with an image of noise each, of which rank 1 computes 4."""
    out = tmp_path / "sent.json"
    preloaded.run_ranks(2, "testing.sent_bytes_script", out)
    found = json.loads(out.read_text())
    (rows, images), later, last = (found["bytes"][call] for call in ("token_kl", "score", "step"))
    pixels = 128 * 128 * 3
    assert 4 * pixels <= images < 4 * pixels + 8000
    assert 8 * 2000 < rows < 8 * 2000 * 6  # the ids of 8 rows, without pixels
    assert max(*later, *last) < 2000  # rows by their hashes, and no image
    mine, theirs = found["sums"]
    assert len(theirs) == 3 and all(each | other == found["whole"] for each, other in zip(mine, theirs, strict=True))
