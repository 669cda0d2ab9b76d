#!/usr/bin/env python3
"""Real clients, unchanged, against the running server: the openai and anthropic packages and curl.

The model that ships knows almost nothing, so calls are forced by tool_choice and forms by schemas, which masks enforce,
and answers are compared instead of judged: streamed with whole, concurrent with alone, and all of them with what
`deepinfer run --input` gives for the same body.

Usage: server_clients_test.py PROGRAM [unittest's options]. Ends with 77 where the packages are missing.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from typing import Literal

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True

import server_harness as harness  # noqa: E402
from server_harness import ServerCase, chat, long_stream, run_lines  # noqa: E402

openai, anthropic, pydantic = harness.need("openai", "anthropic", "pydantic")

CITIES = {"type": "string", "enum": ["Rome", "Oslo"]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": CITIES, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {"type": "object", "properties": {"city": CITIES}, "required": ["city"]},
    },
}
REQUIRED = {"tools": [WEATHER, CLOCK], "tool_choice": "required", "max_tokens": 300}
SUM = "What is 47 + 38?"
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PERSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}

# Bodies whose answers `run`, the whole reply and the stream must agree on.
BODIES = {
    "greedy": chat(SUM, max_tokens=24),
    "long": chat("Tell me a story about a fox.", max_tokens=120),
    "sampled": chat("Tell me a story.", max_tokens=40, temperature=0.9, top_p=0.95, seed=7),
    "filters": chat("Tell me a story.", max_tokens=40, temperature=1.2, top_k=20, min_p=0.02, seed=-3),
    "penalties": chat("Name animals.", max_tokens=40, presence_penalty=0.5, frequency_penalty=0.5),
    "thinking": chat("What is 12 + 5?", max_tokens=120, thinking={"type": "enabled"}),
    "effort": chat("What is 3 + 4?", max_tokens=120, reasoning_effort="low"),
    "stop": chat(SUM, max_tokens=24, stop=["=", "zzz"]),
    "system": {
        **chat("", max_tokens=24),
        "messages": [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "Hello"}],
    },
    "calls": chat("What is the weather in Rome?", **REQUIRED),
    "named": chat(SUM, tools=[WEATHER, CLOCK], tool_choice={"type": "function", "function": {"name": "get_time"}}),
    "schema": chat("Who?", max_tokens=60, response_format=PERSON_FORMAT),
    "choice": chat("Is the sky blue?", choice=["yes", "no, never"]),
    "regex": chat("A date", regex="2[0-9]{3}-0[1-9]"),
    "bias": chat(SUM, logit_bias={"22": -100}, max_tokens=12),
}


class Person(pydantic.BaseModel):
    name: Literal["Ann", "Bob"]
    age: Literal[1, 2, 30]


def calls_of(message):
    """(name, arguments) of a message's calls, in the order of the answer."""
    calls = message.get("tool_calls") or []
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def essence(message):
    """What must agree between two ways to the same answer."""
    return message.get("content") or "", message.get("reasoning_content"), calls_of(message)


def body_arguments(body):
    """A body as arguments of the openai client, which wants fields that it doesn't know in extra_body."""
    known = {
        "model", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop", "n", "tools",
        "tool_choice", "response_format", "logprobs", "top_logprobs", "presence_penalty", "frequency_penalty", "logit_bias",
        "reasoning_effort", "stream", "stream_options",
    }  # fmt: skip
    arguments = {name: value for name, value in body.items() if name in known}
    extra = {name: value for name, value in body.items() if name not in known}
    return {**arguments, **({"extra_body": extra} if extra else {})}


def merge_chunks(chunks):
    """The messages that a chat stream adds up to, by the rules that clients follow: {index: (message, finish)}."""
    merged = {}
    for chunk in chunks:
        for choice in chunk.choices:
            message, _ = merged.setdefault(choice.index, ({}, None))
            delta = choice.delta.model_dump(exclude_unset=True)
            for name in ("role", "content", "reasoning_content"):
                if delta.get(name) is not None:
                    message[name] = message.get(name, "") + delta[name]
            for piece in delta.get("tool_calls") or []:
                calls = message.setdefault("tool_calls", [])
                if piece["index"] == len(calls):
                    assert piece["id"] and piece["type"] == "function" and piece["function"]["name"], piece
                    calls.append({"id": piece["id"], "function": {"name": piece["function"]["name"], "arguments": ""}})
                else:
                    assert piece["index"] == len(calls) - 1 and not piece.get("id"), piece
                calls[-1]["function"]["arguments"] += piece["function"].get("arguments") or ""
            if choice.finish_reason:
                merged[choice.index] = (message, choice.finish_reason)
    return merged


