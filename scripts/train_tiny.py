# Over 500 lines: the whole recipe of one model, from the text to its card, in one file.
"""Train the small Mixture-of-Experts model shipped in ``qllm/models/tiny``.

The text is part of every Python installation: the sources of the standard
library, their docstrings, the docstrings of the built-in modules and the language
reference bundled as ``pydoc_data.topics``. Chat samples are made from the same text.
The recipe is seeded: the same Python, libraries and processor give the same model.

    python scripts/train_tiny.py --out qllm/models/tiny
    python scripts/train_tiny.py --out /tmp/tiny --quick

The held-out part is chosen by module (a package, its C half and its documentation stay
on one side) and is scored in bits per byte against an order-2 byte n-gram model that was
trained on the same training part. Both numbers go into the model card.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import importlib.util
import inspect
import math
import os
import platform
import random
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SYSTEM_PROMPT = "You are a helpful assistant."
SAMPLE_PROMPTS = (
    "What does json.dumps do?",
    "Explain os.path.join.",
    "Tell me about the with statement.",
)

SKIPPED_PARTS = frozenset(
    {"site-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}
)
SKIPPED_NAMES = re.compile(r"^(_sysconfigdata|_sysconfig_vars|topics\.py$|this\.py$)")
SKIPPED_MODULES = re.compile(r"test|^_?xx|^_sysconfigdata")
ALIASES = {"posixpath": "os.path", "posix": "os", "builtins": ""}
GROUPS = {"posixpath": "os", "ntpath": "os", "genericpath": "os", "posix": "os", "nt": "os"}
# Lines that name people, addresses or home folders are unwanted.
UNWANTED_LINE = re.compile(
    r"\w@\w+\.\w|^#!|/(?:root|home|Users)/"
    r"|\b(?:by|from|thanks to|and) [A-Z][a-z]+ [A-Z]"
    r"|\b[A-Z][a-z]+ [A-Z]\. [A-Z][a-z]+|(?i:authors? *:|__(?:author|credits)__)"
    r"|(?i:\b(?:copyright|written by|contributed|maintained by)\b)"
)
TYPOGRAPHY = str.maketrans(
    {"\u2026": "...", "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-"}
)
SIGNATURE = re.compile(r"^[\w.]+\(.*\)( *->.*)?$|^[\w.]+\(.*\) -> ")

QUESTIONS = (
    "What does {0} do?",
    "Explain {0}.",
    "What is {0}?",
    "Tell me about {0}.",
    "How do I use {0}?",
    "Describe {0} in a few words.",
    "Can you explain what {0} is for?",
    "what does {0} do",
    "I do not understand {0}. Can you help?",
    "When would I use {0}?",
)
TOPIC_QUESTIONS = (
    "Tell me about {0}.",
    "Explain {0}.",
    "What should I know about {0}?",
    "Give me an introduction to {0}.",
    "How does {0} work in Python?",
)

Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Document:
    """A text of the corpus; ``group`` decides its side of the split."""

    kind: str
    group: str
    text: str


@dataclass(frozen=True)
class Answer:
    """The material of a chat sample: a subject of a question, and its answer."""

    group: str
    subject: str
    text: str
    is_topic: bool = False


@dataclass
class Corpus:
    """The documents and answers of one side of the split."""

    documents: list[Document] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def texts(self, kind: str | None = None) -> list[str]:
        """Return the texts of one kind, or of all."""
        return [d.text for d in self.documents if kind is None or d.kind == kind]


@dataclass(frozen=True)
class Recipe:
    """All settings that determine the trained model."""

    seed: int = 1234
    vocab_size: int = 3072
    hidden_size: int = 256
    intermediate_size: int = 144
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 8
    experts_per_token: int = 2
    max_positions: int = 4096
    sequence_length: int = 256
    rows: tuple[tuple[str, int], ...] = (("prose", 3), ("chat", 3), ("code", 2))
    steps: int = 2600
    warmup: int = 100
    peak_lr: float = 2e-3
    final_lr: float = 0.03
    weight_decay: float = 0.1
    aux_loss: float = 0.01
    held_out: float = 0.05

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of one optimizer step."""
        return self.sequence_length * sum(n for _, n in self.rows)


