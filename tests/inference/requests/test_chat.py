"""Conversations, by templates in the forms of twelve families: the text of transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import their_tokenizer
import tiny
import tiny_folder
from chat_forms import FORMS
from transformers.utils import chat_template_utils

from deepspeed_ext.inference.initialize import init_inference
from deepspeed_ext.inference.requests.chat import ChatTemplates, templates_of, texts_of

USER, SYSTEM = {"role": "user", "content": "Hi\n"}, {"role": "system", "content": " Be short. "}
ANSWER = {"role": "assistant", "content": "Yes <b>&amp;</b> \u00e9 "}
THOUGHT = {"role": "assistant", "content": "Fine", "reasoning_content": "hm"}
MORE = {"role": "user", "content": "Why?", "name": "Ann", "extra": None}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "with a system": [SYSTEM, USER],
    "with an answer": [USER, ANSWER, MORE],
    "all": [SYSTEM, USER, ANSWER, MORE, THOUGHT],
    "a wrong turn": [USER, MORE],
    "thinking": [USER, {"role": "assistant", "content": "<think>a</think>\nb", "thinking": "c"}],
    "tools": [USER, {"role": "assistant", "content": "ok", "tool_calls": [{"a": [1, None, 2.5]}]}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": " a "}]}],
    "no content": [{"role": "user"}, ANSWER],
}


def text_of(template: str, conversation: Any, **options: Any) -> str:
    variables = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    asked = dict(add_generation_prompt=None, continue_final_message=False) | options
    arguments = asked.pop("template_arguments", None)
    templates = ChatTemplates({"default": template}, variables)
    return texts_of([conversation], templates, None, arguments, **asked)[0]


THEIRS_KNOWS_THINKING = hasattr(chat_template_utils, "_alias_reasoning_fields")


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("form", FORMS)
def test_text_is_that_of_transformers(form: str, conversation: str) -> None:
    """Where theirs is refused, so is ours."""
    tokenizer = their_tokenizer.tokenizer(chat_template=FORMS[form])
    messages = CONVERSATIONS[conversation]
    before = json.dumps(messages)
    for options in (
        dict(add_generation_prompt=True),
        dict(add_generation_prompt=False),
        dict(continue_final_message=True),
        dict(add_generation_prompt=True, template_arguments=dict(enable_thinking=False)),
        dict(
            add_generation_prompt=True, template_arguments=dict(date_string="1 May", bos_token="")
        ),
    ):
        theirs = dict(options)
        theirs |= theirs.pop("template_arguments", {})
        try:
            expected = tokenizer.apply_chat_template(messages, tokenize=False, **theirs)
        except Exception:
            with pytest.raises((ValueError, TypeError), match=r"^chat: "):
                text_of(FORMS[form], messages, **options)
            continue
        if (form, conversation) == ("thinking", "thinking") and not THEIRS_KNOWS_THINKING:
            pytest.skip("this transformers knows one name for reasoning")
        assert text_of(FORMS[form], messages, **options) == expected
    assert json.dumps(messages) == before


def test_most_conversations_are_no_error() -> None:
    """Or the test above would show little."""
    found = 0
    for form in FORMS.values():
        for messages in CONVERSATIONS.values():
            try:
                found += bool(text_of(form, messages))
            except (ValueError, TypeError):
                found += 0
    assert found >= 75


def with_template(template: str | None = FORMS["chatml"], **options: Any) -> Any:
    tokenizer = their_tokenizer.tokenizer(chat_template=template, **options)
    return tiny.engine(tokenizer=tokenizer, stop_tokens=[2], pad_tokens=[0])


def test_chats_are_completions_of_their_texts() -> None:
    engine = with_template("{{ bos_token }}{% for m in messages %}{{ m.content }};{% endfor %}")
    ids = [engine.tokenizer.encode(text) for text in ("Hi;", "Hi;Why?;")]  # which begins them once
    assert [each[0] for each in ids] == [1, 1]
    expected = [each.tokens for each in engine.generate(ids, max_new_tokens=6)]
    some = [[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Hi"}, MORE]]
    found = engine.chat(some, max_new_tokens=6)
    assert [each.tokens for each in found] == expected
    assert engine.chat(some[0], max_new_tokens=6)[0].tokens == expected[0]
    with engine.chat(some[0], max_new_tokens=6, stream=True) as stream:
        assert [t for piece in stream for t in piece.tokens] == expected[0]
    assert engine.chat([]) == []
    several = engine.chat(some[0], max_new_tokens=2, n=2, return_tensors="pt")
    assert several.shape == (2, len(ids[0]) + 2)


def test_a_tokenizer_that_adds_a_beginning_adds_none() -> None:
    class Plain:
        bos_token = "<s>"
        chat_template = "{{ bos_token }}{{ messages[0].content }}"
        special_tokens_map = {"bos_token": "<s>"}  # noqa: RUF012
        inside = their_tokenizer.tokenizer()

        def encode(self, text: str) -> list[int]:
            found: list[int] = self.inside.encode(text)
            return found

        def decode(self, ids: list[int]) -> str:
            return self.inside.decode(ids)

    engine = tiny.engine(tokenizer=Plain())
    ids = Plain().encode("Hi")
    found = engine.chat([{"role": "user", "content": "Hi"}], max_new_tokens=5)
    assert found[0].tokens == engine.generate(ids, max_new_tokens=5)[0].tokens


def test_which_template_counts(tmp_path: Path) -> None:
    """What is given, then the tokenizer's, then the files of a folder, of which jinja is first."""
    folder = tiny_folder.write(tmp_path / "model")
    their_tokenizer.library().save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True}
    template = "{{ bos_token }}|{{ eos_token }}"
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(config | {"chat_template": "json" + template}))

    def text(engine: Any, **options: Any) -> Any:
        templates = templates_of(engine.tokenizer, engine.chat_templates)
        asked = dict(chat_template=None, template_arguments=None) | options
        return texts_of(
            [USER], templates, **asked, add_generation_prompt=None, continue_final_message=False
        )[0]

    assert text(init_inference(folder)) == "json<s>|</s>"
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    file.write_text(json.dumps(config | {"chat_template": named}))
    engine = init_inference(folder)
    assert text(engine) == "a" and text(engine, chat_template="tool_use") == "b"
    assert text(engine, template_arguments={"tools": [{}]}) == "b"
    (folder / "chat_template.jinja").write_text("jinja" + template)
    engine = init_inference(folder)
    assert text(engine) == "jinja<s>|</s>" and text(engine, chat_template="own") == "own"
    engine.tokenizer = their_tokenizer.tokenizer(chat_template="theirs{{ pad_token }}")
    assert text(engine) == "theirs<pad>"
    (folder / "chat_template.jinja").write_bytes(b"\xff{{ x }}")
    with pytest.raises(
        ValueError, match=r"^init_inference: .*chat_template.jinja is no text of UTF"
    ):
        init_inference(folder)


