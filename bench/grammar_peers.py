#!/usr/bin/env python3
"""Grammars: deepinfer beside xgrammar and llguidance on the same schemas, vocabulary and positions, one core, in one
run; started by bench/grammar_peers.sh.

  grammar_peers.py [--model build/cache] [--program build/deepinfer] [--schemas FILE]... [--rounds 3]
                   [--seconds 150] [--json]

A row of FILE is {"schema", "text", "valid"?}. Each program compiles every schema anew and makes a mask before each
token of its valid texts and before the end mark, up to the first token that it refuses. Times are those of the
processor, all threads of a program together, so that what else the machine does isn't in them; Python's share of a call
and the clock's are measured with a call that does nothing, printed and not taken off. Rows are medians of the rounds,
the programs in turn: compile times over the schemas that a program takes, masks over the positions that all programs
reach.

The whole takes about --seconds. A program that has had a quarter of that in a round leaves the schemas that are left
untried, which are then in no program's figures, and are printed by number; rounds that don't fit are not begun.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EOS = "<｜end▁of▁sentence｜>"


def byte_map():
    """Characters of a byte-level vocabulary to their bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, n = {chr(b): b for b in plain}, 0
    for b in range(256):
        if b not in plain:
            table[chr(256 + n)] = b
            n += 1
    return table


class Vocabulary:
    def __init__(self, path):
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        self.path = str(path)
        added = {t["id"]: t["content"] for t in data["added_tokens"]}
        words = {**{i: s for s, i in data["model"]["vocab"].items()}, **added}
        self.size = max(words) + 1
        self.added = added
        self.spellings = [words.get(i, "") for i in range(self.size)]
        self.eos = next(i for i, s in added.items() if s == EOS)


class XGrammar:
    name = "xgrammar"

    def __init__(self, vocabulary):
        import xgrammar
        self.xgr = xgrammar
        info = xgrammar.TokenizerInfo(vocabulary.spellings, xgrammar.VocabType.BYTE_LEVEL, vocab_size=vocabulary.size,
                                      stop_token_ids=[vocabulary.eos])
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.mask = xgrammar.allocate_token_bitmask(1, vocabulary.size)

    def compile(self, schema):
        return self.compiler.compile_json_schema(schema)

    def start(self, compiled):
        return self.xgr.GrammarMatcher(compiled)

    def fill(self, matcher):
        matcher.fill_next_token_bitmask(self.mask)

    def accept(self, matcher, token):
        return matcher.accept_token(token)


