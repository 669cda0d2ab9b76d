#!/usr/bin/env python3
"""The Python package on the model that ships: generate, chat and stream against the program's own answers, refusals in
their places, arguments by the names of vLLM and of the reference.

DEEPINFER_LIBRARY names the library; the first argument is the repository.
"""
import json
import os
import sys
import threading
import unittest

ROOT = sys.argv.pop(1) if len(sys.argv) > 1 and os.path.isdir(sys.argv[1]) else os.getcwd()
sys.path.insert(0, os.path.join(ROOT, "python"))
sys.dont_write_bytecode = True

from deepinfer import LLM, DeepInferError, SamplingParams, version  # noqa: E402

SUM = [{"role": "user", "content": "What is 47 + 38?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=20)


class Generate(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.llm = LLM(os.path.join(ROOT, "models", "tiny"), max_num_seqs=4, max_model_len=1024, threads=2)

    @classmethod
    def tearDownClass(cls):
        cls.llm.close()

    def test_text_ids_finish_reason_and_usage_come_together(self):
        result = self.llm.generate("Once upon a time", GREEDY)[0]
        output = result.outputs[0]
        tokenizer = self.llm.get_tokenizer()
        self.assertEqual(result.prompt, "Once upon a time")
        self.assertEqual(result.prompt_token_ids[1:], tokenizer.encode("Once upon a time"))
        self.assertEqual(tokenizer.decode(output.token_ids), output.text)
        self.assertEqual(len(output.token_ids), 20)
        self.assertEqual(output.finish_reason, "length")
        self.assertEqual(result.usage.completion_tokens, 20)
        self.assertEqual(result.usage.prompt_tokens, len(result.prompt_token_ids))
        self.assertTrue(result.finished and output.finished())
        self.assertIsNone(result.error)
        self.assertGreater(result.total_time, result.time_to_first_token)

    def test_ids_are_the_prompt_that_text_is(self):
        by_text = self.llm.generate("Once upon a time", GREEDY)[0]
        by_ids = self.llm.generate(prompt_token_ids=[by_text.prompt_token_ids], sampling_params=GREEDY)[0]
        by_dict = self.llm.generate({"prompt_token_ids": by_text.prompt_token_ids}, GREEDY)[0]
        self.assertEqual(by_ids.token_ids, by_text.token_ids)
        self.assertEqual(by_dict.token_ids, by_text.token_ids)

    def test_results_keep_the_order_and_number_of_prompts(self):
        prompts = [f"The fox number {i}" for i in range(100)]
        params = [SamplingParams(temperature=0, max_tokens=1 + i % 5) for i in range(100)]
        results = self.llm.generate(prompts, params, use_tqdm=False)
        self.assertEqual([r.prompt for r in results], prompts)
        self.assertEqual([len(r.token_ids) for r in results], [1 + i % 5 for i in range(100)])
        self.assertEqual(len({r.request_id for r in results}), 100)

    def test_refused_requests_have_results(self):
        too_long = list(range(5, 200)) * 6
        results = self.llm.generate(["a", {"prompt_token_ids": [0, 999999]}, {"prompt_token_ids": too_long}, "b", ""], GREEDY)
        self.assertEqual(len(results), 5)
        self.assertIn("999999", str(results[1].error))
        self.assertIn("context", str(results[2].error))
        for i in (1, 2):
            self.assertEqual(results[i].finish_reason, "error")
            self.assertEqual(results[i].text, "")
        self.assertEqual(results[0].token_ids, self.llm.generate("a", GREEDY)[0].token_ids)
        self.assertIsNone(results[3].error)

    def test_mistakes_leave_nothing_behind(self):
        before = self.llm.stats()["n_submitted"]
        with self.assertRaises(ValueError):
            self.llm.generate(["a", "b"], [GREEDY])
        with self.assertRaises(ValueError):
            self.llm.generate(["a"], GREEDY, prompt_token_ids=[[1], [2]])
        with self.assertRaises(ValueError):
            self.llm.generate()
        with self.assertRaises(TypeError):
            self.llm.generate(["a", 5], GREEDY)
        with self.assertRaises(ValueError):
            self.llm.generate(["a", "b"], [GREEDY, SamplingParams(extra={"x": float("nan")})])
        self.assertEqual(self.llm.stats()["n_submitted"], before)

    def test_samples_have_the_seeds_after_the_first(self):
        result = self.llm.generate("The fox", SamplingParams(n=3, seed=7, max_tokens=12))[0]
        self.assertEqual([o.index for o in result.outputs], [0, 1, 2])
        self.assertEqual([o.seed for o in result.outputs], [7, 8, 9])
        for output in result.outputs:
            alone = self.llm.generate("The fox", SamplingParams(seq_seed=output.seed, max_tokens=12))[0]
            self.assertEqual(alone.token_ids, output.token_ids)
        self.assertEqual(result.usage.completion_tokens, sum(len(o.token_ids) for o in result.outputs))

    def test_log_probabilities(self):
        result = self.llm.generate("The fox", SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=True))[0]
        output = result.outputs[0]
        self.assertEqual(len(output.logprobs), 3)
        for token, at in zip(output.token_ids, output.logprobs):
            self.assertEqual(len(at), 2)
            self.assertEqual(at[token].rank, 1)  # greedy takes the most likely one
            self.assertEqual(at[token].decoded_token, self.llm.get_tokenizer().decode([token]))
        self.assertAlmostEqual(output.cumulative_logprob, sum(at[t].logprob for t, at in zip(output.token_ids, output.logprobs)))
        self.assertIsNone(result.prompt_logprobs[0])
        self.assertEqual(len(result.prompt_logprobs), len(result.prompt_token_ids))
        for token, at in list(zip(result.prompt_token_ids, result.prompt_logprobs))[1:]:
            self.assertEqual(list(at), [token])
            self.assertLess(at[token].logprob, 0)

    def test_stop_rules(self):
        whole = self.llm.generate("Once upon a time", GREEDY)[0]
        word = whole.text.split()[4]
        stopped = self.llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=20, stop=["~~", word]))[0]
        self.assertEqual(stopped.text, whole.text[: whole.text.index(word)])
        self.assertEqual((stopped.finish_reason, stopped.outputs[0].stop_reason), ("stop", word))
        token = whole.token_ids[6]
        by_id = self.llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[token]))[0]
        self.assertEqual((by_id.finish_reason, by_id.outputs[0].stop_reason), ("stop", token))
        self.assertEqual(by_id.token_ids[-1], token)

    def test_forced_tokens_and_bias(self):
        forced = self.llm.generate("The fox", SamplingParams(temperature=0, max_tokens=4, golden_token_ids=[100, 101]))[0]
        self.assertEqual(forced.token_ids[:2], [100, 101])
        biased = self.llm.generate("The fox", SamplingParams(temperature=0, max_tokens=4, logit_bias={205: 100}))[0]
        self.assertEqual(biased.token_ids, [205] * 4)

    def structured(self, prompt="x", **fields):
        result = self.llm.generate(prompt, SamplingParams(max_tokens=60, seed=5, **fields), use_tqdm=False)[0]
        self.assertIsNone(result.error)
        return result

    def test_structured_outputs(self):
        schema = {"enum": [True, None, 17]}
        by_dict = self.structured(structured_outputs={"json": schema})
        self.assertIn(json.loads(by_dict.text), (True, None, 17))
        by_text = self.structured(structured_outputs={"json": json.dumps(schema)})
        self.assertEqual(by_text.text, by_dict.text)
        self.assertEqual(self.structured(so_args={"schema_type": "json", "schema": schema}).text, by_dict.text)
        by_regex = self.structured(structured_outputs={"regex": "[a-f]{3}-[0-9]{2}"})
        self.assertRegex(by_regex.text, r"\A[a-f]{3}-[0-9]{2}\Z")
        self.assertEqual(by_regex.finish_reason, "stop")
        self.assertEqual(self.structured(so_args={"schema_type": "regex", "schema": "[a-f]{3}-[0-9]{2}"}).text, by_regex.text)
        rules = 'root ::= "(" root ")" | [0-9]'
        self.assertRegex(self.structured(structured_outputs={"grammar": rules}).text, r"\A\(*[0-9]?\)*\Z")
        self.assertRegex(self.structured(so_args={"schema_type": "ebnf", "schema": rules}).text, r"\A\(*[0-9]?\)*\Z")
        self.assertIn(self.structured(structured_outputs={"choice": ("left", "right")}).text, ("left", "right"))
        for off in ({"json": {"const": 1}, "regex": None}, {"json": {"const": 1}, "json_object": False}):
            self.assertEqual(float(self.structured(structured_outputs=off).text), 1)
        self.assertEqual(self.structured(structured_outputs={"json_object": True}).text[0], "{")

    def test_structured_outputs_of_a_conversation(self):
        params = SamplingParams(seed=5, max_tokens=20, structured_outputs={"choice": ["yes", "no"]})
        for result in self.llm.chat([SUM, SUM], [params, {"so_args": {"schema_type": "regex", "schema": "yes|no"}}]):
            self.assertIsNone(result.error)
            self.assertIn(result.message["content"], ("yes", "no"))
        text = "".join(p.text for p in self.llm.stream(messages=SUM, sampling_params=params) if p.kind == "content")
        self.assertIn(text, ("yes", "no"))

    def test_a_grammar_that_is_refused_has_a_result(self):
        results = self.llm.generate(["x"] * 3, [
            SamplingParams(structured_outputs={"regex": "(a"}),
            SamplingParams(structured_outputs={"regex": "abc"}),
            SamplingParams(structured_outputs={"json": {"$ref": "#/none"}}),
        ], use_tqdm=False)  # fmt: skip
        self.assertIn("'(' has no ')'", str(results[0].error))
        self.assertEqual(results[1].text, "abc")
        self.assertIn("'#/none' is not in the schema", str(results[2].error))

    def test_chat(self):
        results = self.llm.chat([SUM, [{"role": "user", "content": "What is the capital of France?"}]], GREEDY)
        self.assertEqual([r.text for r in results], ["47 + 38 = 85", "Paris is the capital of France."])
        self.assertEqual(results[0].message, {"role": "assistant", "content": "47 + 38 = 85"})
        refused = self.llm.chat([{"role": "nobody", "content": "x"}], GREEDY)[0]
        self.assertIn("nobody", str(refused.error))

    def test_stream(self):
        pieces = list(self.llm.stream(messages=SUM, sampling_params=GREEDY))
        self.assertEqual("".join(p.text for p in pieces if p.kind == "content"), "47 + 38 = 85")
        self.assertEqual(pieces[-1].kind, "done")
        self.assertEqual(pieces[-1].output.text, "47 + 38 = 85")
        text = "".join(p.text for p in self.llm.stream("Once upon a time", GREEDY) if p.kind == "text")
        self.assertEqual(text, self.llm.generate("Once upon a time", GREEDY)[0].text)
        with self.assertRaises(DeepInferError):
            list(self.llm.stream("x", {"temperature": 0, "extra": {"regex": 5}}))

    def test_a_stream_that_is_left_ends(self):
        for piece in self.llm.stream("Once upon a time", SamplingParams(max_tokens=1000, ignore_eos=True)):
            self.assertEqual(piece.kind, "text")
            break
        self.llm.generate("x", GREEDY)
        self.assertGreaterEqual(self.llm.stats()["n_abort"], 1)

    def test_threads_share_an_engine(self):
        results = [None] * 4

        def work(i):
            results[i] = self.llm.generate([f"The fox number {k}" for k in range(8)], GREEDY, use_tqdm=False)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for other in results[1:]:
            self.assertEqual([r.token_ids for r in other], [r.token_ids for r in results[0]])

    def test_statistics(self):
        self.llm.generate("x", GREEDY)
        stats = self.llm.stats()
        self.assertGreater(stats["output_tokens"], 0)
        self.assertEqual(stats["slots"], 4)


