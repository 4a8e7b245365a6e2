"""An agent's episode: which requests continue a response, what is rendered for them, budgets, errors and cancellation."""

from __future__ import annotations

import asyncio
import copy
import threading
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from testing.agent_episodes import ZOOM, Agent, agent_episode, says, zoom_call
from testing.episodes import ASSISTANT, END, USER, completion, decoded, image, renderer
from testing.fakes import make_item
from testing.templates import real_renderer

from vlmrl.engine.base import EngineError, Request
from vlmrl.engine.scripted import ScriptedEngine
from vlmrl.gateway.chat import ChatError, ChatRequest, ChatResponse
from vlmrl.gateway.episode import AgentEpisode
from vlmrl.gateway.request_tree import RequestTree
from vlmrl.multimodal.images import data_uri
from vlmrl.multimodal.messages import is_long
from vlmrl.multimodal.renderer import Renderer
from vlmrl.run.episode_rows import episode_row, is_conversation
from vlmrl.samples import AuditError, audit, emit
from vlmrl.types import Completion

QUESTION = says("user", "What is it?")
Act = Callable[[], Awaitable[Any]]


def played(episode: AgentEpisode, act: Act) -> list[str]:
    """The text of each turn's whole prompt and response, after ``act`` and the audit of merged and step-wise rows."""

    async def play() -> None:
        await act()
        episode.finish()

    asyncio.run(play())
    trajectory = episode.trajectory
    for how in ("merged", "step_wise"):
        audit(emit(trajectory, how), [trajectory], image_token_id=renderer().image_token_id, banned_ids=[])
    return [
        decoded(ids + turn.response_ids) for (ids, _), turn in zip(trajectory.prompts(), trajectory.turns, strict=True)
    ]


def continues(episode: AgentEpisode) -> list[int | None]:
    return [turn.received.continues for turn in episode.trajectory.turns if turn.received is not None]


def refused(request: Awaitable[Any]) -> ChatError:
    async def ask() -> None:
        await request

    with pytest.raises(ChatError) as info:
        asyncio.run(ask())
    return info.value


def test_a_linear_agent_keeps_its_sampled_tokens():
    seen = []

    def response(request: Request, turn: int) -> Completion:
        seen.append(decoded(request.prompt_ids))
        return oddly("red", len(request.prompt_ids))

    episode = agent_episode(response)
    agent = Agent(episode, says("system", "Look."))

    async def act() -> None:
        for text in ("one", "two", "three"):
            await agent.ask(says("user", text))

    texts = played(episode, act)
    assert seen == [text[: text.rindex(ASSISTANT) + len(ASSISTANT)] for text in texts]
    assert texts[1].startswith(f"{texts[0]}\n{USER}two{END}")
    assert episode.trajectory.continues(1) and episode.trajectory.continues(2)
    assert continues(episode) == [None, 0, 1]
    (row,) = emit(episode.trajectory, "merged")
    assert row.response_ids[:4] == oddly("red", 0).token_ids  # encoded again, they would be 2 tokens
    assert {name: episode.trajectory.metrics[name] for name in ("requests_continued", "branches")} == {
        "requests_continued": 1.0,
        "branches": 1.0,
    }


def test_text_parts_names_of_calls_and_dropped_reasoning_are_no_difference():
    responses = ["<think>Hm.</think>Closer." + zoom_call(1), zoom_call("[1, 2]"), "red"]
    episode = agent_episode(responses)

    async def act() -> None:
        agent = Agent(episode, tools=[ZOOM])
        response = await agent.ask(
            says("user", [{"type": "text", "text": "What "}, {"type": "text", "text": "is it?"}])
        )
        assert (response.content, response.reasoning, response.finish_reason) == ("Closer.", "Hm.", "tool_calls")
        agent.messages[0] = QUESTION
        agent.messages[1]["tool_calls"][0]["function"]["arguments"] = {"k": 1.0}
        second = await agent.ask(says("tool", "big", tool_call_id=response.tool_calls[0].id))
        for number, message in enumerate(agent.messages):  # ids that the client made up
            message.pop("tool_call_id", None)
            for call in message.get("tool_calls", []):
                call["id"] = f"own-{number}"
        assert (second.content, second.tool_calls[0].arguments) == ("", {"k": [1, 2]})
        agent.messages[3]["content"] = None
        agent.messages.append({"role": "tool", "content": "far", "tool_call_id": "own-3"})
        await agent.ask()

    played(episode, act)
    assert continues(episode) == [None, 0, 1]