class OpenAIChat(ServerCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.client = openai.OpenAI(base_url=cls.server.url + "/v1", api_key="none", max_retries=0)
        cls.alone = dict(zip(BODIES, run_lines(BODIES.values())))

    @classmethod
    def tearDownClass(cls):
        cls.client.close()
        super().tearDownClass()

    def create(self, body, **fields):
        return self.client.chat.completions.create(**body_arguments({**body, **fields}))

    def test_answers_are_those_of_run(self):
        for name, body in BODIES.items():
            with self.subTest(name):
                reply = self.create(body)
                line = self.alone[name]
                self.assertNotIn("error", line)
                choice = reply.choices[0]
                message = choice.message.model_dump(exclude_unset=True)
                self.assertEqual(essence(message), essence(line["message"]))
                self.assertEqual(message["role"], "assistant")
                expected = (
                    "tool_calls" if calls_of(message) and line["finish_reason"] == "stop" else line["finish_reason"]
                )
                self.assertEqual(choice.finish_reason, expected)
                self.assertEqual(reply.usage.prompt_tokens, line["usage"]["prompt_tokens"])
                self.assertEqual(reply.usage.completion_tokens, line["usage"]["completion_tokens"])
                self.assertEqual(reply.usage.total_tokens, reply.usage.prompt_tokens + reply.usage.completion_tokens)
                self.assertEqual((reply.object, reply.model), ("chat.completion", "tiny"))
                self.assertTrue(reply.id and reply.created > 1.6e9)

    def test_streams_add_up_to_the_same(self):
        for name, body in BODIES.items():
            with self.subTest(name):
                chunks = list(self.create(body, stream=True, stream_options={"include_usage": True}))
                merged = merge_chunks(chunks)
                self.assertEqual(list(merged), [0])
                message, finish = merged[0]
                line = self.alone[name]
                self.assertEqual(essence(message), essence(line["message"]))
                expected = (
                    "tool_calls" if calls_of(message) and line["finish_reason"] == "stop" else line["finish_reason"]
                )
                self.assertEqual(finish, expected)
                self.assertEqual(len({chunk.id for chunk in chunks}), 1)
                self.assertEqual({chunk.object for chunk in chunks}, {"chat.completion.chunk"})
                told = [chunk.usage for chunk in chunks if chunk.usage]
                self.assertEqual(len(told), 1)
                self.assertEqual(told[0].completion_tokens, line["usage"]["completion_tokens"])
                self.assertEqual(told[0].prompt_tokens, line["usage"]["prompt_tokens"])

    def test_a_stream_comes_in_pieces(self):
        chunks = list(self.create(BODIES["long"], stream=True))
        texts = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
        self.assertGreater(len(texts), 20)
        self.assertEqual(chunks[0].choices[0].delta.role, "assistant")

    def test_sixteen_at_once_are_as_each_alone(self):
        async def ask(client, name, is_stream):
            arguments = body_arguments(BODIES[name])
            if not is_stream:
                reply = await client.chat.completions.create(**arguments)
                return essence(reply.choices[0].message.model_dump(exclude_unset=True))
            chunks = [chunk async for chunk in await client.chat.completions.create(stream=True, **arguments)]
            return essence(merge_chunks(chunks)[0][0])

        async def ask_all():
            async with openai.AsyncOpenAI(base_url=self.server.url + "/v1", api_key="none", max_retries=0) as client:
                names = list(BODIES)[:8]
                tasks = [ask(client, name, is_stream) for name in names for is_stream in (False, True)]
                return names, await asyncio.gather(*tasks)

        names, answers = asyncio.run(ask_all())
        for i, name in enumerate(names):
            expected = essence(self.alone[name]["message"])
            self.assertEqual(answers[2 * i : 2 * i + 2], [expected, expected], name)

    def test_usage_tells_thinking_and_cached_tokens(self):
        reply = self.create(BODIES["thinking"])
        details = reply.usage.completion_tokens_details
        self.assertGreater(details.reasoning_tokens, 0)
        self.assertLess(details.reasoning_tokens, reply.usage.completion_tokens)
        self.assertGreaterEqual(details.accepted_prediction_tokens, 0)
        self.assertGreaterEqual(details.rejected_prediction_tokens, 0)
        self.assertGreaterEqual(reply.usage.prompt_tokens_details.cached_tokens, 0)
        body = chat("word " * 600, max_tokens=2)
        self.create(body)
        again = self.create(body)
        self.assertGreater(again.usage.prompt_tokens_details.cached_tokens, 256)

    def parallel_calls(self):
        """A request whose answer has two calls or more. So hot, every token that the grammar allows is about as likely as
        another, also that of one more call; seeds are tried until one draws it, on every machine the same."""
        for seed in range(40):
            body = chat("Rome and Oslo?", **{**REQUIRED, "temperature": 30, "seed": seed})
            choice = self.create(body).choices[0]
            if choice.finish_reason == "tool_calls" and 2 <= len(choice.message.tool_calls) <= 4:
                return body, choice.message
        raise AssertionError("no seed gives two calls")

    def test_parallel_calls_stream_as_deltas_and_results_go_back(self):
        body, message = self.parallel_calls()
        chunks = list(self.create(body, stream=True))
        streamed, finish = merge_chunks(chunks)[0]
        self.assertEqual(finish, "tool_calls")
        self.assertEqual(calls_of(streamed), calls_of(message.model_dump()))
        self.assertEqual(len({call["id"] for call in streamed["tool_calls"]}), len(streamed["tool_calls"]))
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            self.assertIn(arguments["city"], ["Rome", "Oslo"])
            if call.function.name == "get_weather":
                self.assertTrue(1 <= arguments["days"] <= 7)
        pieces = [c for c in chunks if c.choices and c.choices[0].delta.tool_calls]
        self.assertGreater(len(pieces), 2 * len(message.tool_calls), "arguments come as they are made")
        results = [{"role": "tool", "tool_call_id": c.id, "content": "sunny"} for c in message.tool_calls]
        messages = [*body["messages"], message.model_dump(exclude_none=True), *results]
        reply = self.create(body, messages=messages, tool_choice="none", temperature=0)
        self.assertFalse(reply.choices[0].message.tool_calls)
        # What a client kept of the thinking may come back under either name, or not at all.
        for name in ("reasoning_content", "reasoning"):
            messages[-1 - len(results)][name] = "hm"
            self.create(body, messages=messages, tool_choice="auto", max_tokens=4)
        with self.assertRaises(openai.BadRequestError):
            self.create(body, messages=messages[:-1])

    def test_tools_of_pydantic_models(self):
        with self.client.chat.completions.stream(
            model="tiny",
            messages=[{"role": "user", "content": "Who?"}],
            tools=[openai.pydantic_function_tool(Person)],
            tool_choice="required",
            max_tokens=200,
            temperature=0,
        ) as stream:
            kinds = [event.type for event in stream]
            message = stream.get_final_completion().choices[0].message
        self.assertIn("tool_calls.function.arguments.delta", kinds)
        self.assertIn("tool_calls.function.arguments.done", kinds)
        self.assertIsInstance(message.tool_calls[0].function.parsed_arguments, Person)

    def test_structured_output_by_the_helpers(self):
        arguments = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Who?"}],
            "temperature": 0,
            "max_tokens": 100,
        }
        reply = self.client.chat.completions.parse(response_format=Person, **arguments)
        person = reply.choices[0].message.parsed
        self.assertIsInstance(person, Person)
        with self.client.chat.completions.stream(response_format=Person, **arguments) as stream:
            deltas = "".join(event.delta for event in stream if event.type == "content.delta")
            final = stream.get_final_completion()
        self.assertEqual(final.choices[0].message.parsed, person)
        self.assertEqual(deltas, reply.choices[0].message.content)
        with self.assertRaises(openai.LengthFinishReasonError):
            self.client.chat.completions.parse(response_format=Person, **{**arguments, "max_tokens": 2})
        parsed = self.client.responses.parse(model="tiny", input="Who?", text_format=Person, temperature=0)
        self.assertIsInstance(parsed.output_parsed, Person)
        with self.client.responses.stream(model="tiny", input="Who?", text_format=Person, temperature=0) as stream:
            for _ in stream:
                pass
            self.assertEqual(stream.get_final_response().output_parsed, parsed.output_parsed)

    def test_logprobs(self):
        body = {**BODIES["greedy"], "logprobs": True, "top_logprobs": 3}
        choice = self.create(body).choices[0]
        entries = choice.logprobs.content
        line = run_lines([{**BODIES["greedy"], "logprobs": 3}])[0]
        if line["token_ids"][-1] == 1 and len(entries) == len(line["logprobs"]) - 1:
            line["logprobs"].pop()  # an end mark is no part of the content
        self.assertEqual([e.logprob for e in entries], [e["logprob"] for e in line["logprobs"]])
        self.assertEqual(bytes(b for e in entries for b in e.bytes or []).decode().removesuffix("<｜end▁of▁sentence｜>"),
                         choice.message.content)  # fmt: skip
        for entry, known in zip(entries, line["logprobs"]):
            self.assertEqual(len(entry.top_logprobs), 3)
            self.assertEqual([t.logprob for t in entry.top_logprobs], [pair[1] for pair in known["top"]])
            self.assertEqual(entry.token, entry.top_logprobs[0].token)
        streamed = [
            e
            for c in self.create(body, stream=True)
            if c.choices and c.choices[0].logprobs
            for e in c.choices[0].logprobs.content
        ]
        self.assertEqual([(e.token, e.logprob) for e in streamed], [(e.token, e.logprob) for e in entries])

    def test_n_samples_are_their_seeds(self):
        body = chat("Tell me a story.", temperature=1, seed=11, n=3)
        reply = self.create(body)
        self.assertEqual([choice.index for choice in reply.choices], [0, 1, 2])
        alone = [self.create({**body, "n": 1, "seed": 11 + j}).choices[0].message.content for j in range(3)]
        self.assertEqual([choice.message.content for choice in reply.choices], alone)
        self.assertEqual(len(set(alone)), 3)
        streamed = merge_chunks(self.create(body, stream=True))
        self.assertEqual([streamed[j][0]["content"] for j in range(3)], alone)
        self.assertEqual(
            reply.usage.completion_tokens, sum(run["usage"]["completion_tokens"] for run in run_lines([body]))
        )

    def test_seeds_name_answers(self):
        body = chat("Tell me a story.", temperature=1, seed=5)
        first, second = (self.create(body).choices[0].message.content for _ in range(2))
        other = self.create(body, seed=6).choices[0].message.content
        self.assertEqual(first, second)
        self.assertNotEqual(first, other)
        unseeded = [self.create(chat("Tell me a story.", temperature=1)).choices[0].message.content for _ in range(4)]
        self.assertGreater(len(set(unseeded)), 1)

    def test_stop_length_and_both_names_of_the_limit(self):
        whole = self.alone["greedy"]["message"]["content"]
        choice = self.create(BODIES["stop"]).choices[0]
        self.assertEqual((choice.message.content, choice.finish_reason), (whole.split("=")[0], "stop"))
        for name in ("max_tokens", "max_completion_tokens"):
            body = chat(SUM)
            del body["max_tokens"]
            reply = self.create({**body, name: 3})
            self.assertEqual(reply.choices[0].finish_reason, "length")
            self.assertEqual(reply.usage.completion_tokens, 3)

    def test_a_prefix_is_continued(self):
        whole = self.alone["long"]["message"]["content"]
        cut = whole.index(" ", len(whole) // 2)
        messages = [*BODIES["long"]["messages"], {"role": "assistant", "content": whole[:cut]}]
        body = {**BODIES["long"], "messages": messages, "continue_final_message": True}
        self.assertEqual(self.create(body).choices[0].message.content, run_lines([body])[0]["message"]["content"])

    def test_models(self):
        models = self.client.models.list().data
        self.assertEqual([model.id for model in models], ["tiny"])
        self.assertEqual(self.client.models.retrieve("tiny").object, "model")
        with self.assertRaises(openai.NotFoundError):
            self.client.models.retrieve("gpt-9")

    def test_errors_are_the_clients_own(self):
        for fields, param in (
            ({"temperature": -1}, "temperature"),
            ({"top_p": 2}, "top_p"),
            ({"n": 0}, "n"),
            ({"max_tokens": 0}, "max_tokens"),
            (
                {
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "x", "schema": {"type": "nothing"}},
                    }
                },
                None,
            ),
        ):
            for stream in (False, True):
                with self.subTest(fields=fields, stream=stream), self.assertRaises(openai.BadRequestError) as caught:
                    self.create({**BODIES["greedy"], **fields}, stream=stream)
                if param:
                    self.assertEqual(caught.exception.param, param)
                self.assertEqual(caught.exception.type, "invalid_request_error")
                self.assertTrue(caught.exception.request_id)
        with self.assertRaises(openai.NotFoundError) as caught:
            self.create(BODIES["greedy"], model="gpt-9")
        self.assertEqual(caught.exception.code, "model_not_found")
        with self.assertRaises(openai.BadRequestError):
            self.create(chat("word " * 4000))

    def test_a_client_that_stops_reading_frees_its_place(self):
        stream = self.create(long_stream())
        next(iter(stream))
        stream.close()
        self.server.wait_idle()

    def test_rendering_is_the_prompt(self):
        for name in ("greedy", "thinking", "calls"):
            body = BODIES[name]
            rendered = self.server.post("/v1/chat/completions/render", body).json()
            self.assertEqual(len(rendered["token_ids"]), self.alone[name]["usage"]["prompt_tokens"])
            text = self.server.post("/detokenize", {"model": "tiny", "tokens": rendered["token_ids"]}).json()["prompt"]
            self.assertEqual(text, rendered["prompt"])
            asked = self.server.post("/tokenize", {"model": "tiny", "messages": body["messages"]}).json()
            self.assertEqual(asked["count"], len(asked["tokens"]))
        several = self.server.post("/v1/completions/render", {"model": "tiny", "prompt": ["a b", "c"]}).json()
        self.assertEqual(len(several), 2)
        words = self.server.post("/tokenize", {"model": "tiny", "prompt": "Once upon a time"}).json()
        self.assertEqual(len(words["tokens"]), words["count"])
        self.assertEqual(words["max_model_len"], 2048)


