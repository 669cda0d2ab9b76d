"""DeepInfer from Python: inference for DeepSeek-V4.1-Flash through libdeepinfer, by ctypes alone.

    from deepinfer import LLM, SamplingParams

    with LLM() as llm:
        for result in llm.generate(["The fox", "Once upon a time"], SamplingParams(temperature=0, max_tokens=20)):
            print(result.outputs[0].text)

Names and arguments are those that users of the reference engine and of vLLM know; what differs is said where it does.
"""
from ._library import DeepInferError, version
from .llm import LLM, StreamPiece, Tokenizer
from .outputs import CompletionOutput, Logprob, RequestError, RequestOutput, Usage
from .params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "DeepInferError",
    "Logprob",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StreamPiece",
    "Tokenizer",
    "Usage",
    "version",
]
