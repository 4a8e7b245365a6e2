"""Servers that score given tokens: the requests, the scores, what is retried, and the check at the start of a run."""

from __future__ import annotations

import asyncio
import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from testing.clocks import pass_time
from testing.episodes import wait_until
from testing.fake_sglang import END, OPENING, FakeSGLang, logprob_of
from testing.fakes import PAD, item_of
from testing.sglang_engines import PATIENT, Words, settings_and_limits

from vlmrl.checks.image_swap import ImageSwapError
from vlmrl.checks.server_parity import ParityError, Question
from vlmrl.checks.teacher_check import check_teacher_images
from vlmrl.checks.teacher_server import check_teacher_servers
from vlmrl.config import ServerSettings, Teacher
from vlmrl.engine import server as server_module
from vlmrl.engine.base import EngineError, Request, SamplingParams
from vlmrl.engine.server import Server
from vlmrl.engine.server_backend import Attempt, Scored, ScoreRequest, teacher_backend
from vlmrl.engine.server_pool import ServerPool
from vlmrl.engine.server_response import BadResponse
from vlmrl.engine.server_scores import ServerScorer, scores_of
from vlmrl.engine.sglang.backend import SGLangBackend
from vlmrl.engine.vllm.backend import VLLMBackend
from vlmrl.types import Sample

RED = item_of("red", Image.new("RGB", (64, 64), "red"), 4)
BLUE = item_of("blue", Image.new("RGB", (64, 64), "blue"), 4)
SAMPLED = {"output_token_logprobs": [[logprob_of(token), token, None] for token in (5, 6, END)]}


def row(prompt, response, mask=None, media=()) -> Sample:
    mask = [1] * len(response) if mask is None else mask
    return Sample(prompt, response, mask, None, [0] * len(response), "g", "t", True, "stop", list(media))


@pytest.fixture
def fake():
    made = FakeSGLang(pad=PAD)
    yield made
    made.close()


@pytest.fixture
def scorer(fake):
    config, limits = settings_and_limits(urls=(fake.url,), retries=2, **PATIENT)
    pool = ServerPool(SGLangBackend(config), [Server(fake.url)], limits=limits)
    made = ServerScorer(pool, Words(), most_likely=2, seconds_limit=600.0, at_once=2)
    asyncio.run(made.start())
    asyncio.run(made.serve())
    yield made
    made.close()


@pytest.mark.slow
def test_sglang_scores_the_trained_tokens_of_a_row_with_an_image_in_its_response(scorer, fake):
    seen = row([1, PAD, PAD, PAD, PAD, 2], [3, 4, PAD, PAD, PAD, PAD, 5], [1, 1, 0, 0, 0, 0, 1], [RED, BLUE])
    [scores] = scorer.score([seen])
    [body] = fake.bodies_of("/generate")
    assert body["input_ids"] == [1, PAD, 2, 3, 4, PAD, 5] and len(body["image_data"]) == 2
    assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}
    assert (body["return_logprob"], body["logprob_start_len"], body["top_logprobs_num"]) == (True, 5, 2)
    shift = sum(int(each.removeprefix("sha256:")[:2], 16) for each in body["mm_content_hashes"]) / 1024
    wanted = np.array([logprob_of(token) - shift if token != PAD else 0 for token in seen.response_ids], np.float32)
    assert np.allclose(scores.logprobs, wanted)
    assert scores.top_ids.tolist() == [[3, 4], [4, 5], *[[0, 0]] * 4, [5, 6]]
    assert np.allclose(scores.top_logprobs[0], [wanted[0], wanted[0] - 3])


@pytest.mark.slow
def test_a_row_that_ends_where_an_image_would_begin_is_scored(scorer, fake):
    [scores] = scorer.score([row([1], [2, OPENING])])
    assert scores.logprobs.tolist() == [logprob_of(2), logprob_of(OPENING)]
    assert scores.top_ids.shape == scores.top_logprobs.shape == (2, 2)


def attempt(request: ScoreRequest) -> Attempt:
    return Attempt("x1", request, [], None, frozenset(), [], False, "cuda")


