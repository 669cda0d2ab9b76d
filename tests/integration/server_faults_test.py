#!/usr/bin/env python3
"""Overload, limits, refusals and clients that misbehave or die, against the running server.

Each class has one server with the limits that its tests need, and short times where one waits for a time to pass. What
must hold everywhere: the request that is at fault ends, and no other one changes by a token.

Usage: server_faults_test.py PROGRAM [--kills N] [unittest's options]; N clients are killed at random, 24 without it.
"""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True

import server_harness as harness  # noqa: E402
from server_harness import HOST, Server, ServerCase, Wire, chat, limit, long_stream, run_lines, wait_until  # noqa: E402

PATH = "/v1/chat/completions"
SUM = chat("What is 47 + 38?", max_tokens=24)
SMALL = ["--threads", "2", "--max-model-len", "2048", "--max-seqs", "2"]
n_kills = 24


def content(response):
    return response.json()["choices"][0]["message"]["content"]


def read_stream(wire):
    """The whole text of a chat stream on the wire, its finish reason and its last event."""
    head = wire.head()
    if head.status != 200:
        head.body = b"".join(wire.pieces(head))
        raise AssertionError(head)
    datas = [data for _, data, _ in harness.parse_events(wire.pieces(head)) if data is not None]
    text, finish = "", None
    for data in datas:
        if data != "[DONE]" and "choices" in (chunk := json.loads(data)):
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                finish = choice["finish_reason"] or finish
    return text, finish, datas[-1]


def begin_stream(server, body, **options):
    """Opens a stream and waits for its first piece."""
    wire = server.open(PATH, body, **options)
    head = wire.head()
    if head.status != 200:
        head.body = b"".join(wire.pieces(head))
        raise AssertionError(head)
    pieces = wire.pieces(head)
    next(pieces)
    return wire, pieces


class Background(threading.Thread):
    """Runs a function; result() gives what it gave or raises what it raised."""

    def __init__(self, function, *arguments, **options):
        super().__init__(daemon=True)
        self.call = function, arguments, options
        self.outcome = None
        self.start()

    def run(self):
        function, arguments, options = self.call
        try:
            self.outcome = True, function(*arguments, **options), time.monotonic()
        except BaseException as error:  # pylint: disable=broad-except
            self.outcome = False, error, time.monotonic()

    def result(self, seconds=60):
        self.join(limit(seconds))
        if self.outcome is None:
            raise AssertionError(f"{self.call[0].__name__} takes more than {seconds} s")
        is_good, value, _ = self.outcome
        if not is_good:
            raise value
        return value

    @property
    def end(self):
        return self.outcome[2]


class Overload(ServerCase):
    OPTIONS = ("--max-queue", "3")
    ENGINE_OPTIONS = SMALL

    def test_a_full_queue_refuses_and_harms_nobody(self):
        bodies = [chat(f"Story number {i}", max_tokens=30) for i in range(3)]
        alone = [content(self.server.post(PATH, body)) for body in bodies]
        running = [begin_stream(self.server, long_stream(1800)) for _ in range(2)]
        before = self.server.stats()["server"]["refused_busy"]
        queued = []
        for i, body in enumerate(bodies):
            queued.append(Background(self.server.post, PATH, body))
            wait_until(lambda n=i: self.server.engine()["n_waiting"] == n + 1, 10, "a request waits")
        for path, body in (
            (PATH, SUM),
            (PATH, dict(SUM, stream=True)),
            ("/v1/completions", {"prompt": "x", "max_tokens": 2}),
            ("/v1/responses", {"input": "x"}),
            ("/v1/messages", {"messages": SUM["messages"], "max_tokens": 2}),
        ):
            reply = self.server.post(path, dict(body, model="tiny"))
            self.assertEqual(reply.status, 429, reply)
            self.assertTrue(1 <= int(reply.headers["retry-after"]) <= 60)
            self.assertIn("application/json", reply.headers["content-type"])
            self.assertTrue(reply.error()["message"])
        self.assertEqual(reply.json()["type"], "error")
        self.assertEqual(self.server.stats()["server"]["refused_busy"] - before, 5)
        for path in ("/health", "/metrics", "/v1/models", "/stats.json"):
            self.assertEqual(self.server.get(path).status, 200)
        metrics = self.server.metrics()
        waiting = [value for name, value in metrics.items() if name.startswith("vllm:num_requests_waiting")]
        self.assertEqual(waiting, [3.0])
        for wire, _ in running:
            wire.hang_up()
        self.assertEqual([content(q.result()) for q in queued], alone)
        self.server.wait_idle()

    def test_hang_ups_while_queued(self):
        running = [begin_stream(self.server, long_stream(1800)) for _ in range(2)]
        queued = [self.server.open(PATH, long_stream(100)) for _ in range(3)]
        wait_until(lambda: self.server.engine()["n_waiting"] == 3, 10, "three wait")
        for wire in queued:
            wire.close()
        wait_until(lambda: self.server.engine()["n_waiting"] == 0, 3, "nobody waits")
        self.assertEqual(self.server.engine()["n_running"], 2)
        for wire, _ in running:
            wire.close()
        self.server.wait_idle()

    def test_lower_priority_numbers_go_first(self):
        running = [begin_stream(self.server, long_stream(1800)) for _ in range(2)]
        late = []
        for priority in (5, 1, -3):
            late.append(Background(self.server.post, PATH, dict(SUM, priority=priority)))
            wait_until(lambda: self.server.engine()["n_waiting"] == len(late), 10, "a request waits")
        running[0][0].hang_up()
        for request in late:
            self.assertEqual(request.result().status, 200)
        self.assertLess(late[2].end, late[0].end)
        self.assertLess(late[1].end, late[0].end)
        running[1][0].hang_up()
        self.server.wait_idle()


