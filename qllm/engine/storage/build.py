"""Construction of an engine's cached KV: its prefix cache, and the file and threads under it."""

import math
import time
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from qllm.config import EngineConfig
from qllm.engine.costs import StepCosts
from qllm.engine.delayed import Inbox
from qllm.engine.kv.prefix import PrefixCache
from qllm.engine.kv.states import KeptStates
from qllm.engine.kv.tier import FileTier, StoredPage
from qllm.engine.storage.file import KvFile, Layout, Lock, num_slots_in, open_file
from qllm.engine.storage.identity import layout_of
from qllm.engine.storage.mover import Mover
from qllm.engine.storage.pages import STATES_IN_FILE, KvPages, num_states, why_not
from qllm.engine.storage.reads import CLOSE_S, DiskOrder
from qllm.errors import ConfigError, QllmError
from qllm.ingress import LOOK
from qllm.kernels.software import software
from qllm.private import make_private_folder
from qllm.runner.runner import TorchRunner
from qllm.scheduler.prefix import PageStore
from qllm.scheduler.scheduler import Scheduler
from qllm.types import NS_PER_S, Priority

SETTLE_S = 60.0
"""Longest time in seconds that a caller waits for deleted KV to be erased from the file."""


class KeptPages:
    """Builder of an engine's prefix cache, and owner of the file and threads under it.

    Args:
        config: Settings.
        runner: Owner of the KV.
        weights: Digest of the weights, which only a file needs.
        ingress: Transport to wake once an LS request has its pages.
        now_ns: The engine's clock.
        costs: Costs of computing KV. The costs of the file are added.
        order: Order of the threads that use the disk.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: TorchRunner,
        weights: str,
        ingress: Inbox,
        now_ns: Callable[[], int],
        costs: StepCosts,
        order: DiskOrder,
    ) -> None:
        self._config, self._runner, self._now_ns = config, runner, now_ns
        self._weights, self._ingress, self._costs = weights, ingress, costs
        self._order = order
        self._lock: Lock | None = None
        self._file: KvFile | None = None
        self.mover: Mover | None = None
        self._tier: FileTier | None = None
        self._store: PageStore[Any] | None = None

    def prefix_cache(self, decider: Scheduler) -> PrefixCache | None:
        """Return the prefix cache; None if the engine has none.

        Raises:
            ConfigError: An error of `why_not`, or `kv_dir` cannot be used.
        """
        config, runner = self._config, self._runner
        reason = why_not(config, runner)
        if reason is not None:
            if config.kv_dir is not None:
                raise ConfigError(f"kv_dir={config.kv_dir!r} needs the prefix cache: {reason}")
            return None
        if runner.charge.state_bytes and config.kv_dir is not None:
            raise ConfigError(f"kv_dir={config.kv_dir!r} is not possible: {STATES_IN_FILE}")
        page_size = config.page_size
        keep_ls_ns = int(config.keep_ls_s * NS_PER_S)
        self._store = store = PageStore[Any](config.kept_tokens // page_size, keep_ls_ns)
        decides = (runner.fingerprint(), sorted(runner.names.items()), config.kernels)
        dtype = runner.parts.like.dtype
        identity = repr((*decides, config.exactness, str(dtype), page_size))
        segment_ms = config.max_segment_ms
        copy_bytes = (
            None if math.isinf(segment_ms) else int(segment_ms * runner.backend.copy_bytes_per_ms)
        )
        if config.kv_dir is not None:
            layout = layout_of(runner, page_size)
            self._open(Path(config.kv_dir), layout, identity, keep_ls_ns, page_size)
        ttl_ns = None if config.kv_ttl_s is None else int(config.kv_ttl_s * NS_PER_S)
        pages, now_ns = KvPages(runner, page_size), self._now_ns
        states = None
        if runner.charge.state_bytes:
            kept = PageStore[Mapping[int, Any]](num_states(config, runner), keep_ls_ns)
            states = KeptStates(pages, kept, page_size, runner.charge.state_bytes, now_ns)
        return PrefixCache(
            pages, identity, store, page_size, decider.found, now_ns, decider.pool, copy_bytes,
            self._tier, ttl_ns, decider.name_pages if runner.backend.shares_blocks else None,
            states,
        )  # fmt: skip

    def _open(
        self,
        folder: Path,
        layout: Layout,
        identity: str,
        keep_ls_ns: int,
        page_size: int,
    ) -> None:
        """Lock the folder, open its file and start the mover."""
        config = self._config
        num_slots = num_slots_in(int(config.kv_dir_gib * (1 << 30)), layout)
        if not num_slots:
            need = layout.num_bytes
            raise ConfigError(f"kv_dir_gib={config.kv_dir_gib} has no room for a page of {need} B")
        says = {
            "model and settings": blake2b(identity.encode(), digest_size=16).hexdigest(),
            "weights": self._weights,
            "software": software(),
        }
        try:
            make_private_folder(folder)
            self._lock = Lock(folder)
            self._file = open_file(folder, layout, num_slots, says, config.kv_dir_reset)
            entries = self._file.scan()
        except OSError as error:
            raise ConfigError(
                f"kv_dir={str(folder)!r} cannot be used: {error}; give a folder on a disk with "
                f"{config.kv_dir_gib} GiB of room (kv_dir_gib)"
            ) from error
        index = PageStore[StoredPage](num_slots, keep_ls_ns)
        wall, now = time.time(), self._now_ns()
        for entry in entries:
            used_ns = now - max(0, int((wall - entry.used_s) * NS_PER_S))
            until_ns = now + int((entry.until_s - wall) * NS_PER_S)
            priority = Priority.LS if entry.is_ls else Priority.BE
            kept = StoredPage(entry.slot, entry.checksum)
            index.add(entry.name, kept, priority, used_ns, entry.tag, max(0, until_ns))
        free = sorted(set(range(num_slots)) - {entry.slot for entry in entries}, reverse=True)
        self.mover = Mover(self._file, self._wake, self._now_ns, self._order)
        size = layout.num_bytes
        self._tier = FileTier(self.mover, index, free, size, page_size, self._costs)

    def _wake(self) -> None:
        self._ingress.put(LOOK)

    def stats(self) -> dict[str, Any]:
        """Return the file's content and counts; empty without a file. Callable from any thread."""
        tier, mover = self._tier, self.mover
        if tier is None or mover is None or self._file is None:
            return {}
        counts, size = tier.counts, tier.page_bytes
        return {
            "file": {
                "off": mover.failure,
                "direct_io": self._file.blocks.is_direct,
                "kept_pages": len(tier.index),
                "max_pages": tier.index.capacity,
                "kept_bytes": len(tier.index) * size,
                "stored_bytes": counts.stored * size,
                "loaded_bytes": counts.loaded * size,
                "damaged_pages": counts.damaged,
                "late_requests": counts.late,
                "quicker_requests": counts.quicker,
            }
        }

    def settle(self) -> None:
        """Wait until deleted KV is erased from the file. The engine's thread must not call this.

        Raises:
            QllmError: The KV cannot be erased, or was not erased in time.
        """
        if self.mover is not None and not self.mover.settle(SETTLE_S):
            why = self.mover.failure or f"the disk took longer than {SETTLE_S:g} s"
            raise QllmError(
                f"KV was deleted from RAM, but not from the file in {self._config.kv_dir!r}: "
                f"{why}; end the engine and delete the file"
            )

    def _save_rest(self, mover: Mover) -> None:
        """Store cached pages that are not in the file yet."""
        until = time.monotonic() + CLOSE_S
        while (left := until - time.monotonic()) > 0 and mover.settle(left):
            if self._tier is None or self._store is None or not self._tier.has_unsaved:
                return
            self._tier.turn(self._store, self._now_ns())

    def close(self) -> None:
        """Store remaining pages for a limited time, and release the folder. Idempotent."""
        mover, self.mover = self.mover, None
        if mover is not None:
            self._save_rest(mover)
            mover.close()
        elif self._file is not None:
            self._file.close()
        if self._lock is not None:
            self._lock.close()
