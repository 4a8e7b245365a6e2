"""Search: answer questions by searching Wikipedia, over several turns.

    pip install 'vlmrl[search]'
    python datasets/search.py --out data/search              # once: NQ, HotpotQA and a corpus (14 GB); --help for your own
    python recipes/search.py                                 # Qwen3-1.7B, BM25 in this process
    python recipes/search.py --rollout.samples step_wise     # one row per turn

Batch, group, rate, warm-up, KL, turns, passages and token limits are those of Search-R1's GRPO run
(github.com/PeterGriffinJin/Search-R1, train_grpo.sh; Jin et al. 2025, arXiv 2503.09516): 512 questions x 5 episodes, two optimizer
steps a batch, lr 1e-6 with 28.5% of 1005 steps as warm-up, KL 0.001 (k3), two searches and an answer, 3 passages, responses of 500
tokens, on eight GPUs with Qwen2.5-3B and questions of NQ alone. As there, an episode is one assistant message. Their retriever is
e5 on a server; to use it:

    vlmrl retriever serve --corpus data/search/corpus.parquet --retriever dense --encoder intfloat/e5-base-v2 \\
        --query-prefix 'query: ' --passage-prefix 'passage: '
    python recipes/search.py --env-options.retriever http://127.0.0.1:8000

Other histories: ``--rollout.history append`` (passages in user messages), or ``--rollout.history last_turns
--rollout.samples step_wise`` (only the passages of the last turn stay in the prompt).

Memory, computed by ``vlmrl plan recipes/search.py --gpu h100-80gb``: 39 GiB in training; in the rollout the KV cache takes what is
left. No full run of this recipe has been measured yet. Building the BM25 index of 21 million passages, once, needs tens of GB of host
memory.
"""

from pathlib import Path

import vlmrl
from vlmrl import Algo, Config, Data, Eval, EvalData, Model, Optim, Rollout, Train

PREPARED = Path(__file__).parent.parent / "data/search"
STEPS = 1005


def config() -> Config:
    return Config(
        name="search",
        model=Model(path="Qwen/Qwen3-1.7B"),
        data=Data(path=str(PREPARED / "train.parquet")),
        env="../envs/search/env.py:SearchEnv",
        env_options={"retriever": "bm25", "corpus": str(PREPARED / "corpus.parquet"), "topk": 3, "reward": "em"},
        rollout=Rollout(
            group_size=5,
            max_turns=3,
            max_tokens=4096,
            max_response_tokens=500,
            stop=("</search>", "</answer>"),
            history="inline",
        ),
        algo=Algo(advantage="grpo", loss="ppo", kl_coef=0.001, kl="k3"),
        optim=Optim(lr=1e-6, warmup_steps=int(0.285 * 2 * STEPS)),
        train=Train(steps=STEPS, groups_per_batch=512, groups_per_step=256),
        eval=Eval(data=EvalData(path=str(PREPARED / "validation.parquet"), size=512), every=50),
    )


if __name__ == "__main__":
    vlmrl.main(config)
