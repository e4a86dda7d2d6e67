#!/bin/sh
# Installs what norm.c needs on Debian and Ubuntu, and nothing that is already there.
#
#   sh dev/setup.sh         gcc, the C library's headers and make: all that the CPU trainer needs
#   sh dev/setup.sh --all   also what the tests need: git, g++, clang with its sanitizers, libFuzzer
#                           and OpenMP, Open MPI, Chromium, Python packages (pinned below), and the
#                           headers of CUDA, which the emulator compiles against
#
# If nothing is missing it needs neither root nor a network, and says so in one line.
set -eu
cd "$(dirname "$0")/.."
all=""
case $* in
    "") ;;
    --all) all=1 ;;
    *) echo "error: expected nothing or --all, found $*" >&2; exit 2 ;;
esac

# The newest versions that the tests have passed with.
python_packages="numpy==2.4.6 scipy==1.17.1 matplotlib==3.11.2 torch==2.13.0 tiktoken==0.14.0
    safetensors==0.8.0 transformers==5.23.0 accelerate==1.15.0 lm_eval==0.4.13
    pyarrow==26.0.1 tokenizers==0.23.3 huggingface_hub==2.4.0 tensorboard==2.21.0 wandb==0.31.0
    nvidia-cuda-nvdisasm==13.5.37 gguf==0.19.0"
cuda_packages="nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85"
cublas_packages="nvidia-cublas==13.1.0.3"

fail() { echo "error: $1" >&2; echo "  -> $2" >&2; exit 1; }
have() { command -v "$1" > /dev/null; }
installed=""

# ---------------------------------------------------------------------------- Debian packages

missing="" browser=""
need() { missing="$missing $1"; }
# shellcheck disable=SC2086
compiles() { echo '#include <stdio.h>' | ${CC:-cc} -x c -c -o /dev/null - 2> /dev/null; }
found() { ls "$@" > /dev/null 2>&1; }

compiles || { have gcc || need gcc; need libc6-dev; }
have make || need make
if [ "$all" ]; then
    have gcc || need gcc
    have g++ || need g++
    have git || need git
    have clang || need clang
    found /usr/lib/llvm-*/lib/libomp.so || need libomp-dev
    found /usr/lib/llvm-*/lib/clang/*/lib/linux/libclang_rt.fuzzer-*.a || need libclang-rt-dev
    have mpirun || need openmpi-bin
    have chromium || have chromium-browser || have google-chrome || browser=chromium
    have python3 || need python3
    python3 -m pip --version > /dev/null 2>&1 || need python3-pip
    python3 -c 'import ensurepip' > /dev/null 2>&1 || need python3-venv
fi
if [ "$missing$browser" ]; then
    wanted="$missing${browser:+ $browser}"
    have apt-get || fail "missing:$wanted, and apt-get is not there to install them" \
                         "install these Debian packages, or their like, by hand"
    root=""
    [ "$(id -u)" = 0 ] || root=sudo
    [ -z "$root" ] || have sudo || fail "missing:$wanted; to install them needs root, or sudo" \
                                        "as root: apt-get install$wanted"
    $root apt-get update -q
    # Ubuntu has no package of Chromium; one test needs it, or Chrome (dev/test/test_page.py).
    if [ "$browser" ] && apt-cache show $browser > /dev/null 2>&1; then need $browser
    elif [ "$browser" ]; then echo "note: no package of Chromium; install Chrome by hand"; fi
    # shellcheck disable=SC2086
    $root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing
    installed=$missing
fi

# ---------------------------------------------------------------------------- Python packages

# Prints the packages of $python_packages that are missing or have another version. torch==2.13.0 is
# content with 2.13.0+cpu.
python_missing() {
    python3 - $python_packages << 'END'
import importlib.metadata, sys
for package in sys.argv[1:]:
    name, _, version = package.partition("==")
    try:
        found = importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found != version: print(package)
END
}

# Distributions refuse pip outside of an environment, unless it is told to go ahead.
install_python() {
    python3 -m pip install -q "$@" || python3 -m pip install -q --break-system-packages "$@"
}

# headers FOLDER PACKAGE...: FOLDER/include from NVIDIA's wheels on PyPI, complete or not at all.
headers() {
    folder=$1; shift
    rm -rf "$folder.new" && mkdir -p "$folder.new"
    python3 -m pip download -q --no-deps -d "$folder.new/wheels" "$@"
    python3 - "$folder.new" << 'END'
import glob, os, sys, zipfile
for wheel in glob.glob(sys.argv[1] + "/wheels/*.whl"):
    archive = zipfile.ZipFile(wheel)
    for name in archive.namelist():
        if "/include/" in name and not name.endswith("/"):
            path = os.path.join(sys.argv[1], "include", name.split("/include/", 1)[1])
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file: file.write(archive.read(name))
END
    rm -r "$folder.new/wheels"
    rm -rf "$folder" && mv "$folder.new" "$folder"
    installed="$installed $folder"
}

if [ "$all" ]; then
    packages=$(python_missing)
    if [ "$packages" ]; then
        # shellcheck disable=SC2086
        install_python $packages
        installed="$installed $packages"
    fi
    . dev/cuda_headers.sh
    # shellcheck disable=SC2086
    [ -f "$CUDA/include/cuda_runtime.h" ] || headers "$cuda_cache" $cuda_packages
    [ -f "$CUBLAS/cublasLt.h" ] || headers "$cuda_cache-cublas" $cublas_packages
fi
if [ "$installed" ]; then echo "setup: installed$(printf ' %s' $installed)"
else echo "setup: everything is there${all:+ for all tests}"; fi
