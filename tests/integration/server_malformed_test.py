#!/usr/bin/env python3
"""Requests that are wrong, made from right ones: JSON, framing and headers, by a seeded generator.

Every mutation is made so that it is known to be wrong, and must get a 4xx; the few that a lenient server may take are
marked. After each block of them a right request gets the very answer that it got at the start; at the end connections,
blocks and memory are back.

Usage: server_malformed_test.py PROGRAM [--requests N] [--seed N] [unittest's options]; 500 requests without it. A failure
names the seed and the number of the case; --only N sends that one alone.
"""

import json
import os
import random
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True

import server_harness as harness  # noqa: E402
from server_harness import ServerCase, chat  # noqa: E402

settings = {"requests": 500, "seed": 1, "only": None}

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
# Right requests: a route and a body that exercises many of its fields.
BASES = [
    (
        "/v1/chat/completions",
        {
            "model": "tiny", "messages": MESSAGES, "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
            "seed": 1, "n": 1, "stop": ["zz"], "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {"5": 1},
            "logprobs": True, "top_logprobs": 1, "tools": [TOOL], "tool_choice": "auto", "stream": False,
            "response_format": {"type": "text"}, "priority": 0,
        },
    ),
    (
        "/v1/completions",
        {
            "model": "tiny", "prompt": "Once", "max_tokens": 2, "temperature": 0, "top_p": 1, "n": 1, "logprobs": 1,
            "echo": False, "stop": "zz", "seed": 1, "stream": False,
        },
    ),
    (
        "/v1/responses",
        {
            "model": "tiny", "input": [{"role": "user", "content": "Hello"}], "instructions": "Hm", "max_output_tokens": 2,
            "temperature": 0, "top_p": 1, "reasoning": {"effort": "none"}, "text": {"format": {"type": "text"}},
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}],
            "tool_choice": "auto", "stream": False,
        },
    ),
    (
        "/v1/messages",
        {
            "model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], "system": "Hm",
            "max_tokens": 2, "temperature": 0, "stop_sequences": ["zz"], "thinking": {"type": "disabled"},
            "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {}}}],
            "tool_choice": {"type": "auto"}, "stream": False,
        },
    ),
    ("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}),
    ("/v1/chat/completions/render", {"model": "tiny", "messages": MESSAGES}),
    ("/v1/completions/render", {"model": "tiny", "prompt": ["a", "b"]}),
    ("/tokenize", {"model": "tiny", "prompt": "Once"}),
    ("/detokenize", {"model": "tiny", "tokens": [100, 200]}),
]  # fmt: skip

# Values that a field of this name can't have, wherever it stands in a body.
WRONG = {
    "model": ["other", "", 7, [], {}, True],
    "messages": ["x", 7, {}, [], [7], [None], [[]], [{}], [{"role": "user"}], [{"role": "nobody", "content": "x"}],
                 [{"role": "user", "content": 7}], [{"role": "user", "content": [{"type": "nothing"}]}],
                 [{"content": "x"}], [{"role": 7, "content": "x"}]],
    "max_tokens": [0, -1, "2", 1.5, [], {}, True, 10**30],
    "max_output_tokens": [0, -1, "2", 1.5, [], True],
    "temperature": [-1, "x", [], {}, True],
    "top_p": [0, -1, 1.5, "x", []],
    "top_k": [1.5, "x", [], {}],
    "min_p": [-1, 2, "x", []],
    "seed": [1.5, "x", [], {}],
    "n": [0, -1, 10**9, "x", 1.5],
    "stop": [7, {}, [7], [[]], True],
    "stop_sequences": [7, {}, [7], [None]],
    "presence_penalty": [3, -3, "x", []],
    "frequency_penalty": [3, -3, "x", []],
    "logit_bias": [7, "x", [], {"x": 1}, {"5": "y"}, {"-5": 1}],
    "tools": [7, "x", {}, [7], [{}], [{"type": "function"}], [{"type": "function", "function": {}}]],
    "tool_choice": [7, "nothing", [], {"type": "function", "function": {"name": "unknown"}}],
    "stream": [7, "true", [], {}],
    "response_format": [7, [], {"type": "nothing"}, {}, {"type": "json_schema"}],
    "priority": ["x", [], {}, 1.5],
    "prompt": [7, {}, True, [[[]]], [1.5], [-1], [10**9], ["a", 7]],
    "input": [7, {}, [7], [{"role": "nobody", "content": "x"}]],
    "instructions": [7, {}],
    "text": [7, [], {"format": 7}, {"format": {"type": "nothing"}}],
    "system": [7, {}, [7], [{"type": "nothing"}]],
    "tokens": ["x", {}, 7, ["x"], [1.5], [-1], [10**9]],
}  # fmt: skip


