"""Samples of conversations: packed rows have single rows' loss and gradients, images are held once, sampled ids must be rendered."""

import asyncio
import base64
import gc
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from family_conformance import load
from testing.trees import noise

from vlmrl.config import SFT, Algo, Config, Conversations, Optim
from vlmrl.data.conversations import load_conversations
from vlmrl.families import FAMILIES
from vlmrl.multimodal.masks import RowError
from vlmrl.samples import audit
from vlmrl.samples.conversation import samples_of_conversation
from vlmrl.train.trainer import Trainer, TrainerSpec
from vlmrl.types import Sample, Task


class Watched(Trainer):
    """Keeps the gradient instead of applying it."""

    def _apply_gradient(self) -> dict[str, float]:
        self.gradient = {n: p.grad.clone() for n, p in self.policy.named_parameters() if p.grad is not None}
        self.policy.zero_grad()
        return {}


def shown(text: str, image) -> dict:
    parts = [{"type": "text", "text": text}]
    return {"role": "user", "content": parts if image is None else [{"type": "image", "image": image}, *parts]}


def conversations(vision: bool) -> list[Task]:
    """Three with one beginning, with images in the first turn, in later ones and in none; and one of another beginning."""
    images = [noise((64, 32), seed) if vision else None for seed in range(3)]

    def say(text: str) -> dict:
        return {"role": "assistant", "content": text}

    start = [shown("What is this?", images[0]), say("red")]
    talks = [
        [*start, shown("and this", images[1]), say("blue box")],
        [*start, shown("and this", images[2]), say("green"), shown("again", images[1]), say("no")],
        [*start, shown("no image", None), say("yes")],
        [shown("no image", None), say("yes"), shown("now", images[0]), say("red")],
    ]
    return [
        Task(f"{n}", talk, data={"tools": [], "trained": [True] * 3, "sampled": {}}) for n, talk in enumerate(talks)
    ]


def made(model, tasks: list[Task], **limits) -> list[Sample]:
    store = model.new_store()

    async def all_rows() -> list[Sample]:
        options = {"max_tokens": 4096, "seconds": 60.0} | limits
        found = [await samples_of_conversation(task, model.renderer, store, **options) for task in tasks]
        return [sample for rows in found for sample in rows]

    samples = asyncio.run(all_rows())
    audit(samples, image_token_id=model.policy.image_token_id, banned_ids=model.policy.banned_ids)
    return samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_have_the_loss_and_the_gradient_of_single_rows(family, folder):
    model = load(family, folder)
    samples = made(model, conversations(FAMILIES[family].vision))
    assert len({id(item) for sample in samples for item in sample.media}) == 3 * FAMILIES[family].vision  # held once
    found = []
    for budget, share in ((1, False), (10**6, True)):
        spec = TrainerSpec(Algo(loss="sft"), Optim(), 1, tokens_per_micro_batch=budget, share_prefixes=share)
        trainer = Watched(model.policy, spec)
        found.append((trainer.step(samples).metrics["loss"], trainer.gradient))
        trainer.close()
    (loss, single), (packed_loss, packed) = found
    assert packed_loss == pytest.approx(loss, rel=1e-6)
    whole = sum(float(gradient.double().norm()) ** 2 for gradient in single.values()) ** 0.5
    off = {name: float((gradient - packed[name]).double().norm()) / whole for name, gradient in single.items()}
    assert whole > 1e-2 and max(off.values()) < 1e-6, max(off.items(), key=lambda item: item[1])


