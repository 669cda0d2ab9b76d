"""What the tests of the running server stand on: the real program on a free port of loopback, HTTP from sockets up.

A Server is one process of `deepinfer serve`; stop() checks its exit status and that nothing on standard error is a
report of a sanitizer. Wire speaks HTTP/1.1 over one socket and is strict about what comes back (framing, chunks), so
that a client library's tolerance hides nothing. main() is the entry of each test file: the program is its first
argument, the rest goes to unittest; 77 tells that packages are missing and nothing was tested.

DEEPINFER_TEST_FACTOR multiplies every time limit, for programs that sanitizers or a busy machine make slow.
"""

import json
import os
import re
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import unittest

FACTOR = float(os.environ.get("DEEPINFER_TEST_FACTOR", "1"))
HOST = "127.0.0.1"
REPORTS = re.compile(rb"AddressSanitizer|LeakSanitizer|ThreadSanitizer|MemorySanitizer|runtime error:|assertion failed")
ENGINE = ["--threads", "2", "--max-model-len", "2048", "--max-seqs", "8"]
MISSING = 77

program = None


def main(options=()):
    """Runs the tests of the file that is executed. `options` are pairs of a flag and a function that takes its
    value, for amounts of work beyond the usual ones."""
    global program
    rest = sys.argv[1:]
    for flag, take in options:
        if flag in rest:
            at = rest.index(flag)
            take(rest[at + 1])
            del rest[at : at + 2]
    if not rest or not os.access(rest[0], os.X_OK):
        sys.exit(f"usage: {sys.argv[0]} PROGRAM [unittest's options]")
    program = os.path.abspath(rest.pop(0))
    many = 1 << 16
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < many:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(many, hard) if hard != resource.RLIM_INFINITY else many, hard))
    unittest.main(module="__main__", argv=sys.argv[:1] + rest, warnings="ignore")


def need(*modules):
    """Imports packages by name; where one is missing, ends the program as 'nothing tested'."""
    import importlib

    found = []
    for name in modules:
        try:
            found.append(importlib.import_module(name))
        except ImportError as error:
            print(f"skipped: {error}; see tests/requirements.txt", file=sys.stderr)
            sys.exit(MISSING)
    return found


def limit(seconds):
    return seconds * FACTOR


def wait_until(condition, seconds, what):
    """Returns the first true value of `condition`, which must come within `seconds`."""
    end = time.monotonic() + limit(seconds)
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {seconds} s")
        time.sleep(0.01)


class Response:
    def __init__(self, status, headers, body, version="HTTP/1.1"):
        self.status = status
        self.headers = headers  # names in lower case; of several with one name the values joined by ", "
        self.body = body
        self.version = version

    def json(self):
        return json.loads(self.body)

    def error(self):
        """The error object, in either API's form."""
        return self.json()["error"]

    def events(self):
        return list(parse_events([self.body]))

    def __repr__(self):
        return f"<{self.status} {self.headers} {self.body[:300]!r}>"


def parse_events(pieces):
    """Server-sent events out of an iterable of bytes: (event or None, data or None, comment or None) each."""
    buffer = b""
    for piece in pieces:
        buffer += piece
        while b"\n\n" in buffer:
            block, buffer = buffer.split(b"\n\n", 1)
            event = data = comment = None
            for line in block.decode("utf-8").split("\n"):
                name, _, value = line.partition(":")
                value = value.removeprefix(" ")
                if name == "":
                    comment = value
                elif name == "event":
                    event = value
                elif name == "data":
                    data = value if data is None else data + "\n" + value
                else:
                    raise AssertionError(f"a line of an event stream: {line!r}")
            yield event, data, comment
    if buffer:
        raise AssertionError(f"an event stream ends within an event: {buffer!r}")


