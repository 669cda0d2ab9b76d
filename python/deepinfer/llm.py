"""LLM: an engine of libdeepinfer, with generate, chat and stream.

A prompt becomes a request line (docs/interface.md), which the library checks and encodes; what comes of it arrives on
the engine's thread and is handed over by a queue. All lines of a call are made before the first is submitted, so that a
mistake in one leaves none behind in the engine. Results keep the order and the number of the prompts: a request that is
refused has its own result, with the error in it.
"""
import ctypes
import itertools
import json
import os
import queue
import threading
import weakref
from ctypes import POINTER, byref, c_int32, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Optional

from . import _library as c
from ._progress import Progress
from .outputs import CompletionOutput, RequestError, RequestOutput, Usage, completion_of, prompt_logprobs_of
from .params import SamplingParams, params_for


def _text(value):
    return None if value is None else os.fsencode(value)


# Arguments of LLM and the fields of the configuration that they set.
ARGUMENTS = {
    "backend": ("backend", _text),
    "threads": ("threads", int),
    "cpu_isa": ("cpu_isa", _text),
    "device": ("device", int),
    "device_kernels": ("device_kernels", _text),
    "pin": ("is_pinned", bool),
    "dummy_layers": ("dummy_layers", int),
    "numerics": ("numerics", _text),
    "batch_invariant": ("is_order_free", lambda value: not value),
    "max_num_seqs": ("seqs_max", int),
    "max_num_batched_tokens": ("batch_tokens_max", int),
    "long_prefill_token_threshold": ("chunk_max", int),
    "max_model_len": ("context_max", int),
    "max_context_sum": ("context_sum_max", int),
    "kv_cache_memory_bytes": ("kv_bytes", int),
    "replay": ("replay", _text),
    "replay_keep": ("replay_keep", int),
    "num_speculative_tokens": ("draft_tokens", int),
    "draft_policy": ("draft_policy", _text),
    "accept": ("accept", _text),
    "draft_temperatures": ("draft_temperatures", _text),
    "step_times": ("step_times", _text),
    "step_times_ttl": ("step_times_ttl_s", int),
    "grammar_threads": ("grammar_threads", int),
    "grammar_cache": ("grammar_cache_bytes", int),
    "grammar_timeout": ("grammar_timeout_s", float),
    "enable_prefix_caching": ("has_prefix_cache", bool),
    "async_scheduling": ("is_sync", lambda value: not value),
    "max_queue": ("queue_max", int),
    "ttft_goal_ms": ("ttft_goal_ms", float),
    "tpot_goal_ms": ("tpot_goal_ms", float),
    "token_blacklist": ("blacklist", _text),
    "trace": ("trace", _text),
    "log_interval": ("log_interval_steps", int),
    "vendor_compat": ("vendor_compat", bool),
    "reasoning": ("reasoning", lambda value: _text(str(value))),
    "load_format": ("is_dummy", None),
}
# Other names for these, and arguments that LLM reads itself.
ALIASES = {"chunk": "long_prefill_token_threshold", "max_batched_tokens": "max_num_batched_tokens", "max_seqs": "max_num_seqs"}
OWN = ("seed", "log_level")
# Arguments of other engines that decide nothing here: a text says why, and any value is fine; what is no text is the one
# value that is, since it is what is done anyway.
SETTLED = {
    "tokenizer": "the model's own tokenizer.json",
    "trust_remote_code": "no code of a checkpoint is ever run",
    "disable_log_stats": "statistics go to the log at level info",
    "enable_chunked_prefill": True,
    "chunked_prefill": True,
    "stop_preempted_request": False,
    "decode_sequence": True,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "expert_parallel_size": 1,
    "context_parallel_size": 1,
    "dtype": "auto",
    "quantization": None,
    "revision": None,
    "tokenizer_revision": None,
    "gpu_memory_utilization": "kv_cache_memory_bytes sets the memory of the key-value cache, which is planned otherwise",
    "enforce_eager": "there are no graphs to do without",
    "served_model_name": "results don't name the model",
}

IN_FLIGHT_MIN = 64  # requests of a call that are in the engine at once, or four for each place


def _model_folder(model):
    if model is None:
        model = os.environ.get("DEEPINFER_MODEL") or os.environ.get("DEEPINFER_HF_MODEL_DIR")
    if model is None:
        tiny = os.path.join(c.REPOSITORY, "models", "tiny")
        if not os.path.isdir(tiny):
            raise ValueError("model: expected a folder; the small model that ships is not beside this package")
        model = tiny
    return os.fspath(model)