def test_ids_that_were_sampled_are_trained_also_if_their_text_is_encoded_in_another_way(folder):
    """Such as "ye" and "s" for "yes": a policy samples them, and long responses would be left out most often."""
    model = load("qwen3_vl", folder)
    task = conversations(True)[2]
    (sample,) = made(model, [task])
    spans = {span.turn: sample.response_ids[span.start : span.end] for span in sample.responses}
    assert [span.turn for span in sample.responses] == [0, 1] and all(
        sample.loss_mask[s.start] for s in sample.responses
    )
    exact = replace(task, data=task.data | {"sampled": spans})
    assert made(model, [exact])[0].token_ids == sample.token_ids
    parts = [*model.tokenizer.encode("ye"), *model.tokenizer.encode("s"), spans[1][-1]]
    assert parts != spans[1]
    (other,) = made(model, [replace(task, data=task.data | {"sampled": {1: parts}})])
    first, second = other.responses
    assert other.response_ids[first.start : first.end] == spans[0]
    assert other.response_ids[second.start : second.end] == parts
    assert other.loss_mask[second.start : second.end] == [1] * len(parts)
    assert len(other.token_ids) == len(sample.token_ids) + len(parts) - len(spans[1])
    with pytest.raises(RowError, match="response 1 renders to"):  # a file's 5.0 is no id, though it equals 5
        made(model, [replace(task, data=task.data | {"sampled": {1: list(map(float, spans[1]))}})])


@pytest.mark.parametrize(
    "ids", [["no"], ["yes", "<|image_pad|>"], ["yes", 10**9], ["yes", -1], ["yes", True], ["yes", 1.0]], ids=str
)
def test_ids_of_a_file_with_another_text_or_other_tokens_are_a_bad_row(folder, ids):
    """The text of an id beyond the vocabulary is empty, and that of a placeholder is that of the same characters."""
    model = load("qwen3_vl", folder)
    task = conversations(True)[2]
    encode, convert = model.tokenizer.encode, model.tokenizer.convert_tokens_to_ids
    sampled = [
        each
        for part in ids
        for each in ([part] if not isinstance(part, str) else [convert(part)] if part[0] == "<" else encode(part))
    ]
    with pytest.raises(
        RowError,
        match=r"response 1 renders to other tokens than the .* sampled ones, .* the chat template changes its text",
    ) as e:
        made(model, [replace(task, data=task.data | {"sampled": {1: sampled}})])
    assert e.value.reason == "sampled"


def test_a_placeholder_among_the_ids_of_a_file_is_not_the_text_of_its_characters(folder):
    model = load("qwen3_vl", folder)
    talk = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "<|image_pad|>"}]
    task = Task("t", talk, data={"tools": [], "trained": [True], "sampled": {}})
    (sample,) = made(model, [task])
    ids = [model.renderer.image_token_id, sample.response_ids[-1]]
    assert model.renderer.decode(ids) == model.renderer.decode(sample.response_ids)
    with pytest.raises(RowError, match="response 0 renders to"):
        made(model, [replace(task, data=task.data | {"sampled": {0: ids}})])


@pytest.mark.parametrize("family", ["qwen3_vl", "glm4v"])
def test_a_response_that_a_stop_string_ended_is_trained_without_the_token_that_ends_it(family, folder):
    model = load(family, folder)
    task = conversations(True)[1]
    (sample,) = made(model, [task])
    spans = [sample.response_ids[span.start : span.end] for span in sample.responses]
    sampled = {0: spans[0][:-1], 1: spans[1], 2: spans[2][:-1]}
    (stopped,) = made(model, [replace(task, data=task.data | {"sampled": sampled})])
    assert stopped.token_ids == sample.token_ids
    assert [stopped.response_ids[span.start : span.end] for span in stopped.responses] == [*sampled.values()]
    assert sum(stopped.loss_mask) == sum(map(len, sampled.values())) == sum(sample.loss_mask) - 2


def test_of_a_row_that_is_too_long_no_more_is_written_than_shows_that(folder, monkeypatch):
    """The template writes all messages before each response again: 1,600 short ones took 30 s."""
    model = load("qwen3_vl", folder)
    written = []
    write = model.renderer.write
    monkeypatch.setattr(model.renderer, "write", lambda *args: written.append(len(args[0])) or write(*args))
    talk = [shown("Hi", None), {"role": "assistant", "content": "Ho"}] * 800
    with pytest.raises(RowError, match=r"rollout.max_tokens is 100\.") as error:
        made(model, [Task("t", talk, data={"tools": [], "trained": [], "sampled": {}})], max_tokens=100)
    assert error.value.reason == "too_long" and max(written) < 100


