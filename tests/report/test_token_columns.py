"""The tokens of a response as text, with the numbers of each."""

import numpy as np
from testing.trajectories import turn

from vlmrl.report.token_columns import TokenTexts, token_columns
from vlmrl.types import TrainedTokens

PIECES = {1: b"I", 2: "猫".encode()[:1], 3: "猫".encode()[1:], 4: b"!"}


def decode(ids):
    return b"".join(PIECES[i] for i in ids).decode(errors="replace")


def test_tokens_of_one_character_share_a_span_whose_logprob_is_their_sum():
    response = turn(response_ids=[1, 2, 3, 4])
    response.logprobs = [-0.1, -0.2, -0.3, -0.4]
    response.trained = TrainedTokens(
        np.array([-0.5, -0.25, -0.5, -1.0], np.float32),
        [1.0, 1.0, 2.0, 3.0],
        [1, 1, 1, 1],
        np.array([-0.25, -0.5, -1.0, np.nan], np.float32),
    )
    assert token_columns(response, TokenTexts(decode)) == {
        "tokens": ["I", "猫", "!"],
        "logprobs": [-0.1, -0.5, -0.4],
        "trainer_logprobs": [-0.5, -0.75, -1.0],
        "teacher_logprobs": [-0.25, -1.5, None],
        "advantages": [1.0, 2.0, 3.0],
        "loss_mask": [1, 1, 1],
    }


def test_what_is_not_known_is_none():
    response = turn(response_ids=[1, 4])
    response.logprobs = []
    columns = token_columns(response, TokenTexts(decode))
    assert columns == {
        "tokens": ["I", "!"],
        "logprobs": None,
        "trainer_logprobs": None,
        "teacher_logprobs": None,
        "advantages": None,
        "loss_mask": None,
    }


def test_a_token_that_no_sample_contains_is_not_trained():
    response = turn(response_ids=[1, 4])
    response.logprobs = [-0.5, float("nan")]
    response.trained = TrainedTokens(np.array([-0.5], np.float32), [1.0], [1])
    columns = token_columns(response, TokenTexts(decode))
    assert columns["logprobs"] == [-0.5, "nan"]
    assert (columns["trainer_logprobs"], columns["advantages"], columns["loss_mask"]) == (
        [-0.5, None],
        [1.0, None],
        [1, 0],
    )


def test_a_character_that_never_completes_ends_after_four_tokens():
    assert TokenTexts(decode).spans([1, 2]) == [("I", 1), ("\ufffd", 1)]
    assert [count for _, count in TokenTexts(decode).spans([2] * 6)] == [4, 2]
    assert TokenTexts(decode).spans([]) == []


def test_each_token_is_decoded_once():
    decoded = []
    texts = TokenTexts(lambda ids: decoded.append(ids) or "x")
    texts.spans([1, 2, 1])
    texts.spans([2, 1])
    assert decoded == [[1], [2]]
