#!/usr/bin/env python3
"""Rules of the source tree that a compiler doesn't check.

Usage: lint.py [RULE...]; without a rule, all of them. Exit status 1 when something is wrong, with one line for each.

  layers      include lines follow the layers of docs/architecture.md, and other folders include public headers only
  headers     every file opens with a comment that says what it owns
  words       tabs, file lengths, calls that belong to the programs alone, clocks, marks of unfinished work
  references  no header, data file, tool or document that nothing mentions
"""
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# What a layer may include besides itself and include/deepinfer; each entry brings what it may include in turn.
BELOW = {
    "base": [],
    "tensor": ["base"],
    "text": ["base"],
    "backend": ["tensor"],
    "model": ["backend"],
    "engine": ["model", "text"],
    "api": ["engine", "text"],
    "cli": ["server"],
    "server": ["api"],
}

# Public headers of a folder beside <folder>.h: inline functions that few files want and that would weigh on all others.
ALSO_PUBLIC = {"tensor": ["math_inline.h", "format_inline.h"]}

# Libraries that these folders alone may use.
LIBRARY_HOMES = {
    "jansson.h": ["base"],
    "pcre2.h": ["text"],
    "uninorm.h": ["text"],
    "unictype.h": ["text", "engine"],
    "unicase.h": ["text", "engine"],
    "xxhash.h": ["engine"],
    "curl/curl.h": ["cli"],
    "microhttpd.h": ["server"],
    "cmocka.h": [],
}

# Calls that only the programs make, with the files that are the exception.
PROGRAM_CALLS = {
    "getenv": [],
    "environ": ["src/base/options.c"],
    "exit": [],
    "_exit": [],
    "abort": ["src/base/error.c"],
    "printf": [],
    "puts": [],
    "putchar": [],
    "stdout": [],
}

# Clocks that can be set: a time measured with one can be negative. The engine reads di_clock_ns alone.
SETTABLE_CLOCKS = r"\b(CLOCK_REALTIME\w*|(gettimeofday|timespec_get|time|localtime|gmtime|clock_gettime)\s*\()"

problems = []


def problem(path, line, text):
    where = os.path.relpath(path, ROOT)
    problems.append(f"{where}:{line}: {text}" if line else f"{where}: {text}")


def files(*folders, ends=(".c", ".h")):
    for folder in folders:
        for parent, dirs, names in os.walk(os.path.join(ROOT, folder)):
            dirs[:] = sorted(d for d in dirs if d not in ("build", "__pycache__", ".git"))
            for name in sorted(names):
                if name.endswith(tuple(ends)):
                    yield os.path.join(parent, name)


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def without_comments(text):
    """The text with comments and strings blanked out, lines kept."""

    def blank(match):
        kept = match.group(0)
        return "".join(c if c == "\n" else " " for c in kept) if kept[0] == "/" else '""' + "\n" * kept.count("\n")

    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', blank, text, flags=re.S)


def reachable(layer):
    seen = []
    todo = [layer]
    while todo:
        name = todo.pop()
        for below in BELOW[name]:
            if below not in seen:
                seen.append(below)
                todo.append(below)
    return seen


def public_headers(folder):
    """Headers of src/<folder> that other folders may include."""
    name = os.path.basename(folder)
    return [name + ".h"] + ALSO_PUBLIC.get(folder, [])


def rule_layers():
    for path in files("src"):
        inside = os.path.relpath(path, os.path.join(ROOT, "src"))
        folder = os.path.dirname(inside)
        layer = inside.split(os.sep)[0]
        if layer not in BELOW:
            problem(path, 0, f"'{layer}' is not a layer")
            continue
        allowed = reachable(layer) + [layer]
        for number, line in enumerate(read(path).split("\n"), 1):
            match = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
            if not match:
                continue
            kind, name = match.groups()
            if kind == "<":
                if name in LIBRARY_HOMES and layer not in LIBRARY_HOMES[name]:
                    problem(path, number, f"<{name}> belongs to {' and '.join(LIBRARY_HOMES[name]) or 'the tests'}")
                continue
            if name.startswith("deepinfer/"):
                if not os.path.exists(os.path.join(ROOT, "include", name)):
                    problem(path, number, f"'{name}' is not in include/")
                continue
            if "/" not in name:
                if not os.path.exists(os.path.join(os.path.dirname(path), name)):
                    problem(path, number, f"'{name}' is not in this folder")
                continue
            other = os.path.dirname(name)
            if os.path.exists(os.path.join(os.path.dirname(path), name)):
                other = os.path.join(folder, other)  # a folder below this one
            if other == folder:
                problem(path, number, f"write '{os.path.basename(name)}': it is in this folder")
            elif other.split("/")[0] not in allowed:
                problem(path, number, f"{layer} may not include {other}")
            elif os.path.basename(name) not in public_headers(other) and not (
                layer == other.split("/")[0] and other.startswith(folder)
            ):
                problem(path, number, f"'{name}' is private to its folder, include '{other}/{public_headers(other)[0]}'")