class Fairness(ServerCase):
    """First come first served and no limit would let one caller take everything."""

    OPTIONS = ("--api-key", "flood", "--api-key", "quiet")
    ENGINE_OPTIONS = SMALL
    KEY = "quiet"

    def test_a_key_that_floods_does_not_starve_another(self):
        body = chat("Tell me a story.", max_tokens=40, ignore_eos=True)
        flood = [Background(self.server.post, PATH, body, {"Authorization": "Bearer flood"}) for _ in range(40)]
        wait_until(lambda: self.server.engine()["n_waiting"] >= 30, 10, "the flood waits")
        quiet = Background(self.server.post, PATH, body)
        self.assertEqual(quiet.result().status, 200)
        for request in flood:
            self.assertEqual(request.result().status, 200)
        behind = sum(request.end > quiet.end for request in flood)
        self.assertGreater(behind, 20, "the quiet key overtakes most of the flood")


class Keys(ServerCase):
    KEY = "gamma-secret"

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.file = os.path.join(cls.folder.name, "keys")
        cls.write("alpha-secret name=alpha requests=1\nbeta-secret rate=3\n# a comment\n\ngamma-secret name=gamma\n")
        super().setUpClass()

    @classmethod
    def options(cls):
        return ("--api-key-file", cls.file)

    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        cls.folder.cleanup()

    @classmethod
    def write(cls, text):
        with open(cls.file, "w", encoding="utf-8") as file:
            file.write(text)

    def status(self, path, key=None, body=None, headers=None):
        headers = dict(headers or {})
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        with self.server.wire() as wire:
            return wire.request("POST" if body is not None else "GET", path, body, headers).response().status

    def test_what_needs_a_key(self):
        for path in ("/health", "/version", "/metrics", "/", "/stats"):
            self.assertEqual(self.status(path), 200, path)
        for path in ("/v1/models", "/v1/models/tiny", "/server_info", "/stats.json", "/v1/loads"):
            self.assertEqual(self.status(path), 401, path)
            self.assertEqual(self.status(path, "gamma-secret"), 200, path)
        for path in (PATH, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize",
                     "/detokenize", PATH + "/render"):  # fmt: skip
            self.assertEqual(self.status(path, body={}), 401, path)
            self.assertEqual(self.status(path, "gamma-secre", body={}), 401, path)
            self.assertEqual(self.status(path, "gamma-secret", body={}), 400, path)

    def test_forms_of_keys(self):
        for headers in (
            {"Authorization": "Bearer gamma-secret"},
            {"authorization": "bearer gamma-secret"},
            {"X-Api-Key": "gamma-secret"},
        ):
            self.assertEqual(self.status("/v1/models", headers=headers), 200, headers)
        for headers in (
            {"Authorization": "gamma-secret"},
            {"Authorization": "Basic gamma-secret"},
            {"Authorization": "Bearer "},
            {"Authorization": "Bearer"},
            {"Authorization": "Bearer gamma-secret x"},
            {"Authorization": "Bearer gamma-secretgamma-secret"},
            {"Authorization": "Bearer #"},
            {"Authorization": "Bearer alpha-secret name=alpha"},
            {"X-Api-Key": ""},
            {"Cookie": "key=gamma-secret"},
        ):
            self.assertEqual(self.status("/v1/models", headers=headers), 401, headers)
        self.assertEqual(self.status("/v1/models?api_key=gamma-secret"), 401)
        reply = self.server.get("/v1/models", {"Authorization": "Bearer wrong-secret"})
        self.assertNotIn(b"wrong-secret", reply.body)
        self.assertNotIn("wrong-secret", self.server.log())
        self.assertNotIn(b"gamma-secret", self.server.get("/stats.json").body + self.server.get("/server_info").body)

    def test_requests_at_once_of_one_key(self):
        alpha = {"Authorization": "Bearer alpha-secret"}
        wire, pieces = begin_stream(self.server, long_stream(1800), headers=alpha)
        reply = self.server.post(PATH, SUM, alpha)
        self.assertEqual(reply.status, 429)
        self.assertGreaterEqual(int(reply.headers["retry-after"]), 1)
        self.assertEqual(self.server.post(PATH, SUM).status, 200, "another key is not limited")
        self.assertEqual(self.server.get("/v1/models", alpha).status, 200, "nor is what makes no tokens")
        wire.hang_up()
        wait_until(lambda: self.server.post(PATH, SUM, alpha).status == 200, 5, "its place is free again")
        del pieces

    def test_requests_a_minute_of_one_key(self):
        beta = {"Authorization": "Bearer beta-secret"}
        body = dict(SUM, max_tokens=1)
        self.assertEqual([self.server.post(PATH, body, beta).status for _ in range(4)], [200, 200, 200, 429])
        reply = self.server.post("/v1/messages", dict(body, stream=True), {"X-Api-Key": "beta-secret"})
        self.assertEqual(reply.status, 429)
        self.assertTrue(1 <= int(reply.headers["retry-after"]) <= 60)
        self.assertEqual(reply.error()["type"], "rate_limit_error")
        self.assertEqual(self.server.post(PATH, body).status, 200)
        self.assertGreaterEqual(self.server.stats()["server"]["refused_key"], 2)

    def test_z_the_file_is_read_again(self):
        wire, pieces = begin_stream(self.server, long_stream(400), headers={"Authorization": "Bearer alpha-secret"})
        self.write("gamma-secret name=gamma\ndelta-secret\n")
        self.server.send_signal(signal.SIGHUP)
        wait_until(lambda: self.status("/v1/models", "delta-secret") == 200, 5, "the new key counts")
        self.assertEqual(self.status("/v1/models", "alpha-secret"), 401)
        self.assertTrue(b"".join(pieces).endswith(b"data: [DONE]\n\n"), "what runs goes on")
        wire.close()
        self.write("gamma-secret name=gamma\nepsilon-secret requests=many\n")
        self.server.send_signal(signal.SIGHUP)
        wait_until(lambda: "epsilon" not in self.server.log() and "requests" in self.server.log(), 5, "a log line")
        self.assertEqual(self.status("/v1/models", "delta-secret"), 200, "a bad file changes nothing")
        self.assertEqual(self.status("/v1/models", "epsilon-secret"), 401)


