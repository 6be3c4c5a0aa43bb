"""The choice of a model for `model="auto"`: the models as `choose_model` sees them."""

import asyncio
import time
from contextlib import suppress
from weakref import WeakKeyDictionary

from qllm.errors import QllmError
from qllm.fleet.models import AUTO, Candidate, choose_model
from qllm.fleet.routes import EngineView, RequestView, RouteCosts
from qllm.llm import QLLMEngine
from qllm.server.http.errors import ApiError
from qllm.server.requests.front import Front
from qllm.types import NS_PER_S, Priority

BYTES_PER_TOKEN = 4
"""Bytes of a body that are counted as a token of its prompt, before it is tokenised."""
COSTS_EVERY_S = 1.0
"""Least seconds between two questions for an engine's speed."""


class _Speed:
    """The speed of an engine, as it was told last."""

    def __init__(self) -> None:
        self.costs = RouteCosts()
        self._asked_s = float("-inf")

    def look(self, front: Front) -> None:
        """Ask the engine for its speed, at most once a second and off the event loop."""
        now_s = time.monotonic()
        if now_s - self._asked_s >= COSTS_EVERY_S:
            self._asked_s = now_s
            pool = front.text_of(Priority.BE).pool
            asyncio.get_running_loop().run_in_executor(pool, self._ask, front.engine)

    def _ask(self, engine: QLLMEngine) -> None:
        with suppress(QllmError):
            if (told := engine.client.costs_ns()) is not None:
                self.costs = RouteCosts(*(x / NS_PER_S for x in told))


_speeds: WeakKeyDictionary[Front, _Speed] = WeakKeyDictionary()


def choose(front: Front, name: str | None, wanted: Priority, num_bytes: int, answer: int) -> Front:
    """Return the front of a request's model, which for "auto" is chosen by `choose_model`.

    Args:
        front: Front of the server's first model.
        name: Name of the model.
        wanted: Class of the request.
        num_bytes: Bytes of the body. Four are counted as a token.
        answer: Tokens that the request asks for; 0 if it names no number.

    Raises:
        ApiError: No model has the name, or no whole model has room for the request.
    """
    if name != AUTO or not front.config.auto:
        return front.of(name)
    request = RequestView(int(wanted), num_bytes // BYTES_PER_TOKEN, answer)
    models = [_candidate(one) for one in front.all]
    found = choose_model(request, models)
    if found is not None:
        return front.of(found.name)
    able = [model for model in models if model.is_whole and model.serves]
    if not able:
        return front.of(AUTO)  # its error says when it is back
    raise ApiError(
        400,
        f"the request needs about {request.num_prompt_tokens + answer} tokens, and no whole model "
        f"that serves now takes more than {max(m.longest for m in able)}; make it shorter, or name "
        "a model",
        param="model",
        code="context_length_exceeded",
    )


def _candidate(front: Front) -> Candidate:
    """Return a model with its open requests and the speed of its engines together."""
    speed = _speeds.setdefault(front, _Speed())
    speed.look(front)
    fleet, costs = front.engine.fleet, speed.costs
    num = 1 if fleet is None else max(1, sum(engine["up"] for engine in fleet.engines()))
    costs = RouteCosts(costs.token_s / num, costs.step_s / num, costs.output_s / num)
    view = EngineView(front.model_name, costs=costs, seats=num * front.engine.config.max_num_seqs)
    for answer in front.answers:
        backlog = view.ls if answer.served.priority is Priority.LS else view.be
        for handle, num_tokens in zip(answer.handles, answer.num_tokens, strict=True):
            if not handle.has_ended:
                backlog.num += 1
                backlog.num_waiting += not num_tokens
                backlog.prompt_tokens += 0 if num_tokens else len(handle.prompt_token_ids)
    view.refresh()
    serves = front.unavailable() is None
    return Candidate(front.model_name, view, front.max_model_len, front.is_whole, serves)