# --------------------------------------------------------------------------- the text


def clean(text: str) -> str:
    """Keep the plain ASCII lines without names, addresses and home folders."""
    lines = [line.rstrip() for line in text.translate(TYPOGRAPHY).expandtabs().splitlines()]
    kept = [line for line in lines if line.isascii() and not UNWANTED_LINE.search(line)]
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(kept)).strip("\n")


def group_of(module: str) -> str:
    """Return the unit of the held-out split: a top-level package together with its C half."""
    first = module.split(".")[0]
    first = GROUPS.get(first, first)
    return re.sub(r"^(_py|_)", "", first)


def public_name(module: str, name: str) -> str:
    """Return the name used in a question: ``posixpath.join`` is ``os.path.join``."""
    module = ALIASES.get(module, re.sub(r"^(_py(?=[a-z])|_+)", "", module))
    return ".".join(part for part in (module, name) if part)


def paragraphs(text: str) -> list[str]:
    """Return the prose paragraphs of a docstring, each on one line, without signatures."""
    found: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.splitlines() if line.strip()]
        while lines and SIGNATURE.match(lines[0].strip()):
            lines = lines[1:]
        if not lines or any(line.startswith((" ", ">>>", "|", "*", "=", "-")) for line in lines):
            if found:
                break
            continue
        found.append(" ".join(" ".join(lines).split()))
    return found


def answer_text(docstring: str) -> str | None:
    """Return the first paragraph of a docstring, with the second one if the first is short."""
    parts = paragraphs(docstring)
    if not parts:
        return None
    text = parts[0]
    if len(parts) > 1 and len(text) + len(parts[1]) < 400:
        text += "\n" + parts[1]
    ok = 24 <= len(text) <= 600 and text[0].isalpha() and " " in text and not text.endswith(":")
    if not ok:
        return None
    return text if text[-1] in ".!?)" else text + "."


class Collector:
    """A collection of documents and answers; repeated texts are skipped."""

    def __init__(self) -> None:
        self.documents: list[Document] = []
        self.answers: list[Answer] = []
        self._seen: set[str] = set()

    def _is_new(self, text: str) -> bool:
        key = " ".join(text.split())
        if key in self._seen:
            return False
        self._seen.add(key)
        return True

    def add_docs(self, module: str, entries: Iterable[tuple[str, str, str]]) -> None:
        """Add the docstrings ``(name, signature, docstring)`` of one module as a document."""
        sections = []
        for name, signature, docstring in entries:
            text = clean(inspect.cleandoc(docstring))
            if len(text) < 12 or not self._is_new(text):
                continue
            subject = public_name(module, name)
            sections.append(f"{subject}{signature}\n\n{text}")
            answer = answer_text(text)
            last = subject.rpartition(".")[2]
            if answer and not last.startswith("_") and self._is_new("answer " + answer):
                self.answers.append(Answer(group_of(module), subject, answer))
        if sections:
            text = "\n\n\n".join(sections)
            self.documents.append(Document("prose", group_of(module), text))

    def add_code(self, module: str, source: str) -> None:
        """Add a source file unchanged, without tables of numbers."""
        text = clean(source)
        letters = sum(c.isalpha() or c.isspace() for c in text)
        if len(text) > 200 and letters > 0.7 * len(text) and self._is_new(text):
            self.documents.append(Document("code", group_of(module), text))

    def add_topic(self, topic: str, text: str) -> None:
        """Add a page of the language reference and an answer for each of its sections."""
        text = clean(text)
        if not self._is_new(text):
            return
        group = "topic " + topic
        self.documents.append(Document("prose", group, text))
        pieces = re.split(r"(?m)^(\S.*)\n[*=\-~^]{4,}$", text)
        for title, body in zip(pieces[1::2], pieces[2::2], strict=True):
            answer = answer_text(body.strip("\n"))
            subject = re.sub(r"^The ", "the ", " ".join(title.replace('"', "").split()))
            if answer and self._is_new("answer " + answer):
                self.answers.append(Answer(group, subject, answer, is_topic=True))