class OpenAICompletions(ServerCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.client = openai.OpenAI(base_url=cls.server.url + "/v1", api_key="none", max_retries=0)

    @classmethod
    def tearDownClass(cls):
        cls.client.close()
        super().tearDownClass()

    def create(self, prompt, **fields):
        return self.client.completions.create(
            model="tiny", prompt=prompt, **{"max_tokens": 16, "temperature": 0, **fields}
        )

    def test_text_ids_and_several_prompts(self):
        texts = ["Once upon a time", "The fox", "One two three"]
        lines = run_lines([{"prompt": text, "max_tokens": 16, "temperature": 0} for text in texts])
        expected = [line["text"] for line in lines]
        rendered = self.server.post("/v1/completions/render", {"model": "tiny", "prompt": texts}).json()
        ids = [r["token_ids"] for r in rendered]
        self.assertEqual(self.create(texts[0]).choices[0].text, expected[0])
        self.assertEqual(self.create(ids[0]).choices[0].text, expected[0])
        for prompts in (texts, ids):
            reply = self.create(prompts)
            self.assertEqual([c.text for c in reply.choices], expected)
            self.assertEqual([c.index for c in reply.choices], [0, 1, 2])
            self.assertEqual(reply.usage.prompt_tokens, sum(line["usage"]["prompt_tokens"] for line in lines))
        self.assertEqual(reply.object, "text_completion")

    def test_n_of_several_prompts(self):
        texts = ["Once upon a time", "The fox"]
        reply = self.create(texts, n=2, temperature=1, seed=3)
        self.assertEqual([c.index for c in reply.choices], [0, 1, 2, 3])
        lines = run_lines([{"prompt": t, "max_tokens": 16, "temperature": 1, "seed": 3, "n": 2} for t in texts])
        self.assertEqual([c.text for c in reply.choices], [line["text"] for line in lines])

    def test_streams_add_up(self):
        for prompt in ("Once upon a time", ["Once upon a time", "The fox"]):
            whole = [c.text for c in self.create(prompt).choices]
            texts = [""] * len(whole)
            finish = [None] * len(whole)
            usage = None
            for chunk in self.create(prompt, stream=True, stream_options={"include_usage": True}):
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
                    finish[choice.index] = choice.finish_reason or finish[choice.index]
            self.assertEqual(texts, whole)
            self.assertNotIn(None, finish)
            self.assertEqual(usage.completion_tokens, 16 * len(whole))

    def test_echo_and_logprobs(self):
        prompt = "Once upon a time"
        plain = self.create(prompt).choices[0]
        echoed = self.create(prompt, echo=True, logprobs=2).choices[0]
        self.assertEqual(echoed.text, prompt + plain.text)
        logprobs = echoed.logprobs
        self.assertIsNone(logprobs.token_logprobs[0])
        self.assertTrue(all(value <= 0 for value in logprobs.token_logprobs[1:]))
        n = len(logprobs.tokens)
        self.assertEqual([len(logprobs.token_logprobs), len(logprobs.top_logprobs), len(logprobs.text_offset)], [n] * 3)
        self.assertEqual(logprobs.text_offset, sorted(logprobs.text_offset))
        alone = self.create(prompt, logprobs=2).choices[0].logprobs
        self.assertEqual(alone.token_logprobs, logprobs.token_logprobs[-len(alone.token_logprobs) :])
        self.assertEqual("".join(alone.tokens), plain.text)
        scored = self.create(prompt, echo=True, logprobs=1, max_tokens=1).choices[0]
        self.assertEqual(
            scored.logprobs.token_logprobs[:-1], logprobs.token_logprobs[: len(scored.logprobs.tokens) - 1]
        )

    def test_stop_and_formats(self):
        whole = self.create("Once upon a time", max_tokens=40).choices[0].text
        word = whole.split()[5]
        cut = self.create("Once upon a time", max_tokens=40, stop=word).choices[0]
        self.assertEqual((cut.text, cut.finish_reason), (whole[: whole.index(word)], "stop"))
        forced = self.create("Colours:", extra_body={"regex": " (red|green)\\."})
        self.assertIn(forced.choices[0].text, [" red.", " green."])

    def test_errors(self):
        for prompt in ([10**9], [-1], [[1, 2], [-1]], {"a": 1}, 7):
            with self.subTest(prompt), self.assertRaises(openai.BadRequestError):
                self.create(prompt)


class OpenAIResponses(ServerCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.client = openai.OpenAI(base_url=cls.server.url + "/v1", api_key="none", max_retries=0)

    @classmethod
    def tearDownClass(cls):
        cls.client.close()
        super().tearDownClass()

    def create(self, **fields):
        return self.client.responses.create(model="tiny", **{"temperature": 0, "max_output_tokens": 24, **fields})

    def test_answers_are_those_of_chat(self):
        reply = self.create(input=SUM, instructions="Be short.")
        messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": SUM}]
        line = run_lines([{"messages": messages, "max_tokens": 24, "temperature": 0}])[0]
        self.assertEqual(reply.output_text, line["message"]["content"])
        self.assertEqual((reply.status, reply.object), ("completed", "response"))
        self.assertEqual(reply.usage.input_tokens, line["usage"]["prompt_tokens"])
        self.assertEqual(reply.usage.output_tokens, line["usage"]["completion_tokens"])
        cut = self.create(input=SUM, max_output_tokens=2)
        self.assertEqual((cut.status, cut.incomplete_details.reason), ("incomplete", "max_output_tokens"))

    def test_streams_add_up(self):
        for fields in (
            {"input": SUM},
            {"input": "What is 12 + 5?", "reasoning": {"effort": "low"}, "max_output_tokens": 120},
            {"input": "Rome?", "tools": [self.tool()], "tool_choice": "required", "max_output_tokens": 200},
        ):
            with self.subTest(fields):
                whole = self.create(**fields)
                events = list(self.create(stream=True, **fields))
                self.assertEqual([e.sequence_number for e in events], list(range(len(events))))
                kinds = [e.type for e in events]
                self.assertEqual(kinds[:2], ["response.created", "response.in_progress"])
                self.assertEqual(kinds[-1], "response.completed")
                final = events[-1].response
                self.assertEqual(final.output_text, whole.output_text)
                self.assertEqual([i.type for i in final.output], [i.type for i in whole.output])
                for mine, item in zip(final.output, whole.output):
                    if item.type == "function_call":
                        self.assertEqual((mine.name, mine.arguments), (item.name, item.arguments))
                    elif item.type == "reasoning":
                        self.assertEqual(mine.content[0].text, item.content[0].text)
                text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
                self.assertEqual(text, whole.output_text)
                for added in (e for e in events if e.type == "response.output_item.added"):
                    done = [
                        e
                        for e in events
                        if e.type == "response.output_item.done" and e.output_index == added.output_index
                    ]
                    self.assertEqual(len(done), 1)

    @staticmethod
    def tool():
        function = WEATHER["function"]
        return {"type": "function", "name": function["name"], "parameters": function["parameters"], "strict": True}

    def test_calls_and_their_results(self):
        asked = [{"role": "user", "content": "Rome?"}]
        reply = self.create(input=asked, tools=[self.tool()], tool_choice="required", max_output_tokens=300)
        call = reply.output[-1]
        self.assertEqual((call.type, call.name), ("function_call", "get_weather"))
        self.assertIn(json.loads(call.arguments)["city"], ["Rome", "Oslo"])
        items = [*asked, *(item.model_dump(exclude_none=True) for item in reply.output)]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
        again = self.create(input=items, tools=[self.tool()], tool_choice="none")
        self.assertEqual(again.output[-1].type, "message")

    def test_the_helper_of_the_client(self):
        with self.client.responses.stream(model="tiny", input=SUM, temperature=0, max_output_tokens=24) as stream:
            snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
            final = stream.get_final_response()
        self.assertEqual(snapshots[-1], final.output_text)
        self.assertEqual(final.output_text, self.create(input=SUM).output_text)

    def test_async(self):
        async def ask():
            async with openai.AsyncOpenAI(base_url=self.server.url + "/v1", api_key="none", max_retries=0) as client:
                stream = await client.responses.create(
                    model="tiny", input=SUM, temperature=0, max_output_tokens=24, stream=True
                )
                return "".join([e.delta async for e in stream if e.type == "response.output_text.delta"])

        self.assertEqual(asyncio.run(ask()), self.create(input=SUM).output_text)

    def test_errors(self):
        with self.assertRaises(openai.BadRequestError):
            self.create(input=SUM, max_output_tokens=0)
        with self.assertRaises(openai.BadRequestError):
            self.create(input=[{"role": "nobody", "content": "x"}])


class Keys(ServerCase):
    """What the clients make of refusals for keys and rates."""

    OPTIONS = ("--api-key", "right", "--key-rate", "6")
    KEY = "right"

    def test_the_clients_exceptions(self):
        wrong = openai.OpenAI(base_url=self.server.url + "/v1", api_key="wrong", max_retries=0)
        with self.assertRaises(openai.AuthenticationError) as caught:
            wrong.models.list()
        self.assertTrue(caught.exception.code)
        strange = anthropic.Anthropic(base_url=self.server.url, api_key="wrong", max_retries=0)
        with self.assertRaises(anthropic.AuthenticationError) as caught:
            strange.messages.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": "x"}])
        self.assertEqual(caught.exception.body["error"]["type"], "authentication_error")
        right = openai.OpenAI(base_url=self.server.url + "/v1", api_key="right", max_retries=0)
        self.assertEqual(right.models.list().data[0].id, "tiny")
        with self.assertRaises(openai.RateLimitError) as caught:
            for _ in range(7):
                right.chat.completions.create(**chat("x", max_tokens=1))
        self.assertTrue(0 < int(caught.exception.response.headers["retry-after"]) <= 60)
        header = anthropic.Anthropic(
            base_url=self.server.url, api_key="right", max_retries=0, default_headers={"x-api-key": "right"}
        )
        with self.assertRaises(anthropic.RateLimitError) as caught:
            header.messages.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": "x"}])
        self.assertEqual(caught.exception.body["error"]["type"], "rate_limit_error")


class Anthropic(ServerCase):
    TOOL = {
        "name": "get_weather",
        "description": "The weather of a city",
        "input_schema": WEATHER["function"]["parameters"],
    }

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.client = anthropic.Anthropic(base_url=cls.server.url, api_key="none", max_retries=0)

    @classmethod
    def tearDownClass(cls):
        cls.client.close()
        super().tearDownClass()

    def arguments(self, content=SUM, **fields):
        return {
            "model": "tiny", "max_tokens": 24, "temperature": 0, "messages": [{"role": "user", "content": content}], **fields
        }  # fmt: skip

    def create(self, content=SUM, **fields):
        arguments = self.arguments(content, **fields)
        temperature = arguments.pop("temperature")
        return self.client.messages.create(extra_body={"temperature": temperature}, **arguments)

    def streamed(self, content=SUM, **fields):
        arguments = self.arguments(content, **fields)
        temperature = arguments.pop("temperature")
        with self.client.messages.stream(extra_body={"temperature": temperature}, **arguments) as stream:
            events = list(stream)
            return events, stream.get_final_message()

    def test_answers_are_those_of_chat(self):
        reply = self.create(system="Be short.")
        messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": SUM}]
        line = run_lines([{"messages": messages, "max_tokens": 24, "temperature": 0}])[0]
        self.assertEqual(reply.content[0].text, line["message"]["content"])
        self.assertEqual((reply.role, reply.type, reply.model), ("assistant", "message", "tiny"))
        self.assertEqual(reply.stop_reason, "end_turn")
        usage = reply.usage
        self.assertEqual(usage.input_tokens + (usage.cache_read_input_tokens or 0), line["usage"]["prompt_tokens"])
        self.assertEqual(usage.output_tokens, line["usage"]["completion_tokens"])
        self.assertEqual(self.create(max_tokens=2).stop_reason, "max_tokens")
        blocks = [{"type": "text", "text": "Be"}, {"type": "text", "text": "short."}]
        self.create(system=blocks)

    def test_stop_sequences(self):
        whole = self.create().content[0].text
        for reply in (self.create(stop_sequences=["zz", "="]), self.streamed(stop_sequences=["zz", "="])[1]):
            self.assertEqual((reply.stop_reason, reply.stop_sequence), ("stop_sequence", "="))
            self.assertEqual(reply.content[0].text, whole.split("=")[0])

    def test_streams_add_up(self):
        cases = {
            "text": {},
            "thinking": {
                "content": "What is 12 + 5?",
                "max_tokens": 120,
                "thinking": {"type": "enabled", "budget_tokens": 1024},
            },
            "tool": {
                "content": "Rome?",
                "max_tokens": 300,
                "tools": [self.TOOL],
                "tool_choice": {"type": "tool", "name": "get_weather"},
            },
        }
        for name, fields in cases.items():
            with self.subTest(name):
                whole = self.create(**fields)
                events, final = self.streamed(**fields)
                self.assertEqual(final.stop_reason, whole.stop_reason)
                self.assertEqual(
                    [block.model_dump(exclude={"id", "signature"}) for block in final.content],
                    [block.model_dump(exclude={"id", "signature"}) for block in whole.content],
                )
                self.assertEqual(final.usage.output_tokens, whole.usage.output_tokens)
                kinds = [event.type for event in events]
                self.assertEqual((kinds[0], kinds[-1]), ("message_start", "message_stop"))
                self.assertEqual(kinds.count("content_block_start"), kinds.count("content_block_stop"))
        self.assertEqual([block.type for block in self.create(**cases["thinking"]).content], ["thinking", "text"])

    def test_calls_and_their_results(self):
        choice = {"type": "tool", "name": "get_weather"}
        reply = self.create("Rome?", max_tokens=300, tools=[self.TOOL], tool_choice=choice)
        self.assertEqual(reply.stop_reason, "tool_use")
        call = reply.content[-1]
        self.assertEqual((call.type, call.name), ("tool_use", "get_weather"))
        self.assertIn(call.input["city"], ["Rome", "Oslo"])
        messages = [
            {"role": "user", "content": "Rome?"},
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in reply.content]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]},
        ]
        again = self.create(messages=messages, tools=[self.TOOL], tool_choice={"type": "none"})
        self.assertEqual(again.content[0].type, "text")
        with self.assertRaises(anthropic.BadRequestError):
            self.create(messages=messages[:2] + [{"role": "user", "content": "no result"}], tools=[self.TOOL])

    def test_structured_output(self):
        reply = self.client.messages.parse(
            model="tiny", max_tokens=100, messages=[{"role": "user", "content": "Who?"}], output_format=Person
        )
        self.assertIsInstance(reply.parsed_output, Person)

    def test_async(self):
        async def ask():
            async with anthropic.AsyncAnthropic(base_url=self.server.url, api_key="none", max_retries=0) as client:
                arguments = self.arguments()
                temperature = arguments.pop("temperature")
                arguments["extra_body"] = {"temperature": temperature}
                whole = await client.messages.create(**arguments)
                async with client.messages.stream(**arguments) as stream:
                    text = "".join([piece async for piece in stream.text_stream])
                return whole.content[0].text, text

        whole, text = asyncio.run(ask())
        self.assertEqual(whole, text)
        self.assertEqual(whole, self.create().content[0].text)

    def test_tokens_are_counted(self):
        arguments = {"model": "tiny", "messages": [{"role": "user", "content": "One two three"}], "system": "Hm"}
        counted = self.client.messages.count_tokens(**arguments).input_tokens
        usage = self.client.messages.create(max_tokens=1, **arguments).usage
        self.assertEqual(counted, usage.input_tokens + (usage.cache_read_input_tokens or 0))
        counted = self.client.messages.count_tokens(tools=[self.TOOL], **arguments).input_tokens
        self.assertGreater(counted, 100)

    def test_errors_are_the_clients_own(self):
        with self.assertRaises(anthropic.NotFoundError) as caught:
            self.create(model="claude-9")
        self.assertEqual(caught.exception.body["error"]["type"], "not_found_error")
        self.assertEqual(caught.exception.body["type"], "error")
        self.assertTrue(caught.exception.request_id)
        for fields in ({"max_tokens": 0}, {"messages": []}, {"temperature": -1}, {"tools": [{"name": "a b"}]}):
            with self.subTest(fields), self.assertRaises(anthropic.BadRequestError) as caught:
                self.create(**fields)
            self.assertEqual(caught.exception.body["error"]["type"], "invalid_request_error")
        with self.assertRaises(anthropic.BadRequestError):
            self.streamed(messages=[])

    def test_models(self):
        self.assertEqual([model.id for model in self.client.models.list().data], ["tiny"])


