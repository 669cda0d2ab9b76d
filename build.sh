#!/bin/sh
# The front door: installs what is missing, builds the release preset, and then does one of a few things.
#
#   ./build.sh [--no-install] [-D NAME=VALUE]...                     build build/deepinfer and build/libdeepinfer.so
#   ./build.sh [...] run ["PROMPT"] [OPTION]...                      build, then answer a prompt with the model that ships
#   ./build.sh [...] test                                            build, then run every test but the long ones
#   ./build.sh [...] bench [WHAT] [OPTION]...                        build, then measure
#
# It says nothing about a build that goes well; a build that fails shows its whole output. Everything it does by CMake can
# be done without it: `cmake --workflow --preset release`.
set -eu
cd "$(dirname "$0")"

packages="gcc libc6-dev cmake ninja-build pkg-config python3 libjansson-dev libpcre2-dev libunistring-dev libxxhash-dev libedit-dev libmicrohttpd-dev libcurl4-gnutls-dev libcmocka-dev"
default_prompt="Tell me a story about a little fox."

fail() {
    echo "build.sh: $1" >&2
    exit "${2:-1}"
}

usage() {
    sed -n '2,/^set/s/^# \{0,1\}//p' build.sh
}

# Prints those of the packages that are not installed.
missing_packages() {
    for package in $packages; do
        state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) || state=absent
        [ "$state" = installed ] || printf '%s ' "$package"
    done
}

install_packages() {
    if ! command -v dpkg-query >/dev/null; then
        # Not Debian or a child of it: the configure step names what it can't find.
        return 0
    fi
    missing=$(missing_packages)
    [ -n "$missing" ] || return 0
    if [ "$(id -u)" -eq 0 ]; then
        sudo=
    else
        sudo="sudo "
    fi
    command="${sudo}apt-get install -y --no-install-recommends ${missing% }"
    if [ "$may_install" = no ]; then
        fail "missing packages: ${missing% }; install them by: $command"
    fi
    if [ -n "$sudo" ] && ! command -v sudo >/dev/null; then
        fail "missing packages: ${missing% }; there is no sudo, install them as root by: ${command#sudo }"
    fi
    echo "build.sh: $command" >&2
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086 # the command is a list of words
    if ! $command >/dev/null 2>&1; then
        # The lists of a fresh machine are empty or old.
        echo "build.sh: ${sudo}apt-get update" >&2
        ${sudo}apt-get update >/dev/null
        # shellcheck disable=SC2086
        $command >/dev/null
    fi
}

# Runs a command with its output kept back, and shows all of it when the command fails.
quietly() {
    if ! "$@" >build/log.txt 2>&1; then
        cat build/log.txt >&2
        fail "failed: $*"
    fi
}

build() {
    mkdir -p build
    install_packages
    if [ ! -f build/release/build.ninja ]; then
        [ ! -t 2 ] || echo "build.sh: the first build takes about a minute" >&2
        quietly cmake --preset release "$@"
    elif [ $# -gt 0 ]; then
        quietly cmake --preset release "$@"
    fi
    quietly cmake --build --preset release
}

may_install=yes
while [ $# -gt 0 ]; do
    case $1 in
    --no-install)
        may_install=no
        ;;
    -D)
        [ $# -ge 2 ] || fail "-D needs NAME=VALUE" 2
        defines="${defines-} -D$2"
        shift
        ;;
    -D*)
        defines="${defines-} $1"
        ;;
    -h | --help)
        usage
        exit 0
        ;;
    run | test | bench)
        break
        ;;
    *)
        usage >&2
        fail "unknown word '$1'" 2
        ;;
    esac
    shift
done

# shellcheck disable=SC2086 # a list of words; values with spaces are not needed here
build ${defines-}

case ${1-} in
run)
    shift
    [ $# -gt 0 ] || set -- "$default_prompt"
    exec build/deepinfer run "$@"
    ;;
test)
    tests/official_tokenizer.sh >build/official_tokenizer.txt 2>&1 || true # tests that need it are skipped by name
    ctest --preset release -j "$(nproc)"
    ;;
bench)
    shift
    exec build/deepinfer bench "$@"
    ;;
esac
