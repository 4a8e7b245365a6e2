"""Images that a real server keeps: processed once, in memory that its scheduler maps, and valid after a weight update."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from testing.episodes import wait_until
from testing.real_servers import Served, config_of, processes_of, served


def memory_files(one: Served) -> int:
    """Number of images that lie in memory of the server's front end."""
    opened = Path(f"/proc/{one.server.process.group}/fd").iterdir()
    return sum("memfd:vlmrl-image" in str(each.readlink()) for each in opened)


def mapped(one: Served) -> int:
    """Number of mappings of such memory in the server's other processes."""
    others = set(processes_of(one.server.process.group)) - {one.server.process.group}
    maps = [Path(f"/proc/{process}/maps").read_text() for process in others]
    return sum(text.count("memfd:vlmrl-image") for text in maps)


def test_an_image_that_the_server_holds_is_named_and_exact(family):
    request, before = family.question("named", 16), family.requests()
    assert family.ask(request) < family.tolerance
    [item] = request.media
    assert item in family.server.images and memory_files(family) > 0
    encoded = family.run.engine.images_encoded
    assert family.ask(request) < family.tolerance
    assert family.run.engine.images_encoded == encoded and family.requests() == before + 2
    wait_until(lambda: mapped(family) == 0)  # a finished request holds nothing


def test_after_an_update_a_named_image_is_computed_with_the_new_weights_but_not_processed_again(family):
    request = family.question("updated", 16)
    assert family.ask(request) < family.tolerance
    files, before = memory_files(family), family.requests()
    for method in ("tensor", "disk"):
        family.sync.method = method
        family.change(seed=31 + len(method))
        asyncio.run(family.push())
        assert family.ask(request) < family.tolerance
    assert memory_files(family) == files and family.requests() == before + 2  # none was refused


def test_a_cache_that_is_too_small_drops_images_and_their_memory(qwen3_vl, tmp_path):
    config = config_of(qwen3_vl, tmp_path, dtype="float32")
    # One of 64x64 pixels takes 0.1 MB, one of 256x256 takes 1.6 MB.
    args = config.server.args | {"mm-preprocess-cache-size-mb": 1}
    for [one] in served(replace(config, server=replace(config.server, args=args))):
        played = one.episodes("small")
        assert len({item.id for t in played for turn in t.turns for item in turn.media}) > 3
        assert one.largest_difference(played) < one.tolerance and one.run.engine.retried == 0
        assert memory_files(one) <= 10
