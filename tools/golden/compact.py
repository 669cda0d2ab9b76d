#!/usr/bin/env python3
"""Make the small golden files of tests/data from the files that tools/oracle/golden.py and golden_dummy.py write.

  compact.py IN.safetensors OUT.safetensors [--keep-rows N]

Keeps every tensor's name and meaning. Float tensors whose values bf16 holds exactly are stored as BF16; draft.logits keeps
its first two rows; with --keep-rows, tensors with more rows than N keep their last N (selections, routing, cache rows).
Needs nothing but the standard library.
"""
import argparse
import array
import json
import struct
from pathlib import Path

ROW_LIMITED = ("router_idx", "router_weight", "index_selected", "candidate_blocks", "engram_rows")


def read(path):
    raw = Path(path).read_bytes()
    (n,) = struct.unpack("<Q", raw[:8])
    head = json.loads(raw[8:8 + n])
    head.pop("__metadata__", None)
    return {k: (v["dtype"], v["shape"], raw[8 + n + v["data_offsets"][0]:8 + n + v["data_offsets"][1]]) for k, v in head.items()}


def write(path, tensors):
    head, off = {}, 0
    for k in sorted(tensors):
        d, s, b = tensors[k]
        head[k] = {"dtype": d, "shape": s, "data_offsets": [off, off + len(b)]}
        off += len(b)
    blob = json.dumps(head, separators=(",", ":")).encode()
    blob += b" " * (-len(blob) % 8)
    Path(path).write_bytes(struct.pack("<Q", len(blob)) + blob + b"".join(tensors[k][2] for k in sorted(tensors)))


def last_rows(t, n):
    d, s, b = t
    if not s or s[0] <= n:
        return t
    row = len(b) // s[0]
    return d, [n] + s[1:], b[-n * row:]


def first_rows(t, n):
    d, s, b = t
    row = len(b) // s[0]
    return d, [min(n, s[0])] + s[1:], b[:n * row]


def to_bf16(t):
    d, s, b = t
    if d != "F32" or not b:
        return t
    words = array.array("I", b)
    if any(w & 0xFFFF for w in words):
        return t
    return "BF16", s, array.array("H", (w >> 16 for w in words)).tobytes()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("src")
    ap.add_argument("dst")
    ap.add_argument("--keep-rows", type=int, default=0)
    a = ap.parse_args()
    out = {}
    for name, t in read(a.src).items():
        if name == "draft.logits":
            t = first_rows(t, 2)
        if a.keep_rows and name.rsplit(".", 1)[-1] in ROW_LIMITED:
            t = last_rows(t, a.keep_rows)
        out[name] = to_bf16(t)
    write(a.dst, out)


if __name__ == "__main__":
    main()