class Limits(ServerCase):
    """Sizes and times of what clients send and take."""

    OPTIONS = ("--max-body", "100000", "--read-timeout", "1.5", "--write-timeout", "1.5", "--keep-alive", "2")

    def cut_off(self):
        return self.server.stats()["server"]["cut_off"]

    def test_bodies_that_are_too_large(self):
        text = json.dumps(chat("x" * 120000)).encode()
        reply = self.server.post(PATH, text)
        self.assertEqual(reply.status, 413)
        self.assertIn("100000", reply.error()["message"])
        with self.server.wire() as wire:
            wire.request("POST", PATH, headers={"Transfer-Encoding": "chunked"})
            chunk = text[:50000]
            for _ in range(3):
                wire.send(b"%x\r\n" % len(chunk) + chunk + b"\r\n")
            wire.send(b"0\r\n\r\n")
            self.assertEqual(wire.response().status, 413)
        with self.server.wire() as wire:
            wire.request("POST", PATH, headers={"Content-Length": str(10**12), "Expect": "100-continue"})
            self.assertEqual(wire.head().status, 413, "before the body, since the client asked")
        reply = self.server.post("/v1/messages", text)
        self.assertEqual((reply.status, reply.error()["type"]), (413, "request_too_large"))
        self.assertEqual(self.server.post(PATH, SUM).status, 200)

    def test_headers_that_are_too_large(self):
        for headers in (
            {"X-Long": "x" * 200000},
            [(f"X-{i}", "y" * 100) for i in range(2000)],
            {"X" * 100000: "y"},
        ):
            with self.server.wire() as wire:
                try:
                    wire.request("GET", "/health", headers=headers)
                except (BrokenPipeError, ConnectionResetError):
                    pass
                self.assertEqual(wire.response().status, 431)
        with self.server.wire() as wire:
            try:
                wire.request("GET", "/" + "x" * 200000)
            except (BrokenPipeError, ConnectionResetError):
                pass
            self.assertIn(wire.response().status, (414, 431))
        with self.server.wire() as wire:
            wire.request("GET", "/health", headers=[(f"X-{i}", "y") for i in range(60)])
            self.assertEqual(wire.response().status, 200, "browsers send many headers too")

    def test_slow_writers_of_headers_are_cut_off(self):
        before = self.cut_off()
        with self.server.wire() as wire:
            start = time.monotonic()
            try:
                for byte in b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: " + b"y" * 1000:
                    wire.send(bytes([byte]))
                    time.sleep(0.05)
            except (BrokenPipeError, ConnectionResetError):
                pass
            self.assertLess(time.monotonic() - start, limit(10))
            self.assertTrue(wire.is_closed())
            self.assertNotIn(b" 200 ", wire.buffer)
        self.assertEqual(self.server.get("/health").status, 200)
        self.assertGreater(self.cut_off(), before)

    def test_slow_writers_of_bodies_are_cut_off(self):
        body = json.dumps(SUM).encode()
        for headers in ({"Content-Length": str(len(body))}, {"Transfer-Encoding": "chunked"}):
            with self.server.wire() as wire:
                wire.request("POST", PATH, headers=headers)
                start = time.monotonic()
                try:
                    for byte in body:
                        piece = bytes([byte])
                        wire.send(piece if "Content-Length" in headers else b"1\r\n" + piece + b"\r\n")
                        time.sleep(0.05)
                except (BrokenPipeError, ConnectionResetError):
                    pass
                self.assertLess(time.monotonic() - start, limit(10))
                self.assertTrue(wire.is_closed())
                self.assertNotIn(b" 200 ", wire.buffer)
                if wire.buffer:
                    self.assertIn(b" 408 ", wire.buffer)
        self.server.wait_idle()

    def test_silent_and_idle_connections_are_closed(self):
        with self.server.wire() as silent, self.server.wire() as idle:
            idle.request("GET", "/health")
            idle.response()
            self.assertFalse(idle.is_closed(0.5 / harness.FACTOR), "not at once")
            self.assertTrue(idle.is_closed(6))
            self.assertTrue(silent.is_closed(6))

    def test_slow_readers_are_cut_off_and_their_blocks_come_back(self):
        before = self.cut_off()
        # Much text a token, so that the system's buffers are full long before the answer ends.
        body = long_stream(1900, logprobs=True, top_logprobs=20, n=2)
        wires = [self.server.open(PATH, body, receive_buffer=4096) for _ in range(3)]
        self.server.wait_running(6)
        self.assertEqual(content(self.server.post(PATH, SUM)), run_lines([SUM])[0]["message"]["content"])
        self.server.wait_idle(40)
        # Where the engine was faster than the timeouts; the system's probes of a closed window count as progress.
        wait_until(lambda: self.cut_off() - before >= 3, 30, "all three are cut off")
        self.assertGreaterEqual(self.server.engine()["n_abort"], 6)
        for wire in wires:
            wire.close()

    def test_a_slow_reader_that_takes_something_is_served(self):
        body = chat("Tell me a story.", max_tokens=60, ignore_eos=True, stream=True)
        expected = read_stream(self.server.open(PATH, body))[0]
        wire = self.server.open(PATH, body, receive_buffer=4096)
        time.sleep(0.8)
        self.assertEqual(read_stream(wire)[0], expected)
        wire.close()