class Case:
    """Bytes to send and what may come back: a set of statuses' first digits, by default {4}."""

    def __init__(self, name, data, accepted=(4,), close=False):
        self.name = name
        self.data = data
        self.accepted = accepted
        self.close = close  # no more is sent: the client half-closes


def request(path, body, headers=(), method=b"POST", version=b"HTTP/1.1", host=b"Host: localhost\r\n", length=True):
    head = method + b" " + path.encode() + b" " + version + b"\r\n" + host + b"Content-Type: application/json\r\n"
    head += b"".join(line + b"\r\n" for line in headers)
    if length:
        head += b"Content-Length: %d\r\n" % len(body)
    return head + b"\r\n" + body


class Json:
    """Mutations of bodies."""

    def __init__(self, chance):
        self.chance = chance

    def make(self):
        path, body = self.chance.choice(BASES)
        text = json.dumps(body).encode()
        kinds = [name for name in dir(self) if name.startswith("json_")]
        name = self.chance.choice(kinds)
        mutated = getattr(self, name)(body, text)
        if mutated is None:  # nothing to mutate in this body
            name, mutated = "json_truncated", self.json_truncated(body, text)
        accepted = (4,)
        if isinstance(mutated, tuple):
            mutated, accepted = mutated
        return Case(f"{path} {name} {mutated[:300]!r}", request(path, mutated), accepted)

    def json_truncated(self, _, text):
        return text[: self.chance.randrange(len(text))]

    def json_wrong_value(self, body, _):
        names = [name for name in body if name in WRONG]
        name = self.chance.choice(names)
        return json.dumps({**body, name: self.chance.choice(WRONG[name])}).encode()

    def json_missing_field(self, body, _):
        # Without what is asked of it a request means nothing.
        needed = [name for name in ("messages", "prompt", "input", "tokens") if name in body]
        return json.dumps({name: value for name, value in body.items() if name not in needed}).encode()

    def json_deep(self, body, _):
        depth = self.chance.choice([2000, 20000, 200000])
        start, end = self.chance.choice([(b"[", b"]"), (b'{"a":', b"}")])
        middle = start * depth + (b"1" if start != b"[" else b"") + end * depth
        return json.dumps(body).encode()[:-1] + b', "x": ' + middle + b"}"

    def json_bad_utf8(self, body, _):
        junk = self.chance.choice(
            [b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xe2\x82", b"\x80", b"\xf0\x9f"]
        )
        return json.dumps({**body, "x": "here"}).encode().replace(b"here", junk)

    def json_bad_literal(self, body, _):
        literal = self.chance.choice(
            [b"NaN", b"Infinity", b"-Infinity", b"nan", b"True", b"None", b"undefined", b"01", b"1.", b".5", b"+1", b"0x10",
             b"1e", b"--1", b"'x'", b'"\\x"', b'"\\u12"', b'"\n"', b'"\x01"', b"/* x */ 1", b"1 // x", b"1e999", b"-1e999",
             b'"\\ud800"', b'"\\udc00x"', b"[1,]", b'{"a":1,}', b"{a:1}", b"[1 2]", b"\x00"]
        )  # fmt: skip
        return json.dumps(body).encode()[:-1] + b', "x": ' + literal + b"}"

    def json_trailing(self, _, text):
        return text + self.chance.choice([b"}", b"{}", b"x", b",", b"]", b"\x00", b"null", text])

    def json_other_kind(self, _, text):
        return self.chance.choice([b"", b" ", b"null", b"7", b'"x"', b"[]", b"[" + text + b"]", b"true", b"\xef\xbb\xbf", b"\x00" * 20,
                                   b"model=tiny&prompt=x", b"<xml/>", b"--boundary\r\n\r\nx"])  # fmt: skip

    def json_twice(self, body, text):
        # A name that stands twice is read differently by different readers; one that is refused or the last one taken.
        name = self.chance.choice(list(body))
        return text[:-1] + b"," + json.dumps({name: body[name]}).encode()[1:], (2, 4)

    def json_flipped_byte(self, _, text):
        # Structure only: a flipped letter within a text leaves a right request.
        at = self.chance.choice([i for i, byte in enumerate(text) if byte in b'{}[]:,"'])
        junk = self.chance.choice(b"\x00\x01\x07;<>=~^`\xfe")
        return text[:at] + bytes([junk]) + text[at + 1 :]

    def json_huge_number(self, body, _):
        digits = b"9" * self.chance.choice([40, 400, 20000])
        name = self.chance.choice(
            [n for n in ("max_tokens", "max_output_tokens", "n", "top_logprobs", "tokens", "prompt") if n in body]
            or ["x"]
        )
        if name == "x":
            return None
        value = b"[" + digits + b"]" if name in ("tokens", "prompt") else digits
        rest = {key: value for key, value in body.items() if key != name}
        return json.dumps(rest).encode()[:-1] + b', "' + name.encode() + b'": ' + value + b"}"

    def json_ignored(self, body, _):
        # Fields that nobody knows are ignored, whatever they hold.
        value = self.chance.choice([1, "x", [1], {"a": None}, None, "é" * 50, [[[[]]]]])
        return json.dumps({**body, "no_field_of_this_name": value, "metadata": {"a": "b"}}).encode(), (2,)


class Framing:
    """Mutations of how a body is framed: chunks and lengths."""

    def __init__(self, chance):
        self.chance = chance

    def make(self):
        path, body = self.chance.choice(BASES)
        text = json.dumps(body).encode()
        chunked = b"Transfer-Encoding: chunked"
        half = len(text) // 2
        good = b"%x\r\n" % half + text[:half] + b"\r\n%x\r\n" % (len(text) - half) + text[half:] + b"\r\n0\r\n\r\n"
        size = b"%x" % len(text)
        bad_size = self.chance.choice(
            [
                b"xyz",
                b"",
                b"-5",
                b"+" + size,
                b"0x" + size,
                b"f" * 17,
                b"1" + b"0" * 40,
                b"\x00",
                b"g",
                size + b"g",
                b" ",
            ]
        )
        if self.chance.random() < 0.004:
            # What is missing here is the rest of the body, so that this waits until the server has had enough.
            bad_size = b"f" * 15
            return Case(
                f"{path} a size that never comes", request(path, bad_size + b"\r\n" + text, [chunked], length=False)
            )
        cases = [
            ("bad size", [chunked], bad_size + b"\r\n" + text + b"\r\n0\r\n\r\n", (4,), False),
            ("bad second size", [chunked], b"%x\r\n" % half + text[:half] + b"\r\n" + bad_size + b"\r\n", (4,), True),
            ("no end of a chunk", [chunked], size + b"\r\n" + text + b"0\r\n\r\n", (4,), False),
            ("size too small", [chunked], b"%x\r\n" % (len(text) - 3) + text + b"\r\n0\r\n\r\n", (4,), False),
            ("not JSON in chunks", [chunked], b"5\r\n{\"a\":\r\n0\r\n\r\n", (4,), False),
            ("nothing in chunks", [chunked], b"0\r\n\r\n", (4,), False),
            ("junk behind", [chunked], good + b"\x16\x03\x01 junk\r\n\r\n", (2, 4), False),
            ("both framings", [chunked, b"Content-Length: %d" % len(text)], good, (4,), False),
            ("both framings, shorter", [b"Content-Length: 4", chunked], good, (4,), False),
            ("two lengths", [b"Content-Length: %d" % len(text), b"Content-Length: %d" % (len(text) - 1)], text, (4,), False),
            ("two lengths in one", [b"Content-Length: %d, %d" % (len(text), len(text) + 1)], text, (4,), False),
            ("length of letters", [b"Content-Length: abc"], text, (4,), False),
            ("length below zero", [b"Content-Length: -1"], text, (4,), False),
            ("length with a sign", [b"Content-Length: +%d" % len(text)], text, (4,), False),
            ("length in hex", [b"Content-Length: 0x%x" % len(text)], text, (4,), False),
            ("length with a point", [b"Content-Length: %d.0" % len(text)], text, (4,), False),
            ("length past 64 bits", [b"Content-Length: 18446744073709551626"], text, (4,), False),
            ("no length", [], b"", (4,), False),
            ("empty length", [b"Content-Length:"], text, (4,), False),
            ("unknown encoding", [b"Transfer-Encoding: gzip, chunked"], good, (4, 5), False),
            ("not quite chunked", [b"Transfer-Encoding: xchunked"], good, (4, 5), False),
            ("chunked, then not", [b"Transfer-Encoding: chunked, identity"], good, (4, 5), False),
            ("chunked twice", [chunked, chunked], good, (4, 5), False),
            ("quoted encoding", [b'Transfer-Encoding: "chunked"'], good, (4, 5), False),
            ("encoding with a tab", [b"Transfer-Encoding:\x0bchunked"], good, (4, 5), False),
        ]  # fmt: skip
        name, headers, payload, accepted, close = self.chance.choice(cases)
        return Case(
            f"{path} {name} {headers} {payload[:60]!r}", request(path, payload, headers, length=False), accepted, close
        )


class Headers:
    """Mutations of request lines and headers."""

    def __init__(self, chance):
        self.chance = chance

    def make(self):
        path, body = self.chance.choice(BASES)
        text = json.dumps(body).encode()
        p = path.encode()

        def line(first, rest=b"Host: localhost\r\n"):
            return first + b"\r\n" + rest + b"Content-Length: %d\r\n\r\n" % len(text) + text

        def header(raw, accepted=(4,)):
            return request(path, text, [raw]), accepted

        cases = [
            ("no version", (line(b"POST " + p), (4,))),
            ("no path", (line(b"POST"), (4,))),
            ("no path but version", (line(b"POST  HTTP/1.1"), (4,))),
            ("version 9.9", (line(b"POST " + p + b" HTTP/9.9"), (4, 5))),
            ("version 2", (line(b"POST " + p + b" HTTP/2.0"), (4, 5))),
            ("version of letters", (line(b"POST " + p + b" HTTP/x.y"), (4, 5))),
            ("version in lower case", (line(b"POST " + p + b" http/1.1"), (4, 5))),
            ("four words", (line(b"POST " + p + b" HTTP/1.1 x"), (4, 5))),
            ("space in the path", (line(b"POST " + p + b" x HTTP/1.1"), (4, 5))),
            ("method in lower case", (line(b"post " + p + b" HTTP/1.1"), (4, 5))),
            ("method of signs", (line(b"P{}T " + p + b" HTTP/1.1"), (4, 5))),
            ("unknown method", (line(b"BREW " + p + b" HTTP/1.1"), (4, 5))),
            ("leading space", (line(b" POST " + p + b" HTTP/1.1"), (4,))),
            ("wrong path", (line(b"POST " + p + b"x HTTP/1.1"), (4,))),
            ("path of bytes", (line(b"POST /\xff\xfe\x80 HTTP/1.1"), (4,))),
            ("path with NUL", (line(b"POST " + p + b"\x00 HTTP/1.1"), (2, 4))),  # the library sees the path end there
            ("escaped path", (line(b"POST /%00%ff%zz HTTP/1.1"), (4,))),
            ("long path", (line(b"POST /" + b"a" * 70000 + b" HTTP/1.1"), (4,))),
            ("garbage", (bytes(self.chance.randrange(256) for _ in range(200)) + b"\r\n\r\n", (4,))),
            ("TLS", (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n", (4,))),
            ("HTTP/2", (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (4, 5))),
            ("no host", (line(b"POST " + p + b" HTTP/1.1", b""), (4,))),
            ("two hosts", (line(b"POST " + p + b" HTTP/1.1", b"Host: a\r\nHost: b\r\n"), (4,))),
            ("space in a name", header(b"X Y: 1")),
            ("space before the colon", header(b"X-Y : 1")),
            ("space before the length's colon", header(b"Content-Length : 3")),
            ("no colon", header(b"X-Y")),
            ("no name", header(b": 1")),
            ("NUL in a value", header(b"X-Y: a\x00b", (2, 4))),  # likewise
            ("control in a value", header(b"X-Y: a\x01b")),
            ("carriage return in a value", header(b"X-Y: a\rb")),
            ("control in a name", header(b"X\x02Y: 1")),
            ("bytes in a name", header(b"X\xc3\xa9: 1")),
            ("folded line", header(b"X-Y: a\r\n  b", (2, 4))),  # RFC 9112 5.2 leaves it to the server
            ("folded first line", (line(b"POST " + p + b" HTTP/1.1", b" X: y\r\nHost: localhost\r\n"), (4,))),
            ("long header", header(b"X-Y: " + b"z" * 70000)),
            ("many headers", header(b"\r\n".join(b"X-%d: %s" % (i, b"z" * 40) for i in range(3000)))),
            ("wrong key, none needed", header(b"Authorization: Bearer x", (2,))),
            ("bytes in a value", header(b"X-Y: \xc3\xa9\xff", (2, 4))),
            ("line feeds alone", (line(b"POST " + p + b" HTTP/1.1").replace(b"\r\n", b"\n"), (2, 4))),
            ("empty lines in front", (b"\r\n\r\n" + line(b"POST " + p + b" HTTP/1.1"), (2, 4))),
            ("unknown expectation", header(b"Expect: miracles", (2, 4))),
            ("unknown content type", (request(path, text).replace(b"application/json", b"image/png"), (2,))),
            ("unknown content encoding", header(b"Content-Encoding: gzip", (2, 4))),
            ("upgrade", header(b"Connection: Upgrade\r\nUpgrade: websocket", (2, 4))),
            ("wrong method", (line(b"GET " + p + b" HTTP/1.1"), (4,))),
        ]  # fmt: skip
        name, (data, accepted) = self.chance.choice(cases)
        return Case(f"{path} {name}", data, accepted)


def make_case(seed, number):
    chance = random.Random(seed * 1000003 + number)
    return chance.choice([Json, Json, Framing, Headers])(chance).make()


class Malformed(ServerCase):
    # A case that a server may wait with (a body that never ends) shall not take long.
    OPTIONS = ("--read-timeout", "2", "--max-body", "1000000")

    def check_good(self):
        reply = self.server.post("/v1/chat/completions", chat("What is 47 + 38?", max_tokens=24))
        self.assertEqual(reply.status, 200, reply)
        return reply.json()["choices"][0]

    def send(self, case):
        with self.server.wire(timeout=20) as wire:
            try:
                wire.send(case.data)
                if case.close:
                    wire.sock.shutdown(harness.socket.SHUT_WR)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the answer may have come before the request was over
            try:
                return wire.response("GET")
            except (EOFError, ConnectionResetError, TimeoutError, AssertionError) as error:
                return error

    def check(self, number):
        case = make_case(settings["seed"], number)
        reply = self.send(case)
        where = f"seed {settings['seed']}, case {number}: {case.name}"
        if not isinstance(reply, harness.Response):
            return f"{where}: {type(reply).__name__}: {reply}"
        if reply.status // 100 not in case.accepted:
            return f"{where}: {reply}"
        if reply.status >= 400 and "application/json" in reply.headers.get("content-type", ""):
            error = reply.json()["error"]
            if not error["message"] or not error["type"]:
                return f"{where}: an error that says nothing: {reply}"
        return None

    def test_each_gets_its_refusal(self):
        if settings["only"] is not None:
            self.assertIsNone(self.check(settings["only"]))
            return
        expected = self.check_good()
        for number in range(20):  # what is kept for good is there before memory is measured
            self.check(number)
        before = self.server.memory()[0], self.server.n_files(), self.server.engine()["blocks_used"]
        problems = []
        for number in range(settings["requests"]):
            problem = self.check(number)
            if problem:
                problems.append(problem)
                print(problem, file=sys.stderr)
            if number % 25 == 24:
                self.assertEqual(self.check_good(), expected, f"after case {number}")
        self.assertEqual(problems[:20], [], f"{len(problems)} of {settings['requests']}")
        self.server.wait_idle()
        self.assertEqual(self.server.engine()["blocks_used"], before[2])
        harness.wait_until(lambda: self.server.n_files() <= before[1] + 2, 10, "connections are gone")
        grown = self.server.memory()[0] - before[0]
        self.assertLess(grown, 96 << 20, "resident bytes more than at the start")
        stats = self.server.engine()
        self.assertEqual(stats["n_submitted"], stats["n_finished"])

    def test_the_right_requests_are_right(self):
        for path, body in BASES:
            reply = self.server.post(path, body)
            self.assertEqual(reply.status, 200, (path, reply))


def setting(name):
    def take(text):
        settings[name] = int(text)

    return take


if __name__ == "__main__":
    harness.main([(f"--{name}", setting(name)) for name in settings])