def test_vllm_scores_by_prompt_logprobs():
    backend = teacher_backend(Teacher(model="vllm:http://a:1,http://b:2", top_k=2))
    assert isinstance(backend, VLLMBackend) and backend.settings.urls == ("http://a:1", "http://b:2")
    request = ScoreRequest("t", [1, 2, 3, 4], tokens=[-1, 4], most_likely=2)
    call = backend.score(attempt(request))
    assert call.path == "/inference/v1/generate"
    sampling = {"max_tokens": 1, "prompt_logprobs": 2}
    wanted = {"request_id": "x1", "token_ids": [1, 2, 3, 4], "sampling_params": sampling}
    assert json.loads(b"".join(call.body.parts)) == wanted
    entries = {"7": (-0.5, 1), "8": (-1.5, 2), "4": (-4.0, 30)}
    entries = {id: {"logprob": logprob, "rank": rank, "decoded_token": "x"} for id, (logprob, rank) in entries.items()}
    response = {"usage": {"prompt_tokens": 4}, "prompt_logprobs": [None, {}, {}, entries]}
    scores = scores_of(request, backend.parse_scores(attempt(request), response))
    assert scores.logprobs.tolist() == [0, -4] and scores.top_ids.tolist() == [[0, 0], [7, 8]]
    assert scores.top_logprobs.tolist() == [[0, 0], [-0.5, -1.5]]


@pytest.mark.parametrize(
    ("scored", "error", "message"),
    [
        (Scored(2, [(-1.0, 5)], [[(-1.0, 5)]]), ValueError, r"counted 2 tokens, but the renderer 3: it drops images"),
        (Scored(3, [(-1.0, 6)], [[(-1.0, 5)]]), BadResponse, r"token 5 came as 6"),
        (Scored(3, [(None, 5)], [[(-1.0, 5)]]), BadResponse, r"with the logprob None"),
        (Scored(3, [(-1.0, 5)], [[]]), BadResponse, r"0 of 1 most likely ids"),
        (Scored(3, [(-1.0, 5)], [[(-1.0, -1)]]), BadResponse, r"0 of 1 most likely ids"),
        (Scored(3, [(-1.0, 5)], [[(-1.0, 2**31)]]), BadResponse, r"0 of 1 most likely ids"),
        (Scored(3, [(1e308, 5)], [[(-1.0, 5)]]), BadResponse, r"with the logprob 1e\+308"),
        (Scored(3, [(-1e308, 5)], [[(-1.0, 5)]]), BadResponse, r"with the logprob -1e\+308"),
        (Scored(3, [(-1.0, 5)], [[(2.0, 5)]]), BadResponse, r"or positive"),
        (Scored(3, [(-1.0, 5)], [[(-1.0, 5.5)]]), BadResponse, r"0 of 1 most likely ids"),
        (Scored(3, [(-1.0, 5)], [[(-2.0, 5), (math.nan, 6), (-0.1, 7)]]), BadResponse, r"is not a number"),
        (Scored(3, [(-1.0, 5)], [[(-0.1, 6)]]), BadResponse, r"token 5 has the logprob -1 where the most likely"),
        (Scored(3, [(-1.0, 5)], [[(-0.5, 5)]]), BadResponse, r"token 5 has the logprob -1 where the most likely"),
        (Scored(3, [(-1.0, 5)], [[(-2.0, 6)]]), BadResponse, r"token 5 has the logprob -1 where the most likely"),
        (Scored(3, [], []), BadResponse, r"1 tokens came with 0 logprobs"),
    ],
)
def test_scores_that_cannot_be_right_are_refused(scored, error, message):
    with pytest.raises(error, match=message):
        scores_of(ScoreRequest("t", [1, 2, 5], tokens=[5], most_likely=1), scored)


def test_one_id_does_not_count_twice_among_the_most_likely():
    scored = Scored(3, [(-1.0, 5)], [[(-1.0, 5), (-1.0, 5)]])
    with pytest.raises(BadResponse, match=r"1 of 2 most likely ids"):
        scores_of(ScoreRequest("t", [1, 2, 5], tokens=[5], most_likely=2), scored)


def test_an_id_that_is_no_number_is_a_failed_attempt_of_vllm():
    backend = teacher_backend(Teacher(model="vllm:http://a:1", top_k=1))
    request = ScoreRequest("t", [1, 4], tokens=[4], most_likely=1)
    entry = {"logprob": -1.0, "rank": 1}
    response = {"usage": {"prompt_tokens": 2}, "prompt_logprobs": [None, {"4": entry, "x": entry}]}
    with pytest.raises(BadResponse, match="an id of another form"):
        backend.parse_scores(attempt(request), response)


@pytest.mark.slow
def test_a_failure_is_retried_and_counted_and_a_dead_server_is_one_error(scorer, fake):
    fake.statuses = [500, 502]
    [scores] = scorer.score([row([1], [2])])
    assert scores.logprobs.tolist() == [logprob_of(2)] and scorer.retried == 2
    fake.dropping = {"/generate"}
    with pytest.raises(EngineError, match=r"trajectory t: no SGLang server answered in 3 attempts: \w+: "):
        scorer.score([row([1], [2])])