@unittest.skipUnless(shutil.which("curl"), "there is no curl")
class Curl(ServerCase):
    def curl(self, *arguments, stdin=None):
        return subprocess.run(
            ["curl", "-sS", "--max-time", "60", *arguments], input=stdin, capture_output=True, check=False
        )

    def test_a_stream_as_it_comes(self):
        body = json.dumps({**BODIES["long"], "stream": True})
        result = self.curl(
            "-N", self.server.url + "/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body
        )
        self.assertEqual(result.returncode, 0, result.stderr)
        events = [data for _, data, _ in harness.parse_events([result.stdout]) if data is not None]
        self.assertEqual(events[-1], "[DONE]")
        deltas = [json.loads(data)["choices"] for data in events[:-1]]
        text = "".join(c[0]["delta"].get("content") or "" for c in deltas if c)
        self.assertEqual(
            text, self.server.post("/v1/chat/completions", BODIES["long"]).json()["choices"][0]["message"]["content"]
        )

    def test_a_body_from_standard_input(self):
        # curl sends chunks where it can't know the length, and waits for 100 Continue where the body is long.
        body = json.dumps(chat("word " * 600, max_tokens=2)).encode()
        for extra in (
            ["-d", "@-"],
            ["-T", "-", "-X", "POST"],
            ["-d", "@-", "-H", "Expect: 100-continue"],
            ["-0", "-d", "@-"],
        ):
            with self.subTest(extra):
                result = self.curl(self.server.url + "/v1/chat/completions", *extra, stdin=body)
                self.assertEqual(json.loads(result.stdout)["usage"]["completion_tokens"], 2, result.stderr)

    def test_what_is_not_there(self):
        result = self.curl("-f", self.server.url + "/v1/nothing")
        self.assertEqual(result.returncode, 22)
        result = self.curl("-w", "%{http_code} %{content_type}", self.server.url + "/v1/nothing")
        self.assertTrue(result.stdout.endswith(b"404 application/json"), result.stdout)
        result = self.curl("-I", self.server.url + "/health")
        self.assertIn(b"HTTP/1.1 200", result.stdout)

    def test_files_of_headers_and_bodies(self):
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(BODIES["greedy"], file)
            file.flush()
            result = self.curl(self.server.url + "/v1/chat/completions", "--json", f"@{file.name}")
            self.assertIn("choices", json.loads(result.stdout))


if __name__ == "__main__":
    harness.main()
