"""Fixtures for all tests: the tiny models, built once, and the shared material, where it is."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import inspect
import os
import random
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testing import templates
from testing.preloaded import Preloaded

from vlmrl.model import tiny

# Files of cases and drivers whose failed assertions are explained like those of tests.
pytest.register_assert_rewrite("engine.conformance", "engine.server_conformance", "testing.engine_drivers")

# As `run_training` does for a deterministic run. MKL reads it once, and other tests use MKL before those that compare bits.
os.environ["MKL_CBWR"] = "AUTO,STRICT"
# Torch keeps oneDNN's compiled code of the last 1024 shapes of bfloat16 products: half a GiB over all tests.
os.environ.setdefault("LRU_CACHE_CAPACITY", "16")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
# One arena for all threads, and buffers of 1 MiB in mappings of their own, which go back when they are freed: else each thread of a
# run leaves 20 MiB behind.
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--hostile", type=int, default=20, help="the least number of generated inputs of each test that has some"
    )


@pytest.fixture
def hostile(request) -> Callable[[str], Iterator[random.Random]]:
    """``hostile(area)``: a generator of random numbers for each hostile input; `pytest tests/hostile --hostile 1000` tries more."""
    count = request.config.getoption("--hostile")
    return lambda area: (random.Random(f"{area} {index}") for index in range(count))


@pytest.fixture
def how_many(request) -> Callable[[int], int]:
    """``how_many(60)``: the number of generated inputs, at least that of ``--hostile``."""
    return lambda usual: max(usual, request.config.getoption("--hostile"))


def pytest_configure(config) -> None:
    """Tables that tests load are cached for this run of the tests (and its workers), not in the user's home."""
    if not hasattr(config, "workerinput"):
        config.datasets_cache = os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="vlmrl-tests-datasets-")


def pytest_collection_modifyitems(items) -> None:
    """Files with slow tests come first: with `--dist loadfile`, a long one at the end would leave a core idle."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """The garbage collector skips imported modules and collected tests: 800,000 objects, half a second at each full collection."""
    importlib.import_module("hypothesis")  # it asks the collector who holds trio's random state
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config) -> None:
    """The cache of this run goes with it."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(config.datasets_cache, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem) -> bool | None:
    """A test may be a coroutine function: it gets an event loop of its own."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    asyncio.run(test(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}))
    return True


@pytest.fixture(autouse=True)
def no_process_in_a_fast_test(request, monkeypatch) -> None:
    """A test that starts a process or a server must have the marker ``slow``."""
    if request.node.get_closest_marker("slow"):
        return

    def refuse(*args, **kwargs):
        pytest.fail("it starts a process or a server: mark it with @pytest.mark.slow", pytrace=True)

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(socket.socket, "listen", refuse)


@pytest.fixture(autouse=True, scope="module")
def no_tokenizer_kept() -> Iterator[None]:
    """A file of tests leaves no tokenizer of a real vocabulary behind; memory goes back to the system after the next test."""
    yield
    templates.forget()
    kept[0] = 0


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """What tests freed goes back to the system, once it is 100 MiB: in pieces between what is in use, it would stay."""
    yield
    if resident() > kept[0] + 100 * 2**20:
        ctypes.CDLL(None).malloc_trim(0)
        kept[0] = resident()


kept = [0]  # bytes after the last time


def resident() -> int:
    """The memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="session")
def qwen3_vl(tmp_path_factory) -> Path:
    """The folder of a tiny Qwen3-VL."""
    return tiny.build(tmp_path_factory.mktemp("models") / "qwen3_vl", "qwen3_vl")


@pytest.fixture(scope="session")
def qwen2_5_vl(tmp_path_factory) -> Path:
    """The folder of a tiny Qwen2.5-VL."""
    return tiny.build(tmp_path_factory.mktemp("models") / "qwen2_5_vl", "qwen2_5_vl")


@pytest.fixture(params=["qwen3_vl", "qwen2_5_vl"])
def tiny_folder(request) -> Path:
    """The folder of each tiny family in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def preloaded() -> Iterator[Preloaded]:
    """Runs scripts, as one process or as ranks, in forks of a process that has imported the trainer."""
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    process = Preloaded(os.environ | {"PYTHONPATH": paths}, Path.cwd())
    yield process
    process.close()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The material beside the checkout: real tokenizers, processors, chat templates, diagrams."""
    folder = Path(os.environ.get("VLMRL_SHARED") or Path(__file__).parents[2] / "shared")
    if not (folder / "data").is_dir():
        pytest.skip(f"needs the shared material: {folder}/data does not exist (set VLMRL_SHARED to where it is)")
    return folder
