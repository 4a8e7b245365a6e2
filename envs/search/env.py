"""Search: a question that the agent answers by looking things up, as in Search-R1 (arXiv 2503.09516).

A response with ``<search>query</search>`` gets the best passages between ``<information>`` tags. A response with
``<answer>...</answer>``
ends the episode and is scored by exact match or token F1. With ``tool_calls`` a search is a tool call in the chat template's
format.
"""

import json
import re
import string
from collections import Counter
from textwrap import shorten

from vlmrl import Env, Task, obs, read_tool_calls, retrieval

# From the last opening tag to the first closing one.
ACTION = re.compile(r"<(search|answer)>((?:(?!<\1>).)*?)</\1>", re.DOTALL)
HOW_TO_SEARCH = {
    False: "write <search>query</search>; the best passages then come between <information> and </information>",
    True: "call the search tool; it gives the best passages",
}
INSTRUCTIONS = (
    "Answer the question. Reason inside <think> and </think> first, and again whenever you get new information. If you lack "
    "knowledge, {how}. Search as often as you want. When you need no more, give the answer inside <answer> and </answer>, without "
    "explanation, for example <answer>Beijing</answer>."
)
QUERY = {"type": "string", "description": "What to search for."}
SEARCH = {
    "name": "search",
    "description": "Search for passages.",
    "parameters": {"type": "object", "properties": {"query": QUERY}, "required": ["query"]},
}


