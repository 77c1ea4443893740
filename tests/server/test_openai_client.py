"""The client that OpenAI publishes, synchronous and async, against a server of ours."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import tiny

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")
pytest.importorskip("openai", reason="needs the package openai")
import openai
from serving_here import Chatty, served

pytestmark = pytest.mark.long
MESSAGES: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(lambda: tiny.engine(tokenizer=Chatty()), api_key="key") as client:
        yield f"http://127.0.0.1:{client.port}/v1"


@pytest.fixture
def client(address: str) -> Any:
    return openai.OpenAI(base_url=address, api_key="key", max_retries=0)


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").owned_by == "deepspeed_ext"


def test_completions(client: Any) -> None:
    expected = tiny.engine(tokenizer=Chatty()).generate(
        ["Hello", "you"], n=2, temperature=0.8, top_p=0.9, seed=1, max_new_tokens=8, logprobs=3
    )
    fields: Any = dict(model="m", prompt=["Hello", "you"], n=2, temperature=0.8, top_p=0.9, seed=1)
    fields |= dict(max_tokens=8, logprobs=3, user="me", extra_body=dict(top_k=0, min_p=0.0))
    found = client.completions.create(**fields)
    assert [choice.text for choice in found.choices] == [one.text for one in expected]
    assert [c.logprobs.token_logprobs for c in found.choices] == [one.logprobs for one in expected]
    assert found.usage.completion_tokens == 32
    texts = ["", "", "", ""]
    counted = None
    with client.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    ) as stream:
        for chunk in stream:
            counted = chunk.usage or counted
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    assert texts == [one.text for one in expected] and counted == found.usage


def test_chats(client: Any) -> None:
    fields: Any = dict(model="m", messages=MESSAGES, max_completion_tokens=9, seed=2)
    fields |= dict(logprobs=True, top_logprobs=2)
    found = client.chat.completions.create(**fields)
    one = found.choices[0]
    assert one.message.role == "assistant" and one.finish_reason == "length"
    assert len(one.logprobs.content) == 9 and len(one.logprobs.content[0].top_logprobs) == 2
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == one.message.content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_errors_are_those_of_the_client(address: str, client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="model is 'x', expected 'm'"):
        client.completions.create(model="x", prompt="a")
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="m", prompt="a", temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=address, api_key="other").models.list()
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="m", input="a")


def test_async(address: str) -> None:
    """Many at a time, of which some are left in the middle."""
    expected = tiny.engine(tokenizer=Chatty()).generate("Hi", max_new_tokens=40, temperature=0)[0]

    async def one(client: Any, leaves: bool) -> str:
        text = ""
        async with await client.completions.create(
            model="m", prompt="Hi", max_tokens=40, temperature=0, stream=True
        ) as stream:
            async for chunk in stream:
                text += chunk.choices[0].text
                if leaves and len(text) > 3:
                    break
        return text

    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=address, api_key="key") as client:
            found = await asyncio.gather(*(one(client, i % 4 == 0) for i in range(40)))
        for i, text in enumerate(found):
            assert text == expected.text or (i % 4 == 0 and expected.text.startswith(text))

    asyncio.run(ask())
