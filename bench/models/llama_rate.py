"""Time llama.cpp, or ik_llama.cpp, on a GGUF file. Runs in an environment without qllm.

    python llama_rate.py FILE THREADS [mapped]

With "mapped", llama.cpp maps the file and copies no weights, so they need not fit in memory. That
needs xllamacpp.

The environment has one of the packages xllamacpp, llama-cpp-python and ik-llama-cpp-python. The
first runs through its server, the others one batch at a time. Questions and answers:
`answering.py`.
"""

import importlib
import importlib.util
import json
import sys
import time
from typing import Any

from answering import answer

CONTEXT, BATCH = 4096, 512


class Served:
    """The server of llama.cpp in this process, through xllamacpp."""

    def __init__(self, file: str, threads: int, is_mapped: bool = False) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        if is_mapped:
            params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP
            params.no_extra_bufts = True
        params.model.path = file
        params.n_ctx, params.n_parallel = CONTEXT, 1
        params.n_batch = params.n_ubatch = BATCH
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.warmup = True
        self._server = xllamacpp.Server(params)
        self.about = {
            "name": "xllamacpp",
            "llama": xllamacpp.BUILD_INFO,
            "system": xllamacpp.get_system_info(),
        }

    def rates(self, prompt: list[int], tokens: int) -> tuple[float, float]:
        """Return the seconds of a prompt, and of a token after the first."""
        given: dict[str, Any] = {"prompt": prompt, "n_predict": tokens, "temperature": 0.0}
        given |= {"cache_prompt": False, "ignore_eos": True}
        found = self._server.handle_completions(given)
        found = json.loads(found) if isinstance(found, str) else found
        times = found["timings"]
        return times["prompt_ms"] / 1e3, times["predicted_per_token_ms"] / 1e3


class Called:
    """An engine of llama.cpp through the bindings of a package; numpy takes greedy tokens."""

    def __init__(self, name: str, lib: Any, file: str, threads: int) -> None:
        self._lib = lib
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        if hasattr(params, "repack_tensors"):
            params.repack_tensors = True  # ik_llama.cpp: rows interleaved, as llama.cpp does itself
        self._model = lib.llama_model_load_from_file(file.encode(), params)
        if not self._model:
            raise SystemExit(f"{name} cannot load {file}")
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = CONTEXT, BATCH, BATCH
        params.n_threads = params.n_threads_batch = threads
        self._context = lib.llama_init_from_model(self._model, params)
        self._vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        package = importlib.import_module(lib.__name__.partition(".")[0])
        system = _system_info(lib)
        self.about = {"name": name, "llama": package.__version__, "system": system}

    def _clear(self) -> None:
        if hasattr(self._lib, "llama_kv_cache_clear"):
            self._lib.llama_kv_cache_clear(self._context)
        else:
            self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def _next(self, ids: list[int], position: int, last: bool) -> int:
        """Compute tokens; return the best next one."""
        import numpy as np

        batch = self._lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i] = token, position + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = last and i == len(ids) - 1
        failed = self._lib.llama_decode(self._context, batch)
        self._lib.llama_batch_free(batch)
        if failed:
            raise SystemExit(f"llama_decode failed: {failed}")
        if not last:
            return -1
        logits = self._lib.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())

    def rates(self, prompt: list[int], tokens: int) -> tuple[float, float]:
        """Return the seconds of a prompt, and of a token after the first."""
        self._clear()
        times = [time.perf_counter()]
        for at in range(0, len(prompt), BATCH):
            ids = prompt[at : at + BATCH]
            token = self._next(ids, at, last=at + BATCH >= len(prompt))
        times.append(time.perf_counter())
        for at in range(len(prompt), len(prompt) + tokens - 1):
            token = self._next([token], at, last=True)
        times.append(time.perf_counter())
        return times[1] - times[0], (times[2] - times[1]) / (tokens - 1)


def _system_info(lib: Any) -> str:
    """Return the build options of the library."""
    if hasattr(lib, "llama_print_system_info"):
        return str(lib.llama_print_system_info().decode())
    import ctypes  # the bindings of ik_llama.cpp do not have it

    function = lib._lib.llama_print_system_info
    function.restype = ctypes.c_char_p
    return str(function().decode())


def opened(file: str, threads: int, is_mapped: bool = False) -> Served | Called:
    """Load a file with the installed library."""
    if importlib.util.find_spec("xllamacpp"):
        return Served(file, threads, is_mapped)
    if is_mapped:
        raise SystemExit("install xllamacpp here: only with it is the file mapped")
    for package, bindings, name in (
        ("ik_llama_cpp", "ik_llama_cpp._ctypes_api", "ik_llama.cpp"),
        ("llama_cpp", "llama_cpp", "llama.cpp"),
    ):
        if importlib.util.find_spec(package):
            return Called(name, importlib.import_module(bindings), file, threads)
    raise SystemExit("install xllamacpp, llama-cpp-python or ik-llama-cpp-python here")


def main() -> None:
    """Answer until the input ends."""
    file, threads, *how = sys.argv[1:]
    if how not in ([], ["mapped"]):
        raise SystemExit(f"{how} after THREADS must be nothing or 'mapped'")
    llama = opened(file, int(threads), bool(how))
    answer(llama.rates, llama.about)


if __name__ == "__main__":
    main()
