"""The bound on images' memory: exact, never exceeded, and freed with the last reference."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from testing.episodes import a_task, turn_loop
from testing.fakes import qwen_vl
from transformers import Qwen2VLImageProcessor

from vlmrl import Env, obs
from vlmrl.multimodal import pixel_memory
from vlmrl.multimodal.images import load_image
from vlmrl.multimodal.pixel_memory import FilePixels, PixelMemory
from vlmrl.multimodal.pixels import ArrayPixels
from vlmrl.multimodal.store import MediaStore
from vlmrl.samples import step_wise

SIDE = 64
SIZE = SIDE * SIDE * 3  # bytes of an image


def noise(seed: int, side: int = SIDE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


@pytest.fixture(autouse=True)
def on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder for temporary files may be in memory, of which a run warns."""
    monkeypatch.setattr(pixel_memory, "is_in_memory", lambda folder: folder == Path("/dev/shm"))


@pytest.fixture
def memory(tmp_path: Path) -> PixelMemory:
    """Room for four images."""
    return PixelMemory(4 * SIZE, tmp_path)


def in_memory(held: list[ArrayPixels | FilePixels]) -> list[bool]:
    """Whether two reads give the same array: one from a file is new each time."""
    return [pixels.read() is pixels.read() for pixels in held]


def test_pixels_are_the_same_in_memory_and_in_the_file(memory: PixelMemory):
    """Large images are mapped, small ones are not; free parts of the file are used again for other sizes."""
    sides = [SIDE, SIDE + 1, 4 * SIDE, SIDE]
    held = [memory.hold(noise(number, sides[number % 4])) for number in range(20)]
    del held[:8]
    held += [memory.hold(noise(number, sides[number % 4])) for number in range(20, 30)]
    for number, pixels in enumerate(held, start=8):
        assert np.array_equal(pixels.read(), noise(number, sides[number % 4]))
        assert not pixels.read().flags.writeable


def test_an_image_stays_where_there_was_room_for_it(memory: PixelMemory):
    held = [memory.hold(noise(number)) for number in range(6)]
    assert in_memory(held) == [True] * 4 + [False] * 2
    assert memory.usage() == (4 * SIZE, 4 * SIZE, 2 * SIZE)
    del held[0]
    held.append(memory.hold(noise(6)))
    assert in_memory(held) == [True] * 3 + [False] * 2 + [True]


def test_memory_and_the_file_are_freed_with_the_last_reference(memory: PixelMemory, tmp_path: Path):
    held = [memory.hold(noise(number)) for number in range(10)]
    usage = memory.usage()
    assert (usage.held, usage.spilled) == (4 * SIZE, 6 * SIZE) and not list(tmp_path.iterdir())  # the file has no name
    del held
    gc.collect()
    assert memory.usage() == (0, usage.peak, 0)


def test_the_file_does_not_grow_while_as_many_images_come_as_go(memory: PixelMemory):
    held = [memory.hold(noise(number)) for number in range(10)]
    for number in range(100):
        del held[number % 10]
        held.append(memory.hold(noise(number)))
    assert os.fstat(memory._file._file.fileno()).st_size <= 8 * (SIZE + 4096)  # type: ignore[union-attr]


def test_at_no_time_is_more_held_than_the_budget(memory: PixelMemory):
    """Eight threads add and read."""
    threads, most, failures = 8, [0], []
    kept: list[list[ArrayPixels | FilePixels]] = [[] for _ in range(threads)]

    def work(number: int) -> None:
        dice = np.random.default_rng(number)
        try:
            for turn in range(60):
                kept[number].append(memory.hold(noise(number * 1000 + turn)))
                chosen = int(dice.integers(len(kept[number])))
                assert np.array_equal(kept[number][chosen].read(), noise(number * 1000 + chosen))
                most[0] = max(most[0], memory.usage().held)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    assert most[0] <= memory.usage().peak <= 4 * SIZE
    assert memory.usage().held + memory.usage().spilled == threads * 60 * SIZE


def test_images_stay_in_memory_with_one_warning_while_the_file_cannot_be_written(tmp_path: Path):
    memory = PixelMemory(2 * SIZE, tmp_path / "missing")
    with pytest.warns(
        RuntimeWarning, match=r"a quarter of the memory .* cannot be written .*missing.* TMPDIR"
    ) as caught:
        held = [memory.hold(noise(number)) for number in range(5)]
    assert len(caught) == 1 and all(in_memory(held)) and memory.usage() == (5 * SIZE, 5 * SIZE, 0)
    (tmp_path / "missing").mkdir()
    held.append(memory.hold(noise(5)))
    assert memory.usage() == (5 * SIZE, 5 * SIZE, SIZE)
    assert all(np.array_equal(pixels.read(), noise(number)) for number, pixels in enumerate(held))


