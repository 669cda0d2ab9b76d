"""Made-up weights: every tensor of a config as a pure function of (seed, tensor name, element index), see docs/dummy.md.

  python dummy.py config_dir --list                    name, dtype, shape, first 16 bytes and CRC32 of every tensor
  python dummy.py config_dir --write out_dir           the same weights as an ordinary checkpoint (small configs)

`build(path)` gives an oracle model with these weights and no file: matrices and experts stay in bf16 (exact for fp8 and fp4
codes times powers of two) and are widened to fp32 one at a time, so that released layer shapes fit in memory.
"""
from __future__ import annotations

import argparse
import json
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn as nn

import quant as Q
import stio
from config import Config
from load import token_map_of
from model import Lin, Model

GOLDEN = 0x9E3779B97F4A7C15
M64 = (1 << 64) - 1
PIECE = 1 << 16                                     # words generated at a time, small enough for a core's cache


# =============================== streams ==============================================

def mix64(z: int) -> int:
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & M64
    return z ^ z >> 31


def tensor_key(seed: int, name: str) -> int:
    h = 0xCBF29CE484222325                          # FNV-1a, 64 bits
    for b in name.encode():
        h = ((h ^ b) * 0x100000001B3) & M64
    return mix64((h + seed * GOLDEN) & M64)


def _words(out: np.ndarray, key: int, first: int):
    """out[k] = word number first + k of the stream."""
    z = np.arange(first + 1, first + 1 + len(out), dtype=np.uint64)
    z *= np.uint64(GOLDEN)
    z += np.uint64(key)
    t = z >> np.uint64(30)
    for mul, sh in ((0xBF58476D1CE4E5B9, 27), (0x94D049BB133111EB, 31)):
        z ^= t
        z *= np.uint64(mul)
        np.right_shift(z, np.uint64(sh), out=t)
    np.bitwise_xor(z, t, out=out)


def stream(seed: int, name: str, n_bytes: int, fix=None) -> np.ndarray:
    """The first n_bytes of the tensor's stream; fix(words) edits 64-bit words in place."""
    key = tensor_key(seed, name)
    out = np.empty((n_bytes + 7) // 8, dtype=np.uint64)

    def piece(a):
        w = out[a:a + PIECE]
        _words(w, key, a)
        if fix:
            fix(w)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(piece, range(0, len(out), PIECE)))
    return out.view(np.uint8)[:n_bytes]


# =============================== recipes ==============================================

def q_of(n: int) -> int:
    """Power of two nearest to sqrt(n), as an exponent: 4^q <= 2n < 4^(q+1)."""
    return (n.bit_length()) >> 1


GAIN = {"attn.wo_b": -1, "engram.wkv": 1, "shared_experts.w1": 2, "shared_experts.w3": 2, "shared_experts.w2": -7,
        "w1": 2, "w3": 2, "w2": -5, "head": 2, "markov_head.head": 0, "gate": 1, "confidence_head.proj": -1}


def gain_of(name: str) -> int:
    """Longest matching ending of the name without .weight / .scale; 0 when none matches."""
    stem = name.rsplit(".", 1)[0]
    hit = [k for k in GAIN if stem == k or stem.endswith("." + k)]
    if stem.startswith(("vision.", "aligner.")):
        return 0
    return GAIN[max(hit, key=len)] if hit else 0


def _rep(x: int, bits: int) -> np.uint64:
    return np.uint64(sum(x << i for i in range(0, 64, bits)))


def _and_add(mask: int, add: int, bits: int):
    m, a = _rep(mask, bits), _rep(add, bits)

    def fix(w):
        w &= m
        w += a
    return fix


def _scale_fix(byte: int):
    one, base = _rep(1, 8), _rep(byte - 1, 8)

    def fix(w):
        t = w >> np.uint64(1)
        t &= one
        w &= one
        w += t
        w += base
    return fix


fix_fp8 = _and_add(0x9F, 0x40, 8)


@dataclass
class Spec:
    """One stored tensor. shape is the stored one (fp4 weights: bytes); n_in is the fan-in that sets its scale."""
    name: str
    kind: str                                       # fp8 | fp4 | scale | bf16 | f32
    shape: tuple
    n_in: int = 1
    origin: str = ""                                # for scales: which format they belong to


