#!/usr/bin/env python3
"""Speed of the tiny model beside the PyTorch program in tools/oracle, in one run, the two in turn.

  bench/engine/oracle.sh            makes build/venv with torch when it is not there, builds, and runs this
  oracle.py [--rounds 3] [--threads 2] [--program build/deepinfer]

PyTorch: mode dequant, greedy decode of 64 tokens after a 32-token prompt, prefill of 512 tokens, medians of the rounds.
deepinfer: the rows tiny_b1 and tiny_512 of `bench decode` and `bench prefill`, which do the same work.
"""
import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/oracle"))


def oracle_rounds(model, torch, seed):
    g = torch.Generator().manual_seed(seed)
    ids = [0] + torch.randint(4, model.t.vocab_size, (511,), generator=g).tolist()
    start = time.perf_counter()
    model.prefill(ids)
    prefill = len(ids) / (time.perf_counter() - start)
    logits, cache = model.prefill(ids[:32])
    token = int(logits[-1].argmax())
    start = time.perf_counter()
    for _ in range(64):
        token = int(model.decode_step(token, cache).argmax())
    return prefill, 64 / (time.perf_counter() - start)


def ours(program, threads, what, name):
    out = subprocess.run([program, "bench", what, name, "--json", "--threads", str(threads), "--model", str(ROOT / "models/tiny")],
                         check=True, capture_output=True, text=True).stdout
    return next(r["value"] for r in map(json.loads, out.splitlines()) if r["name"] == name)


def compare(program, threads, rounds):
    """{work: {"deepinfer": tokens/s, "PyTorch": tokens/s}} for prefill and decode."""
    import torch
    from load import load
    torch.set_num_threads(threads)
    model = load(ROOT / "models/tiny").set_mode("dequant")
    theirs, mine = {"prefill": [], "decode": []}, {"prefill": [], "decode": []}
    with torch.no_grad():
        oracle_rounds(model, torch, 0)
        for i in range(rounds):
            p, d = oracle_rounds(model, torch, i + 1)
            theirs["prefill"].append(p)
            theirs["decode"].append(d)
            mine["prefill"].append(ours(program, threads, "prefill", "tiny_512"))
            mine["decode"].append(ours(program, threads, "decode", "tiny_b1"))
    return {work: {"deepinfer": statistics.median(mine[work]), "PyTorch": statistics.median(theirs[work])}
            for work in ("prefill", "decode")}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--program", default=str(ROOT / "build/deepinfer"))
    a = ap.parse_args()
    found = compare(a.program, a.threads, a.rounds)
    print(f"{a.threads} threads, medians of {a.rounds} rounds, tokens/s")
    print(f"{'work':10} {'deepinfer':>12} {'PyTorch':>12} {'ratio':>8}")
    for work, r in found.items():
        print(f"{work:10} {r['deepinfer']:12.1f} {r['PyTorch']:12.1f} {r['deepinfer'] / r['PyTorch']:8.2f}")


if __name__ == "__main__":
    main()
