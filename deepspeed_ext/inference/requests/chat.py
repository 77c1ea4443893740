"""Conversations, and the text that a chat template makes of them."""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed_ext.inference.model.checkpoint_folder import ModelFolder
from deepspeed_ext.inference.requests.template_sandbox import run_template

Message = Mapping[str, Any]
Conversation = Sequence[Message]
_OP = "chat"
_RESERVED = ("messages", "add_generation_prompt")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names for the same in messages


class ChatTemplates(NamedTuple):
    """What a tokenizer, or a folder, says of conversations.

    Args:
        texts: of templates by name; of a single one "default".
        variables: special tokens by the names that templates have for them, such as bos_token.
    """

    texts: Mapping[str, str]
    variables: Mapping[str, str]

    def chosen(self, asked: str | None, has_tools: bool) -> str:
        """Return the text of a template.

        Args:
            asked: a name, or a text itself; None for that of the tokenizer.
            has_tools: whether one for tools is to be taken, if there is one.

        Raises:
            ValueError: there is none.
        """
        if asked is not None:
            return self.texts.get(asked, asked)
        if has_tools and "tool_use" in self.texts:
            return self.texts["tool_use"]
        if "default" in self.texts:
            return self.texts["default"]
        has = f"templates {', '.join(self.texts)}" if self.texts else "no chat template"
        want = "chat_template to be one of them" if self.texts else "chat_template"
        raise ValueError(f"{_OP}: the tokenizer has {has}, expected {want}")


def templates_of_folder(folder: ModelFolder | None) -> ChatTemplates:
    """Return the templates and special tokens that the files of a folder have."""
    if folder is None:
        return ChatTemplates({}, {})
    fields = folder.fields_of("tokenizer_config.json")
    tokens = folder.fields_of("special_tokens_map.json") | fields
    named = {name: token for name, token in tokens.items() if name.endswith("_token")}
    extra = fields.get("extra_special_tokens")
    named = (extra if isinstance(extra, dict) else {}) | named
    texts = _of_files(folder) or _named(fields.get("chat_template"))
    return ChatTemplates(texts, _contents(named))


def templates_of(tokenizer: Any, others: ChatTemplates) -> ChatTemplates:
    """Return the templates and special tokens of a tokenizer, and others where it has none.

    Args:
        tokenizer: of which transformers' have chat_template and special_tokens_map; or None.
        others: of the folder.
    """
    texts = _named(getattr(tokenizer, "chat_template", None))
    tokens = _contents(getattr(tokenizer, "special_tokens_map", None) or {})
    return ChatTemplates(texts or others.texts, {**others.variables, **tokens})


def _of_files(folder: ModelFolder) -> dict[str, str]:
    """Return the templates that have files of their own, which count before what JSON has."""
    path = folder.path / "chat_template.jinja"
    found = {"default": _text_of(path)} if path.is_file() else {}
    others = sorted((folder.path / "additional_chat_templates").glob("*.jinja"))
    return found | {each.stem: _text_of(each) for each in others}


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"init_inference: {path} is no text of UTF-8: {error}") from None


def _named(given: Any) -> dict[str, str]:
    """Return templates by name, whichever form they have."""
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, Mapping):
        return {str(name): text for name, text in given.items() if isinstance(text, str)}
    pairs = given if isinstance(given, list) else []
    return {str(each["name"]): str(each["template"]) for each in pairs}