def test_what_was_changed_is_a_branch_that_is_rendered_as_a_whole():
    changes: list[Callable[[Agent], Any]] = [
        lambda agent: agent.messages[1].update(content="Red."),
        lambda agent: agent.messages[0].update(content="What was it?"),
        lambda agent: agent.tools.append(ZOOM),
        lambda agent: agent.messages.insert(1, says("user", "Now.")),
        lambda agent: agent.messages.append(says("assistant", "Really.")),
        lambda agent: agent.messages[1].update(tool_calls=[_call()]),
    ]
    for change in changes:
        episode = agent_episode(["red", "blue"])
        agent = Agent(episode, dict(QUESTION))

        async def act(agent: Agent = agent, change: Callable[[Agent], Any] = change) -> None:
            await agent.ask()
            change(agent)
            await agent.ask(says("user", "Sure?"))

        texts = played(episode, act)
        assert continues(episode) == [None, None]
        rendered = renderer().prompt(agent.messages[:-1], agent.tools).token_ids
        assert texts[1] == decoded(rendered) + "blue" + END
        assert not episode.trajectory.continues(1) or texts[1].startswith(texts[0])
        assert episode.trajectory.metrics["requests_continued"] == 0.0


def _call() -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": "zoom", "arguments": {"k": 1}}}


def test_changed_arguments_of_a_call_are_a_branch():
    episode = agent_episode([zoom_call(1), "red"])

    async def act() -> None:
        agent = Agent(episode, QUESTION, tools=[ZOOM])
        response = await agent.ask()
        agent.messages[1]["tool_calls"][0]["function"]["arguments"] = {"k": 2}
        await agent.ask(says("tool", "big", tool_call_id=response.tool_calls[0].id))

    texts = played(episode, act)
    assert continues(episode) == [None, None]
    assert '"k": 2' in texts[1]


def oddly(text: str, prompt_tokens: int) -> Completion:
    """``text`` with a token for each character."""
    ids = [id for character in text for id in renderer().encode(character)] + [renderer().end_of_turn_id]
    return Completion(ids, [-0.5] * len(ids), "stop", [0] * len(ids), prompt_tokens)


def test_of_equal_texts_the_newest_response_is_continued():
    def response(request: Request, turn: int) -> Any:
        return "red" if len(episode.recorder.turns) else oddly("red", len(request.prompt_ids))

    episode = agent_episode(response)

    async def act() -> None:
        first = Agent(episode, QUESTION)
        await first.ask()
        await Agent(episode, QUESTION).ask()
        await first.ask(says("user", "Sure?"))

    played(episode, act)
    assert continues(episode) == [None, None, 1]
    assert len(episode.trajectory.turns[1].response_ids) == 2


@pytest.mark.parametrize("chosen", [0, 1])
def test_of_equal_texts_that_with_the_reasoning_that_the_client_sends_back_is_continued(chosen: int):
    """Also after further turns of equal texts."""
    thoughts = ["<think>Hot.</think>red", "<think>Warm.</think>red"]
    episode = agent_episode([*thoughts, "yes", "yes", "done", "again"])

    async def act() -> None:
        tries = [Agent(episode, QUESTION) for _ in range(2)]
        for agent in tries:
            agent.messages[-1]["reasoning_content"] = f" {(await agent.ask()).reasoning}\n"
        for agent in tries:
            await agent.ask(says("user", "Sure?"))
        await tries[chosen].ask(says("user", "And now?"))
        tries[chosen].messages[1]["reasoning_content"] = "Hot? Warm?"  # of no response: the newest is continued
        await tries[chosen].ask(says("user", "Once more?"))

    texts = played(episode, act)
    ((now, more),) = [[text for text in texts if "And now?" in text]]
    assert thoughts[chosen] in now and thoughts[1 - chosen] not in now
    assert more.startswith(now)
    assert continues(episode).count(None) == 2