def test_a_full_disk_leaves_the_image_in_memory(memory: PixelMemory, monkeypatch: pytest.MonkeyPatch):
    held = [memory.hold(noise(number)) for number in range(5)]
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        held.append(memory.hold(noise(5)))
    assert np.array_equal(held[-1].read(), noise(5)) and memory.usage() == (5 * SIZE, 5 * SIZE, SIZE)


def test_an_image_for_which_there_is_no_memory_does_not_count(memory: PixelMemory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pixel_memory, "_copied", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        memory.hold(noise(0))
    assert memory.usage().held == 0


def test_a_folder_in_memory_bounds_nothing_and_the_run_says_so():
    with pytest.warns(RuntimeWarning, match=r"a quarter of the memory .* go to /dev/shm, which is in memory.* TMPDIR"):
        held = PixelMemory(0, Path("/dev/shm")).hold(noise(0))
    assert np.array_equal(held.read(), noise(0))


@pytest.mark.filterwarnings("error")
def test_python_does_not_warn_of_a_file_that_is_gone(tmp_path: Path):
    memory = PixelMemory(0, tmp_path)
    memory.hold(noise(0))
    del memory
    gc.collect()


@pytest.mark.slow
def test_a_fork_leaves_the_images_of_its_parent():
    script = """
import gc, os
import numpy as np
from vlmrl.multimodal.pixel_memory import PixelMemory

memory = PixelMemory(0)
held = [memory.hold(np.full((64, 64, 3), value, np.uint8)) for value in (1, 2)]
child = os.fork()
if not child:
    held.clear()
    gc.collect()
    held = [memory.hold(np.full((64, 64, 3), value, np.uint8)) for value in (3, 4)]
    os._exit(0 if [int(pixels.read().max()) for pixels in held] == [3, 4] else 1)
print(os.waitpid(child, 0)[1], *(int(pixels.read().max()) for pixels in held))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.split("\n")[0] == "0 1 2"


def test_another_process_gets_arrays(memory: PixelMemory):
    held = [memory.hold(noise(number)) for number in range(8)]
    received = pickle.loads(pickle.dumps(held))
    assert all(np.array_equal(one.read(), other.read()) for one, other in zip(received, held, strict=True))


def test_the_processes_of_one_machine_share_a_quarter_of_its_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pixel_memory, "memory_bytes", lambda: 800)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert PixelMemory().budget == 100


def test_an_episode_keeps_none_of_the_envs_images_and_frees_its_own_with_its_samples(tmp_path: Path):
    shown: list[weakref.ref[Image.Image]] = []

    class Camera(Env):
        """Four turns, each but the first with another image."""

        def step(self, response_text: str):
            image = Image.fromarray(noise(self.turn))
            shown.append(weakref.ref(image))
            return obs("Next:", images=[image]), self.turn == 3, {"reward": 1.0}

    memory = PixelMemory(2 * SIZE, tmp_path)
    processor = Qwen2VLImageProcessor(size={"shortest_edge": 32 * 32, "longest_edge": SIDE * SIDE}, patch_size=16)
    loop = turn_loop(Camera, ["again"] * 4)
    loop.store = MediaStore(qwen_vl(), processor, memory=memory)
    trajectory = asyncio.run(loop.play(a_task(), "g", "g/00"))
    gc.collect()
    assert len(trajectory.turns) == 4 and len(shown) == 4
    assert not any(reference() for reference in shown)  # the messages hold the store's images in their place
    messages = [message for turn in trajectory.turns[1:] for message in turn.messages]
    assert [message["content"][0]["image"] for message in messages] == [turn.media[0] for turn in trajectory.turns[1:]]
    samples = step_wise(trajectory)
    for number, item in enumerate(samples[-1].media):
        assert np.array_equal(load_image(item), noise(number))
    assert memory.usage().held == 2 * SIZE and memory.usage().spilled > 0
    del trajectory, samples, messages, item
    gc.collect()
    assert memory.usage()._replace(peak=0) == (0, 0, 0)
