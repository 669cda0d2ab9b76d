"""libdeepinfer by ctypes: where it is found, its structures and functions (include/deepinfer/deepinfer.h).

The structures repeat the header's, field by field; each begins with its size, so that the library notices a package that
doesn't fit it. Everything above this module is plain Python.
"""
import ctypes
import os
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)

FOLDER = os.path.dirname(os.path.abspath(__file__))
REPOSITORY = os.path.dirname(os.path.dirname(FOLDER))

BUSY = 12  # DI_ERR_BUSY
TOKEN, TEXT, OUTPUT, DONE = range(4)  # di_engine_event_kind
OUTPUTS = ("reasoning", "content", "call_begin", "call_args", "call_end")  # di_engine_output
WANTS_TOKENS, WANTS_TEXT = 1, 2


class DeepInferError(RuntimeError):
    """What the library refused or could not do; `code` is its di_status."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


class Error(Structure):
    _fields_ = [("code", c_int), ("message", c_char * 1000)]


class Sampling(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("n", c_int32),
        ("max_tokens", c_int64),
        ("min_tokens", c_int64),
        ("temperature", c_double),
        ("top_p", c_double),
        ("top_k", c_int64),
        ("min_p", c_double),
        ("presence_penalty", c_double),
        ("frequency_penalty", c_double),
        ("repetition_penalty", c_double),
        ("has_seed", c_bool),
        ("ignore_eos", c_bool),
        ("logprobs_processed", c_bool),
        ("seed", c_uint64),
        ("logprobs", c_int32),
        ("prompt_logprobs", c_int32),
        ("n_stop", c_size_t),
        ("stop", c_void_p),
        ("stop_len", c_void_p),
        ("n_stop_tokens", c_size_t),
        ("stop_tokens", c_void_p),
        ("n_bias", c_size_t),
        ("bias_tokens", c_void_p),
        ("bias", c_void_p),
        ("n_forced", c_size_t),
        ("forced_tokens", c_void_p),
    ]


class Config(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("model", c_char_p),
        ("backend", c_char_p),
        ("threads", c_int32),
        ("cpu_isa", c_char_p),
        ("is_pinned", c_bool),
        ("is_dummy", c_bool),
        ("dummy_layers", c_int32),
        ("numerics", c_char_p),
        ("is_order_free", c_bool),
        ("seqs_max", c_int32),
        ("batch_tokens_max", c_int64),
        ("chunk_max", c_int64),
        ("context_max", c_int64),
        ("context_sum_max", c_int64),
        ("kv_bytes", c_int64),
        ("replay", c_char_p),
        ("replay_keep", c_int64),
        ("draft_tokens", c_int32),
        ("draft_policy", c_char_p),
        ("accept", c_char_p),
        ("draft_temperatures", c_char_p),
        ("step_times", c_char_p),
        ("step_times_ttl_s", c_int64),
        ("has_prefix_cache", c_bool),
        ("is_sync", c_bool),
        ("queue_max", c_int64),
        ("ttft_goal_ms", c_double),
        ("tpot_goal_ms", c_double),
        ("blacklist", c_char_p),
        ("trace", c_char_p),
        ("log_interval_steps", c_int64),
        ("grammar_threads", c_int32),
        ("grammar_cache_bytes", c_int64),
        ("grammar_timeout_s", c_double),
        ("vendor_compat", c_bool),
        ("reasoning", c_char_p),
        ("sampling", POINTER(Sampling)),
        ("progress", c_void_p),
        ("progress_user", c_void_p),
        ("device", c_int32),
        ("device_kernels", c_char_p),
    ]


class Request(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("json", c_char_p),
        ("json_len", c_size_t),
        ("json_api", c_char_p),
        ("text", c_char_p),
        ("text_len", c_size_t),
        ("ids", POINTER(c_int32)),
        ("n_ids", c_size_t),
        ("sampling", POINTER(Sampling)),
        ("has_priority", c_bool),
        ("priority", c_int32),
        ("caller", c_char_p),
        ("cache_salt", c_char_p),
        ("deadline_ms", c_int64),
        ("events", c_uint32),
        ("json_schema", c_char_p),
        ("regex", c_char_p),
        ("ebnf", c_char_p),
    ]


class Result(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("finish_reason", c_char_p),
        ("error", Error),
        ("text", c_void_p),
        ("text_len", c_size_t),
        ("prompt_tokens", POINTER(c_int32)),
        ("n_prompt", c_int64),
        ("tokens", POINTER(c_int32)),
        ("n_tokens", c_int64),
        ("n_cached", c_int64),
        ("n_reasoning", c_int64),
        ("logprobs", c_void_p),
        ("top", c_void_p),
        ("n_top", c_int32),
        ("n_prompt_top", c_int32),
        ("prompt_logprobs", c_void_p),
        ("prompt_top", c_void_p),
        ("stop_string", c_int64),
        ("stop_token", c_int32),
        ("has_seed", c_bool),
        ("seed", c_uint64),
        ("queued_ns", c_int64),
        ("first_ns", c_int64),
        ("total_ns", c_int64),
        ("n_preempted", c_int32),
        ("n_drafts", c_int64),
        ("n_accepted", c_int64),
    ]


class Event(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("kind", c_int),
        ("index", c_int32),
        ("id", c_uint64),
        ("token", c_int32),
        ("logprob", c_float),
        ("top", c_void_p),
        ("n_top", c_int32),
        ("output", c_int),
        ("call_id", c_int64),
        ("is_cut", c_bool),
        ("text", c_void_p),
        ("text_len", c_size_t),
        ("result", POINTER(Result)),
        ("n_cached", c_int64),
    ]


CALLBACK = CFUNCTYPE(c_int, c_void_p, POINTER(Event))

# name: (result, arguments)
FUNCTIONS = {
    "di_version": (c_char_p, []),
    "di_free": (None, [c_void_p]),
    "di_log_level_set": (c_int, [c_char_p, POINTER(Error)]),
    "di_tokenizer_size": (c_int32, [c_void_p]),
    "di_tokenizer_tokenize": (
        c_int,
        [c_void_p, c_char_p, c_size_t, c_bool, POINTER(POINTER(c_int32)), POINTER(c_size_t), POINTER(Error)],
    ),
    "di_tokenizer_detokenize": (
        c_int,
        [c_void_p, POINTER(c_int32), c_size_t, c_bool, POINTER(c_void_p), POINTER(c_size_t), POINTER(Error)],
    ),
    "di_engine_sampling_init": (None, [POINTER(Sampling), c_size_t]),
    "di_engine_config_init": (None, [POINTER(Config), c_size_t]),
    "di_engine_request_init": (None, [POINTER(Request), c_size_t]),
    "di_engine_create": (c_int, [POINTER(Config), POINTER(c_void_p), POINTER(Error)]),
    "di_engine_destroy": (None, [c_void_p]),
    "di_engine_tokenizer": (c_void_p, [c_void_p]),
    "di_engine_context_max": (c_int64, [c_void_p]),
    "di_engine_submit": (
        c_int,
        [c_void_p, POINTER(Request), CALLBACK, c_void_p, POINTER(c_uint64), POINTER(Error)],
    ),
    "di_engine_abort": (c_bool, [c_void_p, c_uint64]),
    "di_engine_result_json": (c_int, [POINTER(Result), POINTER(c_void_p), POINTER(c_size_t), POINTER(Error)]),
    "di_engine_drain": (c_int, [c_void_p, c_int64, POINTER(Error)]),
    "di_engine_stats_json": (c_int, [c_void_p, POINTER(c_void_p), POINTER(c_size_t), POINTER(Error)]),
}


def _candidates():
    named = os.environ.get("DEEPINFER_LIBRARY")
    if named:
        return [named]
    return [
        os.path.join(FOLDER, "libdeepinfer.so"),
        os.path.join(REPOSITORY, "build", "libdeepinfer.so"),
        os.path.join(REPOSITORY, "build", "release", "libdeepinfer.so"),
    ]


_loaded = None


def library():
    """The library, opened once."""
    global _loaded
    if _loaded is None:
        paths = _candidates()
        found = [path for path in paths if os.path.exists(path)]
        if not found:
            raise DeepInferError(
                0,
                f"libdeepinfer.so is not at {' or '.join(paths)}: build it by ./build.sh, or name it by DEEPINFER_LIBRARY",
            )
        lib = ctypes.CDLL(found[0])
        for name, (result, arguments) in FUNCTIONS.items():
            try:
                function = getattr(lib, name)
            except AttributeError:
                raise DeepInferError(0, f"'{found[0]}' has no {name}: it is of another version") from None
            function.restype = result
            function.argtypes = arguments
        _loaded = lib
    return _loaded


def version():
    """Version of the library."""
    return library().di_version().decode()


def check(status, error):
    if status:
        raise DeepInferError(status, error.message.decode("utf-8", "replace"))


def take_text(pointer, size):
    """The text behind a pointer that the library gave away, which is freed."""
    try:
        return ctypes.string_at(pointer, size).decode("utf-8", "replace")
    finally:
        library().di_free(pointer)


def result_json(result):
    """A result line, inside the callback that got the result."""
    text, size, error = c_void_p(), c_size_t(), Error()
    check(library().di_engine_result_json(result, text, size, error), error)
    return take_text(text, size.value)


def stats_json(engine):
    text, size, error = c_void_p(), c_size_t(), Error()
    check(library().di_engine_stats_json(engine, text, size, error), error)
    return take_text(text, size.value)
