"""Texts as token ids: what is cut at `max_length`, and which tokens of a conversation the loss covers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError
from inweave.models.language_models import load_tokenizer
from inweave.training.data.texts import Chat, read_texts
from inweave.training.data.token_rows import Row, token_rows
from tests.unit.training.tasks.test_language import write_language_model

CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}</s>"
    "{% endgeneration %}\n{% else %}{{ m['content'] }}</s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
#: reasoning is removed from every answer but the last, as in Qwen3's and DeepSeek's templates
REASONING = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = (
    {"role": "system", "content": "a dog"},
    {"role": "user", "content": "the cat?"},
    {"role": "assistant", "content": "on the mat"},
    {"role": "user", "content": "and the dog?"},
    {"role": "assistant", "content": "on the log"},
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: write_language_model(kind, tmp_path_factory.mktemp(kind)) for kind in ("llama", "gpt2")}


@pytest.fixture(params=["llama", "gpt2"])
def tokenizer(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Any:
    return load_tokenizer(folders[request.param])


def with_template(folder: Path, template: str) -> Any:
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = template
    return tokenizer


def covered_text(tokenizer: Any, row: Row) -> str:
    return str(tokenizer.decode([token for token, covered in zip(*row, strict=True) if covered]))


@pytest.mark.parametrize("length", range(2, 40))
def test_the_completion_is_kept_first_and_the_prompt_loses_only_what_must_go(tokenizer: Any, length: int) -> None:
    prompt, completion = "the cat sat on the log and the dog sat on", " the mat and a log"
    ((whole, flags),), none = token_rows(tokenizer, [(prompt, completion)], 1000)
    ((tokens, covered),), cuts = token_rows(tokenizer, [(prompt, completion)], length)
    begin = [0] if whole[0] == 0 else []
    goal = sum(flags)
    context = max(len(begin), 1)
    assert none.longer == 0 and none.text() == "" and len(tokens) == min(length, len(whole))
    assert tokens[: len(begin)] == begin
    assert sum(covered) == min(goal, length - context), "as much of the completion as there is room for"
    first = covered.index(True)
    assert tokens[first:] == whole[flags.index(True) :][: length - first]
    assert tokens[len(begin) : first] == whole[len(begin) : flags.index(True)][-(first - len(begin)) or len(whole) :]
    assert (cuts.longer, cuts.prompts, cuts.completions) == (
        int(length < len(whole)), int(length < len(whole)), int(goal > length - context)
    )  # fmt: skip
    assert cuts.prompt_tokens + cuts.completion_tokens == len(whole) - len(tokens)


def test_texts_without_a_prompt_are_split_and_reported(tokenizer: Any) -> None:
    texts = [("", "the cat sat on the mat " * 4), ("", "a dog"), ("the cat " * 30, "sat")]
    rows, cuts = token_rows(tokenizer, texts, 8)
    assert all(len(tokens) <= 8 for tokens, _ in rows) and len(rows) > 5
    assert (cuts.longer, cuts.split, cuts.prompts, cuts.completions) == (2, 1, 1, 0)
    lost = len(tokenizer("the cat " * 30, add_special_tokens=False).input_ids) + 1
    assert cuts.text().startswith("max_length = 8: 2 texts of more tokens; 1 split into several examples; 1 prompt cut")
    assert 0 < cuts.prompt_tokens <= lost
    assert token_rows(tokenizer, [("the cat", "")], 1000)[1].longer == 0


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_conversation_is_the_templates_and_the_answers_are_trained(
    template: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    tokenizer = with_template(folders["llama"], template)
    (row,), _ = token_rows(tokenizer, [Chat(TALK)], 1000)
    assert row[0] == tokenizer.apply_chat_template(list(TALK), return_dict=True)["input_ids"]
    end = "\n" if template == CHATML else ""
    assert covered_text(tokenizer, row) == f"on the mat</s>{end}on the log</s>{end}"
    if template == MARKED:
        marked = tokenizer.apply_chat_template(list(TALK), return_dict=True, return_assistant_tokens_mask=True)
        assert row[1] == [bool(each) for each in marked["assistant_masks"]]


def test_an_answer_that_later_messages_rewrite_is_a_row_of_its_own(folders: dict[str, Path]) -> None:
    tokenizer = with_template(folders["llama"], REASONING)
    talk = [dict(each) for each in TALK]
    talk[2]["content"] = "a cat</think>on the mat"
    rows, _ = token_rows(tokenizer, [Chat(tuple(talk))], 1000)
    assert [covered_text(tokenizer, row) for row in rows] == ["a cat</think>on the mat</s>\n", "on the log</s>\n"]
    assert "</think>" not in tokenizer.decode(rows[1][0]), "as the model sees its history when it answers"


def test_a_greeting_before_any_question_is_trained_without_its_header(folders: dict[str, Path]) -> None:
    tokenizer = with_template(folders["gpt2"], CHATML)
    (row,), _ = token_rows(tokenizer, [Chat((TALK[2], TALK[1], TALK[4]))], 1000)
    assert covered_text(tokenizer, row) == "on the mat</s>\non the log</s>\n"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "need a chat template, and this model's tokenizer has none"),
        ("{{ raise_exception('roles must alternate') }}", "talk.jsonl, line 7: .*roles must alternate"),
        ("{{ messages[0]['content'] }}", "line 7: .*leaves nothing of the assistant's messages"),
        ("{{ messages | length }}{% if add_generation_prompt %}A{% endif %}", r"line 7: .*mark them in the template"),
        ("{% for", "line 7: the chat template cannot be applied"),
        ("{{ ''.__class__.__mro__ }}", "line 7: .*unsafe"),
    ],
)
def test_templates_that_cannot_be_used_name_the_line(template: str, problem: str, folders: dict[str, Path]) -> None:
    tokenizer = with_template(folders["llama"], template)
    with pytest.raises(ConfigError, match=problem):
        token_rows(tokenizer, [Chat(TALK, label="talk.jsonl, line 7")], 1000)


def test_templates_of_a_folder_and_rows_with_messages_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(folders["llama"], tmp_path / "model"))
    assert load_tokenizer(folder).chat_template is None
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    several = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": MARKED}]
    for form, expected in ((CHATML, CHATML), (several, {"default": CHATML, "tool_use": MARKED})):
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": form}))
        assert load_tokenizer(folder).chat_template == expected
    (folder / "chat_template.jinja").write_text(MARKED)
    assert load_tokenizer(folder).chat_template == MARKED
    file = tmp_path / "talk.jsonl"
    file.write_text(json.dumps({"messages": TALK, "id": 3}) + "\n" + json.dumps({"text": "a cat"}))
    chat, text = read_texts(file)
    assert isinstance(chat, Chat) and chat.messages == TALK and text == ("", "a cat")
    rows, _ = token_rows(load_tokenizer(folder), [chat, text], 1000)
    assert len(rows) == 2
    bad = [{"messages": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}, {"messages": [{"role": "assistant"}]}]
    file.write_text("\n".join(map(json.dumps, bad)))
    with pytest.raises(ConfigError, match="no message has the role assistant") as caught:
        read_texts(file)
    assert len(caught.value.problems) == 3


def test_a_long_conversation_keeps_its_answers(folders: dict[str, Path]) -> None:
    tokenizer = with_template(folders["llama"], CHATML)
    talk = ({"role": "system", "content": "the cat sat on the mat " * 9}, *TALK[1:])
    (whole,), _ = token_rows(tokenizer, [Chat(talk)], 1000)
    needed = len(whole[0]) - whole[1].index(True)
    (row,), cuts = token_rows(tokenizer, [Chat(talk)], needed + 5)
    assert len(row[0]) == needed + 5 and covered_text(tokenizer, row) == covered_text(tokenizer, whole)
    assert (cuts.prompts, cuts.completions, cuts.prompt_tokens) == (1, 0, len(whole[0]) - needed - 5)
