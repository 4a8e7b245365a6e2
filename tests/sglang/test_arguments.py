"""SGLang's own parser knows every argument that servers are started with."""

from __future__ import annotations

import argparse

from testing.real_servers import SHIM

from vlmrl.config import Lora, ServerSettings
from vlmrl.engine.server_backend import ServedModel
from vlmrl.engine.sglang.backend import SGLangBackend


def test_sglang_parses_the_arguments_of_a_colocated_server(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SHIM))
    from sglang.srt.server_args import ServerArgs

    lora = Lora(rank=4, targets=("q_proj",))
    model = ServedModel("/m", "bfloat16", True, lora, expert_routing=True, sleep=True, memory_fraction=0.812)
    _, _, module, *words = (
        SGLangBackend(ServerSettings()).launch(model, tmp_path / "log", "127.0.0.1", 1, gpu=0).command
    )
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(words)
    assert module == "sglang.launch_server" and parsed.enable_fp32_lm_head
    assert (parsed.mm_feature_transport, parsed.image_processor_backend) == ("cpu", "pil")
    assert (parsed.mem_fraction_static, parsed.enable_memory_saver, parsed.base_gpu_id) == (0.812, True, 0)
