"""How many threads torch computes with, on one thread of ours and on no other.

OpenMP's threads spin for milliseconds after every operator, beside those that compute the model.
"""

from threading import Lock, Thread

import torch

_LOCK = Lock()


def set_own_torch_threads(count: int) -> None:
    """Let torch compute with so many threads on this thread, and on no other.

    A thread that is new takes the number that was set last, wherever, so that is set again.
    """
    with _LOCK:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        others = Thread(target=torch.set_num_threads, args=(before,))
        others.start()
        others.join()
