"""GLM-4.1V on a real SGLang server: ids, images and logprobs are the trainer's, also after weight updates."""

from __future__ import annotations

from base64 import b64encode

import pytest
from testing.server_cases import test_glm_has_the_trainers_logprobs_before_and_after_updates  # noqa: F401

from vlmrl.engine.base import Request


def test_ids_that_another_encoding_would_change_are_kept(glm):
    """Each letter by itself, and a placeholder that was typed."""
    request, before = glm.question("letters", 16), glm.requests()
    words = glm.run.model.renderer
    typed = [token for letter in "red blue <|image|> <|user|>" for token in words.encode(letter)]
    assert words.encode(words.decode(typed)) != typed
    assert glm.ask(Request("letters", [*typed, *request.prompt_ids], request.media, request.sampling)) < glm.tolerance
    assert glm.requests() == before + 1


def test_an_image_is_sent_once(glm):
    request = glm.question("named", 16)
    assert glm.ask(request) < glm.tolerance
    encoded, before = glm.run.engine.images_encoded, glm.requests()
    [item] = request.media
    assert item in glm.server.images
    assert glm.ask(request) < glm.tolerance
    assert (glm.run.engine.images_encoded, glm.run.engine.resent, glm.requests()) == (encoded, 0, before + 1)


def test_the_images_sent_last_are_held_as_far_as_they_fit(tmp_path):
    from vlmrl.engine.sglang.on_server.vlmrl_sglang.glm_processor import HELD, SentImages

    file, sent = tmp_path / "a.ppm", SentImages(8)
    file.write_bytes(b"first")
    assert sent.find("a", str(file)) == b"first"
    file.unlink()
    assert sent.find("a", HELD) == sent.find("a", str(file)) == b"first"
    assert sent.find("b", b64encode(b"123").decode()) == b"123"
    assert sent.find("a", HELD) == b"first"  # the last that was used
    assert sent.find("c", b64encode(b"1").decode()) == b"1"
    assert sent.find("a", HELD) == b"first"
    with pytest.raises(ValueError, match="no image is held under b"):
        sent.find("b", HELD)
    assert sent.find("d", b64encode(b"larger than all").decode()) == b"larger than all"
    with pytest.raises(ValueError, match="no image is held under d"):
        sent.find("d", HELD)