def test_a_call_id_continues_the_tokens_of_its_own_response():
    first, second = zoom_call(1), zoom_call(1).replace('": 1', '":  1')  # equal calls, other tokens
    for chosen, text in enumerate((first, second)):
        episode = agent_episode([first, second, "done"])

        async def act(episode: AgentEpisode = episode, chosen: int = chosen) -> None:
            tries = [Agent(episode, QUESTION, tools=[ZOOM]) for _ in range(2)]
            for agent in tries:
                await agent.ask()
            await tries[chosen].ask(says("tool", "big", tool_call_id=tries[chosen].responses[0].tool_calls[0].id))

        assert text in played(episode, act)[-1]


def test_a_fork_after_tool_results_with_images_shares_the_prefix():
    episode = agent_episode(["one", "two", "three", "four"])

    async def act() -> None:
        agent = Agent(episode, says("user", "What is it?", image("red")))
        await agent.ask()
        agent.messages.append(says("tool", "crop", image("blue")))
        fork = agent.fork()
        await agent.ask()
        await fork.ask(says("user", "And?", image("green")))
        await agent.ask(says("user", "Well?"))

    played(episode, act)
    trajectory = episode.trajectory
    assert [turn.text for turn in trajectory.turns] == ["one", "three", "two", "four"]
    assert continues(episode) == [None, 0, 0, 2]
    assert [len(turn.received.image_ids) for turn in trajectory.turns] == [1, 3, 2, 2]
    assert [turn.kept_media for turn in trajectory.turns] == [0, 1, 1, 2]
    assert trajectory.metrics["branches"] == 2.0
    assert [sum(row.loss_mask) for row in emit(trajectory, "merged")] == [
        sum(len(trajectory.turns[number].response_ids) for number in numbers) for numbers in ((0, 1), (2, 3))
    ]


def test_images_are_compared_by_content():
    for color, above in (("red", 0), ("blue", None)):
        episode = agent_episode(["one", "two"])

        async def act(episode: AgentEpisode = episode, color: str = color) -> None:
            agent = Agent(episode, says("user", "What is it?", image("red")))
            await agent.ask()
            agent.messages[0] = says("user", "What is it?", data_uri(image(color)))
            await agent.ask(says("user", "Sure?"))

        played(episode, act)
        assert continues(episode) == [None, above]


def test_an_image_that_the_renderer_loses_is_caught():
    episode = agent_episode(["one", "two"])
    episode.renderer = copy.copy(renderer())
    episode.renderer.delta = lambda messages, *args, **options: renderer().delta(  # type: ignore[method-assign]
        [says("user", "Lost.")], *args, **options
    )

    async def act() -> None:
        agent = Agent(episode, QUESTION)
        await agent.ask()
        await agent.ask(says("user", "Look.", image("blue")))

    with pytest.raises(
        AuditError, match=r"turn 1, image 0: the request had \w+ \(1 images\), but its prompt shows nothing"
    ):
        played(episode, act)


def test_no_text_is_taken_for_an_image_or_for_another_message():
    red = {"type": "image", "image": make_item("red", 2)}
    conversations = [
        [says("user", [red])],
        [says("user", "image red")],
        [says("user", [{"type": "text", "text": "a"}, red])],
        [says("user", "aimage red")],
        [says("user", "a"), says("user", [red])],
        [says("user", "auser")],
        [says("assistant", "", tool_calls=[_call()])],
        [says("assistant", 'zoom {"k": 1}')],
    ]
    digests = [RequestTree().find(messages, []).last for messages in conversations]
    assert len(set(digests)) == len(digests)


def test_an_image_that_cannot_be_shown_is_an_error_at_first_and_then_a_text():
    narrow = image(size=(8000, 4))
    assert refused(agent_episode(["a"]).complete(ChatRequest([says("user", "Look.", narrow)]))).status == 400
    episode = agent_episode(["a", "b", "c"])

    async def act() -> None:
        agent = Agent(episode, QUESTION)
        await agent.ask()
        await agent.ask(says("user", "Look.", narrow))
        await agent.ask(says("user", "Well?"))

    texts = played(episode, act)
    assert "[This image cannot be shown: it is 8000x4 pixels" in texts[1]
    assert continues(episode) == [None, 0, 1]
    assert [turn.metrics for turn in episode.trajectory.turns] == [{}, {"images_not_shown": 1.0}, {}]


