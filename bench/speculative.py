#!/usr/bin/env python3
"""Plot of `deepinfer bench speculative`: speed and accepted drafts against the batch size, for no drafts, fixed numbers
of them and as many as the model of step times says; started by bench/speculative.sh.

  speculative.py [--program build/deepinfer] [--threads 2] [--rows FILE] [--out bench/results]

--rows plots the lines of an earlier run (`bench speculative --json`) instead of measuring. Writes DATE-speculative.png
and, where it has measured, all rows with machine and commit as DATE-speculative.md.
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
NAME = re.compile(r"(off|scheduled|fixed[1-9][0-9]*)_b([0-9]+)(_accepted)?")


def measure(program, threads):
    command = [program, "bench", "speculative", "--json", "--threads", str(threads), "--model",
               str(ROOT / "models/tiny")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def series(rows):
    """Way of drafting to {batch size: value}, for speeds and for accepted drafts."""
    speed, accepted = {}, {}
    for row in rows:
        match = NAME.fullmatch(row["name"])
        if match:
            way, size, is_accepted = match.groups()
            value = 1.0 if way == "off" else row["value"]
            (accepted if is_accepted else speed).setdefault(way, {})[int(size)] = value
    return speed, accepted


def label(way):
    return {"off": "no drafts", "scheduled": "scheduled"}.get(way, way.replace("fixed", "fixed: "))


def plot(speed, accepted, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    shades = ["#c6dcec", "#9cc4de", "#6ba6cd", "#3f86b8", "#1b6ca8"]
    styles = {"off": ("#777777", "--"), "scheduled": ("#c8553d", "-")}
    fixed = sorted(way for way in speed if way.startswith("fixed"))
    for i, way in enumerate(fixed):
        styles[way] = (shades[i * (len(shades) - 1) // max(len(fixed) - 1, 1)], "-")
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    sizes = sorted(next(iter(speed.values())))
    for ax, values, title in ((axes[0], speed, "tokens/s over that without drafts"),
                              (axes[1], accepted, "accepted drafts a step of a sequence")):
        for way in ["off", *fixed, "scheduled"]:
            if way in values:
                at = sorted(values[way])
                color, line = styles[way]
                ax.plot(at, [values[way][n] for n in at], line, color=color, label=label(way),
                        marker=None if way == "off" else "o", markersize=4, linewidth=2 if way == "scheduled" else 1.4)
        ax.set_xscale("log", base=2)
        ax.set_xticks(sizes, [str(n) for n in sizes])
        ax.set_ylim(bottom=0)
        ax.set_xlabel("requests at once")
        ax.set_title(title, fontsize=10)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8, frameon=False)
    fig.tight_layout()
    fig.savefig(path, dpi=120)


def cell(row, key):
    return f"{row[key]:.4g}" if key in row else ""


def report(rows, name, command, load):
    """The figures by themselves, then a line for each batch size: speed, and accepted drafts in brackets."""
    speed, accepted = series(rows)
    found = {row["name"]: row for row in rows}
    ways = ["scheduled", *sorted(way for way in speed if way.startswith("fixed"))]
    lines = [f"# Speculative decoding, {name[:10]}", "", f"- machine: {peers.machine()}",
             f"- commit: {peers.commit()}", f"- command: `{command}`",
             f"- load average {load:.1f} before, {os.getloadavg()[0]:.1f} after", "",
             "| row | value | unit | limit | of | runs | spread |", "|---|---|---|---|---|---|---|"]
    lines += [f"| {row['name']} | {cell(row, 'value')} | {row['unit']} | {cell(row, 'limit')} | "
              f"{row.get('limit_kind', '')} | {row['runs']} | {row['spread']:.1%} |"
              for row in rows if not NAME.fullmatch(row["name"])]
    lines += ["", "Speed over that without drafts, and accepted drafts a step of a sequence:", "",
              "| at once | tokens/s without | " + " | ".join(map(label, ways)) + " |", "|---" * (2 + len(ways)) + "|"]
    for n in sorted({n for way in speed.values() for n in way}):
        off = found.get(f"off_b{n}")
        cells = [f"{speed[way][n]:.3f} ({accepted.get(way, {}).get(n, 0):.2f})" if n in speed.get(way, {}) else ""
                 for way in ways]
        lines.append(f"| {n} | {cell(off, 'value') if off else ''} | " + " | ".join(cells) + " |")
    return [*lines, "", f"![the same as lines]({name}.png)"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", default=str(ROOT / "build/deepinfer"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    text = args.rows.read_text(encoding="utf-8") if args.rows else measure(args.program, args.threads)
    rows = [json.loads(line) for line in text.splitlines() if line]
    speed, accepted = series(rows)
    if not speed:
        sys.exit("speculative.py: no row of a batch size")
    args.out.mkdir(parents=True, exist_ok=True)
    name = f"{datetime.date.today().isoformat()}-speculative"
    plot(speed, accepted, args.out / f"{name}.png")
    if not args.rows:
        lines = report(rows, name, f"bench/speculative.sh --threads {args.threads}", load)
        (args.out / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print("\n".join(lines))
    print(args.out / f"{name}.png")


if __name__ == "__main__":
    main()
