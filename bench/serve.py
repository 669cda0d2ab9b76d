#!/usr/bin/env python3
"""Plot of `deepinfer bench serve`: times to the first and to each further token against the rate of requests, and what
each user gets against what all get; started by bench/serve.sh.

  serve.py [--program build/deepinfer] [--url URL] [--threads 2] [--layers N] [--rows FILE] [--out bench/results]
           [OPTION...]

--layers adds what HTTP costs beside N layers at the released dimensions with made-up weights (8.5 GB each) and the
released tokenizer, whose steps are as long as steps are in earnest. --rows plots the lines of an earlier run (`bench
serve --json`) instead of measuring; other options are handed to the bench (--prompt-tokens, --output-tokens, ..).
Writes DATE-serve.png and, where it has measured, all rows with machine and commit as DATE-serve-rows.md.
"""
import argparse
import datetime
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import peers

ROOT = Path(__file__).resolve().parents[1]
COST = ["throughput_64", "overhead_per_token", "serve_cost", "server_cpu", "client_cpu", "engine_cpu", "server_share"]
NAME = re.compile(r"(open|closed)_([0-9]+)_(.+)")


def command(args, rest):
    line = [args.program, "bench", "serve", "--json", "--threads", str(args.threads)]
    return line + (["--url", args.url] if args.url else ["--model", str(ROOT / "models/tiny")]) + rest


def layers(args):
    """Rows of the cost with layers at the released dimensions, their names with `layers_` in front."""
    folder = ROOT / f"build/peers/layers-{args.layers}"
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([str(ROOT / "tests/official_tokenizer.sh"), str(folder / "tokenizer.json")], check=True)
    config = json.loads((ROOT / "tests/data/model/released.json").read_text(encoding="utf-8"))
    del config["vision_config"], config["image_token_id"]
    text = {key: value for key, value in config["text_config"].items() if not key.startswith("dspark")}
    first = args.layers // 2  # the layers before it have ratio 2, this one and those behind it 1
    sources = sorted({0, first})
    text |= {"num_hidden_layers": args.layers, "num_nextn_predict_layers": 0, "engram_layer_ids": [],
             "engram_num_embeddings": [], "compress_ratios": [2] * first + [1] * (args.layers - first),
             "kv_source_layer_ids": sources, "index_source_layer_ids": sources, "candidate_source_layer_id": first}
    config["text_config"] = text
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    line = [args.program, "bench", "serve", *COST, "--json", "--threads", str(args.threads), "--model", str(folder),
            "--dummy", "--max-model-len", "256", "--prompt-tokens", "4", "--output-tokens", "16"]
    text = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout
    return "".join(line.replace('"name":"', '"name":"layers_') + "\n" for line in text.splitlines())


def points(rows, loop):
    """The figures of each point of a loop, in the order of its load."""
    found = {}
    for row in rows:
        match = NAME.fullmatch(row["name"])
        if match and match[1] == loop:
            found.setdefault(int(match[2]), {})[match[3]] = row["value"]
    return [found[n] | {"at": n} for n in sorted(found)]


def plot(rows, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, axes = plt.subplots(1, 3, figsize=(14, 4.2))
    opened, closed = points(rows, "open"), points(rows, "closed")
    for ax, key, title in ((axes[0], "ttft", "time to the first token, ms"),
                           (axes[1], "tpot", "time per further token, ms")):
        for part, color in (("p50", "#3f86b8"), ("p99", "#c8553d")):
            at = [p for p in opened if f"{key}_{part}" in p and "rate" in p]
            ax.plot([p["rate"] for p in at], [p[f"{key}_{part}"] for p in at], "-o", color=color, label=part,
                    markersize=4)
        ax.set_xlim(left=0)
        ax.set_ylim(bottom=0)
        ax.set_xlabel("requests a second, arriving at random")
        ax.set_title(title, fontsize=10)
        ax.legend(fontsize=8, frameon=False)
    at = [p for p in closed if "user" in p and "throughput" in p]
    axes[2].plot([p["throughput"] for p in at], [p["user"] for p in at], "-o", color="#3f86b8", markersize=4)
    for p in at:
        axes[2].annotate(str(p["at"]), (p["throughput"], p["user"]), textcoords="offset points", xytext=(5, 4),
                         fontsize=8)
    axes[2].set_xlim(left=0)
    axes[2].set_ylim(bottom=0)
    axes[2].set_xlabel("tokens/s of all clients (beside the points: how many)")
    axes[2].set_title("tokens/s of each client", fontsize=10)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    fig.savefig(path, dpi=120)


def cell(row, key):
    return f"{row[key]:.4g}" if key in row else ""


def sweep(lines, rows, loop, first, keys):
    found = points(rows, loop)
    if found:
        lines += ["", f"| {first} | " + " | ".join(title for _, title in keys) + " |", "|---" * (1 + len(keys)) + "|"]
        lines += [f"| {p['at']} | " + " | ".join(f"{p[k]:.4g}" if k in p else "" for k, _ in keys) + " |"
                  for p in found]


def report(rows, name, line, load):
    lines = [f"# The server under load, {name[:10]}", "", f"- machine: {peers.machine()}", f"- commit: {peers.commit()}",
             f"- command: `{line}`", f"- load average {load:.1f} before, {os.getloadavg()[0]:.1f} after", "",
             "| row | value | unit | limit | of | runs | spread |", "|---|---|---|---|---|---|---|"]
    lines += [f"| {row['name']} | {cell(row, 'value')} | {row['unit']} | {cell(row, 'limit')} | "
              f"{row.get('limit_kind', '')} | {row['runs']} | {row['spread']:.1%} |"
              for row in rows if not NAME.fullmatch(row["name"])]
    times = [(f"{k}_{p}", f"{k.upper()} {p}, ms") for k in ("ttft", "tpot") for p in ("p50", "p99")]
    sweep(lines, rows, "open", "% of the capacity", [("rate", "requests/s"), *times, ("throughput", "tokens/s"),
                                                     ("goodput", "good requests/s"), ("refused", "refused")])
    sweep(lines, rows, "closed", "clients", [("throughput", "tokens/s"), ("user", "tokens/s each"), *times])
    return [*lines, "", f"![the same as lines]({name}.png)"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", default=str(ROOT / "build/deepinfer"))
    parser.add_argument("--url")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results")
    args, rest = parser.parse_known_args()
    load = os.getloadavg()[0]
    if args.rows:
        text = args.rows.read_text(encoding="utf-8")
    else:
        text = subprocess.run(command(args, rest), check=True, stdout=subprocess.PIPE, text=True).stdout
        text += layers(args) if args.layers else ""
    rows = [json.loads(line) for line in text.splitlines() if line]
    if not points(rows, "open") and not points(rows, "closed"):
        sys.exit("serve.py: no row of a sweep")
    args.out.mkdir(parents=True, exist_ok=True)
    name = f"{datetime.date.today().isoformat()}-serve"
    plot(rows, args.out / f"{name}.png")
    if not args.rows:
        lines = report(rows, name, "bench/serve.sh " + " ".join(["--threads", str(args.threads), *rest]), load)
        (args.out / f"{name}-rows.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print("\n".join(lines))
    print(args.out / f"{name}.png")


if __name__ == "__main__":
    main()
