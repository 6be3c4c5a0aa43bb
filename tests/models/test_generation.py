"""What a checkpoint says of answers: their ends, and how they are sampled."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from qllm.errors import ModelError
from qllm.models.generation import ids_in, sampling_defaults, unlisted_end
from qllm.models.loader import load
from tests.support.families import make_model

SPECIAL = ("<end>", "<end>2", "<turn>")
GIVEN = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1}
CHAT = "{% for m in messages %}{{ '<turn>' + m.role + ' ' + m.content + BEHIND }}{% endfor %}"


def tokenizer(template: str | None = CHAT, end: str = "<end>\n") -> PreTrainedTokenizerFast:
    words = WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    made.add_tokens([AddedToken(token, special=True) for token in SPECIAL])
    made.add_tokens(["plain"])
    made.chat_template = template and template.replace("BEHIND", repr(end))
    return made


@pytest.mark.parametrize(
    "end", [f"{before}{token}\n" for token in SPECIAL for before in ("", "\n ")]
)
def test_a_special_token_behind_an_answer_that_is_no_end_is_named(end: str) -> None:
    made, token = tokenizer(end=end), end.strip()
    own = made.convert_tokens_to_ids(token)
    others = {made.convert_tokens_to_ids(other) for other in SPECIAL} - {own}
    assert unlisted_end(made, others) == unlisted_end(made, ()) == token
    assert unlisted_end(made, {own}) is None


@pytest.mark.parametrize("end", ["", "\n", "plain", " and so on <end>"])
def test_nothing_is_said_of_what_is_no_special_token_behind_an_answer(end: str) -> None:
    assert unlisted_end(tokenizer(end=end), ()) is None


@pytest.mark.parametrize(
    "template", [None, "", "{{ raise_exception('no') }}", "{{ nothing.at.all }}", "<end>"]
)
def test_nothing_is_said_of_templates_that_show_no_answer(template: str | None) -> None:
    assert unlisted_end(tokenizer(template), ()) is None
    assert unlisted_end(None, ()) is None


@pytest.mark.parametrize("is_listed", [False, True])
def test_the_start_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_listed: bool
) -> None:
    make_model("olmoe").save_pretrained(tmp_path)
    made = tokenizer()
    made.save_pretrained(tmp_path)
    ends = [made.convert_tokens_to_ids("<end>")] * is_listed
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with caplog.at_level(logging.WARNING, "qllm"):
        loaded = load(tmp_path)
    assert loaded.eos_token_ids == set(ends)
    said = "writes '<end>' behind an answer, and that token ends none (ends are the ids none)"
    assert (said in caplog.text) is not is_listed


def test_ids_are_those_of_every_source() -> None:
    assert ids_in(3, [4, 5], (6,), None, [None, True, -1, "7"], "8") == {3, 4, 5, 6}


@pytest.mark.parametrize("do_sample", [{}, {"do_sample": None}, {"do_sample": True}])
@pytest.mark.parametrize("key", GIVEN)
def test_values_count_unless_the_checkpoint_says_it_is_greedy(
    do_sample: dict[str, Any], key: str
) -> None:
    always = {"repetition_penalty": 1.05}
    assert sampling_defaults("m", {**GIVEN, **always, **do_sample}) == {**GIVEN, **always}
    assert sampling_defaults("m", {key: GIVEN[key], **do_sample}) == {key: GIVEN[key]}
    assert sampling_defaults("m", {**GIVEN, **always, "do_sample": False}) == always


@pytest.mark.parametrize("do_sample", [{}, {"do_sample": True}])
def test_values_out_of_range_are_refused_with_the_model(do_sample: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"generation config of model 'm': top_p"):
        sampling_defaults("m", {"top_p": 7, **do_sample})
