"""Images that cross between processes: what is sent, what is taken, and what a server does not open for its client."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from testing.episodes import image
from testing.hostile import CANARY, CANARY_HOST, harmless
from testing.servers import answering

from vlmrl.multimodal import embedded
from vlmrl.multimodal.embedded import check_embedded, embed_image, is_data_uri, refusing_sources_of


@pytest.mark.parametrize(
    "named",
    [CANARY, "/vlmrl-canary/./x/../secret.png", f"file://{CANARY}", CANARY.replace("/secret", "/." * 3000 + "/secret")],
    ids=["path", "dots", "file", "long"],
)
def test_no_spelling_of_a_path_that_a_client_sent_is_opened(named: str):
    refuse = refusing_sources_of({"data": {"deep": [{"photo": named}]}, "answer": None, "seed": 7})
    for source in (
        CANARY,
        Path(CANARY),
        f"file://{CANARY}",
        {"bytes": None, "path": CANARY},
        {"bytes": b"", "path": CANARY},
    ):
        with (
            harmless(source),
            pytest.raises(ValueError, match="must not be opened by a path or URL that the client sent"),
        ):
            refuse(source)


@pytest.mark.parametrize("payload", [[f"http://{CANARY_HOST}/a?{'x' * 5000}"], {f"http://{CANARY_HOST}/a": 1}])
def test_a_long_url_and_a_column_name_are_not_opened_either(payload: Any):
    with (
        harmless(payload),
        pytest.raises(ValueError, match="must not be opened by a path or URL that the client sent"),
    ):
        refusing_sources_of({"data": payload})(next(iter(payload)))


def test_what_the_client_did_not_name_is_sent(tmp_path: Path):
    image("red").save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    refuse = refusing_sources_of({"data": {"name": "a.png", "long": "x" * 10_000}})
    for source in (str(tmp_path / "a.png"), tmp_path / "a.png", content, {"bytes": content, "path": "a.png"}):
        refuse(source)
        assert embed_image(source) == content


@pytest.mark.slow
def test_an_image_is_downloaded_once_while_there_is_room_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    downloads: Counter[str] = Counter()
    image("red").save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()

    async def answer(request: web.Request) -> web.Response:
        downloads[request.path] += 1
        return web.Response(body=content, content_type="image/png")

    with answering(answer) as url:
        for name in ("a", "a", "b", "a"):
            kept = embed_image(f"{url}/{name}.png")
        assert downloads == {"/a.png": 1, "/b.png": 1}
        monkeypatch.setattr(embedded._DOWNLOADED, "most", len(kept))  # room for one
        for name in ("c", "c", "a", "c"):
            assert embed_image(f"{url}/{name}.png") == kept
    assert downloads == {"/a.png": 2, "/b.png": 1, "/c.png": 2}


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("data:image/png;base64,AAAA", True),
        ("data:image/svg+xml;base64,AA==", True),
        ("data:image/png;base64,", False),
        ("data:image/png,AAAA", False),
        ("data:text/html;base64,AAAA", False),
        ("data:image/png;base64,AAAA\n", False),
        ("data:image/png;base64,../../etc/passwd", False),
        ("DATA:image/png;base64,AAAA", False),
        ("data:image/png;base64,A===", False),
    ],
)
def test_a_data_uri_holds_an_images_bytes(text: str, whole: bool):
    assert is_data_uri(text) == whole


def test_the_error_names_the_field_and_the_value():
    with pytest.raises(
        ValueError, match=r"messages\[0\]\.image must be pixels, encoded bytes or a data URI .* it is '/a/b\.png'"
    ):
        check_embedded("/a/b.png", "messages[0].image")
    with pytest.raises(ValueError, match=r"an image does not load: 'data:image/png,AAAA'"):
        embed_image("data:image/png,AAAA")
