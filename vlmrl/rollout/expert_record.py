"""An engine tells the experts of what it ran; each turn keeps those of its own tokens."""

from __future__ import annotations

from collections.abc import Sequence

from vlmrl.types import ExpertRouting, Turn


def share_out(routes: Sequence[ExpertRouting | None], turns: Sequence[Turn]) -> None:
    """Give ``routes``, of the prompt and its reply, to the last of ``turns``, and to the turn before what it could not know.

    Of the prompt they hold at least what is new in the last turn, and the token before it: a reply's last token is only run as part
    of the next prompt. What was run several times keeps the experts of the first time.
    """
    if not routes:
        return
    *earlier, turn = turns
    start = len(routes) - len(turn.prompt_ids) - len(turn.response_ids)
    turn.routes = list(routes[start:])
    if earlier and earlier[-1].routes and turn.kept is None and not earlier[-1].dropped:
        earlier[-1].routes[-1] = routes[start - 1]
