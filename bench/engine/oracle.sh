#!/bin/sh
# Builds, makes a virtual environment with PyTorch when build/venv is not there, and compares speeds (oracle.py).
# The packages are about 3 GB; VENV=DIR takes an environment that exists.
set -eu
cd "$(dirname "$0")/../.."
./build.sh
venv=${VENV:-build/venv}
if [ ! -x "$venv/bin/python" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" --quiet install torch numpy safetensors tokenizers
fi
exec "$venv/bin/python" bench/engine/oracle.py "$@"
