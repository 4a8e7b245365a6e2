"""Three ranks over gloo load a policy: what each of them holds meanwhile, and that every number is that of one process."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from testing.loading_script import CASES
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from vlmrl.config import Lora, Model
from vlmrl.model import tiny
from vlmrl.model.loading import draw_adapters, load_model, read_weights, shapes_of
from vlmrl.model.policy import Policy
from vlmrl.train import sharded_loading

pytestmark = pytest.mark.slow
RANKS = 3


def build(folder, family, dtype=None):
    tiny.build(folder, family, num_layers=12)
    if dtype is not None:
        auto = AutoModelForImageTextToText if "vl" in family else AutoModelForCausalLM
        auto.from_pretrained(folder, dtype=dtype).save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints: in bfloat16, with transposed fused experts, and of a text model in float32."""
    folder = tmp_path_factory.mktemp("sharded")
    build(folder / "bfloat16", "qwen3_vl", torch.bfloat16)
    build(folder / "moe", "qwen3_vl_moe")
    build(folder / "text", "qwen3")
    return folder


@pytest.fixture(scope="module")
def results(preloaded, folder):
    """Of each rank."""
    preloaded.run_ranks(RANKS, "testing.loading_script", folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("case", CASES)
def test_every_weight_and_buffer_is_that_of_one_process(case, results):
    for result in (rank[case] for rank in results):
        assert result["names"] and result["trained"]
        assert result["different"] == result["buffers"] == []
        assert result["dtypes"] == ["torch.float32"]


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_its_shards_and_its_part_of_one_weight(case, results):
    """Rank 0 also has the source: its weights in the checkpoint's dtype, or drawn ones."""
    for result in (rank[case] for rank in results[1:]):
        assert result["peak"] < 1.1 * result["shards"] + result["largest"] < 0.75 * result["total"]
        assert result["read"] == []


def test_rank_0_reads_once_in_the_dtype_of_the_checkpoint(results):
    read = {case: results[0][case]["read"] for case in CASES}
    bfloat16, float32 = ["torch.bfloat16"], ["torch.float32"]
    assert read == {
        "bfloat16": bfloat16,
        "moe": float32,
        "text": float32,
        "random": float32,
        "adapters": bfloat16,
    }


def test_adapters_are_drawn_without_the_weights_as_a_model_with_weights_gets_them(folder):
    config = Model(path=str(folder / "text"), device="cpu", lora=Lora(rank=4))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    drawn = draw_adapters(config, folder, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    loaded = load_model(config, folder, seed=3).policy.model
    expected = {name: weight for name, weight in loaded.named_parameters() if ".lora_" in name}
    assert list(drawn) == list(expected)
    assert all(torch.equal(drawn[name], weight) for name, weight in expected.items())
    assert any(weight.abs().max() > 0 for weight in drawn.values())


def test_a_checkpoint_with_some_float32_weights_is_read_in_float32(folder, tmp_path):
    model = AutoModelForImageTextToText.from_pretrained(folder / "bfloat16", dtype=torch.bfloat16)
    tiny.build(tmp_path / "mixed", "qwen3_vl", num_layers=12)
    norm = model.model.language_model.norm
    norm.weight.data = norm.weight.data.float() + 1e-4  # not a number of bfloat16
    model.save_pretrained(tmp_path / "mixed")
    config = Model(path=str(tmp_path / "mixed"), dtype="bfloat16")
    read = read_weights(config, tmp_path, seed=0)
    assert torch.equal(read.model.language_model.norm.weight, norm.weight)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_head_that_is_tied_in_the_config_but_not_in_the_checkpoint_is_refused(rank, tmp_path):
    """One process trains both: ranks would take the embeddings for the head."""
    tiny.build(tmp_path / "text", "qwen3", num_layers=1)
    config = Model(path=str(tmp_path / "text"), device="cpu", lora=Lora(rank=rank))
    policy = Policy(shapes_of(config, tmp_path))
    sharded_loading._source(policy, config, tmp_path, seed=0)
    weights = load_file(tmp_path / "text/model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 0.01
    save_file(weights, tmp_path / "text/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"tie_word_embeddings: true, by which servers would leave it out"):
        sharded_loading._source(policy, config, tmp_path, seed=0)


def test_random_weights_are_the_same_in_every_dtype(folder):
    config = {"path": f"random:{folder / 'text'}", "device": "cpu"}
    exact, rounded = (load_model(Model(**config, dtype=dtype), folder, seed=0) for dtype in ("float32", "bfloat16"))
    for mine, theirs in zip(rounded.policy.parameters(), exact.policy.parameters(), strict=True):
        assert mine.dtype == torch.bfloat16
        assert torch.equal(mine, theirs.bfloat16())
    rotary = [each for name, each in rounded.policy.model.named_buffers() if "inv_freq" in name]
    assert rotary and {each.dtype for each in rotary} == {torch.float32}


def test_random_weights_are_saved_with_their_dtype_in_every_part_of_the_config(folder, tmp_path):
    config = Model(path=f"random:{folder / 'bfloat16'}", device="cpu", dtype="bfloat16")
    load_model(config, folder, seed=0).save(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {part["dtype"] for part in (saved, saved["text_config"], saved["vision_config"])} == {"bfloat16"}
