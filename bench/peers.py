#!/usr/bin/env python3
"""deepinfer beside other programs on the same shapes, in one run, the programs in turn; started by bench/peers.sh.

  peers.py [--threads 2] [--rounds 7] [--program build/deepinfer] [--ggml DRIVER] [--out bench/results] [--no-model]

Products of 2304 x 5120 matrices, as in `bench kernels`: 1 and 8 rows over 1 GiB of weights of either format, 512 rows
over 8 matrices again and again. Beside them PyTorch's bf16 product, which is oneDNN's, and the mxfp4 product of
llama.cpp's ggml. The speed is that of multiply-adds, two operations each, since the formats differ in bytes: bf16
weights are twice to four times as many. ggml rounds activations to 8-bit integers on the way; deepinfer adds exact
products in one order. Then the tiny model beside the PyTorch program in tools/oracle.

Medians of the rounds; a peer that is not there is named and left out. Writes DATE-peers.md and DATE-peers.png.
"""
import argparse
import datetime
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT, IN, BYTES, FEW = 2304, 5120, 1 << 30, 8
ROWS = (1, 8, 512)
NAMES = {m: ("gemm" if m == 512 else "gemv", f"m{m}") for m in ROWS}


def missing(what, why):
    print(f"peers: no {what}: {why}", file=sys.stderr)


def ours(program, threads, what, rows):
    out = subprocess.run([program, "bench", what, *rows, "--json", "--threads", str(threads), "--model",
                          str(ROOT / "models/tiny")], check=True, capture_output=True, text=True).stdout
    return {r["name"]: r for r in map(json.loads, out.splitlines())}