class SearchEnv(Env):
    """Task: a question; its answer is a text, or a list of texts of which each is right, also as JSON.

    ``retriever``, ``corpus`` and ``encoder`` are arguments of :func:`vlmrl.retrieval.open_retriever`; all episodes share one
    retriever. ``reward`` is ``em`` or ``f1``; ``format_reward`` is added if there is an answer and no response was malformed.
    ``images`` shows the images of passages. ``instructions=False`` leaves the prompt unchanged.
    """

    unfinished_reward = 0.0  # a budget ended the episode before its answer

    def __init__(
        self,
        task: Task,
        retriever: str = "bm25",
        corpus: str | None = None,
        encoder: str | None = None,
        topk: int = 3,
        passage_chars: int = 1000,
        tool_calls: bool = False,
        reward: str = "em",
        format_reward: float = 0.0,
        images: bool = False,
        instructions: bool = True,
    ) -> None:
        super().__init__(task)
        if reward not in ("em", "f1"):
            raise ValueError(f"env_options.reward must be em or f1, but it is {reward!r}.")
        self.topk, self.passage_chars, self.images = topk, passage_chars, images
        self.reward, self.format_reward, self.instructions = reward, format_reward, instructions
        self.tools = [{"type": "function", "function": SEARCH}] if tool_calls else []
        self.answers = right_texts(task.answer)
        is_list = isinstance(self.answers, list | tuple) and bool(self.answers)
        if not is_list or not all(isinstance(right, str) for right in self.answers):
            raise ValueError(
                f"task {task.id}: the answer must be a text or a list of texts, but it is {task.answer!r:.200}. Map a field of it "
                "with data.columns, such as reward_model.ground_truth.target."
            )
        self.searches = self.malformed = 0
        self.seen: set[str] = set()

    @classmethod
    def setup(cls, retriever="bm25", corpus=None, encoder=None, **others):
        return retrieval.open_retriever(retriever, corpus, encoder=encoder)

    def reset(self):
        if not self.instructions:
            return None
        rules = words(INSTRUCTIONS.format(how=HOW_TO_SEARCH[bool(self.tools)]) + "\n\nQuestion: ")
        *before, question = self.task.prompt
        content = question["content"]
        whole = rules["text"] + content if isinstance(content, str) else [rules, *content]
        return [*before, {**question, "content": whole}]

    def step(self, response_text):
        try:
            queries, answer = self.read(response_text)
        except ValueError as problem:
            self.malformed += 1
            return self.say([words(f"{problem}\n")]), False, {"malformed": 1}
        if answer is not None:
            return obs(), True, self.judge(answer)
        if self.turn == self.max_turns - 1:
            return obs(), False, {"malformed": 0}  # the model would not read what is found
        self.searches += len(queries)
        found = self.shared.search(queries, self.topk)
        parts = [part for hits in found for part in self.information([hit.passage for hit in hits])]
        return self.say(parts), False, {"malformed": 0, "passages": sum(map(len, found))}

    def read(self, response):
        """The response's queries, or its answer. The text of a ValueError explains to the model what is wrong."""
        if self.tools and (calls := read_tool_calls(response, self.tools, self.tool_format)):
            for call in calls:
                query = call.arguments.get("query")
                if call.problem or call.name != "search" or not isinstance(query, str) or not query.strip():
                    raise ValueError(
                        call.problem or "The only tool is search, and its query is a text that is not empty."
                    )
            return [call.arguments["query"] for call in calls], None
        action = ACTION.search(response)
        kind, text = (action[1], action[2].strip()) if action else ("", "")
        if kind == "answer" and text:
            return [], text
        if kind == "search" and text and not self.tools:
            return [text], None
        wish = "call the search tool" if self.tools else "write <search>query</search> to search"
        raise ValueError(f"That was no valid action: {wish}, or <answer>...</answer> to answer, with something inside.")

    def information(self, passages):
        """The passages as message parts, each image after its passage."""
        parts = [words("<information>\n")]
        for number, passage in enumerate(passages, 1):
            self.seen.add(passage.id)
            title = f" (Title: {passage.title})" if passage.title else ""
            text = shorten(passage.text, self.passage_chars, placeholder=" ...")
            parts.append(words(f"Doc {number}{title} {text}\n"))
            if self.images and passage.image is not None:
                parts.append({"type": "image", "image": passage.image})
        if not passages:
            parts.append(words("Nothing was found.\n"))
        return [*parts, words("</information>\n")]

    def say(self, parts):
        """The observation, with a warning before the last turn."""
        if self.turn == self.max_turns - 2:
            parts = [*parts, words("This was the last search: answer now, as <answer>...</answer>.\n")]
        if self.tools:  # the chat template puts the result of a tool on lines of its own
            parts[-1] = words(parts[-1]["text"].removesuffix("\n"))
        else:
            parts = [words("\n\n"), *parts, words("\n")]
        text = "".join(part.get("text", "") for part in parts)
        images = [part["image"] for part in parts if part["type"] == "image"]
        return {**obs(text, images), "parts": parts}

    def format_observation(self, observation):
        has_images = "multi_modal_data" in observation
        content = observation["parts"] if has_images else observation["obs_str"]
        return {"role": "tool" if self.tools else "user", "content": content}

    def judge(self, answer):
        scores = {
            "em": max(float(normalised(answer) == normalised(right)) for right in self.answers),
            "f1": max(token_f1(answer, right) for right in self.answers),
        }
        reward = scores[self.reward] + (0.0 if self.malformed else self.format_reward)
        info = {"reward": reward, **scores, "searches": self.searches, "malformed": 0}
        if gold := self.task.data.get("gold_passages"):
            info["gold_seen"] = len(self.seen & set(gold)) / len(gold)
        return info


def right_texts(answer):
    """The right texts of a row, which PopQA has as the JSON of a list."""
    if not isinstance(answer, str):
        return answer
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, list) and found and all(isinstance(right, str) for right in found) else [answer]


def words(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def normalised(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces: SQuAD's rule."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def token_f1(answer: str, right: str) -> float:
    """The harmonic mean of precision and recall over normalised words: SQuAD's F1."""
    mine, gold = normalised(answer).split(), normalised(right).split()
    common = sum((Counter(mine) & Counter(gold)).values())
    return 2 * common / (len(mine) + len(gold)) if common else float(mine == gold)