@pytest.mark.slow
def test_a_server_that_hangs_is_an_error_after_the_limit(fake, scorer):
    scorer._limit, fake.hangs = 0.1, True
    with pytest.raises(EngineError, match=r"its row was not scored in rollout\.engine_timeout \(0\.1 s\)"):
        scorer.score([row([1], [2])])
    fake.release_requests()


@pytest.mark.slow
def test_servers_have_so_many_rows_at_once(fake, scorer):
    """All rows of a batch in a server's queue would exceed the limit of one."""
    answer, counts, two = fake._generate, [0, 0], asyncio.Event()

    async def counted(body):
        counts[0] += 1
        counts[1] = max(counts)
        if counts[0] == 2:
            two.set()
        await two.wait()
        await asyncio.sleep(0.05)  # a third one would come
        counts[0] -= 1
        return await answer(body)

    fake._generate = counted
    assert [scores.logprobs.tolist() for scores in scorer.score([row([1], [token]) for token in range(2, 8)])] == [
        [logprob_of(token)] for token in range(2, 8)
    ]
    assert counts == [0, 2]


class Bytes:
    """A tokenizer whose ids are those of :class:`FakeSGLang`."""

    added_tokens_decoder = MappingProxyType({258: "<end>"})

    def get_vocab(self):
        return {chr(index): index for index in range(259)}

    def __len__(self) -> int:
        return 128

    def decode(self, ids) -> str:
        return bytes(ids).decode()

    def encode(self, text, add_special_tokens) -> list[int]:
        return list(text.encode())


VIDEO = 8
QUESTIONS = [Question(Request("q", [1, PAD, 2], [RED], SamplingParams(8, 1.0)), [1, PAD, PAD, PAD, PAD, 2])]
TEXT_ONLY = [Question(Request("q", [1, 2], [], SamplingParams(8)), [1, 2])]


def checked(scorer, questions=QUESTIONS):
    return asyncio.run(check_teacher_servers(scorer, questions, Bytes(), {PAD, VIDEO}, timeout=60.0))


@pytest.mark.slow
def test_a_server_that_scores_what_it_samples_passes_the_check(scorer, fake):
    fake.meta = SAMPLED
    assert checked(scorer, TEXT_ONLY) == {fake.url: pytest.approx(0, abs=1e-6)}


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_servers_of_another_model_than_the_first_are_refused(fake, scale):
    """Each of them scores what it samples."""
    other = FakeSGLang(pad=PAD)
    other.scale, fake.meta = scale, SAMPLED
    other.meta = {"output_token_logprobs": [[scale * logprob_of(token), token, None] for token in (5, 6, END)]}
    config, limits = settings_and_limits(urls=(fake.url, other.url), **PATIENT)
    pool = ServerPool(SGLangBackend(config), [Server(url) for url in config.urls], limits=limits)
    scorer = ServerScorer(pool, Words(), most_likely=2, seconds_limit=600.0, at_once=4)
    try:
        asyncio.run(scorer.start())
        if scale == 1:
            assert checked(scorer, TEXT_ONLY) == {url: pytest.approx(0, abs=1e-6) for url in config.urls}
            return
        with pytest.raises(ParityError, match=rf"the same model, but {other.url} scores .* than {fake.url}, by 0\.\d+"):
            checked(scorer, TEXT_ONLY)
    finally:
        scorer.close()
        other.close()


@pytest.mark.slow
def test_rows_at_a_silent_server_are_scored_by_another_one(fake, monkeypatch):
    """Although that may have more requests by then than the silent one, whose rows were given up."""
    monkeypatch.setattr(server_module, "FIRST_BACKOFF", 3600.0)
    monkeypatch.setattr(server_module, "LONGEST_BACKOFF", 3600.0)
    silent = FakeSGLang(pad=PAD)
    config, limits = settings_and_limits(urls=(silent.url, fake.url), **PATIENT)
    pool = ServerPool(SGLangBackend(config), [Server(url) for url in config.urls], limits=limits)
    scorer = ServerScorer(pool, Words(), most_likely=2, seconds_limit=600.0, at_once=4)
    silent.hangs = True
    try:
        asyncio.run(scorer.start())
        asyncio.run(scorer.serve())
        with ThreadPoolExecutor(1) as thread:
            rows = [replace(row([1, 2], [token]), trajectory_id=f"t{token}") for token in range(3, 7)]
            scores = thread.submit(scorer.score, rows)
            wait_until(lambda: len(silent.bodies_of("/generate")) == 2 and pool.all[1].in_flight == 0)
            pass_time(scorer.thread.loop)
            wait_until(lambda: scores.done() or len(silent.bodies_of("/generate")) > 2)
            silent.release_requests()
            logprobs = [each.logprobs.tolist() for each in scores.result(600)]
        assert logprobs == [[logprob_of(token)] for token in range(3, 7)]
        assert scorer.retried == 2 and len(silent.bodies_of("/generate")) == 2
    finally:
        scorer.close()
        silent.close()


