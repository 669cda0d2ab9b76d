"""Sampling parameters, with the names that users of vLLM and of the reference engine know."""
import copy
import json
import math
from dataclasses import dataclass, field, fields
from typing import Any, Dict, List, Optional, Sequence, Union


def _fail(name, value, expected):
    raise ValueError(f"{name} {value!r}: expected {expected}")


def _is_int(value):
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value):
    return (_is_int(value) or isinstance(value, float)) and math.isfinite(value)


def _check_ids(name, value):
    if not all(_is_int(token) and 0 <= token < 2**31 for token in value):
        _fail(name, value, "token ids")


_OWN_NAMES = ("extra", "seq_seed", "golden_token_ids", "top_logprobs", "structured_outputs", "so_args")


def _format_of(given):
    """The fields of a request line for structured outputs."""
    if not isinstance(given, dict):
        _fail("structured_outputs", given, "a dict")
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    if len(given) != 1:
        _fail("structured_outputs", given, "one of json, regex, grammar, choice and json_object")
    [(name, value)] = given.items()
    if name == "json":
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": _schema_of(value)}}}
    if name == "json_object":
        return {"response_format": {"type": "json_object"}}
    if name in ("regex", "grammar"):
        if not isinstance(value, str):
            _fail(f"structured_outputs: {name}", value, "a string")
        return {"ebnf" if name == "grammar" else name: value}
    if name == "choice":
        is_list = isinstance(value, (list, tuple)) and len(value) > 0
        if not is_list or not all(isinstance(text, str) for text in value):
            _fail("structured_outputs: choice", value, "a list of one string or more")
        return {"choice": list(value)}
    return _fail("structured_outputs", name, "json, regex, grammar, choice or json_object")


def _schema_of(value):
    """A JSON schema: a dict or a bool, or one as JSON text."""
    schema = value
    if isinstance(value, str):
        try:
            schema = json.loads(value)
        except ValueError as error:
            raise ValueError(f"structured_outputs: json: not JSON: {error}") from None
    if not isinstance(schema, (dict, bool)):
        _fail("structured_outputs: json", value, "a JSON schema as a dict, a bool or JSON text")
    return schema


def _structured_of(so_args):
    """Structured outputs by the reference engine's names."""
    kinds = {"json": "json", "regex": "regex", "ebnf": "grammar"}
    if not isinstance(so_args, dict):
        _fail("so_args", so_args, "a dict")
    for name in so_args:
        if name not in ("schema_type", "schema"):
            _fail("so_args", name, "schema_type and schema")
    if so_args.get("schema_type") not in kinds or so_args.get("schema") is None:
        _fail("so_args", so_args, f"a schema_type of {', '.join(kinds)} and a schema")
    return {kinds[so_args["schema_type"]]: so_args["schema"]}