def our_products(program, threads):
    """Operations per second of each format and number of rows."""
    rows = [f"{NAMES[m][0]}_{f}_{NAMES[m][1]}" for f in ("mxfp4", "fp8") for m in ROWS]
    found, result = ours(program, threads, "kernels", rows), {}
    for f, n_bytes in (("mxfp4", OUT * IN // 2 + OUT * IN // 32), ("fp8", OUT * IN + OUT * IN // 1024)):
        for m in ROWS:
            r = found[f"{NAMES[m][0]}_{f}_{NAMES[m][1]}"]
            per_byte = 1 if r["unit"] == "GFLOP/s" else 2 * m * OUT * IN / n_bytes
            result[f"deepinfer {f}", m] = r["value"] * 1e9 * per_byte
    return result


class OneDnn:
    name = "PyTorch bf16 (oneDNN)"

    def __init__(self, threads):
        import torch
        if not torch.backends.mkldnn.is_available():
            raise RuntimeError("this torch has no oneDNN")
        torch.set_num_threads(threads)
        self.torch = torch
        self.mats = [torch.randn(OUT, IN).to(torch.bfloat16) for _ in range(BYTES // (2 * OUT * IN))]
        self.x = {m: torch.randn(m, IN).to(torch.bfloat16) for m in ROWS}
        self.version = f"torch {torch.__version__}"

    def run(self, m):
        mats = self.mats if m < 64 else self.mats[:FEW]
        with self.torch.no_grad():
            self.torch.nn.functional.linear(self.x[m], mats[0])
            start = time.perf_counter()
            for w in mats:
                self.torch.nn.functional.linear(self.x[m], w)
            return 2 * m * OUT * IN * len(mats) / (time.perf_counter() - start)


class Ggml:
    name = "ggml mxfp4 (llama.cpp)"

    def __init__(self, driver, threads):
        self.p = subprocess.Popen([driver, str(threads), str(OUT), str(IN), str(BYTES)], stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        buffer = self.p.stdout.readline().strip()
        if not buffer:
            raise RuntimeError(f"{driver} ended at once")
        self.version = f"ggml, weights in {buffer}, {os.environ.get('GGML_VERSION', 'version not told')}"

    def run(self, m):
        self.p.stdin.write(f"{m}\n")
        self.p.stdin.flush()
        seconds, n = self.p.stdout.readline().split()
        return 2 * m * OUT * IN * int(n) / float(seconds)


def products(a, peers):
    found = {}
    for i in range(a.rounds):
        for key, value in our_products(a.program, a.threads).items():
            found.setdefault(key, []).append(value)
        for p in peers:
            for m in ROWS:
                found.setdefault((p.name, m), []).append(p.run(m))
        print(f"products: round {i + 1} of {a.rounds}", file=sys.stderr)
    return {k: (statistics.median(v), (max(v) - min(v)) / statistics.median(v)) for k, v in found.items()}


def whole_model(a):
    spec = importlib.util.spec_from_file_location("oracle", ROOT / "bench/engine/oracle.py")
    oracle = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(oracle)
    return oracle.compare(a.program, a.threads, a.rounds)


def machine():
    name, flags = platform.processor() or platform.machine(), ""
    for line in open("/proc/cpuinfo", encoding="utf-8"):
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
        if line.startswith("flags"):
            flags = line.split(":", 1)[1].split()
            break
    sets = [f for f in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16") if f in flags]
    return f"{name}, {os.cpu_count()} processors, {' '.join(sets)}"


def commit():
    r = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run(["git", "-C", str(ROOT), "status", "--porcelain", "-uno"], capture_output=True, text=True)
    return (r.stdout.strip() or "unknown") + (" with changes" if changed.stdout.strip() else "")


def table(found, peers):
    lines = ["| rows | deepinfer mxfp4 | deepinfer fp8 | " + " | ".join(p.name for p in peers) + " | mxfp4 / ggml | fp8 / oneDNN |",
             "|---" * (5 + len(peers)) + "|"]
    for m in ROWS:
        cells = [str(m)]
        for name in ["deepinfer mxfp4", "deepinfer fp8", *(p.name for p in peers)]:
            value, spread = found[name, m]
            cells.append(f"{value * 1e-9:.1f} ({100 * spread:.0f} %)")
        for name, peer in (("deepinfer mxfp4", Ggml.name), ("deepinfer fp8", OneDnn.name)):
            cells.append(f"{found[name, m][0] / found[peer, m][0]:.2f}" if (peer, m) in found else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def plot(path, found, peers, model):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    names = ["deepinfer mxfp4", "deepinfer fp8", *(p.name for p in peers)]
    colors = ["#1b6ca8", "#7db8dd", "#c8553d", "#e0a458"]
    fig, axes = plt.subplots(1, 2 if model else 1, figsize=(11 if model else 7, 4.2), squeeze=False,
                             gridspec_kw={"width_ratios": [2, 1]} if model else None)
    ax, width = axes[0][0], 0.8 / len(names)
    for i, name in enumerate(names):
        at = [x + (i - (len(names) - 1) / 2) * width for x in range(len(ROWS))]
        bars = ax.bar(at, [found[name, m][0] * 1e-9 for m in ROWS], width, label=name, color=colors[i])
        ax.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
    ax.set_xticks(range(len(ROWS)), [f"{m} row{'s' if m > 1 else ''}" for m in ROWS])
    ax.set_ylabel("GFLOP/s")
    ax.set_yscale("log")
    ax.margins(y=0.12)
    ax.set_title(f"products of {OUT} x {IN} matrices")
    ax.legend(fontsize=8, frameon=False)
    if model:
        ax = axes[0][1]
        for i, (side, color) in enumerate((("deepinfer", colors[0]), ("PyTorch", colors[2]))):
            at = [x + (i - 0.5) * 0.38 for x in range(len(model))]
            bars = ax.bar(at, [row[side] for row in model.values()], 0.38, label=side, color=color)
            ax.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
        ax.set_xticks(range(len(model)), list(model))
        ax.set_ylabel("tokens/s")
        ax.set_yscale("log")
        ax.margins(y=0.12)
        ax.set_title("the tiny model")
        ax.legend(fontsize=8, frameon=False)
    for row in axes:
        for ax in row:
            ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    fig.savefig(path, dpi=120)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--rounds", type=int, default=7)
    ap.add_argument("--program", default=str(ROOT / "build/deepinfer"))
    ap.add_argument("--ggml")
    ap.add_argument("--out", default=str(ROOT / "bench/results"))
    ap.add_argument("--no-model", action="store_true")
    a = ap.parse_args()
    peers, model, load = [], None, [os.getloadavg()[0]]
    for make in (lambda: OneDnn(a.threads), lambda: Ggml(a.ggml, a.threads) if a.ggml else None):
        try:
            p = make()
            peers += [p] if p else []
        except Exception as e:  # whatever keeps a peer away is told, and the others run
            missing("peer", e)
    found = products(a, peers)
    if not a.no_model:
        try:
            model = whole_model(a)
        except Exception as e:
            missing("comparison of the whole model", e)
    load.append(os.getloadavg()[0])
    date = datetime.date.today().isoformat()
    lines = [f"# Beside other programs, {date}", "", f"- machine: {machine()}", f"- commit: {commit()}",
             f"- command: `{' '.join(['bench/peers.sh', '--threads', str(a.threads), '--rounds', str(a.rounds)])}`",
             f"- {a.threads} threads, medians of {a.rounds} rounds in turn; load average {load[0]:.1f} before, {load[1]:.1f} after",
             *(f"- {p.name}: {p.version}" for p in peers), "",
             f"Products of {OUT} x {IN} matrices, GFLOP/s (spread):", "", *table(found, peers)]
    if model:
        lines += ["", "The tiny model, tokens/s:", "", "| work | deepinfer | PyTorch | ratio |", "|---|---|---|---|"]
        lines += [f"| {k} | {r['deepinfer']:.1f} | {r['PyTorch']:.1f} | {r['deepinfer'] / r['PyTorch']:.1f} |"
                  for k, r in model.items()]
    out = Path(a.out)
    out.mkdir(parents=True, exist_ok=True)
    try:
        plot(out / f"{date}-peers.png", found, peers, model)
        lines += ["", f"![the same as bars]({date}-peers.png)"]
    except ImportError as e:
        missing("plot", e)
    (out / f"{date}-peers.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
