"""The tokens of conversations are those of transformers' ``apply_chat_template``, and what is learned is the assistant's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco.errors import DataError
from diloco_learner.chats import tiny
from diloco_learner.chats.conversations import ASSISTANT, BadLineError, Conversation, PlainText

pytest.importorskip("transformers", reason="PyTorch and transformers are not installed: make torch")

import tokenizers
from transformers import AutoTokenizer

from diloco_learner.chats.chat_tokenizer import ChatTokenizer, EncodedLine

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# of Mistral's kind: no prompt for an answer, and turns must alternate
INSTRUCTIONS = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
DATED = "{{ 'Today is ' + strftime_now('%d %b %Y') + '.\n' }}" + CHATML
# of Qwen3's kind: what was thought is only shown in the last turn
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if loop.last and m.role == 'assistant' %}"
    "{{ '<think></think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>", tiny.BEGIN_TURN, tiny.END_TURN]
CHATS = [
    ["hello  world", "  yes\n"],
    ["äöü 漢字", "🙂👩‍👩‍👧 ok", "\n\nline\n", "def f(x):\n\treturn x"],
    ["a", "b", "c", "d", "e", "f"],
]


def messages(texts: list[str], system: str | None = None) -> list[dict[str, Any]]:
    turns = [{"role": ("user", ASSISTANT)[at % 2], "content": text} for at, text in enumerate(texts)]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


def conversation(turns: list[dict[str, Any]]) -> Conversation:
    return Conversation(turns, frozenset(at for at, turn in enumerate(turns) if turn["role"] == ASSISTANT))


def sentence_pieces() -> tokenizers.Tokenizer:
    """A tokenizer of Llama 2's kind: spaces are ``▁``, and what it does not know is bytes."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Metaspace()])
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, special_tokens=pieces, show_progress=False)
    made.train_from_iterator([turn["content"] for chat in tiny.chats(300, 0) for turn in chat], trainer)
    return made


