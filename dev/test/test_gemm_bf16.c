// test_gemm_bf16.c: gemm.h with bf16 products under other names, for test_gemm.c, which has it with
// fp32 products.
#define BF16_PRODUCTS
#define real float
#include "../../llmc/gemm.h"

void gemm_packed_bf16(View C, View A, View B, int64_t M, int64_t N, int64_t K, real alpha,
                      bool add);
void bf16_round4(float *out, const float *x);

void gemm_packed_bf16(View C, View A, View B, int64_t M, int64_t N, int64_t K, real alpha,
                      bool add) {
    gemm_packed(C, A, B, M, N, K, alpha, add);
}

void bf16_round4(float *out, const float *x) {
    U32x4 bits = bf16_bits(x);
    memcpy(out, &bits, sizeof bits);
}