class LLGuidance:
    name = "llguidance"

    def __init__(self, vocabulary):
        import llguidance
        import llguidance.numpy
        self.llg = llguidance
        self.fill_mask = llguidance.numpy.fill_next_token_bitmask
        self.tokenizer = llguidance.LLTokenizer(vocabulary.path, n_vocab=vocabulary.size, eos_token=vocabulary.eos,
                                                slices=llguidance.LLTokenizer.json_slices())
        self.mask = llguidance.numpy.allocate_token_bitmask(1, vocabulary.size)

    def compile(self, schema):
        matcher = self.llg.LLMatcher(self.tokenizer, self.llg.LLMatcher.grammar_from_json_schema(schema), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def start(self, compiled):
        return compiled.deep_copy()

    def fill(self, matcher):
        self.fill_mask(matcher, self.mask, 0)

    def accept(self, matcher, token):
        return matcher.consume_token(token)


def read_cases(paths, encode, eos):
    """Schemas with their valid texts and the tokens of these."""
    cases = {}
    for path in paths:
        for line in Path(path).read_text(encoding="utf-8").split("\n"):
            row = json.loads(line) if line.strip() else {}
            if "schema" not in row:
                continue
            texts = cases.setdefault(json.dumps(row["schema"], ensure_ascii=False, separators=(",", ":")), {})
            if isinstance(row.get("text"), str) and row.get("valid", True):
                texts[row["text"]] = None
    return [(schema, list(texts), [encode(t) + [eos] for t in texts]) for schema, texts in cases.items() if texts]


def run_peer(peer, cases, seconds):
    """Compile times by schema, mask times by (schema, text, position), and the first schema that was not tried."""
    compiles, masks, now, end = {}, {}, time.process_time_ns, time.monotonic() + seconds
    for i, (schema, _, texts) in enumerate(cases):
        if time.monotonic() > end:
            return compiles, masks, i
        begin = now()
        try:
            compiled = peer.compile(schema)
        except Exception:  # whatever a peer raises for a schema that it doesn't take
            continue
        compiles[i] = (now() - begin) * 1e-6
        for j, tokens in enumerate(texts):
            matcher = peer.start(compiled)
            for k, token in enumerate(tokens):
                begin = now()
                peer.fill(matcher)
                masks[i, j, k] = (now() - begin) * 1e-3
                if not peer.accept(matcher, token):
                    break
    return compiles, masks, len(cases)


def run_ours(program, model, path, n_cases):
    """The same from deepinfer, which logs the times of its last run."""
    log = subprocess.run([program, "bench", "grammar", "compile", "mask", "--json", "--model", model, "--schemas", path,
                          "--log-level", "debug"], check=True, capture_output=True, text=True).stderr
    compiles, masks = {}, {}
    for line in log.splitlines():
        words = line.replace(":", " ").split()
        if words[2:3] == ["compile"]:
            compiles[int(words[3])] = float(words[4])
        elif words[2:3] == ["mask"]:
            masks[tuple(map(int, words[3:6]))] = float(words[6]) * 1e3
    return compiles, masks, n_cases


def quantile(values, share):
    values = sorted(values)
    return values[int(share * (len(values) - 1))] if values else float("nan")


def call_overhead_us():
    """What Python itself takes of a timed call."""
    now, times = time.process_time_ns, []
    for _ in range(20000):
        begin = now()
        len("")
        times.append((now() - begin) * 1e-3)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "build/cache"), help="folder with tokenizer.json")
    parser.add_argument("--program", default=str(ROOT / "build/deepinfer"))
    parser.add_argument("--schemas", action="append", help="default: the vectors of the tests and bench/schemas.jsonl")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=150, help="for all rounds of all programs")
    parser.add_argument("--json", action="store_true", help="a line a row instead of a table")
    args = parser.parse_args()
    paths = args.schemas or [p for p in (ROOT / "tests/data/grammar/so_json_schema.jsonl", ROOT / "bench/schemas.jsonl")
                             if p.exists()]
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    import tokenizers
    tokenizer_path = Path(args.model) / "tokenizer.json"
    vocabulary = Vocabulary(tokenizer_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_path))
    cases = read_cases(paths, lambda text: tokenizer.encode(text, add_special_tokens=False).ids, vocabulary.eos)
    peers = []
    for kind in (XGrammar, LLGuidance):
        try:
            peers.append(kind(vocabulary))
        except Exception as error:  # a peer that can't be had is left out, for whatever reason
            print(f"grammar_peers: no {kind.name}: {error}", file=sys.stderr)

    runs = {name: [] for name in ["deepinfer", *(p.name for p in peers)]}
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".jsonl") as file:
        for schema, texts, _ in cases:
            for text in texts:
                file.write(json.dumps({"schema": json.loads(schema), "text": text}, ensure_ascii=False) + "\n")
        file.flush()
        begin = time.monotonic()
        for n in range(args.rounds):
            if n > 0 and (time.monotonic() - begin) * (n + 1) / n > args.seconds:
                print(f"grammar_peers: {n} of {args.rounds} rounds", file=sys.stderr)
                break
            runs["deepinfer"].append(run_ours(args.program, args.model, file.name, len(cases)))
            for peer in peers:
                runs[peer.name].append(run_peer(peer, cases, args.seconds / 4))

    n_tried = min(r[2] for rounds in runs.values() for r in rounds)
    if n_tried < len(cases):
        print(f"grammar_peers: schemas {n_tried + 1} to {len(cases)} are left out for want of time", file=sys.stderr)
    common = {k for k in runs["deepinfer"][0][1] if k[0] < n_tried and all(k in r[0][1] for r in runs.values())}
    rows = []
    for name, rounds in runs.items():
        def middle(figure):
            return statistics.median(figure([x for i, x in c.items() if i < n_tried], m) for c, m, _ in rounds)
        rows.append({
            "program": name,
            "compile_median": middle(lambda c, m: quantile(c, 0.5)),
            "compile_p99": middle(lambda c, m: quantile(c, 0.99)),
            "mask_mean": middle(lambda c, m: statistics.fmean(m[k] for k in common)),
            "mask_p99": middle(lambda c, m: quantile([m[k] for k in common], 0.99)),
            "mask_max": middle(lambda c, m: max(m[k] for k in common)),
            "first_mask_max": middle(lambda c, m: max(m[k] for k in common if k[1:] == (0, 0))),
            "refused": n_tried - sum(i < n_tried for i in rounds[0][0]),
            "positions": sum(k[0] < n_tried for k in rounds[0][1]),
        })
    if args.json:
        for row in rows:
            print(json.dumps(row))
        return
    print(f"{n_tried} schemas, {len(common)} positions that all reach, vocabulary of {vocabulary.size}, one core; "
          f"of a mask the clock and Python take {call_overhead_us():.2f} us where that calls")
    names = list(rows[0])[1:]
    units = dict.fromkeys(names[:2], "ms") | dict.fromkeys(names[2:6], "us")
    print(f"{'':18}" + "".join(f"{r['program']:>14}" for r in rows))
    for name in names:
        print(f"{name + ' ' + units.get(name, ''):18}" + "".join(f"{r[name]:14.5g}" for r in rows))


if __name__ == "__main__":
    main()