def test_concurrent_requests_are_branches_and_their_seeds_differ():
    seeds = []

    async def response(request: Request, turn: int) -> str:
        seeds.append(request.sampling.seed)
        await asyncio.sleep(0)
        return f"response {len(seeds)}"

    episode = agent_episode(response)

    async def act() -> None:
        agents = [Agent(episode, QUESTION) for _ in range(8)]
        await asyncio.gather(*(agent.ask(seed=7) for agent in agents))
        await asyncio.gather(*(agent.ask(says("user", "Sure?")) for agent in agents[:3]))

    played(episode, act)
    assert len(set(seeds)) == 11
    assert len(episode.trajectory.turns) == 11
    assert sum(number is not None for number in continues(episode)) == 3


def test_a_branch_that_goes_on_has_an_engine_id_of_its_own_and_all_are_released():
    asked, released = [], []

    def response(request: Request, turn: int) -> str:
        asked.append(request.trajectory_id)
        return "red"

    episode = agent_episode(response)
    release = episode.engine.release
    episode.engine.release = lambda name: (released.append(name), release(name))  # type: ignore[method-assign,func-returns-value]

    async def act() -> None:
        agent = Agent(episode, QUESTION)
        await agent.ask()
        fork, edited = agent.fork(), agent.fork()
        edited.messages[1] = says("assistant", "Blue.")
        await edited.ask(says("user", "c"))
        await agent.ask(says("user", "a"))
        await fork.ask(says("user", "b"))
        await agent.ask(says("user", "a"))
        await fork.ask(says("user", "b"))

    played(episode, act)
    assert asked == ["g/00", "g/00~1", "g/00", "g/00~2", "g/00", "g/00~2"]
    assert sorted(released) == ["g/00", "g/00~1", "g/00~2"]


def test_an_engine_keeps_few_contexts_of_an_agent_that_always_branches():
    released = []
    episode = agent_episode(["red"] * 12)
    episode.engine.release = released.append  # type: ignore[method-assign]

    async def act() -> None:
        for number in range(12):
            await Agent(episode, says("user", f"Question {number}")).ask()
        assert released == ["g/00", "g/00~1", "g/00~2", "g/00~3"]

    played(episode, act)
    assert len(released) == 12


# Budgets


def test_a_response_counts_once_while_its_client_waits_for_it():
    others = list[asyncio.Task[ChatResponse]]()

    def response(request: Request, turn: int) -> str:
        if not others:  # this runs after the first response is there, and before the first agent has it
            others.append(asyncio.create_task(Agent(episode, QUESTION).ask()))
        return "red"

    episode = agent_episode(response, max_turns=2)

    async def act() -> None:
        await Agent(episode, QUESTION).ask()
        await others[0]

    played(episode, act)
    assert (episode.limit, len(episode.trajectory.turns)) == (None, 2)


@pytest.mark.parametrize("text", ["word " * 30, "word " * 3000])
def test_a_prompt_over_the_token_limit_is_refused(text: str):
    episode = agent_episode(["a", "b"], max_tokens=40)
    error = refused(episode.complete(ChatRequest([says("user", text)])))
    assert (error.status, error.code, episode.limit) == (400, "max_tokens", "max_tokens")
    assert "rollout.max_tokens is 40" in error.message


def test_a_cut_response_sets_the_limit_unless_the_client_wanted_it_short():
    for limits, wanted, limit in (
        ({"max_response_tokens": 3}, None, "length"),
        ({"max_response_tokens": 3}, 2, None),
        ({"max_tokens": 20}, None, "max_tokens"),
    ):
        episode = agent_episode(["word " * 20, "b"], **limits)

        async def act(episode: AgentEpisode = episode, wanted: int | None = wanted) -> ChatResponse:
            return await Agent(episode, QUESTION).ask(max_tokens=wanted)

        played(episode, act)
        assert episode.limit == limit