class Parameters(unittest.TestCase):
    def test_ranges(self):
        for bad in (
            {"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -2},
            {"min_p": 2}, {"n": 0}, {"n": True}, {"max_tokens": 0}, {"min_tokens": 5, "max_tokens": 4},
            {"presence_penalty": 3}, {"repetition_penalty": 0}, {"logprobs": 1001}, {"stop": [1]},
            {"stop_token_ids": [-1]}, {"logit_bias": {1: float("inf")}}, {"seed": 1, "seq_seed": 2},
        ):  # fmt: skip
            with self.assertRaises(ValueError, msg=str(bad)):
                SamplingParams(**bad)
        with self.assertRaises(TypeError):
            SamplingParams(seed=1.5)
        with self.assertRaisesRegex(ValueError, "unknown sampling parameter 'tempreture', known are: n, temperature"):
            SamplingParams.of({"tempreture": 1})

    def test_structured_outputs_that_are_wrong(self):
        for bad, message in (
            ({}, "one of json, regex, grammar, choice and json_object"),
            ({"regex": "a", "choice": ["a"]}, "one of json, regex"),
            ({"regexp": "a"}, "'regexp'.*json, regex, grammar, choice or json_object"),
            ({"json": "{"}, "json"),
            ({"json": 5}, "json"),
            ({"regex": 5}, "regex"),
            ({"grammar": ["a"]}, "grammar"),
            ({"choice": "left"}, "choice"),
            ({"choice": []}, "choice"),
            ({"choice": [1]}, "choice"),
            ("regex", "structured_outputs"),
        ):  # fmt: skip
            with self.assertRaisesRegex(ValueError, message, msg=str(bad)):
                SamplingParams(structured_outputs=bad)
        for bad, message in (
            ({"schema_type": "regex"}, "a schema_type of json, regex, ebnf and a schema"),
            ({"schema_type": "xml", "schema": "a"}, "a schema_type of json, regex, ebnf"),
            ({"schema_type": "regex", "schema": "a", "more": 1}, "'more'.*schema_type and schema"),
            ("regex", "so_args"),
        ):  # fmt: skip
            with self.assertRaisesRegex(ValueError, message, msg=str(bad)):
                SamplingParams(so_args=bad)
        with self.assertRaisesRegex(ValueError, "two names of one thing"):
            SamplingParams(so_args={"schema_type": "regex", "schema": "a"}, structured_outputs={"regex": "a"})

    def test_names_of_one_thing(self):
        self.assertEqual(SamplingParams(seq_seed=-1).fields_of_line()["seed"], 2**64 - 1)
        self.assertEqual(SamplingParams(top_logprobs=5).logprobs, 5)
        self.assertEqual(SamplingParams(logprobs=False).fields_of_line(), {})
        self.assertEqual(SamplingParams.of({"max_tokens": None, "top_k": 3}).fields_of_line(), {"top_k": 3})


class Engines(unittest.TestCase):
    def test_arguments(self):
        with self.assertRaisesRegex(TypeError, "unknown argument 'max_len', known are: model, .*max_model_len"):
            LLM(max_len=5)
        with self.assertRaisesRegex(ValueError, "tensor_parallel_size 2: expected 1"):
            LLM(tensor_parallel_size=2)
        with self.assertRaisesRegex(ValueError, "quantization 'awq': expected None"):
            LLM(quantization="awq")
        with self.assertRaisesRegex(DeepInferError, "replay: 'often'"):
            LLM(replay="often")
        with self.assertRaisesRegex(DeepInferError, "no such folder"):
            LLM("/nonexistent/folder")
        with LLM(
            max_model_len=512, max_num_batched_tokens=128, enable_prefix_caching=False, trust_remote_code=True,
            tensor_parallel_size=1, gpu_memory_utilization=0.9, quantization=None, seed=4,
            async_scheduling=False, chunk=32, max_num_seqs=2,
        ) as llm:  # fmt: skip
            self.assertEqual(llm.max_model_len, 512)
            first = llm.generate(["The fox"] * 2, SamplingParams(max_tokens=8), use_tqdm=False)
            self.assertEqual(first[0].token_ids, first[1].token_ids)
            self.assertEqual(first[0].outputs[0].seed, 4)
            self.assertEqual(llm.generate("The fox", SamplingParams(seed=5, max_tokens=8))[0].outputs[0].seed, 5)

    def test_a_bounded_queue_is_waited_for(self):
        with LLM(max_num_seqs=1, max_queue=1, max_model_len=512) as llm:
            results = llm.generate(["The fox"] * 20, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
            self.assertEqual([r.error for r in results], [None] * 20)

    def test_closing(self):
        llm = LLM(max_model_len=512)
        stream = llm.stream("Once upon a time", SamplingParams(max_tokens=400, ignore_eos=True))
        next(stream)
        llm.close()
        self.assertEqual(list(stream)[-1].output.finish_reason, "abort")
        llm.close()
        with self.assertRaisesRegex(DeepInferError, "closed"):
            llm.generate("x")

    def test_version(self):
        self.assertRegex(version(), r"^\d+\.\d+\.\d+$")


if __name__ == "__main__":
    unittest.main()
