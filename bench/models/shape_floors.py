"""Least time of a model's rows: bytes over bandwidth, or FLOPs over the peak.

Bytes are those of the weights that the rows need, read once, and of their KV; the number of experts
is that of even routing. FLOPs are two per weight that a row uses, and those of attention.
"""

import time
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import torch

from bench.kernels.cpu_kernels import Memory, torch_gflops
from qllm.kernels import cpu
from qllm.models.weights.formats.rounding import BITS

BF16_BYTES, STATE_BYTES = 2, 4
EXPERTS = ("gate_up_proj", "down_proj")
PRODUCT = (4096, 2048, 512)
"""Outputs, inputs and rows of the product whose rate is the peak."""


class Machine(NamedTuple):
    """Measured rates of all cores."""

    gb_s: float
    gflops: float


class Measured:
    """A measurement of the machine while contenders wait."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        cpu.set_threads(threads)
        self._memory = Memory(threads)
        self._gb_s: list[float] = []
        self._gflops: list[float] = []
        num_out, num_in, rows = PRODUCT
        self._rows = torch.randn(rows, num_in).bfloat16()
        self._matrix = cpu.Matrix([torch.randn(num_out, num_in).bfloat16()])

    def once(self) -> None:
        """Measure once: the faster of our products and torch's is the peak."""
        self._gb_s.append(max(self._memory.gb_s() for _ in range(3)))
        num_out, num_in, rows = PRODUCT
        best = torch_gflops(num_out, num_in, rows, 3)
        time.sleep(0.01)  # OpenMP's threads stop spinning
        for _ in range(4):
            start = time.perf_counter()
            self._matrix.linear(self._rows)
            gflops = 2e-9 * num_out * num_in * rows / (time.perf_counter() - start)
            best = max(best, gflops)
        self._gflops.append(best)
        time.sleep(0.01)

    def machine(self) -> Machine:
        """Return the medians of all measurements so far."""
        return Machine(median(self._gb_s), median(self._gflops))


class Attention(NamedTuple):
    """Needs of one layer's attention."""

    flops: float
    """FLOPs for one query and one key; for a token, if the layer has a state."""
    kv_bytes: float
    """Bytes of a token's keys and values; of the state, read and written, if the layer has one."""
    window: int | None
    """Most keys of a query; 0 for a layer with a state."""


def _attentions(config: Any) -> Iterator[Attention]:
    """Yield each layer's attention."""
    heads, of = config.num_attention_heads, lambda name: getattr(config, name, None)
    kinds = of("layer_types") or ["full_attention"] * config.num_hidden_layers
    for kind in kinds[: config.num_hidden_layers]:
        if kind == "linear_attention":
            values = config.linear_num_value_heads
            state = values * config.linear_key_head_dim * config.linear_value_head_dim
            yield Attention(6 * state, 2 * STATE_BYTES * state, 0)
        elif of("kv_lora_rank"):
            key = config.qk_nope_head_dim + config.qk_rope_head_dim
            latent = config.kv_lora_rank + config.qk_rope_head_dim
            flops = 2 * heads * (key + config.v_head_dim)
            yield Attention(flops, BF16_BYTES * latent, None)
        else:
            head = of("head_dim") or config.hidden_size // heads
            window = {
                "sliding_attention": of("sliding_window"),
                "chunked_attention": of("attention_chunk_size"),
            }.get(kind)
            kv = 2 * BF16_BYTES * config.num_key_value_heads * head
            yield Attention(4 * heads * head, kv, window)


class Work(NamedTuple):
    """Needs of a pass."""

    bytes: float
    flops: float

    def seconds(self, machine: Machine) -> float:
        """Return the least time in seconds."""
        return max(self.bytes / machine.gb_s, self.flops / machine.gflops) / 1e9


class Needs:
    """Needs of a model's passes.

    Args:
        model: Model on the meta device.
    """

    def __init__(self, model: Any) -> None:
        self._config = config = model.config
        self._attentions = list(_attentions(config))
        self._top_k: int = getattr(config, "num_experts_per_tok", 0)
        self._num_experts, self.experts, self.largest = 1, 0, 0
        for module in model.modules():
            found = [getattr(module, name, None) for name in EXPERTS]
            if all(isinstance(w, torch.Tensor) and w.dim() == 3 for w in found):
                self._num_experts = found[0].shape[0]
                self.largest = sum(w.numel() for w in found)
                self.experts += self.largest
        self.embedding: int = model.get_input_embeddings().weight.numel()
        self.head: int = model.get_output_embeddings().weight.numel()
        self.all = sum(p.numel() for p in model.parameters())
        self.rest = self.all - self.experts - self.embedding - self.head

    def expert_bytes(self, weights: str) -> float:
        """Return the bytes of all experts, by value of `expert_weights`."""
        return self.experts * BITS.get(weights, 8 * BF16_BYTES) / 8

    def resident_bytes(self, weights: str) -> float:
        """Return the bytes of all loaded weights."""
        return BF16_BYTES * (self.all - self.experts) + self.expert_bytes(weights)

    def hit(self, rows: int) -> float:
        """Return the share of the experts that even routing of so many rows uses."""
        return 1.0 - (1.0 - self._top_k / self._num_experts) ** rows

    def prefill(self, tokens: int, weights: str) -> Work:
        """Return the work of a prompt, and its first token."""
        flops = 2.0 * tokens * self._passed() + 2.0 * self.head
        for one in self._attentions:
            keys = tokens / 2 if one.window is None else min(one.window, tokens / 2)
            flops += one.flops * tokens * (1 if one.window == 0 else keys)
        return Work(self._weight_bytes(tokens, weights), flops)

    def turn(self, tokens: int, context: int) -> Work:
        """Return the products of new tokens behind cached ones, and bytes: one read of their KV."""
        flops, read = 2.0 * (tokens * self._passed() + self.head), 0.0
        for one in self._attentions:
            seen, kept = context + tokens / 2, float(context + tokens)
            if one.window is not None:  # a state counts as one key
                seen, kept = (min(one.window or 1, keys) for keys in (seen, kept))
            flops += one.flops * tokens * seen
            read += one.kv_bytes * kept
        return Work(read, flops)

    def decode(self, rows: int, context: int, weights: str) -> Work:
        """Return the work of one token each for a number of rows with a number of tokens."""
        flops, read = 2.0 * rows * (self._passed() + self.head), self._weight_bytes(rows, weights)
        for one in self._attentions:
            keys = context if one.window is None else min(one.window, context)
            flops += one.flops * rows * (1 if one.window == 0 else keys)
            read += one.kv_bytes * rows * (1 if one.window == 0 else keys)
        return Work(read, flops)

    def _passed(self) -> float:
        """Return the weights that a row uses, without the head."""
        return self.rest + self.experts * self._top_k / self._num_experts

    def _weight_bytes(self, rows: int, weights: str) -> float:
        rest = BF16_BYTES * (self.rest + self.head)
        return rest + self.expert_bytes(weights) * self.hit(rows)