def source_entries(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yield ``(name, signature, docstring)`` of a module, its classes and its functions."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, str, str]]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            name = prefix + child.name
            docstring = ast.get_docstring(child)
            signature = ""
            if not isinstance(child, ast.ClassDef):
                signature = f"({ast.unparse(child.args)})"
            if docstring:
                yield name, signature if len(signature) < 160 else "(...)", docstring
            if isinstance(child, ast.ClassDef):
                yield from walk(child, name + ".")

    docstring = ast.get_docstring(tree)
    if docstring:
        yield "", "", docstring
    yield from walk(tree, "")


def collect_sources(into: Collector, root: Path) -> None:
    """Add the Python sources of the standard library, in sorted order."""
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if SKIPPED_PARTS.intersection(relative.parts) or SKIPPED_NAMES.match(path.name):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError):
            continue
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        into.add_docs(module, source_entries(tree))
        into.add_code(module, source)


def object_entries(module: ModuleType) -> Iterator[tuple[str, str, str]]:
    """Yield ``(name, signature, docstring)`` of an extension module and its members."""

    def entry(name: str, value: object) -> Iterator[tuple[str, str, str]]:
        docstring = getattr(value, "__doc__", None)
        documented = callable(value) or inspect.isdatadescriptor(value)
        if documented and isinstance(docstring, str):
            signature = getattr(value, "__text_signature__", None) or ""
            yield name, str(signature).replace("$", ""), docstring

    if isinstance(module.__doc__, str):
        yield "", "", module.__doc__
    for name, value in sorted(vars(module).items()):
        yield from entry(name, value)
        if isinstance(value, type):
            for member, member_value in sorted(vars(value).items()):
                if member != "__doc__":
                    yield from entry(f"{name}.{member}", member_value)


def collect_builtins(into: Collector) -> None:
    """Add the docstrings of the standard modules that have no Python source."""
    for name in sorted(sys.stdlib_module_names):
        if SKIPPED_MODULES.search(name):
            continue
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        origin = (spec.origin or "") if spec else ""
        if origin != "built-in" and not origin.endswith((".so", ".pyd")):
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        into.add_docs(name, object_entries(module))


def collect() -> Collector:
    """Return the whole corpus, in a fixed order."""
    into = Collector()
    collect_sources(into, Path(sysconfig.get_path("stdlib")))
    collect_builtins(into)
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for topic, text in sorted(topics.items()):
        into.add_topic(topic, text)
    return into


def split(collector: Collector, held_out: float, seed: int) -> tuple[Corpus, Corpus]:
    """Split the corpus into a training and a held-out part, by group."""

    def is_held_out(group: str) -> bool:
        digest = hashlib.sha256(f"{seed}:{group}".encode()).digest()
        return int.from_bytes(digest[:4], "big") < held_out * 2**32

    train, test = Corpus(), Corpus()
    for document in collector.documents:
        (test if is_held_out(document.group) else train).documents.append(document)
    for answer in collector.answers:
        (test if is_held_out(answer.group) else train).answers.append(answer)
    return train, test


