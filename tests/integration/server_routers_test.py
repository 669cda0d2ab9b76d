#!/usr/bin/env python3
"""Two routers from the package index, unchanged, each in front of two workers of ours: vllm-router and sglang-router.

Answers through a router are those of a worker alone, streams pass, both workers get work, and when one is killed
requests go on. What the routers ask of a worker beside that (health, models, server_info, model_info, get_load, render)
they ask here by themselves.

Usage: server_routers_test.py PROGRAM [unittest's options]. A missing router is skipped by name; 77 where both are.
"""

import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True

import server_harness as harness  # noqa: E402
from server_harness import HOST, Server, chat, wait_until  # noqa: E402

# Small bodies of several kinds; through sglang-router only what its own types know can be asked.
BODIES = [
    chat("What is 47 + 38?", max_tokens=24),
    chat("Tell me a story.", max_tokens=24, temperature=1, seed=7, top_p=0.9),
    chat(
        "Rome?",
        max_tokens=200,
        tools=[
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "parameters": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
                },
            }
        ],
        tool_choice="required",
    ),
    chat(
        "Who?",
        max_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["Ann", "Bob"]}}},
    ),
]
WORKER = ["--threads", "1", "--max-model-len", "1024", "--max-seqs", "4"]


def free_port():
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return sock.getsockname()[1]


