"""Answers to the prompts of a Ray dataset, by the engines of a running application.

Requests are BE, so they use the capacity that LS requests leave.
"""

from typing import Any

import numpy as np

from qllm.errors import ConfigError
from qllm.ray.deploy import APP, connected


class Answers:
    """A callable that answers batches of prompts. Ray Data makes one in each worker.

    Args:
        app: Name of the application.
        column: Name of the column with the prompts.
        into: Name of the column for the answers.
        asked: Further arguments of `QLLMEngine.generate`.
    """

    def __init__(self, app: str, column: str, into: str, asked: dict[str, Any]) -> None:
        self._engine = connected(app)
        self._column, self._into, self._asked = column, into, asked

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with a column of answers.

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
    """Return a cell as a prompt for `submit`: text, token ids or messages."""
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
    """Return a dataset with an answer to each prompt, computed while the dataset is read.

    Args:
        dataset: A `ray.data.Dataset`.
        app: Name of the running application that answers (`serve run --name`).
        column: Name of the column with the prompts: text, token ids, or chat messages.
        into: Name of the column for the answers' text. INTO_tokens and INTO_end get the number of
            tokens and the finish reason.
        batch_size: Number of rows that one worker has in the engines at once.
        concurrency: Number of workers. They compute nothing, so Ray counts no CPU for them.
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
