#!/bin/sh
# Python with the packages of tests/requirements.txt (public clients, routers, a browser's driver), in build/cache/clients.
#
#   tests/clients.sh                      makes it, by pip; exit status 1 when the packages can't be had
#   tests/clients.sh SCRIPT [ARG]...      runs a test with it, or, where it was not made, with the system's python3, which
#                                         most likely lacks the packages: the test then ends with 77, "skipped"
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
home=$root/build/cache/clients
if [ $# -gt 0 ]; then
    python=$home/bin/python
    [ -x "$python" ] || python=python3
    exec "$python" "$@"
fi

stamp=$home/requirements.txt
cmp -s "$root/tests/requirements.txt" "$stamp" && exit 0
rm -rf "$home"
mkdir -p "$root/build/cache"
python3 -m venv "$home"
"$home/bin/python" -m pip --disable-pip-version-check --quiet --timeout 30 --retries 2 install --only-binary=:all: \
    -r "$root/tests/requirements.txt"
cp "$root/tests/requirements.txt" "$stamp"
