"""/v1/completions, as an HTTP client sees it: the engine's numbers, in OpenAI's form."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import tiny

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
from serving_here import Chatty, Client, served

from deepspeed_ext.server.words import Words


def engine(**options: Any) -> Any:
    return tiny.engine(tokenizer=Chatty(), **options)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with served(engine) as made:
        yield made


def test_prompts_in_each_form(client: Client) -> None:
    """Texts and tokens, alone and several, with n: in the order of prompts, then of samples."""
    options = dict(temperature=0.9, top_p=0.9, seed=5, max_new_tokens=12)
    of_field = dict(temperature=0.9, top_p=0.9, seed=5, max_tokens=12)
    ids = [tiny.Bytes().encode(text) for text in ("Hello", "you")]
    alone = engine()
    for prompt, given in (
        ("Hello", "Hello"),
        (ids[0], [ids[0]]),
        (["Hello", "you"], ["Hello", "you"]),
        (ids, ids),
    ):
        for n in (1, 2):
            expected = alone.generate(given, n=n, **options)
            found = client.complete(prompt=prompt, n=n, **of_field)
            assert [each["text"] for each in found["choices"]] == [each.text for each in expected]
            assert [each["index"] for each in found["choices"]] == list(range(len(expected)))
            count = len(ids[0]) + (len(ids[1]) if len(expected) > n else 0)
            usage = dict(prompt_tokens=count, completion_tokens=12 * len(expected))
            assert found["usage"] == usage | dict(total_tokens=sum(usage.values()))
    assert (found["object"], found["model"]) == ("text_completion", "m")
    assert re.fullmatch("cmpl-[0-9a-f]{24}", found["id"]) and isinstance(found["created"], int)


def test_defaults_are_those_of_openai(client: Client) -> None:
    found = client.complete(prompt="Hello", seed=3)
    expected = engine().generate("Hello", temperature=1.0, seed=3, max_new_tokens=16)[0]
    assert found["choices"][0]["text"] == expected.text
    assert found["choices"][0]["finish_reason"] == "length"
    nulls = dict.fromkeys(("n", "max_tokens", "stop", "logprobs", "suffix", "best_of", "user"))
    assert client.complete(prompt="Hello", seed=3, **nulls)["choices"] == found["choices"]


def test_stop(client: Client) -> None:
    whole = client.complete(prompt="Hello", temperature=0, max_tokens=30)["choices"][0]["text"]
    stop = whole[7:9]
    for given in (stop, ["~~~", stop]):
        one = client.complete(prompt="Hello", temperature=0, max_tokens=30, stop=given)["choices"][
            0
        ]
        assert one["text"] == whole[: whole.index(stop)] and one["finish_reason"] == "stop"
    token = tiny.Bytes().encode(whole[4])
    one = client.complete(prompt="Hello", temperature=0, max_tokens=30, stop_token_ids=token)
    assert one["choices"][0]["text"] == whole[: whole.index(whole[4])]


@pytest.mark.parametrize("n", [1, 3])
def test_streams_are_the_same_in_pieces(n: int, client: Client) -> None:
    fields = dict(prompt=["Hello", "you"], n=n, seed=2, max_tokens=9, logprobs=2)
    whole = client.complete(**fields)
    *events, done = client.events(**fields, stream_options=dict(include_usage=True))
    assert done == "[DONE]" and events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events[:-1])
    assert {event["object"] for event in events} == {"text_completion"}
    assert len({event["id"] for event in events}) == 1
    for one in whole["choices"]:
        mine = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == one["index"]]
        assert "".join(each["text"] for each in mine) == one["text"]
        reasons = [each["finish_reason"] for each in mine]
        assert reasons == [None] * (len(mine) - 1) + ["length"]
        for name, values in one["logprobs"].items():
            parts = [each["logprobs"][name] for each in mine if each["logprobs"]]
            assert [value for part in parts for value in part] == values
    assert "usage" not in client.events(**fields)[0]


def test_echo(client: Client) -> None:
    plain = client.complete(prompt="Hello", seed=2, max_tokens=4)["choices"][0]["text"]
    for prompt in ("Hello", tiny.Bytes().encode("Hello")):
        fields = dict(prompt=prompt, seed=2, echo=True)
        assert client.complete(**fields, max_tokens=4)["choices"][0]["text"] == "Hello" + plain
        events = client.events(**fields, max_tokens=4)
        texts = [event["choices"][0]["text"] for event in events[:-1]]
        assert texts[0] == "Hello" and "".join(texts) == "Hello" + plain
        nothing = client.complete(**fields, max_tokens=0)["choices"][0]
        assert nothing["text"] == "Hello" and nothing["finish_reason"] == "length"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_echo_with_logprobs_streams_what_comes_whole(
    client: Client, n: int, max_tokens: int
) -> None:
    """Of each choice the texts, tokens, log-probabilities, likeliest and offsets, put together."""
    fields: Any = dict(prompt=["Hello", [5]], echo=True, logprobs=2, seed=1)
    fields |= dict(n=n, max_tokens=max_tokens)
    *events, done = client.events(**fields)
    assert done == "[DONE]"
    for choice in client.complete(**fields)["choices"]:
        pieces = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
        for name, whole in choice["logprobs"].items():
            blocks = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
            assert [each for block in blocks for each in block[name]] == whole, name


def test_echo_with_logprobs_is_what_evaluation_tools_read() -> None:
    """Of tokens in batches; greedy or not is told by comparing floats, and right for each."""
    made = engine()
    prompts = [[i * 7 % 97 for i in range(1, n)] for n in (2, 9, 40, 130)]
    greedy = made.generate([[5, 6]], max_new_tokens=20)[0].tokens
    prompts += [[5, 6, *greedy], [5, 6, *greedy[:10], 96]]
    expected = made.score(prompts, top_logprobs=1)
    ends = made.generate(prompts, max_new_tokens=1, temperature=0)
    with served(lambda: made) as client:
        for end in (None, [ends[1].tokens[0]]):  # also where the next token would end it
            made.stop_tokens = tuple(end or ())
            fields = dict(prompt=prompts, echo=True, logprobs=1, max_tokens=1, temperature=0)
            choices = client.complete(**fields)["choices"]
            for one, tokens, score, last in zip(choices, prompts, expected, ends, strict=True):
                block = one["logprobs"]
                assert block["token_logprobs"][0] is None and block["top_logprobs"][0] is None
                assert len(block["token_logprobs"]) == len(tokens) + 1
                assert block["token_logprobs"][1:-1] == score.logprobs
                assert block["tokens"][-1] == tiny.Bytes().decode(last.tokens)
                pairs = zip(block["token_logprobs"], block["top_logprobs"], strict=True)
                found = [value == max(top.values()) for value, top in [*pairs][1:-1]]
                best = [top[0][0] for top in score.top_logprobs or []]
                assert found == [a == b for a, b in zip(tokens[1:], best, strict=True)]


class Twins:
    """A tokenizer of which several tokens have the same text."""

    def decode(self, ids: list[int]) -> str:
        return "ab"[ids[0] % 2]


def test_top_logprobs_by_text() -> None:
    """Nothing hides the token, and it hides nothing; equal ones are not both the likeliest."""
    words = Words(Twins())

    def shown(token: int, logprob: float, top: list[tuple[int, float]]) -> dict[str, float]:
        return words.block([token], [logprob], [top], 0)["top_logprobs"][0]

    assert shown(4, -3.0, [(2, -0.1), (1, -2.5)]) == {"a": -3.0, "token_id:2": -0.1, "b": -2.5}
    assert shown(2, -0.1, [(2, -0.1), (4, -2.5)]) == {"a": -0.1, "token_id:4": -2.5}
    assert shown(2, -0.1, [(1, -0.1), (2, -0.1)])["a"] == math.nextafter(-0.1, -math.inf)
    assert shown(1, -math.inf, [(2, -0.1)]) == {"b": -9999.0, "a": -0.1}
    block = words.block([1, 2], [-0.5, -math.inf], None, 3)
    assert block == {
        "tokens": ["b", "a"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": None,
        "text_offset": [3, 4],
    }


REFUSED: list[tuple[dict[str, Any], str, str | None]] = [
    (
        dict(prompt=None),
        "prompt is null, expected text, tokens, or an array of either, not em",
        "prompt",
    ),
    (dict(prompt=[]), "prompt is an array, expected text, tokens, or an array of either", "prompt"),
    (dict(prompt=""), "prompt 0 is empty, expected at least one token", "prompt"),
    (dict(prompt=["a", ""]), "prompt 1 is empty, expected at least one token", "prompt"),
    (dict(prompt=[1, 2.5]), "prompt is an array, expected text, tokens", "prompt"),
    (dict(prompt=[True]), "prompt is an array, expected text, tokens", "prompt"),
    (dict(prompt=[[97]]), "prompt 0 has token 97, expected 0 to 96", "prompt"),
    (
        dict(prompt=[1] * 250),
        "prompt 0 has 250 tokens and max_tokens is 16, expected at most 256",
        "prompt",
    ),
    (dict(prompt=["a"] * 257), "prompt has 257 prompts, expected at most 256", "prompt"),
    (dict(n=300), "prompt and n ask for 300 completions, expected at most 256", "n"),
    (dict(n=0), "n is 0, expected 1 to", "n"),
    (dict(n="2"), "n is '2', expected an int", "n"),
    (dict(max_tokens=-1), "max_tokens is -1, expected 0 to", "max_tokens"),
    (dict(max_tokens=1.5), "max_tokens is 1.5, expected an integer", "max_tokens"),
    (dict(max_tokens=True), "max_tokens is true, expected an integer", "max_tokens"),
    (dict(temperature="hot"), "temperature is 'hot', expected a float", "temperature"),
    (dict(top_p=0), "top_p is 0, expected over 0, and 1 at most", "top_p"),
    (dict(top_k=-2), "top_k is -2, expected 0 to", "top_k"),
    (dict(logprobs=21), "logprobs is 21, expected 0 to 20", "logprobs"),
    (dict(logprobs=True), "logprobs is true, expected an integer", "logprobs"),
    (dict(seed=0.5), "seed is 0.5, expected an integer", "seed"),
    (dict(stop=[""]), "stop has '', expected strings, none empty", "stop"),
    (dict(stop=[5]), "stop has 5, expected strings, none empty", "stop"),
    (dict(stop_token_ids=["a"]), "stop_token_ids is 'a', expected an int", "stop_token_ids"),
    (dict(stream="yes"), "stream is 'yes', expected true or false", "stream"),
    (dict(stream_options=dict(a=1)), "stream_options is an object, expected", "stream_options"),
    (dict(best_of=4), "best_of is not supported, expected null", "best_of"),
    (dict(suffix="x"), "suffix is not supported, expected null", "suffix"),
    (dict(tools=[{}]), "tools is not supported, expected null", "tools"),
    (
        dict(response_format=dict(type="json_object")),
        "response_format is not supp",
        "response_format",
    ),
    (dict(temprature=1), "temprature is no field that is known here", "temprature"),
    (dict(messages=[]), "messages is no field that is known here", "messages"),
    (dict(logit_bias={"a": 1}), "logit_bias has 'a', expected an object of numbers", "logit_bias"),
    (dict(logit_bias={"5": 101}), "logit_bias[5] is 101.0, expected -100 to 100", "logit_bias"),
    (dict(logit_bias={"97": 1}), "logit_bias has token 97, expected 0 to 96", "logit_bias"),
    (
        dict(stop_token_ids=[1, 97]),
        "stop_token_ids has token 97, expected 0 to 96",
        "stop_token_ids",
    ),
    (dict(logit_bias=[1]), "logit_bias is an array, expected an object of numbers", "logit_bias"),
]


@pytest.mark.parametrize(("fields", "text", "param"), REFUSED, ids=lambda v: str(v)[:30])
def test_what_is_refused(fields: Any, text: str, param: str, client: Client) -> None:
    body = {"model": "m", "prompt": "a"} | fields
    status, message, about = client.refused("/v1/completions", body)
    assert (status, about) == (400, param) and message.startswith(text), message


def test_other_models_and_paths(client: Client) -> None:
    status, message, param = client.refused("/v1/completions", dict(model="other", prompt="a"))
    assert (status, message, param) == (404, "model is 'other', expected 'm'", "model")
    assert client.refused("/v1/completions", dict(prompt="a"))[0] == 400
    assert client.refused("/v1/embeddings", dict(model="m"))[0] == 404
    assert client.refused("/", None)[0] == client.refused("/v1/completions", None)[0] == 404
    assert (
        client.ask("/v1/models")[1]["data"][0]["id"] == client.ask("/v1/models/m")[1]["id"] == "m"
    )
    assert client.refused("/v1/models/a/b", None)[0] == 404


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "the body is no JSON"),
        (b"[1]", "the body is no object"),
        (b'{"model": "m", "prompt": "a", "temperature": NaN}', "the body is no JSON: NaN"),
        (b'{"a": "\xff"}', "the body is no JSON"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "the body is no JSON"),
        (b"[" * 100_000, "the body is 100000 deep, expected at most 16"),
        (b'{"a":' * 17 + b"1" + b"}" * 17, "the body is 17 deep, expected at most 16"),
        (json.dumps(dict(model="m", prompt="\ud800")).encode(), ""),
    ],
    ids=lambda v: str(v)[:30],
)
def test_bodies_that_are_none(body: bytes, text: str, client: Client) -> None:
    status, message, _ = client.refused("/v1/completions", body)
    assert status == 400 and message.startswith(text)


def test_brackets_in_strings_are_not_deep(client: Client) -> None:
    prompt = '[{"\\' * 30
    assert client.complete(prompt=prompt, max_tokens=0, echo=True)["choices"][0]["text"] == prompt


def test_chats(client: Client) -> None:
    messages = [
        {"role": "system", "content": "Be."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "?"}],
        },
    ]
    tokens = Chatty().encode("s: Be. u: Who ? a:")
    options = dict(temperature=1.0, seed=4)
    expected = engine().generate([tokens], max_new_tokens=11, logprobs=2, **options)[0]
    fields = dict(model="m", messages=messages, max_completion_tokens=11, **options)
    fields |= dict(logprobs=True, top_logprobs=2)
    status, found = client.ask("/v1/chat/completions", fields)
    assert status == 200 and found["object"] == "chat.completion", found
    one = found["choices"][0]
    assert one["message"] == dict(role="assistant", content=expected.text, refusal=None)
    content = one["logprobs"]["content"]
    assert [each["logprob"] for each in content] == expected.logprobs
    assert bytes(byte for each in content for byte in each["bytes"]).decode() == expected.text
    assert [len(each["top_logprobs"]) for each in content] == [2] * 11
    *events, done = client.events("/v1/chat/completions", **fields)
    assert done == "[DONE]" and events[0]["object"] == "chat.completion.chunk"
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == dict(role="assistant", content="")
    assert [event["choices"][0]["finish_reason"] for event in events][-2:] == [None, "length"]
    assert "".join(delta.get("content", "") for delta in deltas) == expected.text
    blocks = [event["choices"][0]["logprobs"] for event in events]
    assert [each for block in blocks if block for each in block["content"]] == content
    rest = engine().generate([tokens], max_new_tokens=256 - len(tokens), **options)[0]
    found = client.ask("/v1/chat/completions", dict(model="m", messages=messages, **options))[1]
    assert found["choices"][0]["message"]["content"] == rest.text  # as long as there is room


@pytest.mark.parametrize(
    ("messages", "text", "param"),
    [
        (None, "messages is null, expected an array of messages", "messages"),
        ([], "messages is an array, expected an array of messages, not empty", "messages"),
        (["Hi"], "messages[0] is 'Hi', expected an object", "messages[0]"),
        ([{"content": "a"}], "messages[0].role is null, expected a string", "messages[0].role"),
        ([{"role": "user"}], "messages[0].content is null, expected text", "messages[0].content"),
        ([{"role": "nobody", "content": "a"}], "messages are refused by the template", "messages"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0].type is 'image_url', expected 'text'",
            "messages[0].content[0].type",
        ),
        (
            [{"role": "assistant", "content": "a", "tool_calls": [{}]}],
            "messages[0] has 'tool_calls', expected role and content",
            "messages[0]",
        ),
    ],
    ids=lambda v: str(v)[:30],
)
def test_messages_that_are_refused(messages: Any, text: str, param: str, client: Client) -> None:
    found = client.refused("/v1/chat/completions", dict(model="m", messages=messages))
    assert found[0] == 400 and found[1].startswith(text) and found[2] == param


def test_models_without_a_template() -> None:
    with served(lambda: tiny.engine(tokenizer=tiny.Bytes())) as client:
        fields = dict(model="m", messages=[{"role": "user", "content": "a"}])
        status, message, param = client.refused("/v1/chat/completions", fields)
        assert (status, param) == (400, "messages") and "has no chat template" in message
