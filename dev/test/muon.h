// muon.h: Muon's equations in double and plain loops, for the tests of the judge and of CUDA.
#pragma once
#include <math.h>
#include <string.h>
#include "../../llmc/run/util.h"

// X^T of X [rows, cols].
static inline void transposed(double *to, const double *x, int rows, int cols) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) to[j * rows + i] = x[i * cols + j];
}

// C [n, cols] = A B, A [n, inner].
static inline void product(double *C, const double *A, const double *B, int n, int inner,
                           int cols) {
    for (int i = 0; i < n; i++)
        for (int j = 0; j < cols; j++) {
            C[i * cols + j] = 0;
            for (int k = 0; k < inner; k++) C[i * cols + j] += A[i * inner + k] * B[k * cols + j];
        }
}

// One step of Muon with u [rows, cols] as Jordan et al. 2024 write it: x is transposed if it has
// more rows than columns.
static inline void muon_equations(double *x, const double *u, int rows, int cols) {
    enum { MOST = 96 * 96 };
    static double X[MOST], T[MOST], A[MOST], AA[MOST], B[MOST], BX[MOST];
    double norm = 0;
    int tall = rows > cols, n = tall ? cols : rows, across = tall ? rows : cols;
    CHECK(rows * cols <= MOST, "a matrix of the test is too large");
    if (tall) transposed(X, u, rows, cols);
    else memcpy(X, u, (size_t)rows * cols * sizeof *X);
    for (int i = 0; i < n * across; i++) norm += X[i] * X[i];
    for (int i = 0; i < n * across; i++) X[i] /= sqrt(norm);
    for (int step = 0; step < 5; step++) {
        transposed(T, X, n, across);
        product(A, X, T, n, across, n);
        product(AA, A, A, n, n, n);
        for (int i = 0; i < n * n; i++) B[i] = -4.7750 * A[i] + 2.0315 * AA[i];
        product(BX, B, X, n, n, across);
        for (int i = 0; i < n * across; i++) X[i] = 3.4445 * X[i] + BX[i];
    }
    if (tall) transposed(x, X, n, across);
    else memcpy(x, X, (size_t)rows * cols * sizeof *x);
}
