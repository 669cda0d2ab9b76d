#!/bin/sh
# Speed beside other programs in one run (peers.py): PyTorch with oneDNN, llama.cpp's ggml.
#
#   bench/peers.sh [OPTION of peers.py]...
#
# Builds deepinfer, makes what is missing under build/peers and leaves it there: a virtual environment with torch (about
# 3 GB; VENV=DIR takes one that exists), and ggml from the source of the llama-cpp-python package (PyPI; LLAMA_SOURCE=DIR
# takes it unpacked) with the driver in bench/ops. What can't be had is named and left out.
set -eu
cd "$(dirname "$0")/.."
./build.sh
work=build/peers
venv=${VENV:-$work/venv}
mkdir -p "$work"
if [ ! -x "$venv/bin/python" ]; then
    python3 -m venv "$venv"
fi
for package in torch numpy safetensors tokenizers matplotlib; do
    if ! "$venv/bin/python" -c "import $package" 2>/dev/null; then
        "$venv/bin/pip" --quiet install "$package" || echo "peers.sh: no package $package" >&2
    fi
done

make_driver() {
    source=${LLAMA_SOURCE:-}
    if [ -z "$source" ]; then
        source=$work/llama
        if [ ! -d "$source/vendor" ]; then
            "$venv/bin/pip" --quiet download --no-deps --no-binary :all: --dest "$work" llama-cpp-python || return 1
            mkdir -p "$source"
            tar -xzf "$work"/llama_cpp_python-*.tar.gz -C "$source" --strip-components=1 || return 1
        fi
    fi
    ggml=$source/vendor/llama.cpp/ggml
    [ -f "$ggml/ggml.pc.in" ] || : >"$ggml/ggml.pc.in" # named by its CMakeLists.txt, not in the package
    cmake -S "$ggml" -B "$work/ggml" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON \
        -DGGML_OPENMP=OFF -DGGML_BUILD_TESTS=OFF -DGGML_BUILD_EXAMPLES=OFF >"$work/ggml.log" 2>&1 || return 1
    ninja -C "$work/ggml" ggml ggml-cpu ggml-base >>"$work/ggml.log" 2>&1 || return 1
    cc -O2 -std=gnu17 -I"$ggml/include" -c bench/ops/ggml_mul_mat.c -o "$work/ggml_mul_mat.o" || return 1
    lib=$work/ggml/src
    c++ "$work/ggml_mul_mat.o" -o "$work/ggml_mul_mat" "$lib/libggml.a" "$lib/libggml-cpu.a" "$lib/libggml-base.a" \
        -lpthread -ldl -lm
}

if make_driver; then
    GGML_VERSION=$(sed -n 's/^set(GGML_VERSION_\(MAJOR\|MINOR\|PATCH\) *\([0-9]*\)).*/\2/p' "$ggml/CMakeLists.txt" |
        paste -sd.)
    export GGML_VERSION
    set -- --ggml "$work/ggml_mul_mat" "$@"
else
    echo "peers.sh: no ggml: see $work/ggml.log" >&2
fi
exec "$venv/bin/python" bench/peers.py "$@"