@pytest.mark.parametrize(
    ("messages", "options", "kind", "text"),
    [
        ("Hi", {}, TypeError, "messages are 'Hi', expected messages, or several conversations"),
        ({"role": "user"}, {}, TypeError, "messages are {'role': 'user'}, expected messages, or"),
        ([USER, [USER]], {}, TypeError, "conversation 0 is {'role': 'user', 'content': 'Hi\\n'}, "),
        ([[USER], []], {}, ValueError, "conversation 1 is empty, expected at least one message"),
        (["Hi"], {}, TypeError, "message 0 of conversation 0 is 'Hi', expected role and content"),
        ([[USER], [{"content": "a"}]], {}, TypeError, "message 0 of conversation 1 is {'content'"),
        ([{"role": 1, "content": ""}], {}, TypeError, "message 0 of conversation 0 has the role 1"),
        (
            [{"role": "user", "content": 5}],
            {},
            TypeError,
            "message 0 of conversation 0 has content",
        ),
        (
            [USER, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            {},
            ValueError,
            "message 1 of conversation 0 has a part 'image_url', expected text alone",
        ),
        (
            [{"role": "user", "x": np.zeros(2)}],
            {},
            TypeError,
            "message 0 of conversation 0 has arr",
        ),
        ([USER], dict(chat_template=5), TypeError, "chat_template is 5, expected text, or a name"),
        ([USER], dict(template_arguments=[1]), TypeError, "template_arguments is [1], expected a"),
        (
            [USER],
            dict(template_arguments={"messages": []}),
            TypeError,
            "template_arguments has 'messages', expected other names",
        ),
        (
            [USER],
            dict(add_generation_prompt=True, continue_final_message=True),
            ValueError,
            "add_generation_prompt and continue_final_message are True, expected one",
        ),
        (
            [{"role": "user"}],
            dict(continue_final_message=True),
            ValueError,
            "the last message of conversation 0 has no text, expected some",
        ),
        (
            [USER],
            dict(continue_final_message=True, chat_template="{{ messages[0].content[:3] }}"),
            ValueError,
            "the template leaves text of the last message of conversation 0 out, expected all",
        ),
        (
            [USER],
            dict(chat_template="{% if %}"),
            ValueError,
            "the chat template is none that can be",
        ),
        (
            [USER],
            dict(chat_template="{{ 1 // 0 }}"),
            ValueError,
            "the chat template fails with Zero",
        ),
    ],
)
def test_what_is_no_conversation_is_refused(
    messages: Any, options: Any, kind: Any, text: str
) -> None:
    with pytest.raises(kind) as error:
        with_template().chat(messages, **options)
    assert str(error.value).startswith(f"chat: {text}")


def test_without_tokenizer_or_template_there_is_no_chat() -> None:
    with pytest.raises(ValueError, match=r"^chat: the engine has no tokenizer, expected one"):
        tiny.engine().chat([USER])
    with pytest.raises(ValueError, match=r"^chat: the tokenizer has no chat template, exp"):
        with_template(None).chat([USER])


@pytest.mark.parametrize(
    "code",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set ns = namespace(_a=1) %}",
        "{% set ns = namespace() %}{% set ns.__html__ = messages %}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{% include '/etc/hostname' %}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages[0] | attr('__class__') }}{{ (messages[0] | attr('__class__')).x.y }}",
    ],
)
def test_a_template_is_code_of_a_stranger(code: str) -> None:
    try:
        assert text_of(code, [dict(USER)]) == ""  # what may not be seen is as if it were not there
    except ValueError as error:
        assert str(error).startswith(
            ("chat: the chat template refuses", "chat: the chat template f")
        )