# ---------------------------------------------------------------- tokens and the rows


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with the three ChatML tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        unk_token=None,
        extra_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def chat_text(
    rng: random.Random, answers: list[Answer], peers: dict[str, list[int]], i: int
) -> str:
    """Return a conversation: one or two questions and answers, sometimes a system message."""
    turns = [answers[i]]
    if rng.random() < 0.2:
        turns.append(answers[rng.choice(peers[answers[i].group])])
    text = ""
    if rng.random() < 0.25:
        text = f"{IM_START}system\n{SYSTEM_PROMPT}{IM_END}\n"
    for turn in turns:
        question = rng.choice(TOPIC_QUESTIONS if turn.is_topic else QUESTIONS)
        asked = question.format(turn.subject)
        text += f"{IM_START}user\n{asked}{IM_END}\n{IM_START}assistant\n{turn.text}{IM_END}\n"
    return text


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Return the token ids of a text, with its special tokens."""
    ids: list[int] = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def document_rows(
    documents: list[list[int]], length: int, rng: random.Random
) -> Iterator[list[int]]:
    """Yield packed rows without end; the documents are shuffled in every pass."""
    pending: list[int] = []
    while True:
        order = list(range(len(documents)))
        rng.shuffle(order)
        for i in order:
            pending += [0, *documents[i]]
            while len(pending) >= length:
                yield pending[:length]
                pending = pending[length:]


def chat_rows(
    tokenizer: PreTrainedTokenizerFast, answers: list[Answer], length: int, rng: random.Random
) -> Iterator[list[int]]:
    """Yield rows of conversations without end; each row begins with the start of one."""
    peers: dict[str, list[int]] = {}
    for i, answer in enumerate(answers):
        peers.setdefault(answer.group, []).append(i)
    row: list[int] = []
    while True:
        order = list(range(len(answers)))
        rng.shuffle(order)
        for i in order:
            row += [*encode(tokenizer, chat_text(rng, answers, peers, i)), 0]
            if len(row) >= length:
                yield row[:length]
                row = []


def build_batches(
    recipe: Recipe, train: Corpus, tokenizer: PreTrainedTokenizerFast
) -> npt.NDArray[np.int16]:
    """Return all batches of the run as one array of shape ``(steps, rows, sequence_length)``."""
    length = recipe.sequence_length
    streams: list[Iterator[list[int]]] = []
    for kind, count in recipe.rows:
        rng = random.Random(f"{recipe.seed}:{kind}")
        if kind == "chat":
            stream = chat_rows(tokenizer, train.answers, length, rng)
        else:
            documents = [encode(tokenizer, text) for text in train.texts(kind)]
            print(f"{kind}: {len(documents)} documents, {sum(map(len, documents))} tokens")
            stream = document_rows(documents, length, rng)
        streams += [stream] * count
    batches = np.empty((recipe.steps, len(streams), length), dtype=np.int16)
    for step in range(recipe.steps):
        for row, stream in enumerate(streams):
            batches[step, row] = next(stream)
    return batches


# -------------------------------------------------------------------- the baseline


class TrigramBaseline:
    """An order-2 byte model: Witten-Bell interpolation down to the uniform distribution."""

    def __init__(self, texts: Iterable[str]) -> None:
        joined = "".join("\n\n" + text for text in texts)
        data = np.frombuffer(joined.encode(), dtype=np.uint8).astype(np.int64)
        self._levels = []
        for order in range(3):
            keys = self._keys(data, order)
            counts = np.bincount(keys, minlength=256 ** (order + 1)).reshape(-1, 256)
            self._levels.append((counts, counts.sum(axis=1), (counts > 0).sum(axis=1)))

    @staticmethod
    def _keys(data: Array, order: int) -> Array:
        keys = data[2:].copy()
        for back in range(1, order + 1):
            keys += data[2 - back : len(data) - back] * 256**back
        return keys

    def bits(self, texts: Iterable[str]) -> float:
        """Return the bits that code the texts, each after two line feeds."""
        total = 0.0
        for text in texts:
            data = np.frombuffer(("\n\n" + text).encode(), dtype=np.uint8).astype(np.int64)
            p = np.full(len(data) - 2, 1 / 256)
            for order, (counts, sums, types) in enumerate(self._levels):
                context, byte = np.divmod(self._keys(data, order), 256)
                n, t = sums[context], types[context]
                p = np.where(n > 0, (counts[context, byte] + t * p) / np.maximum(n + t, 1), p)
            total -= float(np.log2(p).sum())
        return total


# ---------------------------------------------------------------------- the model


def build_model(recipe: Recipe) -> MixtralForCausalLM:
    """Return a newly initialised Mixtral model."""
    config = MixtralConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        num_local_experts=recipe.experts,
        num_experts_per_tok=recipe.experts_per_token,
        max_position_embeddings=recipe.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        router_aux_loss_coef=recipe.aux_loss,
        tie_word_embeddings=True,
        bos_token_id=0,
        pad_token_id=0,
        eos_token_id=[2, 0],
    )
    torch.manual_seed(recipe.seed)
    model: MixtralForCausalLM = MixtralForCausalLM._from_config(  # type: ignore[no-untyped-call]
        config, experts_implementation="eager"
    )
    return model


def count_parameters(model: MixtralForCausalLM, recipe: Recipe) -> tuple[int, int]:
    """Return the number of all parameters, and of those that one token uses."""
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    return total, total - experts + experts * recipe.experts_per_token // recipe.experts


def build_optimizer(model: MixtralForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    """Return AdamW, with weight decay on the matrices only."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.peak_lr, betas=(0.9, 0.95), fused=True)