class HangUps(ServerCase):
    """The client goes; within a step its request is gone too."""

    def setUp(self):
        super().setUp()
        self.before = self.server.engine()

    def check_gone(self):
        self.server.wait_idle(2)
        after = self.server.engine()
        self.assertEqual(after["blocks_used"], self.before["blocks_used"])
        self.assertGreater(after["n_abort"], self.before["n_abort"])

    def test_while_streaming(self):
        for close in (Wire.close, Wire.hang_up):
            wire, _ = begin_stream(self.server, long_stream())
            self.assertGreater(self.server.engine()["n_running"], 0)
            close(wire)
            self.check_gone()
            self.before = self.server.engine()

    def test_while_nothing_is_written_yet(self):
        for close in (Wire.close, Wire.hang_up):
            wire = self.server.open(PATH, dict(long_stream(), stream=False))
            self.server.wait_running(1)
            close(wire)
            self.check_gone()
            self.before = self.server.engine()

    def test_in_the_prompt(self):
        ids = [(7 * i) % 5000 + 100 for i in range(2000)]
        wire = self.server.open("/v1/completions", {"model": "tiny", "prompt": ids, "max_tokens": 40, "stream": True})
        self.server.wait_running(1)
        wire.close()
        self.check_gone()

    def test_of_several_samples_and_prompts(self):
        wire = self.server.open(PATH, dict(long_stream(), n=3))
        self.server.wait_running(3)
        wire.hang_up()
        self.check_gone()
        wire = self.server.open(
            "/v1/completions", {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 1500, "ignore_eos": True}
        )
        self.server.wait_running(2)
        wire.hang_up()
        self.check_gone()

    def test_a_half_closed_connection_is_still_answered(self):
        with self.server.wire() as wire:
            wire.request("POST", PATH, SUM)
            wire.sock.shutdown(socket.SHUT_WR)
            try:
                self.assertEqual(wire.response().status, 200)
            except (EOFError, ConnectionResetError):
                pass  # a server may take it for a hang-up; nothing must stay behind then
        self.server.wait_idle(2)

    def test_other_routes_and_their_streams(self):
        for path, body in (
            ("/v1/responses", {"input": "Tell me a story.", "max_output_tokens": 1500}),
            ("/v1/messages", {"messages": SUM["messages"], "max_tokens": 1500}),
            ("/v1/completions", {"prompt": "Once", "max_tokens": 1500}),
        ):
            with self.subTest(path):
                wire = self.server.open(path, dict(body, model="tiny", stream=True, ignore_eos=True))
                head = wire.head()
                self.assertEqual(head.status, 200)
                next(wire.pieces(head))
                wire.hang_up()
                self.server.wait_idle(2)


class Many(ServerCase):
    """Connections by the thousand, and clients that are killed."""

    def test_a_thousand_idle_connections_cost_little(self):
        expected = content(self.server.post(PATH, SUM))
        memory, threads = self.server.memory()
        files = self.server.n_files()
        # Half of them have been served, the others have never said a word.
        wires = []
        for i in range(1000):
            wires.append(self.server.wire())
            if i % 2:
                wires[-1].request("GET", "/health")
                self.assertEqual(wires[-1].response().status, 200)
        wait_until(lambda: self.server.stats()["server"]["connections"] >= 1000, 5, "all are there")
        more_memory, more_threads = self.server.memory()
        # Sanitizers keep more: they come with a factor.
        self.assertLess((more_memory - memory) / 1000, (64 << 10) * harness.FACTOR, "bytes a connection")
        self.assertEqual(more_threads, threads)
        start = time.monotonic()
        self.assertEqual(content(self.server.post(PATH, SUM)), expected)
        self.assertLess(time.monotonic() - start, limit(5))
        self.assertEqual(content(wires[17].request("POST", PATH, SUM).response()), expected)
        for wire in wires:
            wire.close()
        wait_until(lambda: self.server.n_files() <= files + 4, 5, "all are gone")

    def test_killed_clients_leave_nothing(self):
        chance = random.Random(20)
        bodies = [
            (PATH, long_stream(400)),
            (PATH, dict(long_stream(400), stream=False)),
            (PATH, dict(long_stream(300), n=2)),
            ("/v1/completions", {"model": "tiny", "prompt": list(range(100, 1500)), "max_tokens": 200, "stream": True}),
            ("/v1/messages", {"model": "tiny", "messages": SUM["messages"], "max_tokens": 300, "stream": True}),
            ("/v1/responses", {"model": "tiny", "input": "Tell me a story.", "max_output_tokens": 300, "stream": True}),
        ]
        before = self.server.engine()
        files = self.server.n_files()
        left = n_kills
        while left > 0:
            batch = min(left, 6)
            left -= batch
            clients = [self.fork_client(*chance.choice(bodies)) for _ in range(batch)]
            for pid in clients:
                time.sleep(chance.uniform(0, 0.08))
                os.kill(pid, signal.SIGKILL)
            for pid in clients:
                os.waitpid(pid, 0)
            self.server.wait_idle(1)
        after = self.server.engine()
        self.assertEqual(after["blocks_used"], before["blocks_used"])
        self.assertEqual(after["n_submitted"], after["n_finished"])
        wait_until(lambda: self.server.n_files() <= files + 4, 5, "all connections are gone")
        self.assertEqual(content(self.server.post(PATH, SUM)), run_lines([SUM])[0]["message"]["content"])

    def fork_client(self, path, body):
        pid = os.fork()
        if pid:
            return pid
        try:
            wire = self.server.open(path, body)
            while wire.sock.recv(4096):
                pass
            time.sleep(1000)
        finally:
            os._exit(0)