def test_a_row_that_is_not_written_in_time_is_counted_as_that(folder, monkeypatch):
    model, ended = load("qwen3_vl", folder), threading.Event()
    write = model.renderer.write
    monkeypatch.setattr(model.renderer, "write", lambda *args: ended.wait() and write(*args))
    try:
        with pytest.raises(RowError, match=r"task 0: the chat template did not write it in time") as error:
            made(model, conversations(False)[:1], seconds=0.05)
    finally:
        ended.set()
    assert error.value.reason == "timeout"


def test_long_rows_and_broken_images_are_refused(folder):
    model = load("qwen3_vl", folder)
    with pytest.raises(RowError, match=r"tokens or more, and rollout.max_tokens is 20\.") as error:
        made(model, conversations(True)[:1], max_tokens=20)
    assert error.value.reason == "too_long"
    broken = Task(
        "b",
        [shown("?", b"no image"), {"role": "assistant", "content": "x"}],
        data={"tools": [], "trained": [True], "sampled": {}},
    )
    with pytest.raises(RowError) as error:
        made(model, [broken])
    assert error.value.reason == "images"


@pytest.mark.parametrize(
    "message",
    [
        {"content": 5},
        {"content": {"a": 1}},
        {"content": [{"type": "text", "text": 5}]},
        {"content": [{"text": "x"}]},
        {"tool_calls": [{"type": "function", "function": {"name": 5, "arguments": {}}}]},
    ],
)
def test_a_field_of_another_type_is_a_bad_row_and_does_not_stop_the_run(folder, message):
    prompt = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x"} | message]
    row = Task("odd", prompt, data={"tools": [], "trained": [True], "sampled": {}})
    with pytest.raises(RowError, match="task odd: ") as error:
        made(load("qwen3_vl", folder), [row])
    assert error.value.reason == "unreadable"


@pytest.mark.parametrize("token", [2**32, 2**63, 2**70])
def test_a_sampled_id_that_no_tokenizer_can_have_is_a_bad_row(folder, token):
    prompt = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x"}]
    row = Task("odd", prompt, data={"tools": [], "trained": [True], "sampled": {0: [token]}})
    with pytest.raises(RowError, match="task odd: OverflowError") as error:
        made(load("qwen3_vl", folder), [row])
    assert error.value.reason == "unreadable"


def test_rows_of_all_forms_are_read_with_the_memory_of_their_distinct_images(folder, tmp_path):
    distinct = 6
    for number in range(distinct):
        noise((64, 64), number).save(tmp_path / f"{number}.png")
    rows: dict[str, list[dict]] = {"paths": [], "uris": [], "trl": [], "llava": []}
    for number in range(48):
        names = [f"{number % distinct}.png", f"{(number + 1) % distinct}.png"]
        uri = "data:image/png;base64," + base64.b64encode((tmp_path / names[0]).read_bytes()).decode()
        answers = [{"role": "assistant", "content": "red"}]
        shown_at = [{"type": "image", "image": name} for name in names]
        rows["paths"].append({"messages": [{"role": "user", "content": shown_at}, *answers]})
        embedded = [{"type": "image_url", "image_url": {"url": uri}}]
        rows["uris"].append({"messages": [{"role": "user", "content": embedded}, *answers]})
        marked = {"role": "user", "content": "<image>a<image>"}
        rows["trl"].append({"messages": [marked, *answers], "images": [{"path": n} for n in names]})
        talk = [{"from": "human", "value": "<image>a"}, {"from": "gpt", "value": "b"}]
        rows["llava"].append({"conversations": talk, "image": names[0]})
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = {name: Conversations(path=str(tmp_path / f"{name}.jsonl")) for name in rows}
    mixed, _ = load_conversations(Config(sft=SFT(data=data)))
    model = load("qwen3_vl", folder)
    store = model.new_store()

    async def read() -> int:
        total = 0
        for start in range(0, len(mixed), 16):
            options = {"max_tokens": 4096, "seconds": 60.0}
            tasks = [mixed.draw(number) for number in range(start, start + 16)]
            made = [await samples_of_conversation(task, model.renderer, store, **options) for task in tasks]
            total += sum(map(len, made))
        return total

    assert asyncio.run(read()) == 4 * 48
    gc.collect()
    usage = store.memory.usage()
    assert usage.peak <= 2 * distinct * 64 * 64 * 3 and usage.held == 0