def learning_rate(recipe: Recipe, step: int, progress: float) -> float:
    """Return a linear warm-up, then a cosine down to ``final_lr`` of the peak."""
    if step < recipe.warmup:
        return recipe.peak_lr * (step + 1) / recipe.warmup
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return recipe.peak_lr * (recipe.final_lr + (1 - recipe.final_lr) * cosine)


@dataclass
class Run:
    """A training run: the model, its progress and its time limit."""

    recipe: Recipe
    model: MixtralForCausalLM
    batches: npt.NDArray[np.int16]
    deadline_s: float
    checkpoints: Path
    started: float = field(default_factory=time.monotonic)
    step: int = 0
    hurried: bool = False

    def elapsed(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self.started

    def train(self, first_save_s: float, first_save: Callable[[], None]) -> None:
        """Train to the last step. If the time runs out first, the schedule is shortened."""
        optimizer = build_optimizer(self.model, self.recipe)
        self.model.train()
        shown, saved = 0.0, False
        while self.step < self.recipe.steps:
            clock = self.elapsed() / self.deadline_s
            if clock >= 1.0:
                break
            progress = self.step / self.recipe.steps
            self.hurried |= self.step > self.recipe.warmup and clock > progress
            rate = learning_rate(self.recipe, self.step, max(progress, clock))
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = self._one_step(optimizer)
            shown = loss if self.step == 0 else 0.95 * shown + 0.05 * loss
            self.step += 1
            if self.step % 50 == 0:
                speed = self.step * self.recipe.tokens_per_step / self.elapsed()
                print(
                    f"step {self.step}/{self.recipe.steps} loss {shown:.3f} lr {rate:.2e} "
                    f"{speed:.0f} tok/s {self.elapsed():.0f} s",
                    flush=True,
                )
            if self.step % 200 == 0:
                self._checkpoint()
            if not saved and self.elapsed() > first_save_s:
                saved = True
                first_save()
                self.model.train()

    def _one_step(self, optimizer: torch.optim.AdamW) -> float:
        ids = torch.from_numpy(self.batches[self.step].astype(np.int64))
        with torch.autocast("cpu", torch.bfloat16):
            output = self.model(input_ids=ids, labels=ids, output_router_logits=True)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(output.loss.detach()) - self.recipe.aux_loss * float(output.aux_loss.detach())

    def _checkpoint(self) -> None:
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        partial = self.checkpoints / "last.partial"
        torch.save({"step": self.step, "model": self.model.state_dict()}, partial)
        os.replace(partial, self.checkpoints / "last.pt")


@torch.no_grad()
def model_bits(
    model: MixtralForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: Iterable[str], window: int
) -> float:
    """Return the bits that the model needs for the texts, in windows without earlier context."""
    total = 0.0
    for text in texts:
        ids = encode(tokenizer, text)
        for start in range(0, len(ids), window - 1):
            row = torch.tensor([[0, *ids[start : start + window - 1]]])
            logits = model(input_ids=row).logits[0, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum")
            total += float(loss) / math.log(2)
    return total


@torch.no_grad()
def chat(
    model: MixtralForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, limit: int = 80
) -> str:
    """Return the greedy answer to one question."""
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([encode(tokenizer, str(text))])
    generator: Any = model
    output = generator.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False
    )
    new = output[0, ids.shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True)).strip()


# ------------------------------------------------------------------ the folder


@dataclass(frozen=True)
class Score:
    """Held-out bits per byte of one kind of text."""

    kind: str
    size: int
    model: float
    ngram: float


def baseline_bits(train: Corpus, test: Corpus) -> dict[str, float]:
    """Return the bits of the n-gram model per kind: the better of a common and an own one."""
    kinds = sorted({d.kind for d in test.documents})
    everything = TrigramBaseline(train.texts())
    bits = {kind: everything.bits(test.texts(kind)) for kind in kinds}
    del everything
    for kind in kinds:
        bits[kind] = min(bits[kind], TrigramBaseline(train.texts(kind)).bits(test.texts(kind)))
    return bits