def rule_headers():
    for path in files("src", "include", "tests", "tools", "bench", ends=(".c", ".h", ".cu", ".def")):
        text = read(path)
        if not text.startswith("/*"):
            problem(path, 1, "the file does not open with a comment that says what it owns")
            continue
        opening = text[: text.find("*/")]
        if opening.count("\n") >= 25:
            problem(path, 1, "the opening comment is longer than 25 lines: docs/ is the place for more")
        # A body (*_body.h) is code that several files include, each with its own macros.
        if path.endswith(".h") and not path.endswith("_body.h") and not re.search(r"#ifndef (\w+)\n#define \1\n", text):
            problem(path, 1, "no include guard")
    for path in files("tests", "tools", "bench", ends=(".py", ".sh")):
        lines = read(path).split("\n")
        first = lines[1] if lines[0].startswith("#!") and len(lines) > 1 else lines[0]
        if not re.match(r'#|"""|\'\'\'|r?"', first):
            problem(path, 1, "the file does not open with a comment that says what it owns")


def rule_words():
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    for path in files("src", "include", "tests", "tools", "bench", ends=(".c", ".h", ".cu", ".def")):
        name = os.path.relpath(path, ROOT)
        text = read(path)
        for number, line in enumerate(text.split("\n"), 1):
            if "\t" in line:
                problem(path, number, "a tab")
            if line != line.rstrip():
                problem(path, number, "spaces at the end of the line")
            if marks.search(line):
                problem(path, number, "a mark of unfinished work")
        if text.count("\n") > 1500:
            problem(path, 0, f"{text.count(chr(10))} lines, at most 1500")
        if not text.endswith("\n"):
            problem(path, 0, "no line end at the end of the file")
        if not name.startswith("src/") or name.startswith(("src/cli/", "src/server/")):
            continue
        for number, line in enumerate(without_comments(text).split("\n"), 1):
            if name.startswith("src/engine/") and re.search(SETTABLE_CLOCKS, line):
                problem(path, number, "a clock that can be set, or not through di_clock_ns")
            for word, exceptions in PROGRAM_CALLS.items():
                call = rf"(?<![\w.>]){word}\b" + (r"\s*\(" if word not in ("environ", "stdout") else "")
                if re.search(call, line) and name not in exceptions and not line.lstrip().startswith("#"):
                    problem(path, number, f"'{word}' belongs to the programs")


def rule_references():
    sources = {}
    for path in files(
        "src", "include", "tests", "tools", "bench", "docs", "cmake", "python", "models",
        ends=(".c", ".h", ".cpp", ".cu", ".def", ".py", ".sh", ".txt", ".md", ".cmake"),
    ):
        sources[path] = read(path)
    for name in ("README.md", "CMakeLists.txt", "CMakePresets.json", "build.sh", ".ci/run"):
        path = os.path.join(ROOT, name)
        if os.path.exists(path):
            sources[path] = read(path)

    def is_mentioned(word, apart_from):
        return any(word in text for path, text in sources.items() if path != apart_from)

    for path in files("src", "tests", ends=(".h", ".def")):
        if not is_mentioned(f'{os.path.basename(path)}"', path) and not path.endswith("banned.h"):
            problem(path, 0, "nothing includes this header")
    for path in files("docs", ends=(".md",)):
        if not is_mentioned(os.path.basename(path), path):
            problem(path, 0, "no document leads here")
    for path in files("tools", "bench", ends=(".py", ".sh")):
        if os.path.basename(path).startswith("test_"):
            continue  # found by pytest
        stem = os.path.splitext(os.path.basename(path))[0]
        if not any(re.search(rf"\b{re.escape(stem)}\b", text) for other, text in sources.items() if other != path):
            problem(path, 0, "nothing mentions this script")
    data = os.path.join(ROOT, "tests", "data")
    for parent, dirs, names in os.walk(data):
        dirs.sort()
        for name in sorted(names):
            path = os.path.join(parent, name)
            inside = os.path.relpath(path, data)
            # A file is in use when a test names it, its folder, or a part of its name that a test completes.
            parts = [name, os.path.splitext(name)[0], os.path.dirname(inside)]
            if not any(part and is_mentioned(part, path) for part in parts):
                problem(path, 0, "no test reads this file")
    corpus = os.path.join(ROOT, "tests", "fuzz", "corpus")
    if os.path.isdir(corpus):
        for name in sorted(os.listdir(corpus)):
            if not os.path.exists(os.path.join(ROOT, "tests", "fuzz", f"{name}_fuzz.c")):
                problem(os.path.join(corpus, name), 0, "a corpus without its fuzz target")


RULES = {"layers": rule_layers, "headers": rule_headers, "words": rule_words, "references": rule_references}


def main():
    names = sys.argv[1:] or list(RULES)
    for name in names:
        if name not in RULES:
            print(f"unknown rule '{name}', expected: {' '.join(RULES)}", file=sys.stderr)
            return 2
        RULES[name]()
    for text in problems:
        print(text)
    if not problems:
        print(f"{' '.join(names)}: nothing found")
    return 1 if problems else 0


sys.exit(main())
