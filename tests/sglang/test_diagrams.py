"""Real diagrams with the real processor: server and renderer count the same tokens."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace

import pytest
import torch
from PIL import Image
from testing.real_servers import config_of, served
from transformers import AutoProcessor, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from vlmrl.engine.base import Request, SamplingParams

DIAGRAMS = 50
TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


@pytest.fixture(scope="module")
def real_reader(shared, qwen3_vl, tmp_path_factory):
    """The tiny Qwen3-VL, with the real one's tokenizer, processor and vocabulary."""
    if not (shared / "data/geometry3k/images").is_dir():
        pytest.skip(f"needs the diagrams of Geometry3K, and {shared}/data/geometry3k/images does not exist")
    folder = tmp_path_factory.mktemp("models") / "qwen3_vl_real"
    shutil.copytree(shared / "data/qwen/qwen3-vl", folder)
    words = AutoProcessor.from_pretrained(folder).tokenizer
    config = Qwen3VLConfig.from_pretrained(qwen3_vl)
    config.text_config.vocab_size = 151936
    config.text_config.eos_token_id = words.convert_tokens_to_ids("<|im_end|>")
    for field, token in TOKENS.items():
        setattr(config, field, words.convert_tokens_to_ids(token))
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    config = config_of(folder, tmp_path_factory.mktemp("real_reader"))
    for [one] in served(replace(config, rollout=replace(config.rollout, max_tokens=8192))):
        yield one


def test_server_and_renderer_count_the_same_prompt_tokens_on_real_diagrams(real_reader, shared):
    run = real_reader.run
    files = sorted((shared / "data/geometry3k/images").iterdir())
    files = files[:: len(files) // DIAGRAMS][:DIAGRAMS]
    assert len(files) == DIAGRAMS
    sizes = set()

    async def count(file):
        image = Image.open(file).convert("RGB")
        content = [{"type": "image", "image": image}, {"type": "text", "text": "Find x."}]
        rendered = run.model.renderer.prompt([{"role": "user", "content": content}])
        media = [await run.store.get(image)]
        sizes.add(media[0].num_tokens)
        request = Request(str(file), rendered.token_ids, media, SamplingParams(1))
        completion = await run.engine.generate_on(real_reader.server, request)
        assert completion.prompt_tokens == len(rendered.token_ids) - 1 + media[0].num_tokens, file

    async def count_all():
        for file in files:
            await count(file)

    asyncio.run(count_all())
    assert len(sizes) > 20
    [report] = real_reader.reports.values()
    assert report.seen < real_reader.tolerance and report.unseen < real_reader.tolerance