class Ends(unittest.TestCase):
    """Signals: what ends how."""

    def test_draining_finishes_what_runs(self):
        expected = None
        for number in (signal.SIGTERM, signal.SIGINT):
            server = Server(engine=SMALL)
            with server:
                body = long_stream(250)
                if expected is None:
                    expected = read_stream(server.open(PATH, body))
                idle = server.wire()
                idle.request("GET", "/health")
                idle.response()
                wire = server.open(PATH, body)
                queued = [Background(server.post, PATH, SUM) for _ in range(3)]
                server.wait_running(2)
                wait_until(lambda: server.engine()["n_waiting"] >= 1, 5, "one waits")
                server.send_signal(number)
                wait_until(lambda: self.status(server, "/health") != 200, 5, "health tells it")
                health = server.get("/health")
                self.assertEqual(health.status, 503)
                refused = server.post(PATH, SUM)
                self.assertEqual(refused.status, 503)
                self.assertIn("retry-after", refused.headers)
                self.assertEqual(server.stats()["status"], "draining")
                self.assertEqual(read_stream(wire), expected)
                for request in queued:
                    self.assertEqual(request.result().status, 200, "what had been taken is done")
                server.wait_end(0, 10)
                self.assertTrue(idle.is_closed())

    @staticmethod
    def status(server, path):
        return server.get(path).status

    def test_a_second_signal_stops_at_once(self):
        with Server(engine=SMALL) as server:
            wire, _ = begin_stream(server, long_stream(1900))
            server.send_signal(signal.SIGTERM)
            wait_until(lambda: server.get("/health").status == 503, 5, "health tells it")
            self.assertIsNone(server.process.poll())
            server.send_signal(signal.SIGTERM)
            server.wait_end(1, 3)
            self.assertTrue(wire.is_closed())

    def test_an_idle_server_ends_at_once(self):
        with Server(engine=SMALL) as server:
            start = time.monotonic()
            server.stop()
            self.assertLess(time.monotonic() - start, limit(3))

    def test_bad_starts_are_usage_errors(self):
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as junk:
            junk.write("no certificate\n")
            junk.flush()
            for options, status in (
                (("--host", "192.0.2.1"), None),
                (("--host", "no such host"), None),
                (("--tls-cert", junk.name), 2),
                (("--tls-cert", junk.name, "--tls-key", junk.name), None),
                (("--api-key-file", "/nonexistent/keys"), None),
                (("--api-key", ""), 2),
                (("--max-body", "-1"), 2),
                (("--trace-dir", "/nonexistent/folder"), None),
                (("--model", "/nonexistent/model"), 3),
            ):
                with self.subTest(options):
                    server = Server(*options, engine=SMALL, expect_failure=True)
                    found = server.process.wait(limit(20))
                    server.check_reports()
                    self.assertIn(found, (status,) if status else (1, 2, 3, 4))
                    self.assertGreater(len(server.log()), 10, "says why")

    def test_two_servers_on_one_port(self):
        with Server(engine=SMALL) as server:
            other = Server("--port", str(server.port), engine=SMALL, expect_failure=True)
            self.assertNotEqual(other.process.wait(limit(20)), 0)
            self.assertIn(str(server.port), other.log())


