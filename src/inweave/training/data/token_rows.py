"""Texts as token ids: where each begins and ends, which tokens the loss covers, and what is cut at `max_length`.

    text                  <begin> text <end>                 the loss covers the text and <end>
    prompt, completion    <begin> prompt completion <end>    the loss covers the completion and <end>
    messages              the tokenizer's chat template      the loss covers the assistant's messages, with their end

<begin> is there if the tokenizer adds one. A longer text is split into several rows. Of anything else the completion is
kept first: the prompt (all before the first token that the loss covers) loses its start, but for <begin> and never its
last token, and only if that is not enough the end of the row is cut.

The assistant's messages are what the template marks with {% generation %}. A template without these marks is applied to
the messages before and up to each answer, and the answer is the difference. Where later messages change how earlier
ones are written (templates that remove reasoning from the history), every answer becomes a row of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from inweave.errors import ConfigError
from inweave.training.data.texts import Chat, Cuts, Text

Row = tuple[list[int], list[bool]]  # token ids, and which of them the loss covers
Span = tuple[int, int]

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")  # as transformers looks for it
_NO_TEMPLATE = (
    "dataset: rows with messages need a chat template, and this model's tokenizer has none; add chat_template.jinja to "
    "the model's folder, or write the rows as prompt and completion"
)


def token_rows(tokenizer: Any, texts: Iterable[Text], length: int) -> tuple[list[Row], Cuts]:
    """Return rows of at most ``length`` tokens, and what was cut."""
    rows: list[Row] = []
    longer = split = 0
    prompts: list[int] = []  # tokens of each that is cut
    completions: list[int] = []
    begin = _begin(tokenizer)
    for text in texts:
        made = _chat_rows(tokenizer, text) if isinstance(text, Chat) else [_row(tokenizer, text)]
        longer += any(len(tokens) > length for tokens, _ in made)
        for row in made:
            tokens, covered = row
            if len(tokens) <= length or not any(covered):
                rows.append(row)
            elif not isinstance(text, Chat) and not text[0]:
                split += 1
                rows += [(tokens[i : i + length], covered[i : i + length]) for i in range(0, len(tokens), length)]
            else:
                rows.append(_cut(row, length, begin))
                start, end = covered.index(True) - rows[-1][1].index(True), sum(covered) - sum(rows[-1][1])
                prompts += [start] if start else []
                completions += [end] if end else []
    cuts = Cuts(length, longer, split, len(prompts), sum(prompts), len(completions), sum(completions))
    return [row for row in rows if len(row[0]) > 1 and any(row[1][1:])], cuts


def _begin(tokenizer: Any) -> list[int]:
    """Return the token that the tokenizer puts before every text, if it does."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a").input_ids[:1] == [bos] else []


def _row(tokenizer: Any, text: tuple[str, str]) -> Row:
    prompt, completion = text
    eos = tokenizer.eos_token_id
    before = [*_begin(tokenizer), *(tokenizer(prompt, add_special_tokens=False).input_ids if prompt else [])]
    after = [*tokenizer(completion, add_special_tokens=False).input_ids, *([eos] if eos is not None else [])]
    return [*before, *after], [False] * len(before) + [True] * len(after)


def _cut(row: Row, length: int, begin: Sequence[int]) -> Row:
    """Cut a row to ``length``: the prompt's start first, then the end."""
    tokens, covered = row
    first = covered.index(True)
    start = len(begin) if tokens[: len(begin)] == list(begin) else 0
    least = min(first, max(start, 1))  # without a token before it, the first token of a completion is not trained
    end = start + max(0, min(len(tokens) - length, first - least))
    return (tokens[:start] + tokens[end:])[:length], (covered[:start] + covered[end:])[:length]


def _chat_rows(tokenizer: Any, chat: Chat) -> list[Row]:
    """Return the rows of a conversation: one, or one for each answer."""
    if not tokenizer.chat_template:
        raise ConfigError(_NO_TEMPLATE)
    if not tokenizer.is_fast:
        raise ConfigError("dataset: rows with messages need a tokenizer with a tokenizer.json, and this model has none")
    try:
        if _GENERATION.search(tokenizer.get_chat_template(tools=chat.tools)):
            made = tokenizer.apply_chat_template(
                list(chat.messages), tools=chat.tools, return_dict=True, return_assistant_tokens_mask=True
            )
            rows = [(list(made["input_ids"]), [bool(each) for each in made["assistant_masks"]])]
        else:
            rows = [_encode(tokenizer, text, spans) for text, spans in _answers(tokenizer, chat)]
    except ConfigError:
        raise
    except Exception as error:  # a template raises what it likes
        text = " ".join(str(error).split())[:300]
        raise ConfigError(f"{chat.label}: the chat template cannot be applied to these messages: {text}") from None
    if not all(any(covered) for _, covered in rows):
        raise ConfigError(f"{chat.label}: the chat template leaves nothing of the assistant's messages to train")
    return rows


def _answers(tokenizer: Any, chat: Chat) -> Iterator[tuple[str, list[Span]]]:
    """Yield (text, where in it the answers are)."""
    messages = list(chat.messages)

    def render(upto: int, *, prompt: bool = False) -> str:
        options: Mapping[str, Any] = {"tools": chat.tools, "tokenize": False, "add_generation_prompt": prompt}
        return str(tokenizer.apply_chat_template(messages[:upto], **options))

    turns: list[tuple[str, Span]] = []
    for number in (number for number, each in enumerate(messages) if each["role"] == "assistant"):
        after = render(number + 1)
        if number:
            before = render(number, prompt=True)
        else:  # templates need a message: what opens an answer is found in the first one
            opening = render(1, prompt=True).removeprefix(after)
            before = after[: after.find(opening) + len(opening)] if opening in after else after + opening
        if not after.startswith(before):
            raise ConfigError(
                f"{chat.label}: the chat template writes message {number + 1} in a way that does not continue the "
                "prompt for it, so the answer's tokens are not known; mark them in the template with {% generation %}, "
                "or write prompt and completion"
            )
        turns.append((after, (len(before), len(after))))
    whole = render(len(messages))
    if all(whole.startswith(text) for text, _ in turns):
        yield whole, [span for _, span in turns]
    else:
        yield from ((text, [span]) for text, span in turns)


def _encode(tokenizer: Any, text: str, spans: Sequence[Span]) -> Row:
    made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    covered = [any(a <= start < b for a, b in spans) for start, _ in made["offset_mapping"]]
    return list(made["input_ids"]), covered
