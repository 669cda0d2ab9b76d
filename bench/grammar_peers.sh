#!/bin/sh
# Grammars beside other programs in one run (grammar_peers.py): xgrammar and llguidance.
#
#   bench/grammar_peers.sh [OPTION of grammar_peers.py]...
#
# Builds deepinfer, fetches the released tokenizer (129280 tokens) as the tests do, and makes a virtual environment with
# the peers under build/peers, which stays there (about 3 GB, since xgrammar wants torch; VENV=DIR takes one that exists).
# A peer that can't be had is named and left out.
set -eu
cd "$(dirname "$0")/.."
./build.sh
venv=${VENV:-build/peers/venv}
if [ ! -x "$venv/bin/python" ]; then
    mkdir -p "$(dirname "$venv")"
    python3 -m venv "$venv"
fi
for package in tokenizers xgrammar llguidance; do
    if ! "$venv/bin/python" -c "import $package" 2>/dev/null; then
        "$venv/bin/pip" --quiet install "$package" || echo "grammar_peers.sh: no package $package" >&2
    fi
done
tests/official_tokenizer.sh build/cache/tokenizer.json
exec "$venv/bin/python" bench/grammar_peers.py --model build/cache "$@"