def score(
    model: MixtralForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    train: Corpus,
    test: Corpus,
    window: int,
) -> list[Score]:
    """Return scores of model and baseline on the held-out documents, per kind and in total."""
    baseline = baseline_bits(train, test)
    sizes, ours = {}, {}
    for kind in baseline:
        texts = test.texts(kind)
        sizes[kind] = sum(len(t.encode()) for t in texts)
        ours[kind] = model_bits(model, tokenizer, texts, window)
    scores = [
        Score(kind, n, ours[kind] / n, baseline[kind] / n) for kind, n in sorted(sizes.items())
    ]
    n = sum(sizes.values())
    scores.append(Score("all", n, sum(ours.values()) / n, sum(baseline.values()) / n))
    return scores


def save_folder(
    out: Path, model: MixtralForCausalLM, tokenizer: PreTrainedTokenizerFast, card: str
) -> None:
    """Write the model folder next to its place, then swap it in."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".new-") as scratch:
        fresh = Path(scratch) / out.name
        copy = MixtralForCausalLM(model.config)
        copy.load_state_dict(model.state_dict())
        copy.bfloat16()
        copy.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
            eos_token_id=[2, 0], pad_token_id=0, bos_token_id=0, do_sample=False
        )
        copy.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        (fresh / "README.md").write_text(card, encoding="utf-8")
        for path in fresh.iterdir():
            path.chmod(0o644)
        if out.exists():
            shutil.move(out, Path(scratch) / "old")
        shutil.move(fresh, out)


CARD = """---
license: psf-2.0
language: en
pipeline_tag: text-generation
tags: [mixtral, moe, tiny]
---

# tiny

A small trained Mixture-of-Experts language model in the Mixtral architecture, made so that
tests, documentation and demonstrations have a real model to run without a download.

**What it is for:** tests, documentation and demonstrations. It writes text that looks like
Python documentation, and it ends its chat answers. It knows nothing reliably: what it
says about a function is often wrong. Do not use it as a source of facts. It was trained on
sequences of {length} tokens; longer contexts run (up to {positions} positions) but the text
gets worse there.

## Model

| | |
|---|---|
| architecture | Mixtral, {layers} layers, hidden size {hidden}, {heads} heads of {head_dim} \
({kv_heads} key/value heads) |
| experts | {experts} per layer, {top} per token, inner size {inner} |
| parameters | {total:,} in all, {active:,} active per token |
| weights | bfloat16, embedding and output matrix tied |
| tokenizer | byte-level BPE, {vocab} entries, ChatML template, `<|im_end|>` ends a turn |

## Held-out bits per byte

Whole modules were held out (a package, its C half and their docstrings stay on one side; so
does a page of the language reference), {held_out:.1%} of the text. The model is scored with
the shipped bfloat16 weights, in windows of {length} tokens that each start from nothing. The
baseline is an order-2 byte n-gram model (Witten-Bell interpolation) trained on the same
training part; per kind of text the better of one trained on everything and one trained on
that kind alone counts.

| text | bytes | this model | order-2 n-gram |
|---|---|---|---|
{scores}

## Recipe

- Text: the Python {python} standard library as installed: sources and comments, docstrings
  of Python and C modules, and `pydoc_data.topics`. Tests, `site-packages`, encodings and
  build data are left out, and so are lines that name people, addresses or home folders.
- Chat samples are made from the same docstrings: a question from a template, answered with
  the first paragraph.
- {rows} of each batch; {train_mb:.1f} MB of training documents, {answers} chat answers.
- AdamW, peak learning rate {lr}, cosine schedule, weight decay {decay}, router auxiliary
  loss {aux}, fp32 weights with bfloat16 autocast.
- {steps} steps of {batch} tokens = {tokens:.1f} million tokens, {minutes:.0f} minutes on \
{threads}.
- Seed {seed}; torch {torch}, transformers {transformers}.
  {reproducible}

```
{command}
```

## Samples

Greedy decoding, one turn each.

{samples}

## Licence