def test_a_template_sees_no_objects() -> None:
    """Only copies of plain values: not what a subclass or a client's message can do."""

    class Text(str):
        def secret(self) -> str:
            return "seen"

    class Sent:
        def model_dump(self) -> dict[str, Any]:
            return {"role": "user", "content": Text("a"), "number": np.int64(3), "x": None}

    template = "{{ messages[0].content }}{{ messages[0].content.secret }}{{ messages[0].number }}"
    assert text_of(template, [Sent()]) == "a3"
    assert text_of("{{ 'x' in messages[0] }}", [Sent()]) == "False"
    deep: Any = "a"
    for _ in range(100):
        deep = [deep]
    with pytest.raises(ValueError, match="is more than 64 levels deep"):
        text_of(template, [dict(USER, deep=deep)])


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "template, message",
    [
        (ENDLESS * 9, "the chat template takes over 1 s of a processor, expected one that ends"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
            "{{ f(60) }}",
            "the chat template takes over 1 s of a processor, expected one that ends",
        ),
        (
            "{% set some = range(99999) | list %}{% for i in some if -1 in some %}{% endfor %}",
            "the chat template takes over 1 s of a processor, expected one that ends",
        ),
        (
            "{% set some = range(99999) | list %}{{ some | select('in', some) | list | length }}",
            "the chat template takes over 1 s of a processor, expected one that ends",
        ),
        (
            "{% set some = (range(99999) | list) * 40 %}{{ some | map('string') | list }}" * 9,
            "the chat template takes over 1 s of a processor, expected one that ends",
        ),
        ("{{ 9 ** 99999999 }}", "is too large"),
        ("{{ 'a' * 10 ** 10 }}", "'a' \\* 10000000000 is too large"),
        ("{{ 10 ** 10 * [1, 2] }}", "is too large"),
    ],
)
def test_a_template_that_takes_too_long_is_stopped(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        text_of(template, [{"role": "user", "content": "a"}])
    small = "{{ 2 ** 3 }}{{ '-' * 3 }}{% for i in 'ab' %}{{ loop.index }}{{ i }}{% endfor %}"
    assert text_of(small, [{"role": "user", "content": "a"}]) == "8---1a2b"
    some = "{% for i in 'abcb' if i == 'b' %}{{ loop.index }}{{ i }}{% else %}none{% endfor %}"
    assert text_of(some, [{"role": "user", "content": "a"}]) == "1b2b"
    none = some.replace("abcb", "acc")
    assert text_of(none, [{"role": "user", "content": "a"}]) == "none"