class Wire:
    """One connection. What is read is checked: a status line, header lines, a body framed as the head says."""

    def __init__(self, server, timeout=20, receive_buffer=None, trusted=None):
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(limit(timeout))
        self.sock.connect((HOST, server.port))
        if trusted:
            context = ssl.create_default_context(cafile=trusted)
            self.sock = context.wrap_socket(self.sock, server_hostname="localhost")
        self.buffer = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.sock.close()

    def hang_up(self):
        """Closes with a reset, as a client does that dies with unread data."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.sock.close()

    def send(self, data):
        self.sock.sendall(data)
        return self

    def request(self, method, path, body=None, headers=(), version="HTTP/1.1", host=True):
        """Sends a request. `body` is bytes or an object for JSON; `headers` a dict or pairs."""
        pairs = list(headers.items() if isinstance(headers, dict) else headers)
        names = {name.lower() for name, _ in pairs}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            if "content-type" not in names:
                pairs.append(("Content-Type", "application/json"))
        if body is not None and not names & {"content-length", "transfer-encoding"}:
            pairs.append(("Content-Length", str(len(body))))
        if host and "host" not in names:
            pairs.insert(0, ("Host", "localhost"))
        head = f"{method} {path} {version}\r\n" + "".join(f"{name}: {value}\r\n" for name, value in pairs) + "\r\n"
        return self.send(head.encode("latin-1") + (body or b""))

    def fill(self):
        data = self.sock.recv(1 << 16)
        if not data:
            raise EOFError("the server closed the connection")
        self.buffer += data

    def line(self):
        while b"\r\n" not in self.buffer:
            if b"\n" in self.buffer:
                raise AssertionError(f"a bare line feed in {self.buffer[:200]!r}")
            self.fill()
        line, self.buffer = self.buffer.split(b"\r\n", 1)
        return line

    def take(self, n):
        while len(self.buffer) < n:
            self.fill()
        data, self.buffer = self.buffer[:n], self.buffer[n:]
        return data

    def head(self):
        """Reads a status line and headers: a Response without a body."""
        match = re.fullmatch(rb"(HTTP/1\.[01]) (\d{3}) ?([^\r\n]*)", self.line())
        if not match:
            raise AssertionError("no status line")
        headers = {}
        while line := self.line():
            name, colon, value = line.partition(b":")
            if not colon or not re.fullmatch(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
                raise AssertionError(f"a header line {line!r}")
            name = name.decode().lower()
            value = value.strip().decode("latin-1")
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        return Response(int(match[2]), headers, b"", match[1].decode())

    def pieces(self, head, method="GET"):
        """The body of `head` as it comes."""
        if method == "HEAD" or head.status in (204, 304) or head.status < 200:
            return
        if "chunked" in head.headers.get("transfer-encoding", ""):
            if "content-length" in head.headers:
                raise AssertionError("a length beside chunks")
            while True:
                line = self.line()
                if not re.fullmatch(rb"[0-9A-Fa-f]+", line):
                    raise AssertionError(f"a chunk's size {line!r}")
                size = int(line, 16)
                data = self.take(size)
                end = self.line()
                if end:
                    raise AssertionError(f"behind a chunk: {end!r}")
                if size == 0:
                    return
                yield data
        elif "content-length" in head.headers:
            yield self.take(int(head.headers["content-length"]))
        else:
            while True:
                if self.buffer:
                    data, self.buffer = self.buffer, b""
                    yield data
                try:
                    self.fill()
                except EOFError:
                    return

    def response(self, method="GET"):
        """Reads one whole response; interim ones (100) are dropped."""
        head = self.head()
        while head.status < 200:
            head = self.head()
        head.body = b"".join(self.pieces(head, method))
        return head

    def is_closed(self, seconds=10):
        """Whether the server ends the connection within some time, with nothing more to say."""
        self.sock.settimeout(limit(seconds))
        try:
            while True:
                data = self.sock.recv(1 << 16)
                if not data:
                    return True
                self.buffer += data
        except (ConnectionResetError, BrokenPipeError):
            return True
        except (TimeoutError, ssl.SSLError):
            return False


class Server:
    """One `deepinfer serve`. Used as a context it must end well; `key` is sent with every request of the helpers."""

    def __init__(self, *options, engine=ENGINE, key=None, trusted=None, env=None, wait=True, expect_failure=False):
        self.key = key
        self.trusted = trusted
        self.stderr = tempfile.TemporaryFile()
        self.stdout_lines = []
        self.port = None
        self.is_stopped = False
        environment = dict(os.environ, **(env or {}))
        environment["ASAN_OPTIONS"] = "exitcode=99:quarantine_size_mb=8:" + environment.get("ASAN_OPTIONS", "")
        command = [program, "serve", "--port", "0", *engine, *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self.stderr, stdin=subprocess.DEVNULL, env=environment
        )
        self.listens = threading.Event()
        self.reader = threading.Thread(target=self.read_stdout, daemon=True)
        self.reader.start()
        if expect_failure:
            return
        if not self.listens.wait(limit(30)) or self.port is None:
            self.kill()
            raise AssertionError(f"{command} does not listen: {self.log()}")
        if wait:
            self.wait_ready()

    def read_stdout(self):
        for line in self.process.stdout:
            text = line.decode(errors="replace").rstrip("\n")
            self.stdout_lines.append(text)
            match = re.search(r"listening on (https?)://(\[[^\]]*\]|[^:/]+):(\d+)", text)
            if match and self.port is None:
                self.scheme, self.address, self.port = match[1], match[2], int(match[3])
                self.listens.set()
        self.listens.set()

    def wait_ready(self):
        wait_until(self.is_ready, 60, "the model is loaded")

    def is_ready(self):
        if self.process.poll() is not None:
            raise AssertionError(f"the server ended with {self.process.returncode}: {self.log()}")
        return self.get("/health").status == 200

    @property
    def url(self):
        return f"{self.scheme}://{HOST}:{self.port}"

    def log(self):
        self.stderr.seek(0)
        return self.stderr.read()[-20000:].decode(errors="replace")

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.stop()
        else:
            self.kill()

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.is_stopped = True

    def send_signal(self, number):
        self.process.send_signal(number)

    def stop(self, number=signal.SIGTERM, expected=0, seconds=30):
        """Ends the server and checks how it ended."""
        if self.is_stopped:
            return
        self.is_stopped = True
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.wait_end(expected, seconds)

    def wait_end(self, expected=0, seconds=30):
        self.is_stopped = True
        try:
            status = self.process.wait(limit(seconds))
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the server did not end within {seconds} s: {self.log()}") from None
        self.check_reports()
        if status != expected:
            raise AssertionError(f"exit status {status}, expected {expected}: {self.log()}")

    def check_reports(self):
        self.stderr.seek(0)
        text = self.stderr.read()
        found = REPORTS.search(text)
        if found:
            raise AssertionError(text[max(0, found.start() - 500) : found.start() + 6000].decode(errors="replace"))

    # ---- requests, each on a connection of its own

    def wire(self, timeout=20, receive_buffer=None):
        return Wire(self, timeout, receive_buffer, self.trusted)

    def headers(self, headers=()):
        pairs = list(headers.items() if isinstance(headers, dict) else headers)
        names = {name.lower() for name, _ in pairs}
        if self.key and not names & {"authorization", "x-api-key"}:
            pairs.append(("Authorization", f"Bearer {self.key}"))
        return pairs

    def request(self, method, path, body=None, headers=(), timeout=60, version="HTTP/1.1"):
        with self.wire(timeout) as wire:
            wire.request(method, path, body, self.headers(headers), version)
            return wire.response(method)

    def get(self, path, headers=(), timeout=20):
        return self.request("GET", path, None, headers, timeout)

    def post(self, path, body, headers=(), timeout=60):
        return self.request("POST", path, body, headers, timeout)

    def open(self, path, body, headers=(), timeout=60, receive_buffer=None):
        """Sends a request and leaves the answer on the wire."""
        return self.wire(timeout, receive_buffer).request("POST", path, body, self.headers(headers))

    def ask(self, content, **fields):
        """One chat completion, greedy unless told otherwise."""
        return self.post("/v1/chat/completions", chat(content, **fields))

    # ---- what the server tells about itself

    def stats(self):
        return self.get("/stats.json").json()

    def engine(self):
        return self.stats()["engine"]

    def metrics(self):
        """Samples of /metrics by `name{labels}`; every line must be of the text format."""
        samples = {}
        for line in self.get("/metrics").body.decode().splitlines():
            if line.startswith("# ") or not line:
                continue
            match = re.fullmatch(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^{}]*\})? (\S+)", line)
            if not match:
                raise AssertionError(f"a line of /metrics: {line!r}")
            name = match[1] + (match[2] or "")
            if name in samples:
                raise AssertionError(f"{name} twice in /metrics")
            samples[name] = float(match[3])
        return samples

    def wait_idle(self, seconds=5):
        """Until nothing runs or waits and no sample holds a block."""

        def is_idle():
            engine = self.engine()
            return engine["n_running"] == engine["n_waiting"] == engine["blocks_used"] == engine["slots_used"] == 0

        wait_until(is_idle, seconds, f"the engine is idle ({self.engine()})")

    def wait_running(self, n, seconds=10):
        wait_until(lambda: self.engine()["n_running"] >= n, seconds, f"{n} samples run")

    def memory(self):
        """Resident bytes and the number of threads."""
        with open(f"/proc/{self.process.pid}/status", encoding="ascii", errors="replace") as file:
            text = file.read()
        return (
            int(re.search(r"VmRSS:\s*(\d+) kB", text)[1]) * 1024,
            int(re.search(r"Threads:\s*(\d+)", text)[1]),
        )

    def n_files(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


def chat(content, **fields):
    """A chat body of one user message; greedy and short unless fields say otherwise."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 16, "temperature": 0}
    body.update(fields)
    return body


