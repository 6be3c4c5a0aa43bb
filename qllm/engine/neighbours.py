"""The other engines on the same cores: each engine tells the others whether it has LS work.

    engine A  --1 (LS work) or 0-->  engine B
              <--1 or 0-----------

Engines of one group have a socket each in a folder of the user on this machine. Every two engines
are connected. A connection ends with either process, in any way: so an engine that was killed, or
crashed, has no LS work from then on. An engine that stands still keeps what it said last, and the
other engines' BE keeps its share meanwhile (`qllm.scheduler.pressure`).
"""

import logging
import os
import selectors
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from qllm.errors import ConfigError, shown
from qllm.private import make_private_folder
from qllm.scheduler.pressure import Pressure

_log = logging.getLogger("qllm.engine")


class Neighbours:
    """One engine's connections to the other engines of its group, with a thread that reads them.

    Args:
        group: Name of the group (`shared_cores`).
        pressure: Receiver of the other engines' state. Only `turn` changes it.
        wake: Function that makes the loop call `turn` soon. Called on the thread.
        folder: Folder of all groups; None is the user's own folder on this machine.

    Raises:
        ConfigError: No socket can be made.
    """

    def __init__(
        self,
        group: str,
        pressure: Pressure,
        wake: Callable[[], None],
        folder: Path | None = None,
    ) -> None:
        self.pressure, self._wake = pressure, wake
        self._lock = threading.Lock()
        self._told: dict[socket.socket, bool] = {}
        """The state that each other engine was told last."""
        self._has_ls: dict[socket.socket, bool] = {}
        """The state of each other engine, as it said last: True is LS work."""
        own = folder or Path(tempfile.gettempdir()) / f"qllm-cores-{os.getuid()}"
        self._file = own / group / f"{os.getpid()}-{os.urandom(4).hex()}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._end, self._ended = socket.socketpair()
        try:
            make_private_folder(own)
            make_private_folder(self._file.parent)
            if own.stat().st_uid != os.getuid():
                raise PermissionError(f"{own} belongs to another user")
            self._listener.bind(str(self._file))
            self._listener.listen()
        except OSError as error:
            for made in (self._listener, self._end, self._ended):
                made.close()
            raise ConfigError(
                f"shared_cores={shown(group)} cannot be joined: {error}; use another name, or set "
                "TMPDIR to a folder of your own with a short path"
            ) from error
        self._selector = selectors.DefaultSelector()
        for waited in (self._listener, self._ended):
            waited.setblocking(False)
            self._selector.register(waited, selectors.EVENT_READ)
        for file in sorted(self._file.parent.iterdir()):
            if file != self._file:
                self._meet(file)
        self._thread = threading.Thread(target=self._run, name="qllm-neighbours", daemon=True)
        self._thread.start()

    @property
    def num_met(self) -> int:
        """Number of connections to other engines."""
        with self._lock:
            return len(self._told)

    def turn(self, has_ls: bool, now_ns: int) -> None:
        """Tell the others whether this engine has LS work, and apply what they said.

        Called on the loop's thread before each decision.
        """
        with self._lock:
            late = [link for link, told in self._told.items() if told is not has_ls]
            for link in late:
                with suppress(OSError):  # full, as it stands still: told at a later turn; or ended
                    link.send(bytes([has_ls]))
                    self._told[link] = has_ls
            is_on = any(self._has_ls.values())
        self.pressure.set(is_on, now_ns)

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._end.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _meet(self, file: Path) -> None:
        """Connect to the engine at a socket. The socket of an engine that has ended is removed."""
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.setblocking(False)
        try:
            link.connect(str(file))
        except ConnectionRefusedError:
            link.close()
            file.unlink(missing_ok=True)
        except OSError:  # it has just ended
            link.close()
        else:
            self._enter(link)

    def _enter(self, link: socket.socket) -> None:
        link.setblocking(False)
        self._selector.register(link, selectors.EVENT_READ)
        with self._lock:
            self._told[link] = self._has_ls[link] = False

    def _run(self) -> None:
        try:
            while True:
                ready = [key.fileobj for key, _ in self._selector.select()]
                if self._ended in ready:
                    return
                for one in ready:
                    self._look(one)
        except Exception:  # noqa: BLE001 - logged; the engine serves on without neighbours
            _log.exception("this engine no longer knows what others on its cores do")
        finally:
            self._leave_all()

    def _look(self, one: object) -> None:
        """Accept an engine, or read what one says."""
        if one is self._listener:
            with suppress(OSError):  # it has left, or there are no descriptors now
                link, _ = self._listener.accept()
                if _user_of(link) == os.getuid():
                    self._enter(link)
                    self._wake()  # to tell it
                else:
                    link.close()
            return
        assert isinstance(one, socket.socket)
        try:
            said = one.recv(1)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        with self._lock:
            was_on = any(self._has_ls.values())
            if said:
                self._has_ls[one] = said != b"\0"
            else:
                del self._has_ls[one], self._told[one]
            is_on = any(self._has_ls.values())
        if not said:
            self._selector.unregister(one)
            one.close()
        if is_on is not was_on:
            self._wake()

    def _leave_all(self) -> None:
        with self._lock:
            links = list(self._told)
            self._told.clear()
            self._has_ls.clear()
        for link in (*links, self._listener, self._ended):
            link.close()
        self._selector.close()
        self._file.unlink(missing_ok=True)


def _user_of(link: socket.socket) -> int:
    """Return the user at the other end of a socket."""
    data = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", data)[1])