def _check_settled(name, value, model):
    expected = SETTLED[name]
    if isinstance(expected, str) and name != "dtype":
        if name == "tokenizer" and value is not None and os.fspath(value) != model:
            raise ValueError(f"tokenizer {value!r}: expected None or the model's folder, for {expected}")
    elif value is not None and value != expected:
        raise ValueError(f"{name} {value!r}: expected {expected!r}")


def _configure(config, arguments, model):
    known = list(ARGUMENTS) + list(ALIASES) + list(OWN) + list(SETTLED)
    for name, value in arguments.items():
        if name not in known:
            raise TypeError(f"LLM: unknown argument '{name}', known are: model, {', '.join(sorted(known))}")
        name = ALIASES.get(name, name)
        if name in SETTLED:
            _check_settled(name, value, model)
        elif name == "load_format":
            if value not in (None, "auto", "safetensors", "dummy"):
                raise ValueError(f"load_format {value!r}: expected 'auto', 'safetensors' or 'dummy'")
            config.is_dummy = value == "dummy"
        elif name in ARGUMENTS and value is not None:
            target, convert = ARGUMENTS[name]
            try:
                setattr(config, target, convert(value))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name} {value!r}: {error}") from None


@dataclass
class StreamPiece:
    """A piece of an output as it comes: kind "text" (prompts), "reasoning", "content", "call_begin", "call_args",
    "call_end" (conversations), or "done" with the sample's whole output."""

    index: int
    kind: str
    text: str = ""
    call_id: Optional[int] = None
    output: Optional[CompletionOutput] = None


class Tokenizer:
    """The model's tokenizer. Ends with its LLM."""

    def __init__(self, llm, tokenizer):
        self._llm = llm
        self._tokenizer = tokenizer

    def _handle(self):
        self._llm._engine()
        return self._tokenizer

    def __len__(self):
        return c.library().di_tokenizer_size(self._handle())

    def encode(self, text, plain=False):
        """Ids of a text, without a begin mark; plain: the spellings of special tokens are ordinary text."""
        data = text.encode("utf-8", "surrogatepass")
        ids, n, error = POINTER(c_int32)(), c_size_t(), c.Error()
        c.check(c.library().di_tokenizer_tokenize(self._handle(), data, len(data), plain, ids, n, error), error)
        try:
            return ids[: n.value]
        finally:
            c.library().di_free(ids)

    def decode(self, ids, skip_special_tokens=True):
        array = (c_int32 * max(len(ids), 1))(*ids)
        text, size, error = c_void_p(), c_size_t(), c.Error()
        c.check(
            c.library().di_tokenizer_detokenize(self._handle(), array, len(ids), skip_special_tokens, text, size, error), error
        )
        return c.take_text(text, size.value)


class _Ticket:
    """A request in the engine: where its events go."""

    def __init__(self, place, line, params, inbox, is_streamed):
        self.key = None
        self.place = place  # which of the call's prompts
        self.line = line
        self.params = params
        self.inbox = inbox  # of the call: (ticket, StreamPiece or _Done)
        self.is_streamed = is_streamed
        self.id = c_uint64()
        self.n_left = params.n  # samples that have not been taken from the inbox
        self.outputs = [None] * params.n
        self.prompt_token_ids = []
        self.prompt_logprobs = None
        self.first_ns = self.total_ns = None


@dataclass
class _Done:
    """A sample's result as the engine's thread copies it; reading it is left to the thread that waits for it."""

    index: int
    line: Optional[str] = None
    failure: Optional[Exception] = None
    stop_string: int = -1
    stop_token: int = -1
    prompt_token_ids: Optional[list] = None  # of sample 0, with the times
    first_ns: int = 0
    total_ns: int = 0


def _copy_result(event):
    """Nothing may be raised into the engine: what goes wrong becomes the sample's error."""
    done = _Done(event.index)
    try:
        result = event.result.contents
        done.line = c.result_json(event.result)
        done.stop_string, done.stop_token = result.stop_string, result.stop_token
        done.first_ns, done.total_ns = result.first_ns, result.total_ns
        if event.index == 0:
            done.prompt_token_ids = result.prompt_tokens[: result.n_prompt] if result.n_prompt else []
    except Exception as error:  # pylint: disable=broad-except
        done.failure = error
    return done


