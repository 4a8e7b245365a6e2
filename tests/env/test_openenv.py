"""An OpenEnv server of the real library, and whole episodes with it."""

import base64
import io
from typing import Any

import pytest
from testing.episodes import a_task, image, play, play_audited, wait_until
from testing.servers import free_port, served_asgi

pytest.importorskip("openenv.core.generic_client", reason="needs openenv: pip install 'vlmrl[openenv]'")

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from vlmrl import OpenEnvEnv, obs

pytestmark = pytest.mark.slow

opened: list[Any] = []


class Paint(Action):
    color: str


class Seen(Observation):
    text: str
    png: str


class Canvas(Environment):
    """Paints the color of each action; gold ends the episode with reward 1, any other color gives 0.25."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **others) -> Seen:
        opened.append(self)
        return self.seen(f"seed {seed}", "white")

    def step(self, action: Paint, timeout_s=None, **others) -> Seen:
        if action.color == "broken":
            raise OSError("the canvas tore")
        done = action.color == "gold"
        return self.seen(action.color, action.color, done=done, reward=1.0 if done else 0.25)

    @property
    def state(self) -> State:
        return State()

    def close(self) -> None:
        if self in opened:
            opened.remove(self)

    def seen(self, text: str, color: str, **fields: Any) -> Seen:
        buffer = io.BytesIO()
        image(color).save(buffer, format="PNG")
        return Seen(text=text, png=base64.b64encode(buffer.getvalue()).decode(), **fields)


class Painter(OpenEnvEnv):
    def read_action(self, response: str) -> dict[str, Any]:
        if " " in response:
            raise ValueError("One word.")
        return {"color": response}

    def show(self, observation: dict[str, Any]) -> dict[str, Any]:
        return obs(observation["text"], images=[base64.b64decode(observation["png"])])


@pytest.fixture
def url():
    with served_asgi(create_fastapi_app(Canvas, Paint, Seen, max_concurrent_envs=8)) as address:
        yield address


def test_an_episode_with_a_served_canvas_shows_its_images_and_sums_its_rewards(url: str):
    trajectory = play_audited(Painter, ["red", "two words", "gold"], a_task("Paint.", seed=7), options={"url": url})
    assert (trajectory.ending, trajectory.turn_rewards) == ("env_done", [0.25, 0.0, 1.0])
    assert trajectory.turns[0].messages[1]["content"][1]["text"] == "seed 7"
    colors = [[item.image.getpixel((0, 0)) for item in turn.media] for turn in trajectory.turns]
    assert colors == [[(255, 255, 255)], [(255, 0, 0)], []]
    assert trajectory.turns[2].messages[0]["content"] == "One word."
    wait_until(lambda: not opened)  # the server closes the session when its connection ends


def test_an_episode_that_is_cut_off_keeps_its_rewards(url: str):
    assert play(Painter, ["red", "blue"], options={"url": url}, max_turns=2).reward == 0.5


def test_without_a_working_server_the_trajectory_fails(url: str):
    broken = play(Painter, ["broken"], options={"url": url})
    assert broken.failed and broken.metrics["env_retries"] == 1 and "canvas tore" in broken.error
    away = play(Painter, ["red"], options={"url": f"http://127.0.0.1:{free_port()}"})
    assert away.failed and "Failed to connect" in away.error