class Isolation(ServerCase):
    """One request's fault never reaches another."""

    def test_failures_beside_other_requests(self):
        good = [chat(f"Story {i}", max_tokens=60, temperature=0.8, seed=i) for i in range(4)]
        alone = [content(self.server.post(PATH, body)) for body in good]
        bad = [
            chat(
                "x",
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}},
            ),
            chat("x", regex="(unclosed"),
            chat("word " * 4000),
            # The grammar allows nothing more where the request wants more: an error in the middle.
            chat("x", regex="a{1,3}", min_tokens=50, max_tokens=60),
            chat("x", max_tokens=0),
            chat("x", logit_bias={"999999": 1}),
            {"model": "tiny", "messages": "none"},
        ]
        workers = [Background(self.server.post, PATH, body) for body in good]
        statuses = []
        while any(worker.is_alive() for worker in workers) or len(statuses) < len(bad):
            statuses.append(self.server.post(PATH, bad[len(statuses) % len(bad)]).status)
        self.assertEqual([content(worker.result()) for worker in workers], alone)
        self.assertTrue(all(400 <= status < 600 for status in statuses), statuses)
        self.assertNotIn(429, statuses)
        self.server.wait_idle()

    def test_an_error_behind_the_head_is_an_event(self):
        fields = {"regex": "a{1,3}", "min_tokens": 50, "max_tokens": 60, "stream": True}
        wire = self.server.open(PATH, chat("x", **fields))
        head = wire.head()
        if head.status == 200:
            datas = [data for _, data, _ in harness.parse_events(wire.pieces(head)) if data is not None]
            errors = [json.loads(data) for data in datas if data != "[DONE]" and "error" in json.loads(data)]
            self.assertEqual(len(errors), 1, datas)
            self.assertTrue(errors[0]["error"]["message"])
        else:
            self.assertIn(head.status, (400, 500))
        wire.close()
        for path, body in (
            ("/v1/messages", {"messages": SUM["messages"], **fields}),
            ("/v1/responses", {"input": "x", "max_output_tokens": 60, **fields}),
        ):
            wire = self.server.open(path, dict(body, model="tiny"))
            head = wire.head()
            if head.status == 200:
                events = [
                    (event, data) for event, data, _ in harness.parse_events(wire.pieces(head)) if data is not None
                ]
                kinds = [event for event, _ in events]
                self.assertTrue(
                    {"error", "response.failed", "message_stop", "response.completed", "response.incomplete"}
                    & set(kinds)
                )
            wire.close()
        self.server.wait_idle()