class _Tickets:
    """Requests that are in the engine, by the number that their events carry. Shared with the engine's thread."""

    def __init__(self):
        self.lock = threading.Lock()
        self.by_key = {}
        self.n_samples = {}
        self.keys = itertools.count(1)

    def add(self, ticket):
        with self.lock:
            ticket.key = next(self.keys)
            self.by_key[ticket.key] = ticket
            self.n_samples[ticket.key] = ticket.params.n

    def remove(self, key):
        with self.lock:
            self.by_key.pop(key, None)
            self.n_samples.pop(key, None)

    def on_event(self, user, pointer):
        ticket = self.by_key.get(user)
        if ticket is None:
            return 1
        event = pointer.contents
        if event.kind == c.DONE:
            self.n_samples[user] -= 1
            if self.n_samples[user] == 0:
                self.remove(user)
            ticket.inbox.put((ticket, _copy_result(event)))
        elif event.kind in (c.TEXT, c.OUTPUT) and ticket.is_streamed:
            kind = "text" if event.kind == c.TEXT else c.OUTPUTS[event.output]
            text = ctypes.string_at(event.text, event.text_len).decode("utf-8", "replace") if event.text else ""
            call_id = event.call_id if event.call_id >= 0 else None
            ticket.inbox.put((ticket, StreamPiece(event.index, kind, text, call_id)))
        return 0


def _close(handle, callback):
    """Ends the engine. The callback must live until then."""
    c.library().di_engine_destroy(handle)
    del callback