def long_stream(max_tokens=1500, **fields):
    """A chat body whose answer goes on for seconds."""
    return chat("Tell me a long story.", max_tokens=max_tokens, ignore_eos=True, stream=True, **fields)


def run_lines(bodies, *options):
    """What `deepinfer run --input` gives for these bodies: a list of result lines."""
    lines = "".join(json.dumps(dict(body, id=i)) + "\n" for i, body in enumerate(bodies))
    result = subprocess.run(
        [program, "run", "--input", "-", *ENGINE, *options], input=lines.encode(), capture_output=True, check=False
    )
    if result.returncode not in (0, 1):
        raise AssertionError(f"run ended with {result.returncode}: {result.stderr[-2000:]}")
    return [json.loads(line) for line in result.stdout.splitlines()]


def find_tool(name):
    """A program beside this interpreter (of its virtual environment) or in PATH, or None."""
    beside = os.path.join(os.path.dirname(sys.executable), name)
    return beside if os.access(beside, os.X_OK) else shutil.which(name)


class ServerCase(unittest.TestCase):
    """Tests on one server, which is started once for the class with the options of `OPTIONS`."""

    OPTIONS = ()
    ENGINE_OPTIONS = ENGINE
    KEY = None
    server = None

    @classmethod
    def setUpClass(cls):
        cls.server = Server(*cls.options(), engine=list(cls.ENGINE_OPTIONS), key=cls.KEY)

    @classmethod
    def options(cls):
        return cls.OPTIONS

    @classmethod
    def tearDownClass(cls):
        if cls.server:
            cls.server.stop()

    def setUp(self):
        self.assertIsNone(self.server.process.poll(), f"the server has ended: {self.server.log()}")