def make(s: Spec, seed: int, hc_mult: int) -> torch.Tensor:
    n = int(np.prod(s.shape))
    g, q = gain_of(s.name), q_of(s.n_in)
    if s.kind == "fp8":
        return torch.from_numpy(stream(seed, s.name, n, fix_fp8)).view(torch.float8_e4m3fn).view(s.shape)
    if s.kind == "fp4":
        return torch.from_numpy(stream(seed, s.name, n)).view(torch.int8).view(s.shape)
    if s.kind == "scale":
        byte = {"fp8": 123 - q + g, "fp4": 125 - q + g, "row": 121}[s.origin]
        return torch.from_numpy(stream(seed, s.name, n, _scale_fix(byte))).view(torch.float8_e8m0fnu).view(s.shape)
    if s.kind == "bf16":
        if s.name.endswith("q_norm.weight"):
            fix = _and_add(0x3F, 0x3FA0, 16)
        elif re.search(r"norm\d?\.weight$|\.[qk]_weight$", s.name):
            fix = _and_add(0x3F, 0x3F60, 16)
        else:
            small = 6 if s.name.endswith(".bias") else 0
            fix = _and_add(0x81FF, (124 - q + g - small) << 7, 16)
        return torch.from_numpy(stream(seed, s.name, 2 * n, fix)).view(torch.bfloat16).view(s.shape)
    v = torch.from_numpy(stream(seed, s.name, 2 * n).view(np.int16).astype(np.float32)).view(s.shape)
    leaf = s.name.rsplit(".", 1)[-1]
    if leaf == "attn_sink":
        return v * 2.0 ** -15
    if leaf in ("bias", "bias_vl"):
        return v * 2.0 ** -19
    if leaf.endswith("_fn"):
        return v * 2.0 ** -(14 + q)
    if leaf.endswith("_scale"):
        return 0.5 + v * 2.0 ** -19
    assert leaf in ("hc_attn_base", "hc_ffn_base"), s.name
    m = hc_mult
    one = (int(s.name.split(".")[1]) + (leaf == "hc_ffn_base")) % m
    c = torch.cat([torch.full((m,), -2.0), torch.zeros(m), (torch.eye(m) * 4 - 2).flatten()])
    c[one] = 2.0
    return c + v * 2.0 ** -17


# =============================== all tensors of a config ================================

def shell(cfg: Config, token_map=None) -> Model:
    """The model without values: large parameters on the meta device."""
    with mock.patch.object(torch, "randn", lambda *s: torch.empty(*s, device="meta")):
        return Model(cfg, token_map).eval()


def _blocks(n: int) -> int:
    return (n + 31) // 32