@dataclass
class SamplingParams:
    """How tokens are drawn.

    The defaults are the engine's own (docs/interface.md): in particular max_tokens is what the context leaves, up to 8192
    and more with thinking. `seed` also goes by `seq_seed`, `forced_token_ids` by `golden_token_ids`, and `logprobs` by
    `top_logprobs`. `structured_outputs` says what the output has to follow: {"json": schema}, {"regex": text},
    {"grammar": EBNF}, {"choice": [text, ..]} or {"json_object": True}; the reference engine's name is `so_args`, with
    "schema_type" and "schema". `extra` holds further fields of a request line as they are.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: Optional[int] = None
    min_tokens: int = 0
    stop: Optional[Union[str, Sequence[str]]] = None
    stop_token_ids: Optional[Sequence[int]] = None
    seed: Optional[int] = None
    logprobs: Optional[Union[int, bool]] = None
    prompt_logprobs: Optional[Union[int, bool]] = None
    logprobs_mode: str = "raw"
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Optional[Dict[int, float]] = None
    ignore_eos: bool = False
    forced_token_ids: Optional[Sequence[int]] = None
    priority: int = 0
    cache_salt: Optional[str] = None
    structured_outputs: Optional[Dict[str, Any]] = None
    so_args: Optional[Dict[str, Any]] = None
    extra: Dict[str, Any] = field(default_factory=dict)
    seq_seed: Optional[int] = None
    golden_token_ids: Optional[Sequence[int]] = None
    top_logprobs: Optional[int] = None

    def __post_init__(self):
        for name, alias in (("seed", "seq_seed"), ("forced_token_ids", "golden_token_ids"), ("logprobs", "top_logprobs")):
            value = getattr(self, alias)
            if value is None:
                continue
            if getattr(self, name) is not None and getattr(self, name) != value:
                raise ValueError(f"{name} {getattr(self, name)!r} and {alias} {value!r} are two names of one thing")
            setattr(self, name, value)
            setattr(self, alias, None)
        if self.so_args is not None:
            if self.structured_outputs is not None:
                raise ValueError("structured_outputs and so_args are two names of one thing")
            self.structured_outputs = _structured_of(self.so_args)
            self.so_args = None
        if self.structured_outputs is not None:
            _format_of(self.structured_outputs)
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.stop is not None:
            self.stop = [text for text in self.stop if text != ""]  # an empty one stops nothing
        self.logprobs = self._logprobs("logprobs")
        self.prompt_logprobs = self._logprobs("prompt_logprobs")
        self._check()

    def _logprobs(self, name):
        """None, False and -1 are off; True is the token's own; a number that many alternatives."""
        value = getattr(self, name)
        if value is None or value is False or (_is_int(value) and value == -1):
            return None
        if value is True:
            return 0
        if not _is_int(value) or not 0 <= value <= 1000:
            _fail(name, value, "0 to 1000, None or a bool")
        return value

    def _check(self):
        ranges = (
            ("n", 1, 1024, True),
            ("temperature", 0, math.inf, False),
            ("top_k", -1, 2**31 - 1, True),
            ("min_p", 0, 1, False),
            ("min_tokens", 0, 2**62, True),
            ("presence_penalty", -2, 2, False),
            ("frequency_penalty", -2, 2, False),
            ("priority", -(2**31), 2**31 - 1, True),
        )
        for name, low, high, is_whole in ranges:
            value = getattr(self, name)
            if not (_is_int(value) if is_whole else _is_number(value)) or not low <= value <= high:
                kind = "an integer" if is_whole else "a number"
                _fail(name, value, f"{kind} of {low} or more" if high == math.inf else f"{kind} from {low} to {high}")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            _fail("top_p", self.top_p, "a number above 0, at most 1")
        if not _is_number(self.repetition_penalty) or not self.repetition_penalty > 0:
            _fail("repetition_penalty", self.repetition_penalty, "a number above 0")
        if self.max_tokens is not None and (not _is_int(self.max_tokens) or self.max_tokens < 1):
            _fail("max_tokens", self.max_tokens, "an integer of 1 or more, or None")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _fail("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        if self.seed is not None and not _is_int(self.seed):
            raise TypeError(f"seed {self.seed!r}: expected an integer or None")
        if self.stop is not None and not all(isinstance(text, str) for text in self.stop):
            _fail("stop", self.stop, "a string or a list of strings")
        if self.logprobs_mode not in ("raw", "processed"):
            _fail("logprobs_mode", self.logprobs_mode, "'raw' or 'processed'")
        if not isinstance(self.ignore_eos, bool):
            _fail("ignore_eos", self.ignore_eos, "a bool")
        for name in ("stop_token_ids", "forced_token_ids"):
            if getattr(self, name) is not None:
                setattr(self, name, [int(token) for token in getattr(self, name)])
                _check_ids(name, getattr(self, name))
        if self.logit_bias is not None:
            self.logit_bias = {int(token): value for token, value in self.logit_bias.items()}
            _check_ids("logit_bias", self.logit_bias)
            if not all(_is_number(value) for value in self.logit_bias.values()):
                _fail("logit_bias", self.logit_bias, "finite numbers by token id")

    @classmethod
    def of(cls, value):
        """A SamplingParams, a dict of its fields (None: the default), or None for the defaults."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, dict):
            known = [f.name for f in fields(cls)]
            for name in value:
                if name not in known:
                    raise ValueError(f"unknown sampling parameter '{name}', known are: {', '.join(known)}")
            return cls(**{name: item for name, item in value.items() if item is not None})
        raise TypeError(f"sampling parameters of type {type(value).__name__}: expected SamplingParams, a dict or None")

    def clone(self):
        return copy.deepcopy(self)

    def fields_of_line(self) -> Dict[str, Any]:
        """The fields of a request line; those at their defaults are left out, so that the engine's own apply."""
        line = dict(self.extra)
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in _OWN_NAMES or value is None or value == f.default:
                continue
            line[f.name] = value
        if self.structured_outputs is not None:
            line.update(_format_of(self.structured_outputs))
        if self.seed is not None:
            line["seed"] = self.seed % 2**64
        if self.logit_bias:
            line["logit_bias"] = {str(token): value for token, value in self.logit_bias.items()}
        return line


def params_for(value, n: int) -> List[SamplingParams]:
    """One SamplingParams for each of n requests: a list is taken item by item, anything else stands for all."""
    if isinstance(value, (list, tuple)):
        if len(value) != n:
            raise ValueError(f"{len(value)} sampling parameters for {n} prompts: expected as many, or one for all")
        return [SamplingParams.of(item) for item in value]
    return [SamplingParams.of(value)] * n
