#!/usr/bin/env python3
"""Makes bench/schemas.jsonl: schemas of real programs for `bench grammar`, from a checkout of SchemaStore.

Usage: bench_schemas.py CHECKOUT OUT, with jsonschema[format] installed.

Takes schemas of 1 to 4.8 KB, without references to other files, in the order of a hash of their names, until there are
100 of at most 290 KiB together. Annotations (descriptions, examples, defaults) are left out: no grammar reads them, and
they would be most of the file. Each row has one text that follows the schema, keys in the schema's order, where a simple
generator finds one that the validator takes.
"""
import hashlib
import json
import pathlib
import random
import re
import sys
import warnings

import jsonschema

COUNT = 100
BYTES_MAX = 290 << 10
SIZES = range(1000, 4800)
ANNOTATIONS = {"title", "description", "markdownDescription", "examples", "default", "$comment", "deprecated",
               "deprecationMessage", "doNotSuggest", "enumDescriptions", "markdownEnumDescriptions", "defaultSnippets",
               "tsType", "errorMessage", "readOnly", "writeOnly", "version", "fileMatch", "allowTrailingCommas"}
MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
DATA = {"enum", "const"}


def without_annotations(node, is_map=False):
    if isinstance(node, list):
        return [without_annotations(v) for v in node]
    if not isinstance(node, dict):
        return node
    out = {}
    for key, value in node.items():
        if not is_map and (key in ANNOTATIONS or key.startswith("x-")):
            continue
        out[key] = value if not is_map and key in DATA else without_annotations(value, not is_map and key in MAPS)
    return out


def references(node):
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref" and isinstance(value, str):
                yield value
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


class Generator:
    """Values of a schema, for the keywords that most schemas use."""

    WORDS = ("main", "build output", "value-1", "https://example.com/a", "src/index.js", "1.2.3", "café")

    FORMATS = {"uri": ["https://example.com/a"], "date": ["2024-02-29"], "date-time": ["2024-02-29T12:00:00Z"],
               "email": ["someone@example.com"], "hostname": ["example.com"], "ipv4": ["127.0.0.1"],
               "regex": ["^[a-z]+$"], "uuid": ["123e4567-e89b-12d3-a456-426614174000"], "time": ["12:30:00"],
               "uri-reference": ["a/b.json"]}

    def __init__(self, schema, seed):
        self.root = schema
        self.rng = random.Random(seed)

    def value(self, schema, depth):
        if schema is True or schema == {}:
            return self.rng.choice([1, "text", True, None])
        if "$ref" in schema:
            target = self.root
            for part in schema["$ref"].lstrip("#").strip("/").split("/"):
                part = part.replace("~1", "/").replace("~0", "~")
                target = target[part] if part else target
            return self.value(target, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self.rng.choice(schema["enum"])
        for key in ("oneOf", "anyOf"):
            if key in schema:
                return self.value(self.rng.choice(schema[key]), depth)
        if "allOf" in schema and "properties" not in schema:
            return self.value(schema["allOf"][0], depth)
        kind = schema.get("type", "object" if "properties" in schema else "string")
        kind = self.rng.choice(kind) if isinstance(kind, list) else kind
        if kind == "object":
            return self.object(schema, depth)
        if kind == "array":
            items = schema.get("items", True)
            n = max(schema.get("minItems", 0), 0 if depth <= 0 else self.rng.randint(0, 3))
            n = min(n, schema.get("maxItems", n))
            return [self.value(items[i % len(items)] if isinstance(items, list) else items, depth - 1)
                    for i in range(n)]
        if kind == "integer":
            return int(schema.get("minimum", 0)) + self.rng.randint(0, 9)
        if kind == "number":
            return schema.get("minimum", 0) + self.rng.randint(0, 99) / 4
        if kind == "boolean":
            return self.rng.random() < 0.5
        if kind == "null":
            return None
        words = self.FORMATS.get(schema.get("format"), self.WORDS)
        words = [w for w in words if re.search(schema.get("pattern", ""), w, re.ASCII)] or ["a"]
        return self.rng.choice(words)[:schema.get("maxLength")]

    def object(self, schema, depth):
        out, required = {}, schema.get("required", [])
        for key, value in schema.get("properties", {}).items():
            if value is not False and (key in required or (depth > 0 and self.rng.random() < 0.6)):
                out[key] = self.value(value, depth - 1)
        others = schema.get("additionalProperties")
        if isinstance(others, dict) and depth > 0 and not schema.get("properties"):
            for key in ("first", "second-key")[:self.rng.randint(1, 2)]:
                out[key] = self.value(others, depth - 1)
        return out


def text_of(schema, name):
    """The longest of some valid texts under 1 KB; None for none."""
    best = None
    try:
        validator = jsonschema.validators.validator_for(schema)(schema, format_checker=jsonschema.FormatChecker())
        for seed in range(12):
            value = Generator(schema, f"{name} {seed}").value(schema, 4)
            text = json.dumps(value, ensure_ascii=False)
            if validator.is_valid(value) and len(text) < 1000 and len(text) > len(best or ""):
                best = text
    except (KeyError, TypeError, ValueError, IndexError, RecursionError, re.error):
        pass
    return best


def main():
    warnings.simplefilter("ignore")
    folder, out = pathlib.Path(sys.argv[1]) / "src/schemas/json", pathlib.Path(sys.argv[2])
    rows, size = [], 0
    for path in sorted(folder.glob("*.json"), key=lambda p: hashlib.sha256(p.name.encode()).hexdigest()):
        try:
            schema = without_annotations(json.loads(path.read_text(encoding="utf-8")))
        except ValueError:
            continue
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        if len(text) not in SIZES or any(not r.startswith("#") for r in references(schema)):
            continue
        row = {"source": path.name, "schema": schema}
        instance = text_of(schema, path.name)
        if instance:
            row.update(text=instance, valid=True)
        line = json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"
        if size + len(line.encode()) > BYTES_MAX:
            continue
        rows.append(line)
        size += len(line.encode())
        if len(rows) == COUNT:
            break
    out.write_text("".join(rows), encoding="utf-8")
    n_texts = sum('"valid":true' in row for row in rows)
    print(f"{len(rows)} schemas, {size} bytes, {n_texts} with a text")


if __name__ == "__main__":
    main()
