"""Results: a RequestOutput for each prompt, a CompletionOutput for each of its samples, as vLLM names them."""
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Union


@dataclass
class Logprob:
    """Log-probability of a token in its place; rank counts from 1 among those that were asked for, None: not there."""

    logprob: float
    rank: Optional[int] = None
    decoded_token: Optional[str] = None


@dataclass
class RequestError:
    """Why a request gave nothing, or not all."""

    message: str
    type: str = "invalid_request_error"
    param: Optional[str] = None

    def __str__(self):
        return self.message


@dataclass
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def total_tokens(self):
        return self.prompt_tokens + self.completion_tokens


@dataclass
class CompletionOutput:
    """One sample: text, ids and why it ended ("stop", "length", "abort", "error") together."""

    index: int
    text: str = ""
    token_ids: List[int] = field(default_factory=list)
    cumulative_logprob: Optional[float] = None
    logprobs: Optional[List[Dict[int, Logprob]]] = None
    finish_reason: Optional[str] = None
    stop_reason: Optional[Union[int, str]] = None  # the stop token or stop string that ended it
    seed: Optional[int] = None
    message: Optional[Dict[str, Any]] = None  # of conversations: content, reasoning_content, tool_calls
    usage: Usage = field(default_factory=Usage)
    error: Optional[RequestError] = None

    def finished(self):
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """What came of one prompt. A refused one has `error` and one output with finish_reason "error"."""

    request_id: str
    prompt: Optional[str] = None
    prompt_token_ids: List[int] = field(default_factory=list)
    outputs: List[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: Optional[List[Optional[Dict[int, Logprob]]]] = None
    finished: bool = True
    error: Optional[RequestError] = None
    time_to_first_token: Optional[float] = None  # seconds
    total_time: Optional[float] = None

    @property
    def text(self):
        return self.outputs[0].text

    @property
    def token_ids(self):
        return self.outputs[0].token_ids

    @property
    def finish_reason(self):
        return self.outputs[0].finish_reason

    @property
    def message(self):
        return self.outputs[0].message

    @property
    def num_cached_tokens(self):
        return self.outputs[0].usage.cached_tokens

    @property
    def usage(self):
        """Of all samples: the prompt counts once."""
        usages = [output.usage for output in self.outputs]
        return Usage(
            prompt_tokens=usages[0].prompt_tokens,
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=usages[0].cached_tokens,
            draft_tokens=sum(usage.draft_tokens for usage in usages),
            accepted_tokens=sum(usage.accepted_tokens for usage in usages),
        )


def _position(entry, decode):
    """The dict of one position: the token itself, and the alternatives by falling probability."""
    at = {}
    for rank, (token, logprob) in enumerate(entry["top"], 1):
        at[token] = Logprob(logprob, rank, decode(token))
    token = entry["token_id"]
    if token not in at:
        at[token] = Logprob(entry["logprob"], None, decode(token))
    return at


def completion_of(line, index, decode):
    """A CompletionOutput from a result line (docs/interface.md)."""
    output = CompletionOutput(
        index=index,
        text=line["text"],
        token_ids=line["token_ids"],
        finish_reason=line["finish_reason"],
        seed=line.get("seed"),
        message=line.get("message"),
        usage=Usage(**line["usage"]),
    )
    if line.get("logprobs") is not None:
        output.logprobs = [_position(entry, decode) for entry in line["logprobs"]]
        output.cumulative_logprob = sum(entry["logprob"] for entry in line["logprobs"])
    if line.get("error"):
        output.error = RequestError(line["error"]["message"], line["error"]["type"], line["error"].get("param"))
    return output


def prompt_logprobs_of(line, decode):
    if line.get("prompt_logprobs") is None:
        return None
    return [entry and _position(entry, decode) for entry in line["prompt_logprobs"]]