def specs_of(name: str, kind: str, shape: tuple) -> list[Spec]:
    """Stored tensors of one state_dict entry (experts: of the whole stack)."""
    stem = name[: -len("weight")]
    if kind in ("bf16", "f32"):
        n_in = 1 if name.endswith("embed.weight") else int(np.prod(shape[1:]))
        return [Spec(name, kind, shape, n_in)]
    if kind == "fp8":
        return [Spec(name, "fp8", shape, shape[1]),
                Spec(stem + "scale", "scale", (_blocks(shape[0]), _blocks(shape[1])), shape[1], "fp8")]
    if kind == "fp8row":
        return [Spec(name, "fp8", shape), Spec(stem + "scale", "scale", (shape[0], shape[1] // 32), 1, "row")]
    pre, leaf = name.rsplit(".", 1)
    E, O, I = shape
    out = []
    for e in range(E):
        for w in (("w1", "w3") if leaf == "w13" else ("w2",)):
            o = O // 2 if leaf == "w13" else O
            p = f"{pre}.experts.{e}.{w}."
            out += [Spec(p + "weight", "fp4", (o, I // 2), I), Spec(p + "scale", "scale", (o, I // 32), I, "fp4")]
    return out


def all_specs(model: Model) -> dict[str, list[Spec]]:
    shapes = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    return {k: specs_of(k, kind, shapes[k]) for k, kind in model.storage_kinds().items()}


# =============================== decoding to bf16 =======================================

_PAIR = np.array([Q.fp4_value(torch.tensor([b & 15, b >> 4])).bfloat16().view(torch.int16).numpy().view(np.uint32)[0]
                  for b in range(256)], dtype=np.uint32)


def widen(codes: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
    s = Q.e8m0_decode(scale.view(torch.uint8)).bfloat16()
    if kind == "fp4":
        w = torch.from_numpy(_PAIR[codes.view(torch.uint8).numpy()].view(np.int16)).view(torch.bfloat16)
        w = w.view(codes.shape[0], -1)
    else:
        w = codes.bfloat16()
        if kind == "fp8":
            s = s.repeat_interleave(32, 0)[: w.shape[0]]
    if w.shape[1] % 32:
        return w.mul_(s.repeat_interleave(32, 1)[:, : w.shape[1]])
    w.view(w.shape[0], -1, 32).mul_(s[..., None])
    return w


class Experts:
    """Stack of expert matrices in bf16; indexing gives one in fp32."""

    def __init__(self, data: torch.Tensor):
        self.data, self.shape = data, data.shape

    def __getitem__(self, e: int) -> torch.Tensor:
        return self.data[e].float()


@torch.no_grad()
def fill(model: Model, seed: int) -> Model:
    m, kinds = model.t.hc_mult, model.storage_kinds()
    for name, specs in all_specs(model).items():
        path, leaf = name.rsplit(".", 1)
        mod, kind = model.get_submodule(path), kinds[name]
        if kind == "mxfp4":
            mats = [widen(make(a, seed, m), make(b, seed, m), "fp4") for a, b in zip(specs[::2], specs[1::2])]
            if leaf == "w13":
                mats = [torch.cat(p) for p in zip(mats[::2], mats[1::2])]
            del mod._parameters[leaf]
            mod.__dict__[leaf] = Experts(torch.stack(mats))
            continue
        x = make(specs[0], seed, m)
        if kind in ("fp8", "fp8row"):
            x = widen(x, make(specs[1], seed, m), kind)
        if kind != "fp8":
            x = x.float()
        if leaf in mod._buffers:
            mod._buffers[leaf] = x
        else:
            mod._parameters[leaf] = nn.Parameter(x, requires_grad=False)
    for mod in model.modules():
        if isinstance(mod, Lin) and mod.kind == "fp8":
            mod.w = lambda lin=mod: lin.weight.float()
    model.num.moe_impl = "loop"
    return model


def seed_of(path: str | Path) -> int:
    path = Path(path)
    return int(json.loads((path / "config.json" if path.is_dir() else path).read_text()).get("dummy_seed", 0))


def build(path: str | Path, seed: int | None = None) -> Model:
    """path: a folder with config.json and, if there is one, tokenizer.json (without: the identity token map)."""
    path = Path(path)
    cfg = Config.load(path)
    tm = token_map_of(path if path.is_dir() else path.parent, cfg)
    return fill(shell(cfg, tm), seed_of(path) if seed is None else seed)


# =============================== as a checkpoint ========================================

def stored(cfg: Config, seed: int, token_map=None) -> dict[str, torch.Tensor]:
    return {s.name: make(s, seed, cfg.text.hc_mult) for ss in all_specs(shell(cfg, token_map)).values() for s in ss}


def write_checkpoint(cfg: Config, seed: int, out_dir: str | Path, token_map=None) -> int:
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    st = stored(cfg, seed, token_map)
    stio.write(out / "model.safetensors", st, {"format": "pt"})
    total = sum(v.numel() * v.element_size() for v in st.values())
    (out / "model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {"total_size": total}, "weight_map": {n: "model.safetensors" for n in sorted(st)}}, indent=1))
    (out / "config.json").write_text(json.dumps(cfg.dump() | {"dummy_seed": seed}, indent=2))
    n = cfg.text.vocab_size
    (out / "engram_token_map.json").write_text(json.dumps(list(range(n)) if token_map is None else list(token_map)))
    return total


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("config")
    ap.add_argument("--seed", type=int)
    ap.add_argument("--write")
    ap.add_argument("--list", action="store_true")
    ap.add_argument("--match", default="")
    a = ap.parse_args()
    path = Path(a.config)
    cfg, seed = Config.load(path), seed_of(path) if a.seed is None else a.seed
    tm = token_map_of(path if path.is_dir() else path.parent, cfg)
    if a.list:
        for ss in all_specs(shell(cfg, tm)).values():
            for s in ss:
                if re.search(a.match, s.name):
                    raw = stio.raw_bytes(make(s, seed, cfg.text.hc_mult))
                    print(s.name, s.kind, list(s.shape), raw[:16].hex(), f"{zlib.crc32(raw):08x}", flush=True)
    if a.write:
        print(write_checkpoint(cfg, seed, a.write, tm), "bytes")


if __name__ == "__main__":
    main()