def test_a_cut_response_is_closed_by_a_token_that_is_not_trained():
    episode = agent_episode(["word word word", "b"], max_response_tokens=2)

    async def act() -> None:
        agent = Agent(episode, QUESTION)
        response = await agent.ask()
        assert response.finish_reason == "length"
        await agent.ask(says("user", "Go on."))

    texts = played(episode, act)
    assert f"{END}\n{USER}Go on.{END}" in texts[1]
    (row,) = emit(episode.trajectory, "merged")
    assert row.loss_mask[:3] == [1, 1, 0]


# Errors


def test_messages_that_cannot_be_rendered_are_the_clients_mistake():
    episode = agent_episode(["a"])
    error = refused(episode.complete(ChatRequest([says("user", [{"type": "sound"}])])))
    assert (error.status, error.code, episode.failure) == (400, "messages", None)
    assert "must have the type text or image" in error.message


def test_an_engine_error_fails_the_episode():
    def response(request: Request, turn: int) -> str:
        raise EngineError("all servers are down.")

    episode = agent_episode(response)
    errors = [refused(episode.complete(ChatRequest([QUESTION]))) for _ in range(2)]
    assert [error.status for error in errors] == [503, 503]
    assert episode.failure == "all servers are down."


def test_an_engine_that_counts_other_prompt_tokens_fails_the_episode():
    episode = agent_episode(lambda request, turn: completion("a", 3))
    assert refused(episode.complete(ChatRequest([QUESTION]))).status == 500
    assert "the engine counted 3 prompt tokens" in str(episode.failure)


def test_a_text_that_is_too_long_in_any_case_is_neither_looked_up_nor_rendered(monkeypatch):
    """Looking 60 MB up, and rendering them, stopped the event loop for 2 s."""
    for name in ("prompt", "clean_tools"):
        monkeypatch.setattr(Renderer, name, lambda *args, **options: pytest.fail("it is rendered"))
    monkeypatch.setattr(RequestTree, "find", lambda *args: pytest.fail("it is looked up"))
    episode = agent_episode([], max_tokens=100)
    field = {"type": "object", "properties": {"a" * 10_000: {}}}
    long = {"type": "function", "function": {"name": "f", "parameters": field}}
    for request in (ChatRequest([says("user", "a" * 10_000)]), ChatRequest([QUESTION], [long])):
        for call in (episode.complete, episode.count_tokens):
            with pytest.raises(ChatError, match=r"rollout\.max_tokens is 100"):
                asyncio.run(call(request))


def test_an_engine_that_takes_too_long_fails_the_episode():
    async def response(request: Request, turn: int) -> str:
        await asyncio.Event().wait()
        return ""

    episode = agent_episode(response, engine_timeout=0.01)
    assert refused(episode.complete(ChatRequest([QUESTION]))).status == 503
    assert "no response in rollout.engine_timeout" in str(episode.failure)


# Generation prompts and stop strings


def test_a_response_after_an_empty_thought_of_the_template_is_what_was_sampled(shared: Path):
    real, responses = real_renderer(shared, "qwen3-vl", "qwen3_5_nothink"), iter(["red", "blue\n\nStop", "green"])
    episode = agent_episode(ScriptedEngine(lambda request, turn: next(responses), real))
    episode.renderer = real

    async def act() -> None:
        agent = Agent(episode, QUESTION)
        assert ((await agent.ask()).content, agent.responses[0].reasoning) == ("red", "")
        response = await agent.ask(says("user", "Sure?"), stop=("\n\n",))
        assert (response.content, response.stop) == ("blue", "\n\n")
        await episode.complete(ChatRequest([*agent.messages, says("user", "Why?")]))

    asyncio.run(act())
    episode.finish()
    assert continues(episode) == [None, 0, 1]


# Cancellation