def _contents(tokens: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens, which may come with how they are split off."""
    texts = {
        n: each.get("content") if isinstance(each, dict) else each for n, each in tokens.items()
    }
    return {name: str(text) for name, text in texts.items() if isinstance(text, str)}


def texts_of(
    messages: Any,
    templates: ChatTemplates,
    chat_template: str | None,
    template_arguments: Any,
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
) -> list[str]:
    """Return the text of each conversation; see `InferenceEngine.chat`."""
    if add_generation_prompt and continue_final_message:
        raise ValueError(
            f"{_OP}: add_generation_prompt and continue_final_message are True, expected one"
        )
    if chat_template is not None and not isinstance(chat_template, str):
        raise TypeError(f"{_OP}: chat_template is {chat_template!r:.60}, expected text, or a name")
    arguments = _checked_arguments(template_arguments)
    text = templates.chosen(chat_template, bool(arguments.get("tools")))
    begins = not continue_final_message
    options = dict(
        add_generation_prompt=begins if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=continue_final_message,
    )
    variables = {**templates.variables, **arguments}
    some = enumerate(_conversations_of(messages))
    return [rendered(each, text, variables, number=i, **options) for i, each in some]


def rendered(
    conversation: Any,
    text: str,
    variables: Mapping[str, Any],
    *,
    number: int = 0,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """Return the text of a conversation by a template.

    Args:
        conversation: messages, in their order.
        text: of the template.
        variables: for the template.
        number: of the conversation in the call.
        add_generation_prompt: whether what begins an answer follows.
        continue_final_message: whether the text ends with that of the last message.

    Raises:
        TypeError: a message is none.
        ValueError: the template is none, refuses the messages, or loses the last one.
    """
    messages = _messages_of(conversation, number)
    mark = f"{secrets.randbits(64):020} "  # nobody can have it; some templates take its space off
    last = _mark_end(messages[-1], mark, number) if continue_final_message else ""
    asked = _plain(variables, f"{_OP}: template_arguments", 0)
    values = {"tools": None, "documents": None} | asked
    values |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
    made = run_template(text, values)
    if not continue_final_message:
        return made
    at = made.rfind(mark.strip())
    if at < 0 or last.strip() not in made[:at]:
        raise ValueError(
            f"{_OP}: the template leaves text of the last message of conversation {number} out,"
            " expected all of it, as continue_final_message is True"
        )
    return made[:at] if made[at:].startswith(mark) else made[:at].rstrip()


def _conversations_of(messages: Any) -> list[Any]:
    """Return several conversations, of what may be one.

    Raises:
        TypeError: it is neither.
    """
    some = list(messages) if isinstance(messages, Sequence) else []
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise TypeError(
            f"{_OP}: messages are {messages!r:.60}, expected messages, or several conversations"
        )
    of_lists = [isinstance(each, Sequence) and not isinstance(each, str | bytes) for each in some]
    if any(of_lists) and not all(of_lists):
        wrong = of_lists.index(False)
        raise TypeError(f"{_OP}: conversation {wrong} is {some[wrong]!r:.60}, expected messages")
    return some if any(of_lists) or not some else [some]


def _checked_arguments(given: Any) -> Mapping[str, Any]:
    """Return variables for a template, which may not be those of `chat` itself."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"{_OP}: template_arguments is {given!r:.60}, expected a dict")
    for name in given:
        if not isinstance(name, str) or name in _RESERVED:
            raise TypeError(
                f"{_OP}: template_arguments has {name!r:.60}, expected other names: messages and"
                " add_generation_prompt are arguments of chat"
            )
    return given


def _messages_of(conversation: Any, number: int) -> list[dict[str, Any]]:
    """Return messages of nothing but plain values, those that are None left out."""
    found = []
    for i, each in enumerate(conversation):
        at = f"{_OP}: message {i} of conversation {number}"
        message = _plain(each, at, 0)
        if not isinstance(message, dict) or "role" not in message:
            raise TypeError(f"{at} is {each!r:.60}, expected role and content")
        message = {name: value for name, value in message.items() if value is not None}
        if not isinstance(message["role"], str):
            raise TypeError(f"{at} has the role {message['role']!r:.60}, expected a string")
        _check_parts(message.get("content"), at)
        thought = next((message[name] for name in _REASONING if name in message), None)
        if thought is not None:
            message = {"thinking": thought} | message | {"reasoning_content": thought}
        found.append(message)
    if not found:
        raise ValueError(f"{_OP}: conversation {number} is empty, expected at least one message")
    return found


def _check_parts(content: Any, at: str) -> None:
    """Refuse what is no text, as pictures are."""
    if content is not None and not isinstance(content, str | list | tuple):
        raise TypeError(f"{at} has content {content!r:.60}, expected text, or parts of text")
    for part in content if isinstance(content, list | tuple) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            told = repr(kind) if kind not in (None, "text") else f"{part!r:.60}"
            raise ValueError(f"{at} has a part {told}, expected text alone")


def _mark_end(message: dict[str, Any], mark: str, number: int) -> str:
    """Mark where the text of a message ends, and return that text."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + mark
        return content
    parts = content if isinstance(content, list | tuple) else []
    if not parts:
        raise ValueError(
            f"{_OP}: the last message of conversation {number} has no text, expected some, as"
            " continue_final_message is True"
        )
    text: str = parts[-1]["text"]
    parts[-1]["text"] = text + mark
    return text


def _plain(value: Any, at: str, depth: int) -> Any:
    """Return a copy of nothing but Python's own values, as objects have methods.

    Raises:
        TypeError: there is something else in it.
    """
    if depth > 64:
        raise ValueError(f"{at} is more than 64 levels deep, expected fewer")
    if isinstance(value, str):
        return str.__str__(value)
    if value is None or type(value) in (int, float, bool):
        return value
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(each, at, depth + 1) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, at, depth + 1) for each in value]
    if callable(getattr(value, "model_dump", None)):  # as the messages of clients
        return _plain(value.model_dump(), at, depth + 1)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of numpy's
        return _plain(value.item(), at, depth + 1)
    raise TypeError(f"{at} has {value!r:.60}, expected text, numbers, lists and dicts")
