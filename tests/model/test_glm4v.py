"""GLM-V beyond the conformance suite: chat formats whose turns are ended by the token of the next one, tools, and image sizes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from family_conformance import load
from jinja2.exceptions import TemplateError
from PIL import Image
from testing.trees import largest_difference, train, worst_gradient
from transformers import Glm4vImageProcessor

from vlmrl import Task, ToolEnv
from vlmrl.config import Rollout
from vlmrl.engine.scripted import ScriptedEngine
from vlmrl.env.base import resolve_env
from vlmrl.families.glm4v import TEMPLATE as GLM_TEMPLATE
from vlmrl.families.glm4v import Glm4V
from vlmrl.model import tiny
from vlmrl.multimodal.renderer import Renderer
from vlmrl.rollout.history import new_history
from vlmrl.rollout.turn_loop import TurnLoop
from vlmrl.samples import audit, concat

IMAGE = "<|begin_of_image|><|image|><|end_of_image|>"
TEMPLATE = (  # as in GLM-4.1V, without tools
    """[gMASK]<sop>
{%- for message in messages %}{{ '<|' ~ {'tool': 'observation'}.get(message.role, message.role) ~ '|>\n' }}
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{{ part.text if part.type == 'text' else '"""
    + IMAGE
    + """' }}{% endfor %}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""
)
NOISE = Image.effect_noise((64, 64), 50).convert("RGB")


OURS = GLM_TEMPLATE.read_text()
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def renderer(template: str = TEMPLATE, roles: tuple[str, ...] = ("<|user|>", "<|observation|>")) -> Renderer:
    """As in the published models, responses end with the token of a role."""
    words = Glm4V.tiny_tokenizer(tiny.tokenizer())
    stops = words.convert_tokens_to_ids(list(roles))
    return Renderer(words, image_token="<|image|>", chat_template=template, stop_ids=stops)


def observation(role: str = "user") -> dict:
    return {"role": role, "content": [{"type": "image", "image": NOISE}, {"type": "text", "text": "Closer:"}]}


@pytest.mark.parametrize(
    ("end", "role", "added"),
    [
        ("<|user|>", "user", ""),  # the response has sampled what opens the next turn
        ("<|observation|>", "tool", ""),
        ("<|observation|>", "user", "<|user|>"),
        ("<|endoftext|>", "user", "<|user|>"),
        ("red", "tool", "<|observation|>"),  # cut at its limit
    ],
)
def test_an_observation_opens_its_turn_once(end, role, added):
    words = renderer()
    response = words.tokenizer.encode(f"yes{end}")
    turn = SimpleNamespace(response_ids=response)
    following = new_history(Rollout(), words, ()).continuation(turn, [observation(role)])
    assert words.decode(following.rendered.token_ids) == f"{added}\n{IMAGE}Closer:<|assistant|>\n"
    assert (len(following.rendered.images), following.dropped) == (1, 0)


def test_an_episode_is_the_template_s_own_conversation():
    words = renderer()
    first, response = [{"role": "user", "content": "What?"}], words.tokenizer.encode("a square<|user|>")
    ids = words.prompt(first).token_ids + response
    ids += words.delta([observation()], response=response).token_ids
    whole = words.prompt([*first, {"role": "assistant", "content": "a square"}, observation()]).token_ids
    assert ids == whole
    assert words.text(response) == "a square" and words.opening == ""


def test_what_the_generation_prompt_opens_is_kept_beside_the_response():
    assert renderer(TEMPLATE.replace("<|assistant|>\n", "<|assistant|>\n<think>")).opening == "<think>"


def test_a_template_whose_turns_nothing_ends_is_refused():
    with pytest.raises(ValueError, match=r"never writes the end-of-turn token '<\|endoftext\|>', nor does it begin"):
        renderer(roles=())


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "image", "image": NOISE}, {"type": "text", "text": "What?"}]},
    {"role": "assistant", "content": "a square"},
    {"role": "user", "content": "Where?"},
]


def test_ours_writes_what_the_published_template_writes_and_shows_tools():
    ours, published = renderer(OURS), renderer()
    assert ours.prompt(CHAT).token_ids == published.prompt(CHAT).token_ids
    assert (ours.tool_format, published.tool_format, ours.opening, ours.has_tool_role) == ("glm", "json", "", True)
    with pytest.raises(ValueError, match=r"set model.chat_template \(ours do: .*`glm` for GLM-V\)"):
        published.check_tools([LOOK])
    text = ours.decode(ours.prompt(CHAT, [LOOK]).token_ids)
    assert text.startswith("[gMASK]<sop><|system|>\n# Tools\n") and '<tools>\n{"type": "function", "function"' in text
    assert text.endswith(
        "</tool_call><|system|>\nBe brief.<|user|>\n"
        + IMAGE
        + "What?<|assistant|>\na square<|user|>\nWhere?<|assistant|>\n"
    )


def test_an_episode_with_tools_is_the_template_s_own_conversation():
    """Calls end with what opens their results; a response is trained up to that token, which stands once."""
    words = renderer(OURS)
    call = "I look.\n<tool_call>look\n</tool_call>"
    results = [
        {"role": "tool", "content": [{"type": "text", "text": "Closer:"}, {"type": "image", "image": NOISE}]},
        {"role": "tool", "content": "far"},
    ]
    ids, trained = words.prompt(CHAT, [LOOK]).token_ids, []
    for response, messages in [
        (f"{call}<|observation|>", results),
        ("red<|user|>", [{"role": "user", "content": "Sure?"}]),
        ("yes", []),
    ]:
        trained += words.tokenizer.encode(response)
        ids += words.tokenizer.encode(response)
        if messages:
            ids += words.delta(messages, [LOOK], response=ids).token_ids
    parsed = {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [{"function": {"name": "look", "arguments": {}}}],
    }
    for first in ({"role": "assistant", "content": call}, parsed):
        whole = [*CHAT, first, *results, {"role": "assistant", "content": "red"}, {"role": "user", "content": "Sure?"}]
        rendered, mask = words.conversation([*whole, {"role": "assistant", "content": "yes"}], [LOOK])
        assert rendered.token_ids == ids and len(rendered.images) == 2
        kept = [token for token, marked in zip(ids, mask, strict=True) if marked]
        assert kept == [*words.tokenizer.encode("a square<|user|>"), *trained]
    assert words.decode(ids).count("<|observation|>") == 1
    assert (
        f"<|observation|>\n<tool_response>\nCloser:{IMAGE}\n</tool_response>\n<tool_response>\nfar\n</tool_response><|assistant|>\nred"
        in words.decode(ids)
    )


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "critic", "content": "."}, "must have the role system, user, assistant or tool, not critic"),
        ({"role": "user", "content": [{"type": "video"}]}, "must have the type text or image, not video"),
    ],
)
def test_what_the_template_cannot_show_is_refused(message, problem):
    words = renderer(OURS)
    with pytest.raises(TemplateError, match=problem):
        words.tokenizer.apply_chat_template([message], chat_template=OURS, tokenize=False)


class Magnifier(ToolEnv):
    """Shows a part of the task's image, which the call chooses."""

    def magnify(self, box: list[int], note: str = ""):
        """Magnify.

        Args:
            box: The part.
            note: Anything.
        """
        return [note, self.task.images[0].crop(box)]

    functions = (magnify,)

    def judge(self, response):
        return float("red" in response)


def test_a_tool_env_trains_a_step(tmp_path):
    model = load("glm4v", tmp_path)
    box, note = ("box", "[0, 0, 32, 64]"), ("note", "5")
    values = "\n".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in (box, note))
    call = f"<tool_call>magnify\n{values}\n</tool_call><|observation|>"
    samples, store = [], model.new_store()
    for member, answer in enumerate(["red<|user|>", "blue<|user|>"]):
        engine = ScriptedEngine(lambda request, turn, answer=answer: (call, answer)[turn], model.renderer)
        loop = TurnLoop(resolve_env(Magnifier), engine, model.renderer, store, Rollout(max_turns=2, max_tokens=2000))
        played = asyncio.run(loop.play(Task("t", CHAT[:2], [NOISE]), "g", f"g/{member}"))
        assert not played.failed and [turn.text for turn in played.turns] == [
            call.removesuffix("<|observation|>"),
            answer.removesuffix("<|user|>"),
        ]
        assert [item.size for turn in played.turns for item in turn.media] == [(56, 56), (28, 56)]
        [sample] = concat(played)
        audit([sample], [played], image_token_id=model.policy.image_token_id, banned_ids=model.policy.banned_ids)
        assert "<tool_response>\n5<|begin_of_image|>" in model.renderer.decode(sample.response_ids)
        assert sum(sample.loss_mask) == len(played.turns[0].response_ids) + len(played.turns[1].response_ids)
        sample.advantage = played.reward - 0.5
        samples.append(sample)
    shared, alone = train(model, samples, 10**6, share=True), train(model, samples, 1, share=False)
    assert largest_difference(alone, shared) < 1e-5 and worst_gradient(alone, shared) < (1e-5, "")
    assert all(
        gradient.norm() > 0 for name, gradient in shared.gradient.items() if "visual" in name and "weight" in name
    )


@pytest.mark.parametrize("size", [(8000, 6000), (5000, 1000), (100, 40), (20, 801)])
def test_sizes_are_a_published_processors_and_limits_are_pixels_of_the_image(size):
    """The processor counts two equal frames: 9633792 are 4816896 pixels of an image."""
    processor = Glm4vImageProcessor(size={"shortest_edge": 12544, "longest_edge": 9633792})
    family = Glm4V(None)
    width, height = family.resized(processor, size, None)
    assert width * height // 14**2 == processor.get_number_of_image_patches(size[1], size[0])
    assert width * height <= 9633792 // 2
    width, height = family.resized(processor, size, 500_000)
    assert 0.9 * min(500_000, size[0] * size[1]) < width * height <= 500_000


def test_no_media_token_can_be_sampled():
    """After the start of a video, a server would take a later image's placeholders for frames."""
    fields = {name: number for number, name in enumerate(Glm4V.tiny_media_ids)}
    assert Glm4V(SimpleNamespace(**fields)).banned_ids == [0, 1, 2, 3, 4, 5]
