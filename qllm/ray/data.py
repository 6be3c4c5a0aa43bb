"""Answers to the prompts of a Ray dataset, by the engines of a running application.

Requests are BE: they fill what LS requests leave, and give it back when those come.
"""

from typing import Any

import numpy as np

from qllm.errors import ConfigError
from qllm.ray.deploy import APP, connected


class Answers:
    """Answers batches of prompts; Ray Data makes one in each of its workers.

    Args:
        app: Name of the application.
        column: Which one holds the prompts.
        into: Which one gets the answers.
        asked: Further arguments of `QLLMEngine.generate`.
    """

    def __init__(self, app: str, column: str, into: str, asked: dict[str, Any]) -> None:
        self._engine = connected(app)
        self._column, self._into, self._asked = column, into, asked

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch with its answers.

        Raises:
            ConfigError: The column is missing.
        """
        if self._column not in batch:
            raise ConfigError(f"column={self._column!r} is none of the dataset's: {sorted(batch)}")
        prompts = [_prompt(value) for value in batch[self._column]]
        results = self._engine.generate(prompts, progress=False, **self._asked)
        return {
            **batch,
            self._into: np.array([result.text for result in results], dtype=object),
            f"{self._into}_tokens": np.array([len(result.token_ids) for result in results]),
            f"{self._into}_end": np.array([result.finish_reason.value for result in results]),
        }


def _prompt(value: Any) -> Any:
    """A cell as `submit` takes prompts: text, token ids or messages."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def map_batches(
    dataset: Any,
    *,
    app: str = APP,
    column: str = "prompt",
    into: str = "answer",
    batch_size: int = 64,
    concurrency: int = 1,
    **asked: Any,
) -> Any:
    """A dataset with an answer to each of its prompts, computed as it is read.

    Args:
        dataset: A `ray.data.Dataset`.
        app: Name of the application that answers (`serve run --name`); it must run.
        column: Which column holds the prompts: text, token ids, or chat messages.
        into: Which one gets the answers' text; INTO_tokens and INTO_end get how many tokens each
            has, and why it ended.
        batch_size: Rows that one worker has in the engines at once.
        concurrency: Workers. They compute nothing, so Ray counts no CPU for them.
        **asked: Further arguments of `QLLMEngine.generate`: `max_tokens`, `temperature`, `seed`,
            `priority` ("BE") and so on.

    Returns:
        A `ray.data.Dataset`.
    """
    keywords = {"app": app, "column": column, "into": into, "asked": asked}
    return dataset.map_batches(
        Answers,
        fn_constructor_kwargs=keywords,
        batch_size=batch_size,
        concurrency=concurrency,
        num_cpus=0,
    )