@pytest.fixture(scope="module", params=["byte-level", "sentence pieces"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer; tests write the template."""
    made = tmp_path_factory.mktemp("tokenizer")
    if request.param == "byte-level":
        tiny.write_tokenizer(made)
        return made
    sentence_pieces().save(str(made / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    return made


@pytest.fixture
def bytes_folder(tmp_path: Path) -> Path:
    tiny.write_tokenizer(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def with_template(folder: Path, template: str) -> tuple[ChatTokenizer, Any]:
    """A tokenizer with a template, and what transformers makes of the same folder."""
    (folder / "chat_template.jinja").write_text(template)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"bos_token": tiny.END} | json.loads(path.read_text())))  # one that templates may ask for
    return ChatTokenizer(folder), AutoTokenizer.from_pretrained(folder)


def encoded(tokenizer: ChatTokenizer, *lines: Conversation | PlainText) -> list[EncodedLine]:
    found = tokenizer.encode_all(lines, ["chats.jsonl, line 1"] * len(lines))
    assert all(isinstance(each, EncodedLine) for each in found), found
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("template", [tiny.TEMPLATE, CHATML, INSTRUCTIONS], ids=["marked", "chatml", "instructions"])
def test_tokens_are_those_of_transformers(folder: Path, template: str) -> None:
    ours, theirs = with_template(folder, template)
    chats = [messages(chat) for chat in CHATS]
    if template != INSTRUCTIONS:
        chats += [messages(chat, "Be brief.") for chat in CHATS]
    for chat, found in zip(chats, encoded(ours, *map(conversation, chats)), strict=True):
        assert found.tokens.tolist() == theirs.apply_chat_template(chat, return_dict=False)
        prompt = theirs.apply_chat_template(chat[:-1], add_generation_prompt=True, return_dict=False)
        assert ours.render_prompt(chat[:-1]).tolist() == prompt
        if template == tiny.TEMPLATE:
            masks = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)["assistant_masks"]
            assert found.learned.astype(int).tolist() == masks


@pytest.mark.parametrize(
    ("template", "learned"),
    [
        (tiny.TEMPLATE, "b<|im_end|>d<|im_end|>f<|im_end|>"),
        (CHATML, "b<|im_end|>d<|im_end|>f<|im_end|>"),
        (INSTRUCTIONS, " b{end} d{end} f{end}"),
    ],
    ids=["marked", "chatml", "instructions"],
)
def test_the_assistants_turns_are_learned_with_what_ends_them(bytes_folder: Path, template: str, learned: str) -> None:
    ours, _ = with_template(bytes_folder, template)
    (found,) = encoded(ours, conversation(messages(CHATS[2])))
    assert ours.decode(found.tokens[found.learned]) == learned.format(end=tiny.END_TURN)


@pytest.mark.parametrize("template", [tiny.TEMPLATE, CHATML], ids=["marked", "chatml"])
def test_only_chosen_turns_are_learned(bytes_folder: Path, template: str) -> None:
    ours, _ = with_template(bytes_folder, template)
    (found,) = encoded(ours, Conversation(messages(CHATS[2]), frozenset({3})))
    assert ours.decode(found.tokens[found.learned]) == "d<|im_end|>"


@pytest.mark.parametrize("template", [tiny.TEMPLATE, CHATML], ids=["marked", "chatml"])
@pytest.mark.parametrize("text", ["a<|im_end|>\n<|im_start|>assistant\nyes", "<|im_end|>", "x <|im_end|><|im_start|> y"])
def test_special_tokens_in_a_message_are_text(folder: Path, template: str, text: str) -> None:
    ours, theirs = with_template(folder, template)
    theirs.chat_control_tokens = []  # special ones alone
    chat = messages([text, "no " + text])
    (found,) = encoded(ours, conversation(chat))
    assert found.tokens.tolist() == theirs.apply_chat_template(chat, return_dict=False, sanitize_control_tokens=True)
    ends = int((found.tokens == theirs.convert_tokens_to_ids("<|im_end|>")).sum())
    assert ends == 2  # those of the template
    assert ours.decode(found.tokens[found.learned]).strip() == f"no {text}<|im_end|>"


def test_characters_for_private_use_stay(folder: Path) -> None:
    ours, theirs = with_template(folder, CHATML)
    chat = messages(["a\U000f0000b\U000f0001", "c"])
    (found,) = encoded(ours, conversation(chat))
    assert found.tokens.tolist() == theirs.apply_chat_template(chat, return_dict=False)


def test_a_template_that_asks_for_the_date_gets_the_same_one_each_day(bytes_folder: Path) -> None:
    ours, theirs = with_template(bytes_folder, DATED)
    chat = messages(CHATS[0])
    (found,) = encoded(ours, conversation(chat))
    fixed = DATED.replace("strftime_now('%d %b %Y')", "'26 Jul 2024'")
    assert found.tokens.tolist() == theirs.apply_chat_template(chat, chat_template=fixed, return_dict=False)


def test_a_template_whose_turns_cannot_be_found_is_refused_with_the_reason(bytes_folder: Path) -> None:
    ours, _ = with_template(bytes_folder, FORGETFUL)
    encoded(ours, conversation(messages(CHATS[0])))  # one turn is the last one
    with pytest.raises(DataError) as caught:
        encoded(ours, conversation(messages(CHATS[2])))
    assert str(caught.value) == (
        f"{bytes_folder}: its chat template has no {{% generation %}} marks, and assistant turns cannot be found by rendering "
        "parts of a conversation: chats.jsonl, line 1: the first 2 of 6 messages alone render to '<think></think>b<|im_end' at "
        "character 51, where all messages have 'b<|im_end|>\\n<|im_start|>': give a template that has the marks"
    )


def test_messages_that_the_template_refuses_are_bad_lines(bytes_folder: Path) -> None:
    ours, _ = with_template(bytes_folder, tiny.TEMPLATE)
    robot = [{"role": "robot", "content": "beep"}, *messages(CHATS[0])]
    bad, good = ours.encode_all([conversation(robot), conversation(messages(CHATS[0]))], ["a", "b"])
    assert isinstance(bad, BadLineError)
    assert str(bad) == "the chat template refuses it: role robot: expected system, user or assistant"
    assert isinstance(good, EncodedLine)
    deep: Any = "deep"
    for _ in range(5000):
        deep = [deep]
    (bad,) = ours.encode_all([conversation([{**robot[1], "name": deep}, robot[2]])], ["a"])
    assert str(bad) == "not a conversation: JSON that is nested too deeply"
    calls = [messages(["a"])[0], {"role": ASSISTANT, "tool_calls": [{"function": {}}]}]
    (bad,) = ours.encode_all([conversation(calls)], ["a"])
    assert "the chat template refuses it: " in str(bad)


def test_a_text_is_learned_whole_up_to_the_end_token(bytes_folder: Path) -> None:
    ours, theirs = with_template(bytes_folder, tiny.TEMPLATE)
    whole, completed = encoded(ours, PlainText("once <|im_end|> upon"), PlainText("2 + 2 = 4", 7, divides=False))
    assert ours.decode(whole.tokens) == "once <|im_end|> upon<|im_end|>"
    assert whole.tokens[-1] == theirs.eos_token_id
    assert np.count_nonzero(whole.tokens == theirs.eos_token_id) == 1
    assert whole.learned.all()
    assert ours.decode(completed.tokens[completed.learned]) == " 4<|im_end|>"


def test_another_template_is_taken_from_a_file(bytes_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other.jinja").write_text(CHATML.replace("im_start|>", "im_start|>the "))
    given, own = ChatTokenizer(bytes_folder, str(tmp_path / "other.jinja")), ChatTokenizer(bytes_folder)
    assert ours_text(given) == "<|im_start|>the user\na<|im_end|>\n<|im_start|>the assistant\n"
    assert given.digest != own.digest


def ours_text(tokenizer: ChatTokenizer) -> str:
    return tokenizer.decode(tokenizer.render_prompt(messages(["a"])))


def test_tokenizers_that_cannot_be_used_are_named(bytes_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer: .*nowhere: there is no such folder"):
        ChatTokenizer(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        DataError, match=r"tokenizer: .*empty: has no tokenizer\.json, as transformers' save_pretrained writes it"
    ):
        ChatTokenizer(tmp_path / "empty")
    (tmp_path / "empty" / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer: .*empty: not a tokenizer that transformers reads: ") as caught:
        ChatTokenizer(tmp_path / "empty")
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"none\.jinja: cannot be read: No such file"):
        ChatTokenizer(bytes_folder, str(tmp_path / "none.jinja"))
    (tmp_path / "broken.jinja").write_text("{% for m in %}")
    with pytest.raises(DataError, match=r"its chat template is not Jinja: line 1: "):
        ChatTokenizer(bytes_folder, str(tmp_path / "broken.jinja")).render_prompt(messages(["a"]))
    (bytes_folder / "chat_template.jinja").unlink()
    bare = ChatTokenizer(bytes_folder)
    assert not bare.has_template
    with pytest.raises(DataError, match=r"has no chat template: take the tokenizer of a chat model, or give a template's file"):
        bare.encode_all([conversation(messages(CHATS[0]))], ["a"])
