"""Real diagrams with the real processor: both sides see as many tokens."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace

import pytest
import torch
from conftest import config_of, connected
from PIL import Image
from transformers import AutoProcessor, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from vlmrl.engine.base import Request, SamplingParams

DIAGRAMS = 50


@pytest.fixture(scope="session")
def real_processor_run(shared, qwen3_vl, tmp_path_factory):
    """The tiny Qwen3-VL, with the real one's tokenizer, processor and vocabulary."""
    source = shared / "data/qwen/qwen3-vl"
    if not (shared / "data/geometry3k/images").is_dir():
        pytest.skip(f"needs the diagrams of Geometry3K, and {shared}/data/geometry3k/images does not exist")
    folder = tmp_path_factory.mktemp("models") / "qwen3_vl_real"
    shutil.copytree(source, folder)
    words = AutoProcessor.from_pretrained(folder).tokenizer
    config = Qwen3VLConfig.from_pretrained(qwen3_vl)
    config.text_config.vocab_size = 151936
    config.text_config.eos_token_id = words.convert_tokens_to_ids("<|im_end|>")
    for name in ("image_pad", "video_pad", "vision_start", "vision_end"):
        field = {"image_pad": "image_token_id", "video_pad": "video_token_id"}.get(name, f"{name}_token_id")
        setattr(config, field, words.convert_tokens_to_ids(f"<|{name}|>"))
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    config = config_of(folder, tmp_path_factory.mktemp("real_run"), check=False)
    run = connected(replace(config, rollout=replace(config.rollout, max_tokens=8192)))
    yield run
    run.engine.close()


def test_prompt_tokens_are_counted_alike_on_real_diagrams(real_processor_run, shared):
    run = real_processor_run
    files = sorted((shared / "data/geometry3k/images").iterdir())[:: 2328 // DIAGRAMS][:DIAGRAMS]
    assert len(files) == DIAGRAMS
    server = run.engine.servers.all[0]
    sizes = set()

    async def count(file):
        picture = Image.open(file).convert("RGB")
        content = [{"type": "image", "image": picture}, {"type": "text", "text": "Find x."}]
        rendered = run.model.renderer.prompt([{"role": "user", "content": content}])
        media = [await run.store.get(picture)]
        sizes.add(media[0].num_tokens)
        ours = len(rendered.token_ids) - 1 + media[0].num_tokens
        request = Request(str(file), rendered.token_ids, media, SamplingParams(1))
        answer, _ = await run.engine.thread.run(run.engine._ask(server, request))
        assert answer["meta_info"]["prompt_tokens"] == ours, file

    async def count_all():
        for file in files:
            await count(file)

    asyncio.run(count_all())
    assert len(sizes) > 20
