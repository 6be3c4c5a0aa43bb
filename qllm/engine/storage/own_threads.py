"""A count of torch threads for a single thread of ours.

OpenMP's threads spin for milliseconds after every operator, which slows the model's threads.
"""

from threading import Lock, Thread

import torch

_LOCK = Lock()


def set_own_torch_threads(count: int) -> None:
    """Let torch compute with `count` threads on this thread only.

    A new thread gets the count that any thread set last. So a helper thread sets the old count
    again.
    """
    with _LOCK:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        others = Thread(target=torch.set_num_threads, args=(before,))
        others.start()
        others.join()
