"""Agents of several episodes at once that fork and edit their conversations, leave midway and use the keys of others.

No text of an episode is in another, what was received is trained, and the audit passes.
"""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest
from testing.agent_episodes import ZOOM, agent_episode, zoom_call
from testing.episodes import decoded, renderer, wait_until
from testing.gateway import png, serving, uri

from vlmrl.samples import audit, emit

pytestmark = pytest.mark.slow
NAMES = ("ape", "bee", "cat")
COLORS = ("red", "blue", "green")


def episode(name: str, rng: random.Random) -> Any:
    """An episode whose model says a text with ``name`` in it, at times the same one twice, or makes a call."""

    def response(request: Any, turn: int) -> str:
        said = f"{name} says {rng.randrange(30)}."
        return rng.choice((said, f"<think>{name} thinks</think>{said}", said + zoom_call(rng.choice((1, 1.0)))))

    return agent_episode(response, max_turns=1000)


def following(conversation: list[Any], name: str, rng: random.Random) -> list[Any]:
    """The conversation with what may follow its last message, or with an earlier one changed."""
    *before, last = conversation
    if before and rng.random() < 0.15:
        place = rng.randrange(len(conversation))
        changed = {**conversation[place], "content": f"{name} edited {rng.randrange(9)}"}
        conversation = [*conversation[:place], changed, *conversation[place + 1 :]]
    if last.get("tool_calls"):
        ids = [call["id"] if rng.random() < 0.8 else "renamed" for call in last["tool_calls"]]
        return [*conversation, *({"role": "tool", "tool_call_id": each, "content": f"{name} found"} for each in ids)]
    parts = [{"type": "text", "text": f"{name} asks {rng.randrange(3)}"}]
    if rng.random() < 0.3:
        parts.append({"type": "image_url", "image_url": {"url": uri(png(rng.choice(COLORS)))}})
    return [*conversation, {"role": "user", "content": parts}]


def play(served: Any, number: int, rng: random.Random, received: list[str]) -> None:
    """An agent of episode ``number``, which adds the ids of the responses that it received whole."""
    client, other = served.clients[number], served.clients[(number + 1) % len(NAMES)]
    known = [[{"role": "system", "content": f"{NAMES[number]} begins"}]]
    for _ in range(20):
        body = {"messages": following(rng.choice(known), NAMES[number], rng), "tools": [ZOOM]}
        if rng.random() < 0.05:
            key = {"authorization": f"Bearer {other.api_key}"}
            assert served.post(body=body, client=client, headers=key).status_code == 401
        elif rng.random() < 0.15:
            content = json.dumps(body).encode()
            with served.connect() as connection:
                head = served.head(len(content)).replace(served.client.api_key.encode(), client.api_key.encode())
                target = (served.client.url.rpartition("/")[2].encode(), client.url.rpartition("/")[2].encode())
                connection.sendall(head.replace(*target) + content[: rng.choice((10, len(content)))])
        else:
            response = served.post(body=body, client=client)
            if response.status_code == 200:
                received.append(response.json()["id"])
                message = response.json()["choices"][0]["message"]
                known = [*known, [*body["messages"], message]][-6:]
            else:
                assert "max_tokens" in response.text, response.text


def test_forks_edits_and_lost_clients_mix_no_episodes_up(hostile, how_many):
    for rng in islice(hostile("agents"), how_many(20) // 10):
        episodes = [episode(name, random.Random(rng.random())) for name in NAMES]
        received: list[list[str]] = [[] for _ in NAMES]
        with serving(*episodes) as served, ThreadPoolExecutor() as pool:
            agents = [(number, random.Random(rng.random())) for number in (0, 1, 2) * 2]
            for done in [pool.submit(play, served, number, own, received[number]) for number, own in agents]:
                done.result()
            for client in served.clients:
                served.server.close_episode(client)
            wait_until(lambda app=served.server._app: not app.opened)
            places = [dict(each._places) for each in episodes]
            kept = [each.recorder.ordered() for each in episodes]
            for each in episodes:
                served.run_loop.wait(finish(each))
        for number, each in enumerate(episodes):
            assert each.failure is None and {places[number][name] for name in received[number]} <= set(kept[number])
            for turn in range(len(each.trajectory.turns)):
                text = decoded(each.trajectory.context(turn).token_ids)
                assert NAMES[number] in text and not any(name in text for name in NAMES if name != NAMES[number])
            for how in ("merged", "step_wise"):
                audit(emit(each.trajectory, how), [each.trajectory], image_token_id=renderer().image_token_id)


async def finish(episode: Any) -> None:
    episode.finish()