def test_a_client_that_leaves_cancels_its_request():
    started, left = asyncio.Event(), asyncio.Event()

    async def response(request: Request, turn: int) -> str:
        if started.is_set():
            return "red"
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        return ""

    episode = agent_episode(response, max_turns=1)

    async def act() -> None:
        request = asyncio.create_task(Agent(episode, QUESTION).ask())
        await started.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert left.is_set()
        await Agent(episode, QUESTION).ask()  # a cancelled request is no turn

    episode.engine.release = lambda name: None  # type: ignore[method-assign]
    played(episode, act)
    assert len(episode.trajectory.turns) == 1
    assert episode.trajectory.metrics["requests_cancelled"] == 1.0


def test_the_end_of_the_episode_cancels_what_is_in_flight():
    started = asyncio.Event()

    async def response(request: Request, turn: int) -> str:
        started.set()
        await asyncio.Event().wait()
        return ""

    episode = agent_episode(response)

    async def play() -> None:
        request = asyncio.create_task(Agent(episode, QUESTION).ask())
        await started.wait()
        episode.finish()
        with pytest.raises(ChatError, match="has ended"):
            await request
        with pytest.raises(ChatError, match="has ended"):
            await Agent(episode, QUESTION).ask()
        episode.finish()

    asyncio.run(play())
    assert episode.trajectory.turns == []
    assert episode.trajectory.metrics["requests_cancelled"] == 1.0


def test_a_response_that_was_not_delivered_is_left_out_unless_it_is_continued():
    episode = agent_episode(["lost", "red", "blue", "done"])

    async def act() -> None:
        episode.undelivered(await Agent(episode, QUESTION).ask())
        agent = Agent(episode, QUESTION)
        episode.undelivered(await agent.ask())
        episode.undelivered(await agent.ask(says("user", "Sure?")))
        await agent.ask(says("user", "Done?"))

    texts = played(episode, act)
    assert [turn.text for turn in episode.trajectory.turns] == ["red", "blue", "done"]
    assert not any("lost" in text for text in texts)
    assert episode.trajectory.metrics["responses_undelivered"] == 1.0


def test_a_second_system_message_that_the_template_leaves_out_is_refused(shared):
    """As LangGraph sends a summary beside the prompt: with Qwen3-VL's template the policy did not see it."""
    real = real_renderer(shared, "qwen3-vl", "qwen3_vl")
    episode = agent_episode(ScriptedEngine(lambda request, turn: "red", real))
    episode.renderer = real

    async def act() -> None:
        agent = Agent(episode, says("system", "Look."), QUESTION)
        await agent.ask()
        for messages in ([*agent.messages, says("system", "Be brief."), QUESTION], [says("system", "a")] * 2):
            with pytest.raises(ChatError, match="leaves out messages of the role 'system'") as info:
                await episode.complete(ChatRequest(messages))
            assert info.value.status == 400

    asyncio.run(act())
    episode.finish()
    assert episode.failure is None and len(episode.trajectory.turns) == 1