class LLM:
    """An engine with a model.

    model: a folder with config.json, tokenizer.json and the weights; by default $DEEPINFER_MODEL or the small model that
    ships. The other arguments go by name; ARGUMENTS lists them. `seed` is the default of requests that name none. Any
    number of threads may use one object. close() or a with statement ends it.
    """

    def __init__(self, model=None, **arguments):
        lib = c.library()
        self.model = _model_folder(model)
        config, sampling, error = c.Config(), c.Sampling(), c.Error()
        lib.di_engine_config_init(config, ctypes.sizeof(config))
        lib.di_engine_sampling_init(sampling, ctypes.sizeof(sampling))
        config.model = os.fsencode(self.model)
        _configure(config, arguments, self.model)
        seed = arguments.get("seed")
        if seed is not None:
            sampling.has_seed = True
            sampling.seed = int(seed) % 2**64
        config.sampling = ctypes.pointer(sampling)
        if arguments.get("log_level") is not None:
            c.check(lib.di_log_level_set(os.fsencode(arguments["log_level"]), error), error)
        handle = c_void_p()
        c.check(lib.di_engine_create(config, byref(handle), error), error)
        self._handle = handle
        self._tickets = _Tickets()
        self._callback = c.CALLBACK(self._tickets.on_event)
        self._finalizer = weakref.finalize(self, _close, handle, self._callback)
        self._in_flight_max = max(IN_FLIGHT_MIN, 4 * config.seqs_max)
        self._request_ids = itertools.count()
        self.max_model_len = lib.di_engine_context_max(handle)
        self._tokenizer = lib.di_engine_tokenizer(handle)

    # ---- life

    def close(self):
        """Ends what runs and frees the model. Called once or more often."""
        self._finalizer()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()

    def _engine(self):
        if not self._finalizer.alive:
            raise _closed()
        return self._handle

    def get_tokenizer(self):
        """The model's tokenizer, None where it has none."""
        self._engine()
        return Tokenizer(self, self._tokenizer) if self._tokenizer else None

    def stats(self):
        """Counters and state of the engine as a dict (docs/interface.md)."""
        return json.loads(c.stats_json(self._engine()))

    # ---- requests

    def generate(self, prompts=None, sampling_params=None, prompt_token_ids=None, use_tqdm=True):
        """Continues prompts: a string, a list of strings, or dicts with "prompt" or "prompt_token_ids". prompt_token_ids
        are lists of ids and win over the texts. Returns a list of RequestOutput, one for each prompt, in order."""
        lines, texts = _prompt_lines(prompts, prompt_token_ids)
        return self._run(lines, texts, params_for(sampling_params, len(lines)), use_tqdm)

    def chat(self, messages, sampling_params=None, use_tqdm=True, tools=None, **fields):
        """Answers a conversation (a list of messages) or several. fields: more of a chat request, such as tool_choice,
        reasoning_effort, thinking. Returns a list of RequestOutput, one for each conversation."""
        lines = _chat_lines(messages, tools, fields)
        return self._run(lines, [None] * len(lines), params_for(sampling_params, len(lines)), use_tqdm)

    def stream(self, prompt=None, sampling_params=None, messages=None, tools=None, **fields):
        """Yields StreamPiece as the answer to one prompt (a text, a list of ids) or one conversation comes; for each
        sample the last has kind "done". Leaving the loop ends the request. A refused one raises DeepInferError."""
        if (prompt is None) == (messages is None):
            raise ValueError("stream: expected a prompt or messages")
        if messages is not None:
            line = _chat_lines(messages, tools, fields)[0]
        elif isinstance(prompt, str):
            line = {"prompt": prompt}
        else:
            line = {"prompt_token_ids": _ids(prompt)}
        params = SamplingParams.of(sampling_params)
        return self._pieces(_Ticket(0, _line(line, params), params, queue.SimpleQueue(), True))

    def _pieces(self, ticket):
        refused = self._submit(ticket)
        if refused:
            raise refused
        try:
            while ticket.n_left:
                piece = ticket.inbox.get()[1]
                if isinstance(piece, _Done):
                    piece = StreamPiece(piece.index, "done", output=self._take(ticket, piece))
                yield piece
        finally:
            self._abort([ticket])

    # ---- the way through the engine

    def _submit(self, ticket):
        """Submits; returns the error when the library refuses."""
        request, error = c.Request(), c.Error()
        c.library().di_engine_request_init(request, ctypes.sizeof(request))
        request.json = ticket.line
        request.json_len = len(ticket.line)
        request.events = c.WANTS_TEXT if ticket.is_streamed else 0
        engine = self._engine()
        self._tickets.add(ticket)
        status = c.library().di_engine_submit(engine, request, self._callback, ticket.key, byref(ticket.id), error)
        if not status:
            return None
        self._tickets.remove(ticket.key)
        return c.DeepInferError(status, error.message.decode("utf-8", "replace"))

    def _abort(self, tickets):
        for ticket in tickets:
            if ticket.n_left and self._finalizer.alive:
                c.library().di_engine_abort(self._handle, ticket.id)

    def _run(self, lines, texts, params, use_tqdm):
        self._engine()
        inbox = queue.SimpleQueue()
        waiting = [(i, _line(line, p), p) for i, (line, p) in enumerate(zip(lines, params))][::-1]
        results = [None] * len(lines)
        running = {}
        progress = Progress(len(lines), use_tqdm)
        tokens = Usage()
        try:
            while waiting or running:
                while waiting and len(running) < self._in_flight_max:
                    place, line, p = waiting[-1]
                    ticket = _Ticket(place, line, p, inbox, False)
                    refused = self._submit(ticket)
                    if refused and refused.code == c.BUSY and running:
                        break  # there is room when something has ended
                    waiting.pop()
                    if refused:
                        results[place] = self._refusal(texts[place], refused)
                    else:
                        running[ticket.key] = ticket
                if not running:
                    continue
                ticket, done = inbox.get()
                tokens.completion_tokens += self._take(ticket, done).usage.completion_tokens
                if ticket.n_left == 0:
                    del running[ticket.key]
                    results[ticket.place] = self._result(texts[ticket.place], ticket)
                    tokens.prompt_tokens += results[ticket.place].usage.prompt_tokens
                progress.show(len(lines) - len(waiting) - len(running), tokens.prompt_tokens, tokens.completion_tokens)
        except BaseException:
            # Interrupted: nothing of this call stays behind in the engine.
            self._abort(running.values())
            raise
        finally:
            progress.close()
        return results

    def _decode(self, token):
        """What one id stands for; a part of a character is U+FFFD."""
        return Tokenizer(self, self._tokenizer).decode([token], False) if self._tokenizer else None

    def _take(self, ticket, done):
        """A sample's output, from its result line."""
        ticket.n_left -= 1
        try:
            if done.failure:
                raise done.failure
            line = json.loads(done.line)
            output = completion_of(line, done.index, self._decode)
            if done.stop_string >= 0 and ticket.params.stop:
                output.stop_reason = ticket.params.stop[done.stop_string]
            elif done.stop_token >= 0:
                output.stop_reason = done.stop_token
            if done.index == 0:
                ticket.prompt_token_ids = done.prompt_token_ids
                ticket.prompt_logprobs = prompt_logprobs_of(line, self._decode)
                ticket.first_ns, ticket.total_ns = done.first_ns, done.total_ns
        except Exception as error:  # pylint: disable=broad-except
            failed = RequestError(f"{type(error).__name__}: {error}", "server_error")
            output = CompletionOutput(done.index, finish_reason="error", error=failed)
        ticket.outputs[done.index] = output
        return output

    def _result(self, text, ticket):
        outputs = ticket.outputs
        return RequestOutput(
            request_id=str(next(self._request_ids)),
            prompt=text,
            prompt_token_ids=ticket.prompt_token_ids,
            outputs=outputs,
            prompt_logprobs=ticket.prompt_logprobs,
            error=next((output.error for output in outputs if output.error), None),
            time_to_first_token=ticket.first_ns and ticket.first_ns * 1e-9,
            total_time=ticket.total_ns and ticket.total_ns * 1e-9,
        )

    def _refusal(self, text, refused):
        kind = "rate_limit_error" if refused.code == c.BUSY else "invalid_request_error"
        error = RequestError(str(refused), kind)
        output = CompletionOutput(0, finish_reason="error", error=error)
        return RequestOutput(str(next(self._request_ids)), prompt=text, outputs=[output], error=error)