class Http(ServerCase):
    """The protocol's corners, as careful clients use them."""

    def test_methods(self):
        for path, methods in (
            (PATH, {"POST"}),
            ("/v1/models", {"GET", "HEAD"}),
            ("/health", {"GET", "HEAD"}),
            ("/metrics", {"GET", "HEAD"}),
        ):
            for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "TRACE", "PROPFIND"):
                if method in methods:
                    continue
                reply = self.server.request(method, path, b"" if method == "POST" else None)
                self.assertEqual(reply.status, 405, (method, path, reply))
                allowed = {word.strip() for word in reply.headers["allow"].split(",")}
                self.assertEqual(allowed - {"OPTIONS"}, methods)
            reply = self.server.request("OPTIONS", path)
            self.assertIn(reply.status, (200, 204))
            self.assertLessEqual(methods, {word.strip() for word in reply.headers["allow"].split(",")})
        whole = self.server.get("/v1/models")
        head = self.server.request("HEAD", "/v1/models")
        self.assertEqual((head.status, head.body), (200, b""))
        self.assertEqual(head.headers["content-length"], str(len(whole.body)))

    def test_paths_that_are_none(self):
        for path in (
            "/v1",
            "/v1/",
            "/v1/chat",
            "/V1/models",
            "/v1/models/",
            "/v1/models/other",
            "/healthz",
            "/v1/embeddings",
        ):
            reply = self.server.get(path)
            self.assertEqual(reply.status, 404, path)
            self.assertEqual(reply.error()["type"], "invalid_request_error" if path != "x" else None)
        self.assertEqual(self.server.get("/health?x=1&y").status, 200)

    def test_every_answer_has_a_request_id(self):
        seen = set()
        for path in ("/health", "/v1/models", "/nothing", "/metrics"):
            seen.add(self.server.get(path).headers["x-request-id"])
        seen.add(self.server.post(PATH, SUM).headers["x-request-id"])
        seen.add(self.server.post(PATH, {}).headers["x-request-id"])
        self.assertEqual(len(seen), 6)
        self.assertEqual(self.server.get("/health", {"X-Request-Id": "given-1"}).headers["x-request-id"], "given-1")
        for bad in ("x" * 1000, "a b", "caf\xe9", ""):
            self.assertNotEqual(self.server.get("/health", {"X-Request-Id": bad}).headers["x-request-id"], bad)
        reply = self.server.post("/v1/messages", {}, {"X-Request-Id": 'a"b\\'})
        self.assertEqual(reply.json()["request_id"], 'a"b\\')

    def test_http_1_0(self):
        reply = self.server.request("POST", PATH, SUM, version="HTTP/1.0")
        self.assertEqual(content(reply), content(self.server.post(PATH, SUM)))
        with self.server.wire() as wire:
            wire.request("POST", PATH, dict(SUM, stream=True), version="HTTP/1.0")
            head = wire.head()
            self.assertNotIn("transfer-encoding", head.headers)
            body = b"".join(wire.pieces(head))
            self.assertTrue(body.endswith(b"data: [DONE]\n\n"))
        with self.server.wire() as wire:
            wire.request("GET", "/health", version="HTTP/1.0", host=False)
            self.assertEqual(wire.response().status, 200)

    def test_one_connection_serves_many_requests(self):
        expected = content(self.server.post(PATH, SUM))
        with self.server.wire() as wire:
            for _ in range(3):
                self.assertEqual(content(wire.request("POST", PATH, SUM).response()), expected)
                self.assertEqual(wire.request("GET", "/nothing").response().status, 404)
                self.assertEqual(wire.request("POST", PATH, b"{").response().status, 400)
                text = read_stream(wire.request("POST", PATH, dict(SUM, stream=True)))[0]
                self.assertEqual(text, expected)
            wire.request("GET", "/health", headers={"Connection": "close"})
            self.assertEqual(wire.response().status, 200)
            self.assertTrue(wire.is_closed())

    def test_pipelined_requests_are_answered_in_order(self):
        expected = content(self.server.post(PATH, SUM))
        with self.server.wire() as wire:
            wire.request("GET", "/version").request("POST", PATH, SUM).request("GET", "/nothing")
            wire.request("POST", PATH, dict(SUM, stream=True)).request("GET", "/health")
            self.assertIn("version", wire.response().json())
            self.assertEqual(content(wire.response()), expected)
            self.assertEqual(wire.response().status, 404)
            self.assertEqual(read_stream(wire)[0], expected)
            self.assertEqual(wire.response().status, 200)

    def test_a_body_that_asks_first(self):
        text = json.dumps(SUM).encode()
        with self.server.wire() as wire:
            wire.request("POST", PATH, headers={"Expect": "100-continue", "Content-Length": str(len(text))})
            self.assertEqual(wire.head().status, 100)
            self.assertEqual(wire.send(text).response().status, 200)
            wire.request("POST", "/nothing", headers={"Expect": "100-continue", "Content-Length": str(len(text))})
            reply = wire.head()
            if reply.status == 100:
                reply = wire.send(text).response()
            self.assertEqual(reply.status, 404)

    def test_bodies_in_chunks(self):
        text = json.dumps(SUM).encode()
        expected = content(self.server.post(PATH, SUM))
        for size in (1, 7, len(text)):
            with self.server.wire() as wire:
                wire.request("POST", PATH, headers={"Transfer-Encoding": "chunked"})
                for at in range(0, len(text), size):
                    piece = text[at : at + size]
                    wire.send(b"%X;name=value\r\n" % len(piece) + piece + b"\r\n")
                wire.send(b"0\r\nTrailer: x\r\n\r\n")
                self.assertEqual(content(wire.response()), expected)
                self.assertEqual(wire.request("GET", "/health").response().status, 200)

    def test_bodies_in_pieces(self):
        text = json.dumps(SUM).encode()
        with self.server.wire() as wire:
            wire.request("POST", PATH, headers={"Content-Length": str(len(text))})
            for at in range(0, len(text), 40):
                wire.send(text[at : at + 40])
                time.sleep(0.01)
            self.assertEqual(wire.response().status, 200)

    def test_metrics_that_the_documents_name_are_there(self):
        self.server.post(PATH, SUM)
        names = {re.sub(r"\{.*", "", name) for name in self.server.metrics()}
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        for page in ("docs/server.md", "docs/examples/prometheus.yml"):
            with open(os.path.join(root, page), encoding="utf-8") as file:
                for name in re.findall(r"\b(?:deepinfer|vllm):[a-z_0-9]+", file.read()):
                    self.assertTrue({name, f"{name}_bucket"} & names, f"{page}: {name}")
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
            self.assertIn(name, names)
        with self.server.wire() as wire:
            reply = wire.request("GET", "/metrics").response()
        self.assertIn("version=0.0.4", reply.headers["content-type"])
        samples = self.server.metrics()
        for name in [name for name in samples if "_bucket{" in name and 'le="+Inf"' in name]:
            base = name.split("_bucket{")[0]
            self.assertEqual(samples[name], samples[f"{base}_count"])
        self.assertGreater(samples["deepinfer:output_tokens_total"], 0)

    def test_nothing_on_disk_is_served(self):
        with self.server.wire() as wire:
            home = wire.request("GET", "/").response()
        self.assertIn("text/html", home.headers["content-type"])
        for path in (
            "/../../../../etc/passwd", "/..%2f..%2fetc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/etc/passwd", "//etc/passwd",
            "/./etc/passwd", "/stats/../../etc/passwd", "/v1/models/../../../etc/passwd", "/v1/models/%2fetc%2fpasswd",
            "/..\\..\\etc\\passwd", "/etc/passwd%00.js", "file:///etc/passwd", "/web/../server.c", "/web/%2e%2e/server.c",
            "/config.json", "/tokenizer.json", "/model-00001-of-00003.safetensors", "/.git/config", "/proc/self/environ",
            "/chat.html%00", "/index.html/../../config.json",
        ):  # fmt: skip
            reply = self.server.get(path)
            self.assertIn(reply.status, (400, 404), path)
            self.assertNotIn(b"root:", reply.body)
            self.assertLess(len(reply.body), 4096)

    def test_it_listens_on_loopback_alone(self):
        self.assertEqual(self.server.address, HOST)
        found = []
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with open(table, encoding="ascii") as file:
                for line in file.readlines()[1:]:
                    address, port = line.split()[1].split(":")
                    if int(port, 16) == self.server.port and line.split()[3] == "0A":
                        found.append(address)
        self.assertEqual(found, ["0100007F"])

    def test_no_origin_is_allowed_unless_named(self):
        reply = self.server.get("/v1/models", {"Origin": "http://evil.example"})
        self.assertNotIn("access-control-allow-origin", reply.headers)
        reply = self.server.request(
            "OPTIONS", PATH, None, {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
        )
        self.assertNotIn("access-control-allow-origin", reply.headers)


class Cors(ServerCase):
    OPTIONS = (
        "--cors-origin",
        "http://app.example",
        "--cors-origin",
        "https://other.example:8443",
        "--api-key",
        "secret",
    )
    KEY = "secret"

    def test_named_origins_alone(self):
        ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
        for origin in ("http://app.example", "https://other.example:8443"):
            with self.server.wire() as wire:
                wire.request("OPTIONS", PATH, headers={"Origin": origin, **ask})
                reply = wire.response("OPTIONS")
            self.assertIn(reply.status, (200, 204), "a preflight carries no key")
            self.assertEqual(reply.headers["access-control-allow-origin"], origin)
            self.assertIn("POST", reply.headers["access-control-allow-methods"])
            self.assertIn("authorization", reply.headers["access-control-allow-headers"].lower())
            self.assertIn("content-type", reply.headers["access-control-allow-headers"].lower())
            self.assertIn("origin", reply.headers["vary"].lower())
            reply = self.server.post(PATH, SUM, {"Origin": origin})
            self.assertEqual(reply.headers["access-control-allow-origin"], origin)
            self.assertEqual(
                self.server.post(PATH, {}, {"Origin": origin}).headers["access-control-allow-origin"], origin
            )
            with self.server.wire() as wire:
                reply = wire.request("POST", PATH, SUM, {"Origin": origin}).response()
                self.assertEqual((reply.status, reply.headers["access-control-allow-origin"]), (401, origin))
        for origin in ("https://app.example", "http://app.example.evil", "http://app.example:80", "null", "*"):
            reply = self.server.request("OPTIONS", PATH, None, {"Origin": origin, **ask})
            self.assertNotIn("access-control-allow-origin", reply.headers, origin)
            self.assertNotIn("access-control-allow-origin", self.server.get("/v1/models", {"Origin": origin}).headers)

    def test_any_origin(self):
        with Server("--cors-origin", "*", engine=SMALL) as server:
            reply = server.get("/v1/models", {"Origin": "http://whoever.example"})
            self.assertIn(reply.headers["access-control-allow-origin"], ("*", "http://whoever.example"))
            self.assertNotIn("access-control-allow-credentials", reply.headers)


@unittest.skipUnless(shutil.which("openssl"), "there is no openssl")
class Tls(unittest.TestCase):
    def test_https(self):
        with tempfile.TemporaryDirectory() as folder:
            cert, key = (os.path.join(folder, name) for name in ("cert.pem", "key.pem"))
            subprocess.run(
                ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
                 "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key,
                 "-out", cert],
                check=True,
                capture_output=True,
            )  # fmt: skip
            with Server("--tls-cert", cert, "--tls-key", key, engine=SMALL, trusted=cert) as server:
                self.assertEqual(server.scheme, "https")
                expected = content(server.post(PATH, SUM))
                self.assertEqual(read_stream(server.open(PATH, dict(SUM, stream=True)))[0], expected)
                with server.wire() as wire:
                    for _ in range(3):
                        self.assertEqual(wire.request("GET", "/health").response().status, 200)
                with Wire(server) as plain:
                    plain.request("GET", "/health")
                    self.assertTrue(plain.is_closed())
                    self.assertNotIn(b" 200 ", plain.buffer)
                wire, _ = begin_stream(server, long_stream(1800))
                wire.close()
                server.wait_idle(3)
                with open(key, encoding="ascii") as file:
                    secret = file.read().split("\n")[1]
                self.assertNotIn(secret, server.log())