def test_a_repeated_first_request_keeps_all_of_its_messages():
    """The response to the first one came after its client had left. `vlmrl collect` wrote the rest without the system message."""
    episode = agent_episode(["lost", "red", "blue"])
    episode.trajectory.id = "collect/00000/00"
    first = [says("system", "Look."), says("user", "What is it?", image("red"))]

    async def act() -> None:
        episode.undelivered(await Agent(episode, *first).ask())
        agent = Agent(episode, *first)
        await agent.ask()
        await agent.ask(says("user", "Sure?"))

    played(episode, act)
    assert is_conversation(episode.trajectory)
    row = episode_row(episode.trajectory, "m")
    assert [each["role"] for each in row["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert [each["message"] for each in row["responses"]] == [2, 4]


def test_a_long_conversation_and_its_merged_row_take_memory_in_proportion_to_their_length():
    count = 200
    episode = agent_episode(["red"] * count, max_turns=count, max_tokens=100_000)

    async def act() -> None:
        agent = Agent(episode, QUESTION)
        for _ in range(count):
            await agent.ask(says("user", "word " * 20))
        assert len(episode._tree._begun) <= 2 * count + 3

    played(episode, act)
    assert sum(len(turn.messages) for turn in episode.trajectory.turns) == count + 1
    assert sum(len(turn.prompt_ids) for turn in episode.trajectory.turns) < 100 * count
    emit(episode.trajectory, "merged")
    tracemalloc.start()
    try:
        (row,) = emit(episode.trajectory, "merged")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(row) > 15_000
    assert peak < 300 * len(row)  # some lists of 8 bytes a token, not one for each turn


def many_tools(count: int = 60, description: str = "Searches the reports. " * 40) -> list[dict]:
    """As an ordinary MCP agent has them: 60 KB."""
    return [{"type": "function", "function": {"name": f"tool_{n}", "description": description}} for n in range(count)]


def test_long_tools_are_rendered_outside_the_event_loop(monkeypatch):
    threads = set[str]()
    render, find = Renderer.write, RequestTree.find

    def note(tools):
        threads.update([threading.current_thread().name] if tools else [])

    monkeypatch.setattr(Renderer, "write", lambda own, m, tools, *a, **o: note(tools) or render(own, m, tools, *a, **o))
    monkeypatch.setattr(RequestTree, "find", lambda own, messages, tools: note(tools) or find(own, messages, tools))
    episode = agent_episode(["a", "b", "c"], max_tokens=200_000)

    async def act() -> None:
        agent = Agent(episode, QUESTION, tools=many_tools())
        await agent.ask()
        await agent.ask(says("user", "Sure?"))
        await Agent(episode, says("user", "Another"), tools=copy.deepcopy(agent.tools)).ask()

    played(episode, act)
    assert threads and all(name.startswith("vlmrl-cpu") for name in threads)
    assert continues(episode) == [None, 0, None]


@pytest.mark.parametrize(
    "value",
    [
        "a" * 10_001,
        [says("user", "a" * 10_001)],
        [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "a", "arguments": {"a": "b" * 10_001}}}],
            }
        ],
        [{"role": "assistant", "content": "", "reasoning_content": "a" * 10_001}],
        [says("user", "")] * 5000,
        ([], many_tools()),
        {"a": [[]] * 10_001},
        ([], [{"type": "function", "function": {"name": "a", "parameters": {"properties": {"b" * 10_001: {}}}}}]),
    ],
)
def test_what_takes_long_to_render(value):
    assert is_long(value) and not is_long(([says("user", "a" * 5000)], many_tools(1)))


def test_the_tools_of_a_refused_request_are_not_the_trajectorys():
    """A teacher would see them, though no response did, and they may have 64 MiB."""
    episode = agent_episode(["a"])

    async def act() -> None:
        await Agent(episode, QUESTION, tools=[ZOOM]).ask()
        with pytest.raises(ChatError, match="max_tokens"):
            await Agent(episode, QUESTION, tools=many_tools()).ask()

    played(episode, act)
    assert episode.trajectory.tools == [ZOOM]


def test_the_tools_of_a_response_that_nobody_received_are_not_the_trajectorys():
    """The row of a collected episode had the tools of a side request whose client had left, not those of its prompts."""
    episode = agent_episode(["a", "a title"])

    async def act() -> None:
        await Agent(episode, QUESTION, tools=[ZOOM]).ask()
        episode.undelivered(await Agent(episode, says("user", "A title?")).ask())

    played(episode, act)
    assert len(episode.trajectory.turns) == 1
    assert episode.trajectory.tools == [ZOOM]


def test_the_tokens_that_are_counted_are_those_of_the_prompt():
    """Of a request that continues a response, its reasoning was not counted, which the client does not send back."""
    episode = agent_episode(["<think>So far it is red.</think>red", "blue", "green"])

    async def act() -> None:
        agent = Agent(episode, QUESTION, tools=[ZOOM])
        for new in ([], [says("user", "Sure?")], [says("user", "Really?", image("blue"))]):
            count = await episode.count_tokens(ChatRequest([*agent.messages, *new], agent.tools))
            assert (await agent.ask(*new)).prompt_tokens == count

    played(episode, act)


def test_more_messages_than_tokens_are_refused_before_they_are_read():
    episode = agent_episode([], max_tokens=100)
    messages = [says("user", "")] * 101
    episode._tree = None  # it is not asked
    for ask in (episode.complete, episode.count_tokens):
        error = refused(ask(ChatRequest(messages)))
        assert (error.status, error.code) == (400, "max_tokens") and "at least 101 tokens" in error.message
