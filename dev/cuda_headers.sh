# Sourced from the root of the repository by the Makefile and by scripts. Sets what is unset of
#   CUDA    the folder of the CUDA toolkit, or of its headers alone (CUDA/include/cuda_runtime.h)
#   CUBLAS  the folder of cublasLt.h
# to the toolkit in /usr/local/cuda, otherwise to the headers that dev/setup.sh --all downloads.
cuda_cache=${XDG_CACHE_HOME:-${HOME:-}/.cache}/cuda-headers-13.0
if [ -z "${CUDA:-}" ]; then
    CUDA=/usr/local/cuda
    if [ ! -f "$CUDA/include/cuda_runtime.h" ] && [ -f "$cuda_cache/include/cuda_runtime.h" ]; then
        CUDA=$cuda_cache
    fi
fi
if [ -z "${CUBLAS:-}" ]; then
    CUBLAS=$CUDA/include
    if [ ! -f "$CUBLAS/cublasLt.h" ] && [ -f "$cuda_cache-cublas/include/cublasLt.h" ]; then
        CUBLAS=$cuda_cache-cublas/include
    fi
fi
export CUDA CUBLAS

# Whether both headers are there; otherwise one line on stdout says which is missing.
cuda_headers_found() {
    for header in "$CUDA/include/cuda_runtime.h" "$CUBLAS/cublasLt.h"; do
        [ -f "$header" ] && continue
        echo "no $header (sh dev/setup.sh --all, or CUDA=... CUBLAS=...)"
        return 1
    done
}