def _closed():
    return c.DeepInferError(0, "the engine was closed")


# ---- lines


def _ids(value):
    if isinstance(value, (str, bytes)):
        raise TypeError(f"prompt_token_ids of type {type(value).__name__}: expected a list of ids")
    ids = [int(token) for token in value]
    return ids


def _prompt_line(prompt):
    """The fields of one prompt, and its text."""
    if isinstance(prompt, str):
        return {"prompt": prompt}, prompt
    if isinstance(prompt, dict):
        line = {key: prompt[key] for key in ("cache_salt", "priority") if prompt.get(key) is not None}
        if prompt.get("prompt_token_ids") is not None:
            return {"prompt_token_ids": _ids(prompt["prompt_token_ids"]), **line}, prompt.get("prompt")
        if isinstance(prompt.get("prompt"), str):
            return {"prompt": prompt["prompt"], **line}, prompt["prompt"]
        raise ValueError("a prompt as a dict: expected the key 'prompt' or 'prompt_token_ids'")
    if isinstance(prompt, (list, tuple)):
        return {"prompt_token_ids": _ids(prompt)}, None
    raise TypeError(f"prompt of type {type(prompt).__name__}: expected a string, a dict or a list of ids")


def _prompt_lines(prompts, prompt_token_ids):
    if prompts is None and prompt_token_ids is None:
        raise ValueError("generate: expected prompts or prompt_token_ids")
    if isinstance(prompts, (str, dict)):
        prompts = [prompts]
    if prompt_token_ids is not None:
        if prompt_token_ids and isinstance(prompt_token_ids[0], int):
            prompt_token_ids = [prompt_token_ids]
        if prompts is not None and len(prompts) != len(prompt_token_ids):
            raise ValueError(f"{len(prompts)} prompts and {len(prompt_token_ids)} prompt_token_ids: expected as many")
        return [{"prompt_token_ids": _ids(ids)} for ids in prompt_token_ids], list(prompts or [None] * len(prompt_token_ids))
    if prompts and all(isinstance(prompt, int) for prompt in prompts):
        prompts = [prompts]
    pairs = [_prompt_line(prompt) for prompt in prompts]
    return [line for line, _ in pairs], [text for _, text in pairs]


def _chat_lines(messages, tools, fields):
    if not isinstance(messages, (list, tuple)):
        raise TypeError(f"messages of type {type(messages).__name__}: expected a list of messages, or several")
    conversations = [messages] if not messages or isinstance(messages[0], dict) else messages
    more = {name: value for name, value in fields.items() if value is not None}
    if tools is not None:
        more["tools"] = tools
    return [{"messages": list(conversation), **more} for conversation in conversations]


def _line(line, params):
    """A request line as bytes. What JSON can't say is an error before anything is submitted."""
    try:
        return json.dumps({**params.fields_of_line(), **line}, ensure_ascii=True, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"the request can't be written as JSON: {error}") from None
