"""The blocks of docs/porting.md that run environments and agents of other frameworks, as they stand."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from testing.client_episodes import need, play_client
from testing.episodes import a_task, play_audited, renderer

PAGE = (Path(__file__).parents[2] / "docs/porting.md").read_text()


def block(name: str) -> dict:
    (source,) = re.findall(rf"```python\n(# {name}\.py\n.*?)```", PAGE, re.DOTALL)
    names: dict = {"__name__": name}
    exec(compile(source, "docs/porting.md", "exec"), names)
    return names


def test_an_environment_of_skyrl_is_played_with_its_own_messages_rewards_and_metrics():
    need("skyrl_gym")
    task = a_task("What is 2 + 2?", answer="4", data={"env_class": "gsm8k_multi_turn"})
    trajectory = play_audited(block("skyrl")["SkyRLEnv"], ["I think so.", "#### 4"], task, max_turns=3)
    assert trajectory.ending == "env_done"
    assert trajectory.turn_rewards == [0.0, 1.0]
    assert "in the exact format: '#### ANSWER'" in trajectory.turns[1].messages[0]["content"]
    assert trajectory.turns[1].metrics == {"steps": 2.0}


@pytest.mark.slow
def test_an_agent_workflow_of_areal_gets_the_task_and_the_endpoint(monkeypatch):
    openai = need("openai")

    class MathAgent:  # the form of AReaL's `areal/workflow/openai/math_agent.py`
        async def run(self, data, **extra_kwargs):
            async with openai.AsyncOpenAI(
                base_url=extra_kwargs["base_url"], api_key=extra_kwargs["api_key"], max_retries=0
            ) as client:
                answer = await client.chat.completions.create(model="default", messages=data["messages"])
            return float(answer.choices[0].message.content == data["answer"])

    monkeypatch.setitem(sys.modules, "my_workflows", SimpleNamespace(MathAgent=MathAgent))
    agent, task = block("areal_agent")["play"], a_task("What is 2 + 2?", answer="4")

    async def play(client):
        return await agent(task, client)

    assert play_client(play, ["4"], renderer()).result == 1.0