def essence(reply):
    message = reply["choices"][0]["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
    return (
        message.get("content") or "",
        calls,
        reply["choices"][0]["finish_reason"],
        reply["usage"]["completion_tokens"],
    )


class Router:
    """The router's process, with the requests of the harness."""

    trusted = None
    key = None

    def __init__(self, command, workers, *options):
        self.port = free_port()
        self.log = tempfile.TemporaryFile()
        arguments = ["--host", HOST, "--port", str(self.port), "--prometheus-port", str(free_port()), *options]
        self.process = subprocess.Popen(
            [*command, *arguments, "--worker-urls", *(worker.url for worker in workers)],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )

    wire, headers = Server.wire, Server.headers
    request, get, post = Server.request, Server.get, Server.post

    def is_ready(self):
        if self.process.poll() is not None:
            raise AssertionError(f"the router has ended: {self.text()}")
        try:
            return self.post("/v1/chat/completions", chat("x", max_tokens=1)).status == 200
        except OSError:
            return False

    def text(self):
        self.log.seek(0)
        return self.log.read()[-6000:].decode(errors="replace")

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class RouterTests:
    COMMAND = []
    KEY_OPTION = ()
    KNOWS_MESSAGES = False

    @classmethod
    def setUpClass(cls):
        cls.workers = [Server(engine=WORKER), Server(engine=WORKER)]
        cls.router = None
        try:
            cls.expected = [essence(cls.workers[0].post("/v1/chat/completions", body).json()) for body in BODIES]
            cls.router = Router(
                cls.COMMAND, cls.workers, "--policy", "round_robin", "--worker-startup-check-interval", "1"
            )
            wait_until(cls.router.is_ready, 40, "the router is ready")
        except BaseException:
            cls.tearDownClass()
            raise

    @classmethod
    def tearDownClass(cls):
        if cls.router:
            cls.router.stop()
        for worker in cls.workers:
            worker.stop()

    def counts(self, workers=None):
        return [worker.engine()["n_submitted"] for worker in workers or self.workers]

    def test_1_answers_are_those_of_a_worker_and_both_work(self):
        before = self.counts()
        for _ in range(3):
            for body, expected in zip(BODIES, self.expected):
                reply = self.router.post("/v1/chat/completions", body)
                self.assertEqual(reply.status, 200, reply)
                self.assertEqual(essence(reply.json()), expected)
        done = [after - start for start, after in zip(before, self.counts())]
        self.assertEqual(sum(done), 3 * len(BODIES))
        self.assertGreaterEqual(min(done), 2, "both workers get requests")

    def test_2_streams_pass(self):
        body = dict(BODIES[0], stream=True, stream_options={"include_usage": True})
        with self.router.wire() as wire:
            wire.request("POST", "/v1/chat/completions", body)
            head = wire.head()
            self.assertEqual(head.status, 200)
            self.assertIn("text/event-stream", head.headers["content-type"])
            events = [data for _, data, _ in harness.parse_events(wire.pieces(head)) if data is not None]
        self.assertEqual(events[-1], "[DONE]")
        chunks = [harness.json.loads(data) for data in events[:-1]]
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
        self.assertEqual(text, self.expected[0][0])
        self.assertEqual(chunks[-1]["usage"]["completion_tokens"], self.expected[0][3])

    def test_3_models_and_errors_pass(self):
        models = self.router.get("/v1/models")
        self.assertEqual([model["id"] for model in models.json()["data"]], ["tiny"], models)
        reply = self.router.post("/v1/chat/completions", chat("x", temperature=-1))
        self.assertEqual(reply.status, 400)
        reply = self.router.post(
            "/v1/completions", {"model": "tiny", "prompt": "Once", "max_tokens": 3, "temperature": 0}
        )
        self.assertEqual(reply.json()["usage"]["completion_tokens"], 3)
        reply = self.router.post("/v1/responses", {"model": "tiny", "input": "Hello", "max_output_tokens": 3})
        self.assertEqual(reply.json()["object"], "response", reply)
        reply = self.router.post("/v1/messages", {"model": "tiny", "max_tokens": 3, "messages": BODIES[0]["messages"]})
        self.assertEqual(reply.status, 200 if self.KNOWS_MESSAGES else 404)

    def test_4_load_is_told(self):
        for worker in self.workers:
            worker.wait_idle()
        loads = self.router.get("/get_loads").json()["workers"]
        self.assertEqual(len(loads), 2)
        self.check_loads([worker["load"] for worker in loads])

    def check_loads(self, loads):
        self.assertEqual(loads, [0, 0])

    def test_5_a_hang_up_reaches_the_worker(self):
        body = chat("Tell me a long story.", max_tokens=900, ignore_eos=True, stream=True)
        wire = self.router.wire().request("POST", "/v1/chat/completions", body)
        head = wire.head()
        next(wire.pieces(head))
        wire.hang_up()
        for worker in self.workers:
            worker.wait_idle()

    def test_8_keys_pass(self):
        with Server("--api-key", "secret", engine=WORKER, key="secret") as worker:
            router = Router(self.COMMAND, [worker], "--policy", "round_robin", *self.KEY_OPTION)
            try:
                router.key = "secret"
                wait_until(router.is_ready, 40, "the router is ready")
                self.assertEqual(router.get("/v1/models").json()["data"][0]["id"], "tiny")
                router.key = "wrong"
                self.assertEqual(router.post("/v1/chat/completions", BODIES[0]).status, 401)
            finally:
                router.stop()

    def test_9_a_worker_dies_and_requests_go_on(self):
        self.workers[0].kill()
        for _ in range(8):
            reply = self.router.post("/v1/chat/completions", BODIES[0])
            self.assertEqual(reply.status, 200, reply)
            self.assertEqual(essence(reply.json()), self.expected[0])


@unittest.skipUnless(harness.find_tool("vllm-router"), "vllm-router is not installed")
class VllmRouter(RouterTests, unittest.TestCase):
    COMMAND = [harness.find_tool("vllm-router")]
    KEY_OPTION = ("--api-key", "secret")
    KNOWS_MESSAGES = True

    def check_loads(self, loads):
        # This router wants an object where the other wants a list; it counts by itself where it finds none.
        self.assertTrue(all(load in (-1, 0) for load in loads), loads)

    def test_6_the_default_policy_renders_first(self):
        router = Router(self.COMMAND, self.workers)
        try:
            wait_until(router.is_ready, 40, "the router is ready")
            before = [worker.stats()["server"]["requests"] for worker in self.workers]
            for body, expected in zip(BODIES, self.expected):
                self.assertEqual(essence(router.post("/v1/chat/completions", body).json()), expected)
            after = [worker.stats()["server"]["requests"] for worker in self.workers]
            # Each worker is asked for each prompt, whoever gets the request then.
            for start, end in zip(before, after):
                self.assertGreaterEqual(end - start, len(BODIES))
            text = router.text()
            self.assertNotIn("missing_tokens", text)
            self.assertNotIn("invalid_token_ids", text)
        finally:
            router.stop()

    def test_7_a_worker_that_starts_late_is_waited_for(self):
        with Server(engine=WORKER, wait=False) as late:
            router = Router(self.COMMAND, [late, self.workers[1]], "--policy", "round_robin")
            try:
                wait_until(router.is_ready, 40, "the router is ready")
            finally:
                router.stop()


@unittest.skipUnless(importlib.util.find_spec("sglang_router"), "sglang-router is not installed")
class SglangRouter(RouterTests, unittest.TestCase):
    COMMAND = [sys.executable, "-m", "sglang_router.launch_router"]
    KEY_OPTION = ("--api-key", "secret")


if __name__ == "__main__":
    if not harness.find_tool("vllm-router") and not importlib.util.find_spec("sglang_router"):
        print(
            "skipped: neither vllm-router nor sglang-router is installed; see tests/requirements.txt", file=sys.stderr
        )
        sys.exit(harness.MISSING)
    harness.main()
