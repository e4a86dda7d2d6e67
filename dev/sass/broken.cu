// broken.cu: kernels that are wrong on purpose, each in one way that a gate of dev/sass_check.py
// finds in its machine code. Nothing calls them. Expect a line FAILED for each of
//
//   sh dev/arch_check.sh dev/sass/broken.cu
#include <cuda_bf16.h>
#include <stdint.h>

// Eight stores of 2 bytes where one has 16: gate STS.
extern "C" __global__ void pieces_kernel(__nv_bfloat16 *to, const __nv_bfloat16 *from, int n) {
    __shared__ __align__(16) __nv_bfloat16 kept[2048];
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        for (int k = 0; k < 8; k++) {
            kept[threadIdx.x % 256 * 8 + k] = from[i * 3 + k * n];
            to[i] = kept[(threadIdx.x * 7 + k) % 256];
        }
}

__device__ void ldm(uint32_t r[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row)) : "memory");
}

__device__ void mma(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// LDSM after the wait for this thread's copies, before the barrier: gate order.
extern "C" __global__ void early_kernel(float *to, const char *from, int n) {
    __shared__ __align__(16) char tile[16384];
    float d[4] = {};
    for (int i = 0; i < n; i++) {
        uint32_t a[4], b[4];
        uint32_t at = (uint32_t)__cvta_generic_to_shared(tile + threadIdx.x * 16);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                     :: "r"(at), "l"(from + i * 16384) : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        ldm(a, tile + threadIdx.x % 32 * 16);
        __syncthreads();
        ldm(b, tile + 4096 + threadIdx.x % 32 * 16);
        mma(d, a, b);
        __syncthreads();
    }
    to[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}

// Lanes that go on with the next round while the others wait for them: gate lanes apart.
extern "C" __global__ void branch_kernel(float *to, const char *from, int n) {
    __shared__ __align__(16) char tile[16384];
    float d[4] = {}, x = 0;
    for (int i = 0; i < n; i++) {
        if (from[threadIdx.x + i] > 3) {
            to[i] = x;
            x += __expf(to[i * 3 + threadIdx.x]);
            if (x > 3) continue;
        }
        uint32_t a[4];
        ldm(a, tile + threadIdx.x % 32 * 16);
        mma(d, a, a);
    }
    to[threadIdx.x] = d[0] + d[1] + d[2] + d[3] + x;
}
