"""Open questions, graded by a language model: the agent answers, reads the judge's remarks, and improves its answer.

The judge grades by a rubric: the task's column ``rubric``, or else the option. With ``grade="turn"`` every answer gets a reward, with
``"episode"`` only the last one, graded with the whole conversation. With one turn both are the same.
"""

from typing import Literal

from vlmrl import Env, Judge, Task, obs, weighted_reward

RUBRIC = "Grade the agent's last answer: is it right, complete and clear? Where images are shown, does it say what is in them?"
WORDS = 200  # up to this length an answer gets the whole reward for brevity


class JudgeEnv(Env):
    """``url`` and ``model`` name the judge (any OpenAI-compatible endpoint); ``brevity`` weighs short answers beside its score."""

    unfinished_reward = 0.0  # a budget ended the episode before the last answer was whole

    def __init__(
        self,
        task: Task,
        url: str,
        model: str,
        rubric: str = RUBRIC,
        grade: Literal["turn", "episode"] = "episode",
        brevity: float = 0.0,
        timeout: float = 20.0,
        max_concurrent: int = 16,
    ) -> None:
        super().__init__(task)
        self.rubric = task.data.get("rubric") or rubric
        self.grade = grade
        self.weights = {"judge": 1.0, "short": brevity}
        self.conversation = list(task.prompt)

    @classmethod
    def setup(cls, url: str, model: str, timeout: float = 20.0, max_concurrent: int = 16, **options) -> Judge:
        if options.get("grade", "episode") not in ("turn", "episode"):
            raise ValueError(f"grade must be turn or episode, but it is {options['grade']!r}.")
        return Judge(url, model, timeout=timeout, max_concurrent=max_concurrent)

    def step(self, response_text):
        self.conversation.append({"role": "assistant", "content": response_text})
        answer = self.task.answer
        reference = str(answer) if answer or answer == 0 else ""
        last = self.turn + 1 == self.max_turns
        verdict = self.shared.grade(self.rubric, self.conversation, reference)
        short = min(1.0, WORDS / max(1, len(response_text.split())))
        info = verdict.metrics
        if last or self.grade == "turn":
            info |= weighted_reward({"judge": verdict.score, "short": short}, self.weights)
        remarks = f"A reader remarks: {verdict.remarks}\nAnswer again, better."
        self.conversation.append({"role": "user", "content": remarks})
        return obs(remarks), last, info
