#!/bin/sh
# The server under load, as a plot (serve.py).
#
#   bench/serve.sh [OPTION of serve.py]...
#
# Builds deepinfer and makes a virtual environment with matplotlib under build/peers, which stays there (VENV=DIR takes one
# that exists). Takes some minutes, on a machine that does nothing else.
set -eu
cd "$(dirname "$0")/.."
./build.sh
venv=${VENV:-build/peers/venv}
if [ ! -x "$venv/bin/python" ]; then
    mkdir -p "$(dirname "$venv")"
    python3 -m venv "$venv"
fi
if ! "$venv/bin/python" -c "import matplotlib" 2>/dev/null; then
    "$venv/bin/pip" --quiet install matplotlib
fi
exec "$venv/bin/python" bench/serve.py "$@"