@pytest.mark.slow
@pytest.mark.parametrize("logprobs", [[], [[None, 5, None]] * 3, [["-1", 5, None]] * 3])
def test_a_sampled_response_without_its_logprobs_is_no_answer(scorer, fake, logprobs):
    fake.meta = {"output_token_logprobs": logprobs}
    with pytest.raises(EngineError, match=r"gave no answer that can be used: BadResponse: 3 ids came with"):
        checked(scorer, TEXT_ONLY)


@pytest.mark.slow
def test_a_tokenizer_that_answers_with_no_list_is_an_engine_error(scorer, fake):
    fake.encode = lambda text: None
    with pytest.raises(EngineError, match=r"encodes no text, so that its tokenizer is not known: TypeError"):
        checked(scorer)


def samples(fake, *tokens):
    fake.response = list(tokens)
    fake.meta = {"output_token_logprobs": [[logprob_of(token), token, None] for token in tokens]}


@pytest.mark.slow
@pytest.mark.parametrize("after", [PAD, VIDEO, 300])
def test_a_response_is_checked_up_to_a_placeholder_or_an_id_of_no_token(scorer, fake, after):
    """Servers ban none. SGLang answers with HTTP 500 to a request with the placeholder of a video, and no video."""
    answer, responses = fake._generate, iter([(PAD, 5), (300, 5), (5, 6, after, END)])

    async def generate(body):
        if "logprob_start_len" not in body:
            samples(fake, *next(responses))
        return await answer(body)

    fake._generate = generate
    assert checked(scorer, TEXT_ONLY) == {fake.url: pytest.approx(0, abs=1e-6)}
    [scored] = [body["input_ids"] for body in fake.bodies_of("/generate") if "logprob_start_len" in body]
    assert scored == [1, 2, 5, 6]


@pytest.mark.slow
def test_a_server_that_only_samples_image_placeholders_is_refused(scorer, fake):
    samples(fake, PAD, 5)
    with pytest.raises(ParityError, match="begins each of 8 responses with a placeholder of an image"):
        checked(scorer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ({"scale": 2.0}, ParityError, r"scores a response with other logprobs than it sampled it with, by 0\.\d+ nats"),
        ({"encode": lambda text: list(text.upper().encode())}, ValueError, r"its tokenizer must be the policy's, but"),
        ({"encode": lambda text: list(text[:-1].encode())}, ValueError, r"it reads \[\] where"),
        ({"failing": {"/tokenize"}}, EngineError, r"encodes no text, so that its tokenizer is not known"),
        ({"pad": -1}, ValueError, r"counted \d+ tokens, but the renderer \d+: it drops images"),
        ({"dropping": {"/generate"}}, EngineError, r"gave no answer that can be used"),
    ],
)
def test_a_faulty_server_is_refused_at_the_start(scorer, fake, fault, error, message):
    fake.meta = SAMPLED
    for name, value in fault.items():
        setattr(fake, name, value)
    with pytest.raises(error, match=message):
        checked(scorer)


@pytest.mark.slow
def test_a_server_whose_images_do_not_reach_its_model_is_blind(scorer, fake):
    store = SimpleNamespace(load=lambda image: replace(BLUE, id="noise"))
    seen = [row([1, PAD, PAD, PAD, PAD, 2], [3, 4], media=[RED])]
    assert check_teacher_images(scorer.logprobs, store, seen, PAD) > 5e-4
    fake.sees_images = False
    with pytest.raises(ImageSwapError, match=r"the teacher's image 0 \(red\).* The teacher is blind"):
        check_teacher_images(scorer.logprobs, store, seen, PAD)


def test_a_program_without_a_name_is_refused():
    with pytest.raises(ValueError, match=r"teacher\.model must begin with sglang or vllm"):
        teacher_backend(Teacher(model="own:http://a:1", loss="sampled"))
    backend = teacher_backend(Teacher(model="sglang:http://a:1", loss="sampled"))
    assert backend.settings == ServerSettings(urls=("http://a:1",))