The weights are derived from the sources and documentation of the Python standard library,
which are under the Python Software Foundation License Version 2.
"""


def write_card(
    run: Run, corpora: tuple[Corpus, Corpus], folder: Path, args: argparse.Namespace
) -> str:
    """Return the model card, from scores and samples of the saved folder."""
    recipe, (train, test) = run.recipe, corpora
    minutes = run.elapsed() / 60
    model: MixtralForCausalLM = MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    model.train(False)
    scores = score(model, tokenizer, train, test, recipe.sequence_length)
    lines = [f"| {s.kind} | {s.size:,} | **{s.model:.3f}** | {s.ngram:.3f} |" for s in scores]
    samples = [f"> **{p}**\n>\n> {quote(chat(model, tokenizer, p))}" for p in SAMPLE_PROMPTS]
    total, active = count_parameters(model, recipe)
    held_out = scores[-1].size / (scores[-1].size + sum(map(len, train.texts())))
    all_rows = sum(n for _, n in recipe.rows)
    return CARD.format(
        length=recipe.sequence_length, positions=recipe.max_positions, layers=recipe.layers,
        hidden=recipe.hidden_size, heads=recipe.heads, head_dim=recipe.head_dim,
        kv_heads=recipe.kv_heads, experts=recipe.experts, top=recipe.experts_per_token,
        inner=recipe.intermediate_size, total=total, active=active, vocab=recipe.vocab_size,
        held_out=held_out, scores="\n".join(lines), python=platform.python_version(),
        rows=", ".join(f"{n}/{all_rows} {kind}" for kind, n in recipe.rows),
        train_mb=sum(map(len, train.texts())) / 1e6, answers=len(train.answers),
        lr=recipe.peak_lr, decay=recipe.weight_decay, aux=recipe.aux_loss, steps=run.step,
        batch=recipe.tokens_per_step, tokens=run.step * recipe.tokens_per_step / 1e6,
        minutes=minutes, threads="one core" if args.threads == 1 else f"{args.threads} threads",
        seed=recipe.seed, torch=torch.__version__.split("+")[0],
        transformers=transformers.__version__, reproducible=reproducibility(run),
        command=args.command, samples="\n\n".join(samples),
    )  # fmt: skip


def quote(text: str) -> str:
    """Continue a Markdown quotation over all lines."""
    return text.replace("\n", "\n> ")


def reproducibility(run: Run) -> str:
    """Return the card's text about repeating the run."""
    if run.hurried:
        return "The clock hurried the schedule, so the run does not repeat exactly."
    return "The number of steps, not the clock, set the schedule."


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="optimizer steps")
    parser.add_argument("--minutes", type=float, default=40.0, help="stop training after this")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--first-save", type=float, default=10.0, help="minutes to a first save")
    parser.add_argument("--checkpoints", type=Path, help="folder for checkpoints")
    parser.add_argument("--quick", action="store_true", help="a smoke run of 20 steps")
    args = parser.parse_args()
    if args.quick:
        args.steps = min(args.steps, 20)
    args.command = f"python scripts/train_tiny.py {' '.join(sys.argv[1:])}"
    if args.checkpoints is None:
        args.checkpoints = Path(tempfile.gettempdir()) / "tiny_ckpt"
    return args


def main() -> None:
    """Collect the text, train, score and write the folder."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    recipe = Recipe(seed=args.seed, steps=args.steps)
    train, test = split(collect(), recipe.held_out, recipe.seed)
    print(f"training {sum(map(len, train.texts()))} bytes, {len(train.answers)} answers")
    print(f"held out {sum(map(len, test.texts()))} bytes, {len(test.answers)} answers")
    texts = train.texts("prose") + train.texts("code")[::3] + [a.text for a in train.answers]
    tokenizer = train_tokenizer(texts, recipe.vocab_size)
    batches = build_batches(recipe, train, tokenizer)
    model = build_model(recipe)
    print("parameters: {} in all, {} active".format(*count_parameters(model, recipe)), flush=True)
    run = Run(recipe, model, batches, args.minutes * 60, args.checkpoints)

    def first_save() -> None:
        save_folder(args.out, model, tokenizer, "# tiny\n\nNot trained to the end yet.\n")

    run.train(args.first_save * 60, first_save)
    save_folder(args.out, model, tokenizer, "")
    card = write_card(run, (train, test), args.out, args)
    (args.out / "README.md").write_text(card, encoding="utf-8")
    size = sum(p.stat().st_size for p in args.out.iterdir())
    print(card)
    print(f"wrote {args.out}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