class Traces(unittest.TestCase):
    def test_no_folder_no_traces(self):
        with Server(engine=SMALL) as server:
            self.assertIn(server.post("/trace", {}).status, (403, 404))

    def test_into_the_folder_and_from_loopback_alone(self):
        with tempfile.TemporaryDirectory() as folder, Server("--trace-dir", folder, engine=SMALL) as server:
            request = Background(server.post, PATH, long_stream(200))
            server.wait_running(1)
            reply = server.post("/trace", {"num_steps": 5})
            self.assertEqual(reply.status, 200, reply)
            self.assertEqual(request.result().status, 200)
            self.assertEqual(os.listdir(folder), [reply.json()["file"]])
            with open(os.path.join(folder, reply.json()["file"]), encoding="utf-8") as file:
                self.assertTrue(json.load(file))
            for field in ("dir", "path", "file", "filename", "folder", "output", "output_dir"):
                reply = server.post("/trace", {"num_steps": 5, field: "/tmp/elsewhere"})
                self.assertEqual(reply.status, 400, field)
                self.assertIn(field, reply.error()["message"])
            for body in (
                {"num_steps": -1},
                {"num_steps": "x"},
                {"num_steps": 10**9},
                {"num_steps": 1.5},
                [],
                b"{",
                b"7",
            ):
                self.assertEqual(server.post("/trace", body).status, 400, body)
            for name in ("X-Forwarded-For", "Forwarded", "X-Real-IP", "Via"):
                reply = server.post("/trace", {"num_steps": 5}, {name: "127.0.0.1"})
                self.assertEqual(reply.status, 403, name)
            # A page of another site that a browser on this machine has open is not this machine's user.
            reply = server.post("/trace", {"num_steps": 5}, {"Sec-Fetch-Site": "cross-site"})
            self.assertEqual(reply.status, 403)
            self.assertEqual(len(os.listdir(folder)), 1)

    def test_a_trace_that_nobody_waits_for_leaves_nothing(self):
        with tempfile.TemporaryDirectory() as folder, Server("--trace-dir", folder, engine=SMALL) as server:
            wire = server.open("/trace", {"num_steps": 50})
            wait_until(lambda: os.listdir(folder), 5, "a trace begins")
            self.assertEqual(server.post("/trace", {"num_steps": 5}).status, 409, "one at a time")
            wire.hang_up()
            wait_until(lambda: not os.listdir(folder), 5, "it is given up")
            self.assertEqual(server.post(PATH, SUM).status, 200)


def set_kills(text):
    global n_kills
    n_kills = int(text)


if __name__ == "__main__":
    harness.main([("--kills", set_kills)])
